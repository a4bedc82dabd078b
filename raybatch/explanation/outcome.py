"""Compares a plan with its run: forecast and actual figures, and causes of differences."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raybatch.config import from_plain
from raybatch.durable.units import UnitCounts
from raybatch.explanation.record import PROBE, Explanation
from raybatch.pictures.charts import ShareBar, draw_shares
from raybatch.pictures.document import Figure, Section, Table
from raybatch.pictures.wording import amount, count, duration, full, percent
from raybatch.records.pool_stats import PoolStats

# smaller differences count as planned
_AS_PLANNED = 0.01
# differences below this are not reported
_SHORT_S = 1.0
# counters of a replica, by the field of a `RunActual`
_GROWING = {
    "num_preemptions": "num_preemptions",
    "recomputed_tokens": "num_recomputed_tokens",
    "swapped_tokens": "num_swapped_tokens",
    "swapped_bytes": "swapped_bytes",
    "rounded_tokens": "num_rounded_tokens",
    "num_rounded_sequences": "num_rounded_sequences",
    "weight_copy_bytes": "weight_copy_bytes",
    "num_weight_copies": "num_weight_copies",
    "num_weight_stalls": "num_weight_stalls",
    "num_rounds": "num_exchanges",
    "round_bytes": "exchange_bytes",
    "drafted_tokens": "num_drafted_tokens",
    "accepted_tokens": "num_accepted_tokens",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunActual:
    """Counters of a run; a counter is None if it was not counted.

    Tokens are those of all requested rows and samples, including copies of other rows.

    Args:
        computed_tokens: prompt tokens that were computed, not found in a cache, when their row
            first started.
        num_generated: rows that engines generated; the others are copies of identical rows.
        kv_tokens: KV cache tokens of the engine with the fewest.
        swapped_tokens: tokens whose KV was swapped in from host memory instead of recomputed.
        rounded_tokens: swapped-in tokens with KV in 8 bits.
        num_weight_stalls: layers that waited for their weights.
        accepted_tokens: accepted draft tokens; each saved a decode step.
        num_group_cuts: how often rows of a prefix group were given to another replica.
        cut_tokens: prefix tokens that these replicas computed once more.
        engine_s: engine seconds, summed over replicas.
        likely_engine_s: forecast of `engine_s` from the actual tokens: (expected, low, high).
        wall_s: seconds from the first row at a ready engine to the last finished row.
        is_warm: the engines had run before, so their caches were not empty.
    """

    prompt_tokens: int
    computed_tokens: int
    generated_tokens: int = 0
    num_rows: int = 0
    num_generated: int = 0
    kv_tokens: int | None = None
    num_replicas: int = 1
    num_restarts: int = 0
    num_preemptions: int | None = None
    recomputed_tokens: int | None = None
    swapped_tokens: int | None = None
    swapped_bytes: int | None = None
    rounded_tokens: int | None = None
    num_rounded_sequences: int | None = None
    weight_copy_bytes: int | None = None
    num_weight_copies: int | None = None
    num_weight_stalls: int | None = None
    num_rounds: int | None = None
    round_bytes: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    num_group_cuts: int | None = None
    cut_tokens: int | None = None
    engine_s: float | None = None
    likely_engine_s: tuple[float, float, float] | None = None
    wall_s: float = 0.0
    is_warm: bool = False

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens

    @property
    def hit_rate(self) -> float:
        return self.saved_tokens / max(1, self.prompt_tokens)


def actual_of(
    counts: UnitCounts, before: PoolStats, after: PoolStats, *, num_restarts: int, wall_s: float
) -> RunActual:
    """Return the counters of a run; those lost with a crashed engine are None.

    `before` and `after` are the stats of the pool at the start and at the end of the run: its
    engines may have worked before.
    """
    grown: dict[str, Any] = {}
    for field, name in _GROWING.items() if not num_restarts else ():
        old, new = (
            sum(int(getattr(replica, name)) for replica in stats.replicas)
            for stats in (before, after)
        )
        grown[field] = new - min(old, new)
    sizes = [replica.kv_tokens for replica in after.replicas if replica.kv_tokens]
    return RunActual(
        prompt_tokens=counts.prompt_tokens,
        computed_tokens=counts.prompt_tokens - counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        num_rows=counts.num_asked,
        num_generated=counts.num_asked - counts.num_copies,
        kv_tokens=min(sizes, default=None),
        num_replicas=after.num_replicas,
        num_restarts=num_restarts,
        num_group_cuts=max(0, after.num_group_cuts - before.num_group_cuts),
        cut_tokens=max(0, after.cut_tokens - before.cut_tokens),
        engine_s=max(0.0, after.busy_s - before.busy_s),
        wall_s=wall_s,
        is_warm=before.busy_s > 0 and before.num_ready > 0,
        **grown,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOutcome:
    """A plan's explanation before the run, and the actual counters."""

    plan: Explanation
    actual: RunActual

    def rows(self) -> tuple[tuple[str, str, str], ...]:
        """Return (name, planned value, actual value) of each figure of the run, as texts."""
        plan, actual = self.plan, self.actual
        profile, time, cuts = plan.profile, plan.time, actual.num_group_cuts
        extra: list[tuple[str, str, str]] = []
        if actual.drafted_tokens:
            share = f"{amount(actual.accepted_tokens or 0)} of {amount(actual.drafted_tokens)}"
            extra.append(("accepted drafts", "", share))
        if copied := actual.weight_copy_bytes:
            mebibytes = amount(round(copied / 2**20))
            per_token = amount(round(copied / 2**10 / max(1, actual.generated_tokens)))
            shown = f"{mebibytes} MiB, {per_token} KiB per generated token"
            stalls, copies = actual.num_weight_stalls or 0, actual.num_weight_copies or 0
            extra.append(("weights copied", "", shown))
            extra.append(("weight stalls", "", f"{amount(stalls)} of {amount(copies)}"))
        if actual.num_rounds:
            sent = amount(round((actual.round_bytes or 0) / 2**20))
            extra.append(("rounds", "", f"{amount(actual.num_rounds)}, {sent} MiB of rows sent"))
        sizes = (plan.kv.tokens if plan.kv else None, actual.kv_tokens)
        kv, own_kv = ("not known" if one is None else f"{amount(one)} tokens" for one in sizes)
        planned = full(profile.num_requested - profile.num_generated)
        outputs, generated = profile.output_tokens.total, actual.generated_tokens
        pieces = "" if cuts is None else f"{full(profile.num_groups + cuts)} pieces"
        return (
            ("hit rate", percent(plan.hit_rate), percent(actual.hit_rate)),
            ("saved prompt tokens", amount(plan.saved_tokens), amount(actual.saved_tokens)),
            ("generated tokens", amount(outputs), amount(generated)),
            *extra,
            ("copies of other rows", planned, full(actual.num_rows - actual.num_generated)),
            ("order", plan.order if plan.is_reordered else "input", ""),
            ("groups", full(profile.num_groups if plan.is_reordered else 0), pieces),
            ("KV cache", kv, own_kv),
            ("engine time", _time(time.engine_s if time else None), _time(actual.engine_s)),
            ("wall time", _time(time.wall_s if time else None), _time(actual.wall_s)),
        )

    def deviations(self) -> tuple[str, ...]:
        """Return messages on how the run differed from its plan, with the causes.

        A difference in saved prompt tokens counts from 1 % on.
        """
        actual, more = self.actual, self.actual.saved_tokens - self.plan.saved_tokens
        lines = []
        if abs(more) > _AS_PLANNED * max(1, self.plan.saved_tokens):
            word = "more" if more > 0 else "fewer"
            causes = "; ".join(self._causes(more)) or "cause unknown"
            lines.append(
                f"{amount(abs(more))} {word} prompt tokens were saved than planned: {causes}"
            )
        if actual.num_preemptions:
            again = amount(actual.recomputed_tokens or 0)
            times = count(actual.num_preemptions, "preemption")
            lines.append(f"{again} tokens were recomputed after {times}")
        if actual.swapped_tokens:
            back = amount(actual.swapped_tokens)
            mebibytes = amount(round((actual.swapped_bytes or 0) / 2**20))
            lines.append(
                f"the KV of {back} tokens was swapped in from host memory after preemptions; "
                f"{mebibytes} MiB were copied in both directions"
            )
        if actual.num_rounded_sequences:
            samples = count(actual.num_rounded_sequences, "sample")
            lines.append(
                f"{samples} continued with 8-bit KV, of {amount(actual.rounded_tokens or 0)} "
                "tokens, and may have other answers (engine.host_kv_dtype)"
            )
        lines += self._time_deviations()
        return tuple(lines)

    def facts(self) -> list[tuple[str, str]]:
        plan, actual = self.plan, self.actual
        order = f"order {plan.order}" if plan.is_reordered else "input order"
        text = (
            f"{order}; hit rate {percent(plan.hit_rate)} planned, {percent(actual.hit_rate)} "
            f"actual; {amount(plan.saved_tokens)} prompt tokens saved planned, "
            f"{amount(actual.saved_tokens)} actual"
        )
        facts = [("plan", text)]
        if plan.time is not None:
            facts += [
                (name, f"{planned} planned, {took} actual")
                for name, planned, took in self.rows()
                if "time" in name
            ]
        return facts + [("  differs", text) for text in self.deviations()]

    def sections(self) -> tuple[Section, ...]:
        bars = [
            ShareBar(name="planned", share=self.plan.hit_rate),
            ShareBar(name="actual", share=self.actual.hit_rate, is_main=True),
            *(
                ShareBar(name=f"{order.name}, forecast", share=order.hit_rate, error=order.error)
                for order in self.plan.orders
                if order.name != "planned"
            ),
        ]
        drawn = draw_shares(bars, label="hit rate, share of all prompt tokens")
        figure = Figure(title="Prompt tokens that were not computed", svg=drawn, is_wide=True)
        # the last column of a table is for texts; there are none here
        rows = tuple((*row, "") for row in self.rows())
        section = Section(
            title="Plan and actual",
            table=Table(header=("", "plan", "actual", ""), rows=rows),
            notes=self.deviations() or ("the run went as planned",),
            figures=(figure,),
        )
        return (section,)

    def to_mapping(self) -> dict[str, Any]:
        return {
            "plan": self.plan.to_mapping(),
            "actual": dataclasses.asdict(self.actual),
            "hit_rate": {"plan": self.plan.hit_rate, "actual": self.actual.hit_rate},
            "saved_tokens": {"plan": self.plan.saved_tokens, "actual": self.actual.saved_tokens},
            "deviations": list(self.deviations()),
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, where: str) -> "PlanOutcome":
        """Return the outcome that `to_mapping` has turned into `mapping`.

        `where` names the mapping in messages.

        Raises:
            ConfigError: the mapping is from another version.
            KeyError: "plan" or "actual" is missing.
        """
        return cls(
            plan=Explanation.from_mapping(mapping["plan"], where=f"{where}.plan"),
            actual=from_plain(RunActual, mapping["actual"], where=f"{where}.actual"),
        )

    def _causes(self, more: int) -> list[str]:
        """Return causes for `more` saved tokens than planned (or fewer, if negative)."""
        plan, actual = self.plan, self.actual
        causes = []
        if more > 0 and actual.is_warm:
            causes.append("the caches of the engines were warm from earlier work")
        if more > 0 and plan.lengths_from == PROBE:
            causes.append("the probe left its prefixes in the caches")
        lost = plan.profile.prompt_tokens.total - actual.prompt_tokens
        if lost:
            word = "fewer" if lost > 0 else "more"
            causes.append(f"{amount(abs(lost))} {word} prompt tokens reached the engines")
        if actual.num_group_cuts:
            cuts, tokens = count(actual.num_group_cuts, "cut"), amount(actual.cut_tokens or 0)
            causes.append(f"{cuts} of groups over replicas: {tokens} prefix tokens more")
        if plan.kv is not None and actual.kv_tokens is not None:
            whole = plan.profile.prompt_tokens.total + plan.profile.output_tokens.total
            change = actual.kv_tokens / plan.kv.tokens - 1
            is_short = min(plan.kv.tokens, actual.kv_tokens) < whole
            # a larger cache has no fewer hits
            if is_short and abs(change) > _AS_PLANNED and (change > 0) == (more > 0):
                word = "larger" if change > 0 else "smaller"
                causes.append(f"the KV cache was {percent(abs(change), 0)} {word} than planned")
        if plan.kv is None:
            causes.append("the plan did not know the size of the KV cache")
        elif not plan.orders:
            causes.append("the plan assumes that each prefix is computed once, for any KV cache")
        if actual.num_restarts:
            replicas = count(actual.num_restarts, "replica")
            causes.append(f"{replicas} restarted with an empty cache")
        num_copies = plan.profile.num_requested - plan.profile.num_generated
        if actual.num_rows - actual.num_generated != num_copies:
            causes.append("another number of rows was copied than planned")
        return causes

    def _time_deviations(self) -> list[str]:
        time, actual = self.plan.time, self.actual
        lines = []
        outputs, generated = self.plan.profile.output_tokens.total, actual.generated_tokens
        share = generated / max(1, outputs)
        if generated and abs(share - 1) > 10 * _AS_PLANNED:
            lines.append(
                f"rows generated {percent(share, 0)} of the tokens expected from "
                f"{self.plan.lengths_from}"
            )
        if (
            time is None
            or time.low_s <= actual.wall_s <= time.high_s
            or abs(actual.wall_s - time.wall_s) <= _SHORT_S
        ):
            return lines
        word = "less" if actual.wall_s < time.low_s else "more"
        took = (
            f"wall time was {duration(actual.wall_s)}, {word} than the likely range of the plan, "
            f"{duration(time.low_s)} to {duration(time.high_s)}"
        )
        if actual.likely_engine_s is not None and actual.engine_s is not None:
            expected, low, high = map(duration, actual.likely_engine_s)
            took += (
                f"; the actual tokens predict {expected} of engine time, likely {low} to {high}, "
                f"and it was "
                f"{duration(actual.engine_s)}"
            )
        lines.append(took)
        if time.num_replicas != actual.num_replicas:
            planned = count(time.num_replicas, "replica")
            lines.append(f"{full(actual.num_replicas)} worked, {planned} were planned")
        return lines


def _time(seconds: float | None) -> str:
    return "not known" if seconds is None else duration(seconds)
