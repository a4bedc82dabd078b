"""Text report of GPU memory with replicated and shared weights."""

import json
from dataclasses import asdict, dataclass

from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import amount, count, duration, full, percent
from raybatch_lab.sharing.gain import MOST_ROWS, SharingGain
from raybatch_lab.sharing.memory_plan import Holding


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Output of `raybatch bench plan memory`."""

    model: str
    gain: SharingGain

    @property
    def is_possible(self) -> bool:
        return self.gain.best is not None

    def to_json(self) -> str:
        found = {"model": self.model, **asdict(self.gain), "kv_ratio": self.gain.plan.kv_ratio}
        return json.dumps(found, indent=1)

    def to_text(self) -> str:
        """Return the report as printable ASCII text."""
        section = Section(
            title="", facts=tuple(self._facts()), table=self._table(), notes=tuple(self._notes())
        )
        return to_text(f"The memory of {self.model}", [section])

    def _facts(self) -> list[tuple[str, str]]:
        query, sizes, plan = self.gain.query, self.gain.sizes, self.gain.plan
        budget = query.budget
        share = percent(sum(sizes.ffn_bytes) / sizes.weight_bytes, 0)
        facts = [
            (
                "model",
                f"{count(sizes.num_layers, 'layer')}, {sizes.weight_bytes / 1e9:,.1f} GB of "
                f"weights ({share} feed-forward), {full(sizes.kv_bytes_per_token)} bytes of KV "
                "a token",
            ),
            (
                "GPUs",
                f"{count(query.size, 'replica')} of {count(query.tp, 'GPU')}, of "
                f"{budget.gpu_bytes / 1e9:,.1f} GB each {budget.usable_bytes / 1e9:,.1f} GB for "
                "weights and KV",
            ),
        ]
        best = self.gain.best
        shared, alone = map(self.gain.problem_of, (plan.shared, plan.replicated))
        if best is None:
            return [*facts, ("plan", f"none: {shared}")]
        layout = "each replica has all weights" if best.by is None else f"share by {best.by}"
        if shared:
            why = f"sharing is not possible: {shared}"
        elif alone:
            why = f"replicated weights do not fit: {alone}"
        else:
            why = f"a sharing replica has {plan.kv_ratio:.2f} times the KV"
            if self.gain.bounds is None:
                layout = f"by memory alone {layout}"
        return [*facts, ("plan", f"{layout}; {why}")]

    def _table(self) -> Table:
        plan, tokens = self.gain.plan, self.gain.query.sequence_tokens
        layouts = (plan.replicated, plan.by_layer, plan.by_shard)
        header = (
            "weights",
            "GB a GPU",
            "slots",
            "GB",
            "KV tokens",
            "of all",
            f"rows of {full(tokens)}",
        )
        return Table(header=header, rows=tuple(self._row(layout) for layout in layouts))

    def _row(self, layout: Holding) -> tuple[str, ...]:
        return (
            "replicated" if layout.by is None else f"by {layout.by}",
            f"{layout.weight_bytes / 1e9:,.2f}",
            full(layout.num_slots),
            f"{layout.slot_bytes / 1e9:,.2f}",
            full(layout.kv_tokens),
            amount(layout.kv_tokens * self.gain.plan.size),
            full(layout.rows(self.gain.query.sequence_tokens)),
        )

    def _notes(self) -> list[str]:
        notes = ["resident weights and slots per GPU; KV tokens and rows per replica"]
        plan = self.gain.plan
        if not plan.shared.problem:
            notes.append(f"shared by {plan.shared.by}: {plan.reason}")
        if pass_s := self.gain.pass_s:
            of_layer = pass_s["shard"] / pass_s["layer"]
            notes.append(f"a pass by shard takes {of_layer:.2f} of one by layer")
        bounds, tokens = self.gain.bounds, self.gain.query.sequence_tokens
        if bounds is None:
            rates = "--gpu-bytes-per-s, --gpu-flops and --link-bytes-per-s"
            return [*notes, f"set the GPU rates for times of passes and jobs: {rates}"]
        most = f"above {MOST_ROWS:,} rows"
        saturation = (
            most if bounds.saturation_rows is None else f"{bounds.saturation_rows:,.0f} rows"
        )
        hiding = most if bounds.hiding_rows is None else count(bounds.hiding_rows, "row")
        notes.append(f"B_e, beyond which a larger batch gains little: {saturation} of {tokens:,}")
        notes.append(
            f"B_th, which hides the weight fetch ({1e3 * bounds.fetch_s:,.1f} ms a pass): {hiding} "
            "of a replica"
        )
        if (rows := self.gain.threshold_rows) is not None:
            notes.append(
                f"below {rows:,.0f} rows per replica, activation exchange is faster than weight "
                "fetch"
            )
        notes.append(self._jobs())
        notes.append("seconds are computed from these rates, not measured")
        return notes

    def _jobs(self) -> str:
        times = {"replicated": self.gain.replicated_s, "shared": self.gain.shared_s}
        text = ", ".join(f"{layout} {duration(s)}" for layout, s in times.items() if s is not None)
        tokens = full(self.gain.query.sequence_tokens)
        rows = f"{count(self.gain.job_rows, 'row')} of up to {tokens} tokens, half of them prompts"
        return f"a job of {rows}, simulated: {text or 'not possible'}"
