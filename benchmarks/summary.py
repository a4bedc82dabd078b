"""Makes the rows of a table from the records of a run, and refuses speeds; pure functions.

No speed of a workload is shown, for any peer, unless the greedy tokens of every raybatch run of the
workload equal those of the reference on the sampled rows.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suites import BASELINE, PEERS, PeerKind

Record = dict[str, Any]
Cell = tuple[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Median and range over repetitions."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One peer on one workload.

    Args:
        rate_cpu: output tokens per CPU second, from the median.
        rate_wall: output tokens per second of wall time, from the median.
        ratio_cpu: the baseline's `rate_cpu` over this peer's: above 1 raybatch is cheaper. The
            baseline is raybatch in the same form; for pools it is the pool with one replica.
        ratio_wall: the same by wall time.
        equal_rows: rows whose tokens equal raybatch's, and rows compared; None without raybatch.
        hit_rate: prompt tokens taken from the prefix cache, as a fraction; None if not reported.
        memory: memory of a pool, summed over its engines, in the run with the most; else None.
        window_s: seconds of a job from the first queued request to the last token; None if unknown.
        load_s: loading seconds of an engine, which the other times leave out; None for a job, whose
            times include loading.
        foreign_cores: largest load by other processes during a repetition.
    """

    model: str
    workload: str
    peer: str
    kind: PeerKind
    num_replicas: int
    num_requests: int
    num_repetitions: int
    cpu_s: Spread
    wall_s: Spread
    rate_cpu: float
    rate_wall: float
    ratio_cpu: float | None
    ratio_wall: float | None
    equal_rows: tuple[int, int] | None
    hit_rate: float | None
    memory: Mapping[str, int] | None
    window_s: Spread | None
    load_s: float | None
    foreign_cores: float


def spread(values: Sequence[float]) -> Spread:
    """Return median and range of at least one value."""
    return Spread(median=statistics.median(values), low=min(values), high=max(values))


def differing_rows(reference: Record, record: Record) -> list[int]:
    """Return the rows, among those that both ran, whose tokens differ."""
    expected, found = _digests(reference), _digests(record)
    return [row for row in expected if row in found and expected[row] != found[row]]


def refusals(records: Iterable[Record]) -> dict[Cell, str]:
    """Return the workloads, by model and name, whose speeds must not be printed, and why."""
    records = list(records)
    reasons: dict[Cell, str] = {}
    references = {_cell(r): r for r in records if r["kind"] == "reference"}
    for record in records:
        if record["kind"] not in ("warm_up", "measure"):
            continue
        if record.get("rows_of_wrong_length"):
            rows = _listed(record["rows_of_wrong_length"])
            reasons[_cell(record)] = f"{record['peer']} returned a wrong number of tokens in {rows}"
        if not record["peer"].startswith(BASELINE):
            continue
        reference = references.get(_cell(record))
        if reference is None:
            reasons[_cell(record)] = "the tokens of raybatch were not compared with transformers'"
            continue
        digests = {r["workload_digest"] for r in (reference, record) if "workload_digest" in r}
        if len(digests) > 1:
            reasons[_cell(record)] = f"{record['peer']} was compared on other requests"
            continue
        rows_apart = differing_rows(reference, record)
        if rows_apart:
            reasons[_cell(record)] = (
                f"the tokens of {record['peer']} differ from transformers' in "
                f"{_listed(rows_apart)} of {len(reference['row_digests'])} compared"
            )
    return reasons


def failures(records: Iterable[Record]) -> list[str]:
    """Return a line for every peer that failed on a workload and has no result of it."""
    records = list(records)
    done = {(*_cell(r), r["peer"]) for r in records if r["kind"] == "measure"}
    lines = {
        (*_cell(r), r["peer"]): f"{r['model']}, {r['workload']}, {r['peer']}: {r['why']}"
        for r in records
        if r["kind"] == "failure"
    }
    return [line for key, line in lines.items() if key not in done]


def summarize(records: Iterable[Record]) -> list[Row]:
    """Return a row for every peer and workload that may be printed, in the order of the run."""
    records = list(records)
    refused = refusals(records)
    loads = {(r["model"], r["peer"]): r["load_s"] for r in records if r["kind"] == "load"}
    cells: dict[Cell, dict[str, list[Record]]] = {}
    for record in records:
        if record["kind"] == "measure" and _cell(record) not in refused:
            cells.setdefault(_cell(record), {}).setdefault(record["peer"], []).append(record)
    rows = []
    for cell, by_peer in cells.items():
        # in the order of `PEERS`, because a continued run may have measured in another order
        for peer in sorted(by_peer, key=list(PEERS).index):
            load_s = loads.get((cell[0], peer))
            rows.append(_row(by_peer[peer], by_peer.get(PEERS[peer].baseline), load_s))
    return rows


def _row(measures: list[Record], baseline: list[Record] | None, load_s: float | None) -> Row:
    first = measures[0]
    peer = PEERS[first["peer"]]
    rate_cpu, rate_wall = _rates(measures)
    ratio_cpu = ratio_wall = equal_rows = None
    if baseline:
        base_cpu, base_wall = _rates(baseline)
        ratio_cpu, ratio_wall = base_cpu / rate_cpu, base_wall / rate_wall
        compared = _digests(first).keys() & _digests(baseline[0]).keys()
        num_apart = len(differing_rows(baseline[0], first))
        equal_rows = (len(compared) - num_apart, len(compared))
    cached = first.get("counters", {}).get("cached_tokens")
    windows = [m["window_s"] for m in measures if m.get("window_s") is not None]
    return Row(
        model=first["model"],
        workload=first["workload"],
        peer=first["peer"],
        kind=peer.kind,
        num_replicas=peer.replicas,
        num_requests=first["num_requests"],
        num_repetitions=len(measures),
        cpu_s=spread([m["cpu_s"] for m in measures]),
        wall_s=spread([m["wall_s"] for m in measures]),
        rate_cpu=rate_cpu,
        rate_wall=rate_wall,
        ratio_cpu=ratio_cpu,
        ratio_wall=ratio_wall,
        equal_rows=equal_rows,
        hit_rate=None if cached is None else cached / first["prompt_tokens"],
        memory=_largest_memory(measures),
        window_s=spread(windows) if windows else None,
        load_s=load_s,
        foreign_cores=max(m["foreign_cores"] for m in measures),
    )


def _rates(measures: Sequence[Record]) -> tuple[float, float]:
    tokens = measures[0]["output_tokens"]
    cpu_s = statistics.median(m["cpu_s"] for m in measures)
    wall_s = statistics.median(m["wall_s"] for m in measures)
    return tokens / cpu_s, tokens / wall_s


def _largest_memory(measures: Sequence[Record]) -> dict[str, int] | None:
    sums = []
    for engines in (measure["engines"] for measure in measures if measure.get("engines")):
        total = {name: sum(engine[name] for engine in engines) for name in engines[0]}
        # all engines map the same file
        sums.append(total | {"weights_file": engines[0]["weights_file"]})
    return max(sums, key=lambda total: total["pss"], default=None)


def _cell(record: Record) -> Cell:
    return record["model"], record["workload"]


def _digests(record: Record) -> dict[int, str]:
    digests = record.get("row_digests", [])
    rows = record.get("rows")
    return dict(zip(range(len(digests)) if rows is None else rows, digests, strict=True))


def _listed(rows: Sequence[int], most: int = 5) -> str:
    names = ", ".join(str(row) for row in rows[:most])
    return f"row {names}" if len(rows) == 1 else f"{len(rows)} rows ({names}, ..)"
