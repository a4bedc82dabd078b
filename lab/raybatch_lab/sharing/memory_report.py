"""What replicas of a model hold on GPUs, alone and in a group that shares weights, as text."""

import json
from dataclasses import asdict, dataclass

from raybatch.pictures.document import Section, Table, to_text
from raybatch.pictures.wording import amount, count, duration, full, percent
from raybatch.policy.memory_plan import Holding
from raybatch_lab.sharing.gain import MOST_ROWS, SharingGain


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """What `raybatch bench plan memory` says."""

    model: str
    gain: SharingGain

    @property
    def is_possible(self) -> bool:
        return self.gain.best is not None

    def to_json(self) -> str:
        found = {"model": self.model, **asdict(self.gain), "kv_ratio": self.gain.plan.kv_ratio}
        return json.dumps(found, indent=1)

    def to_text(self) -> str:
        """Return the plan in lines for people, printable ASCII only."""
        section = Section(
            title="", facts=tuple(self._facts()), table=self._table(), notes=tuple(self._notes())
        )
        return to_text(f"The memory of {self.model}", [section])

    def _facts(self) -> list[tuple[str, str]]:
        asked, sizes, plan = self.gain.question, self.gain.sizes, self.gain.plan
        budget = asked.budget
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
                f"{count(asked.size, 'replica')} of {count(asked.tp, 'GPU')}, of "
                f"{budget.gpu_bytes / 1e9:,.1f} GB each {budget.usable_bytes / 1e9:,.1f} GB for "
                "weights and KV",
            ),
        ]
        best = self.gain.best
        shared, alone = map(self.gain.problem_of, (plan.shared, plan.replicated))
        if best is None:
            return [*facts, ("plan", f"none: {shared}")]
        way = "each replica has all weights" if best.by is None else f"share by {best.by}"
        if shared:
            why = f"shared it cannot be: {shared}"
        elif alone:
            why = f"alone no replica runs: {alone}"
        else:
            why = f"a replica that shares has {plan.kv_ratio:.2f} times the KV"
            if self.gain.bounds is None:
                way = f"by memory alone {way}"
        return [*facts, ("plan", f"{way}; {why}")]

    def _table(self) -> Table:
        plan, tokens = self.gain.plan, self.gain.question.sequence_tokens
        ways = (plan.replicated, plan.by_layer, plan.by_tile)
        header = (
            "weights",
            "GB a GPU",
            "slots",
            "GB",
            "KV tokens",
            "of all",
            f"rows of {full(tokens)}",
        )
        return Table(header=header, rows=tuple(self._row(way) for way in ways))

    def _row(self, way: Holding) -> tuple[str, ...]:
        return (
            "replicated" if way.by is None else f"by {way.by}",
            f"{way.weight_bytes / 1e9:,.2f}",
            full(way.num_slots),
            f"{way.slot_bytes / 1e9:,.2f}",
            full(way.kv_tokens),
            amount(way.kv_tokens * self.gain.plan.size),
            full(way.rows(self.gain.question.sequence_tokens)),
        )

    def _notes(self) -> list[str]:
        notes = ["weights that stay and slots of each GPU; KV tokens and rows of a replica"]
        plan = self.gain.plan
        if not plan.shared.problem:
            notes.append(f"shared, by {plan.shared.by} and not otherwise: {plan.reason}")
        if pass_s := self.gain.pass_s:
            of_layer = pass_s["tile"] / pass_s["layer"]
            notes.append(f"a pass by tile takes {of_layer:.2f} of one by layer")
        bounds, tokens = self.gain.bounds, self.gain.question.sequence_tokens
        if bounds is None:
            rates = "--gpu-bytes-per-s, --gpu-flops and --link-bytes-per-s"
            return [*notes, f"for seconds of passes and jobs give what a GPU reaches: {rates}"]
        most = f"above {MOST_ROWS:,} rows"
        saturation = (
            most if bounds.saturation_rows is None else f"{bounds.saturation_rows:,.0f} rows"
        )
        hiding = most if bounds.hiding_rows is None else count(bounds.hiding_rows, "row")
        notes.append(f"B_e, beyond which a larger batch gains little: {saturation} of {tokens:,}")
        notes.append(
            f"B_th, from which on copies ({1e3 * bounds.copies_s:,.1f} ms a pass) hide: {hiding} "
            "of a replica"
        )
        if (rows := self.gain.threshold_rows) is not None:
            notes.append(
                f"rows travel to the weights where a replica has fewer than {rows:,.0f} of them: "
                "then that is quicker than copies"
            )
        notes.append(self._jobs())
        notes.append("seconds are computed from these rates, and not measured")
        return notes

    def _jobs(self) -> str:
        times = {"replicated": self.gain.replicated_s, "shared": self.gain.shared_s}
        told = ", ".join(f"{way} {duration(s)}" for way, s in times.items() if s is not None)
        tokens = full(self.gain.question.sequence_tokens)
        rows = f"{count(self.gain.job_rows, 'row')} of up to {tokens} tokens, half of them prompts"
        return f"a job of {rows}, simulated: {told or 'cannot be'}"
