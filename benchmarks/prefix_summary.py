"""Makes table rows and verdicts from the records of a prefix run; pure functions.

Counts come first: computed prompt tokens, and hits as a fraction of the possible ones. A speed that
`summary.refusals` refuses appears nowhere.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prefix_sides import SIDES, Contestant, parse
from suites import BASELINE, PeerKind
from summary import Cell, Record, Spread, differing_rows, refusals, spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One contestant on one workload at one KV size.

    Args:
        kv_tokens: KV tokens of each replica.
        computed_tokens: median of prompt tokens that no cache had; None if not reported.
        recomputed_tokens: additional tokens of preempted sequences; None if not reported.
        fewest_tokens: prompt tokens to compute if every whole block of the tree is computed once.
        hit_fraction: cached tokens over the most that can be cached; None if nothing is shared.
        plan_s: seconds of planning, part of `wall_s`.
        equal_rows: rows whose tokens equal raybatch's, and rows compared.
        window_s: engine window of a job, see the README.
    """

    model: str
    workload: str
    kv_percent: int
    kv_tokens: int
    contestant: Contestant
    num_requests: int
    num_repetitions: int
    prompt_tokens: int
    output_tokens: int
    computed_tokens: float | None
    recomputed_tokens: float | None
    fewest_tokens: int
    hit_fraction: float | None
    preemptions: float | None
    steps: float | None
    plan_s: float | None
    cpu_s: Spread
    wall_s: Spread
    window_s: Spread | None
    equal_rows: tuple[int, int] | None
    foreign_cores: float

    @property
    def kind(self) -> PeerKind:
        return SIDES[self.contestant.side].kind

    @property
    def is_planned(self) -> bool:
        return self.contestant.side.endswith("-plan")

    @property
    def is_peer(self) -> bool:
        return not self.contestant.side.startswith(BASELINE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The planned run of a cell compared with others, in one measure.

    Args:
        side: side of the planned run.
        measure: "engine CPU s", "job wall s" or "job window s".
        planned: seconds of the planned run.
        cheap: best peer on sorted prompts or shuffled groups.
        shuffled: best peer on shuffled prompts.
        unplanned: raybatch without a plan on the same shuffled prompts.
    """

    model: str
    workload: str
    kv_percent: int
    side: str
    measure: str
    planned: float
    cheap: tuple[str, float] | None
    shuffled: tuple[str, float] | None
    unplanned: float | None


def summarize(records: Iterable[Record]) -> list[Row]:
    """Return a row for every measurement that may be printed, in the order of the run."""
    records = list(records)
    refused = refusals(records)
    measures: dict[tuple[Cell, str], list[Record]] = {}
    baselines: dict[Cell, Record] = {}
    for record in records:
        cell = (record["model"], record["workload"])
        if record["kind"] == "measure" and cell not in refused:
            measures.setdefault((cell, record["peer"]), []).append(record)
            if record["peer"].startswith(BASELINE):
                baselines.setdefault(cell, record)
    facts = {(r["model"], r["workload"], r["peer"]): r for r in records if r["kind"] == "facts"}
    return [
        _row(group, baselines.get(cell), facts[(*cell, f"kv{parse(name)[1]}")])
        for (cell, name), group in measures.items()
    ]


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Compare every planned run of one replica with the others of its cell."""
    measures: tuple[tuple[PeerKind, str, Callable[[Row], Spread | None]], ...] = (
        ("engine", "engine CPU s", lambda row: row.cpu_s),
        ("job", "job window s", lambda row: row.window_s),
        ("job", "job wall s", lambda row: row.wall_s),
    )
    found = []
    for kind, measure, read in measures:
        for planned in rows:
            if planned.kind != kind or not planned.is_planned or planned.contestant.replicas > 1:
                continue
            others = [row for row in rows if _is_beside(row, planned)]
            found.append(_verdict(planned, others, measure, read))
    return found


def _is_beside(row: Row, planned: Row) -> bool:
    cell = (planned.model, planned.workload, planned.kv_percent, planned.kind)
    return (
        (row.model, row.workload, row.kv_percent, row.kind) == cell
        and row.contestant.replicas == 1
        and not row.is_planned
    )


def _verdict(
    planned: Row, others: Sequence[Row], measure: str, read: Callable[[Row], Spread | None]
) -> Verdict:
    def best(*, is_peer: bool, is_shuffled: bool) -> tuple[str, float] | None:
        times = [
            (value.median, f"{row.contestant.side} {row.contestant.order}")
            for row in others
            if row.is_peer == is_peer
            and (row.contestant.order == "shuffled") == is_shuffled
            and (value := read(row)) is not None
        ]
        return min(times)[::-1] if times else None

    own = read(planned)
    unplanned = best(is_peer=False, is_shuffled=True)
    return Verdict(
        model=planned.model,
        workload=planned.workload,
        kv_percent=planned.kv_percent,
        side=planned.contestant.side,
        measure=measure,
        planned=own.median if own is not None else float("nan"),
        cheap=best(is_peer=True, is_shuffled=False),
        shuffled=best(is_peer=True, is_shuffled=True),
        unplanned=None if unplanned is None else unplanned[1],
    )


def _row(measures: list[Record], baseline: Record | None, facts: Record) -> Row:
    first = measures[0]
    contestant, kv_percent = parse(first["peer"])
    equal_rows = None
    if baseline is not None:
        num_rows = first["num_requests"]
        equal_rows = (num_rows - len(differing_rows(baseline, first)), num_rows)
    cached = _counter(measures, "cached_tokens")
    computed = None if cached is None else first["prompt_tokens"] - cached
    windows = [m["window_s"] for m in measures if m.get("window_s") is not None]
    saveable = facts["saveable_tokens"]
    return Row(
        model=first["model"],
        workload=first["workload"],
        kv_percent=kv_percent,
        kv_tokens=facts["kv_tokens"],
        contestant=contestant,
        num_requests=first["num_requests"],
        num_repetitions=len(measures),
        prompt_tokens=first["prompt_tokens"],
        output_tokens=first["output_tokens"],
        computed_tokens=computed,
        recomputed_tokens=_counter(measures, "recomputed_tokens"),
        fewest_tokens=facts["prompt_tokens"] - saveable,
        hit_fraction=None if cached is None or not saveable else cached / saveable,
        preemptions=_counter(measures, "preemptions"),
        steps=_counter(measures, "steps"),
        plan_s=_counter(measures, "plan_s"),
        cpu_s=spread([m["cpu_s"] for m in measures]),
        wall_s=spread([m["wall_s"] for m in measures]),
        window_s=spread(windows) if windows else None,
        equal_rows=equal_rows,
        foreign_cores=max(m["foreign_cores"] for m in measures),
    )


def _counter(measures: Sequence[Record], name: str) -> float | None:
    values = [m["counters"][name] for m in measures if name in m.get("counters", {})]
    return statistics.median(values) if values else None
