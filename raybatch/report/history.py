"""The history of runs, read from their logs into frozen records of bounded size.

Memory is independent of the length of a run and its log.
"""

import heapq
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from raybatch.durable.run_log import read_events, run_ids
from raybatch.durable.storage import Store
from raybatch.records.pool_stats import PoolCounts, QuantileCoverage

# prefix of `RunRecord.end` if a limit ended the run
STOPPED = "stopped by "

_MAX_SAMPLES = 240
_NUM_SLOWEST = 5
# execution modes listed per run; an engine may change its mode
_MAX_MODES = 8
# more samples are not visible in a drawing
_MAX_UNITS = 300
# of the first line
_TEXTS = ("host", "source", "model", "backend", "backend_reason", "executor")

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSample(PoolCounts):
    """The state of a run at the end of an interval; counts are cumulative.

    `kv` is the used share of the caches, `engines` has (rank, busy seconds, ready seconds) of each
    engine in this interval, `length_coverage` tells how good predicted output lengths were so far.
    """

    end_s: float
    seconds: float
    rows: int = 0
    cost: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv: float = 0.0
    num_ready: int = 0
    preemptions: int = 0
    engines: tuple[tuple[int, float, float], ...] = ()
    length_coverage: tuple[QuantileCoverage, ...] = ()

    @property
    def busy_s(self) -> float:
        return sum(busy_s for _, busy_s, _ in self.engines)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitTime:
    """When a unit ran, in seconds since the start of the run, and in which feeder process."""

    unit: int
    start_s: float
    seconds: float
    rows: int
    host: str
    pid: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run of a job, by its log.

    Args:
        started: seconds since 1970.
        seconds: from its start to the last line of its log.
        end: "finished", "incomplete", "stopped by ..." with the limit or SIGTERM, "interrupted", or
            "failed: ..."; "" if the log has no end.
        executor: "local" or "ray"; "" if unknown.
        units_found: units already written by another run when this one reached them.
        units: all units, if they are few.
        samples: a few hundred at most, of equal weight.
        modes: (mode, number of engines) of the most frequent last execution modes of engines.
        mode_changes: how often an engine changed its mode, or the forecast of its mode.
    """

    run_id: str
    started: float
    seconds: float
    end: str = ""
    host: str = ""
    source: str = ""
    model: str = ""
    backend: str = ""
    backend_reason: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    executor: str = ""
    units_resumed: int = 0
    rows_resumed: int = 0
    units_written: int = 0
    rows_written: int = 0
    units_found: int = 0
    median_unit_s: float = 0.0
    p95_unit_s: float = 0.0
    slowest: tuple[UnitTime, ...] = ()
    units: tuple[UnitTime, ...] = ()
    samples: tuple[RunSample, ...] = ()
    modes: tuple[tuple[str, int], ...] = ()
    mode_changes: int = 0

    @property
    def limit(self) -> str:
        return self.end.removeprefix(STOPPED) if self.end.startswith(STOPPED) else ""

    @property
    def last(self) -> RunSample:
        return self.samples[-1] if self.samples else RunSample(end_s=0.0, seconds=0.0)

    @property
    def work_span(self) -> tuple[float, float] | None:
        """(begin, end) of the work of engines, in seconds since the start; None if none worked."""
        busy = [sample for sample in self.samples if sample.busy_s > 0]
        return (busy[0].end_s - busy[0].seconds, busy[-1].end_s) if busy else None


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """All runs of a job that have a log, oldest first."""

    runs: tuple[RunRecord, ...] = ()

    @property
    def total_s(self) -> float:
        return sum(run.seconds for run in self.runs)


def read_history(store: Store) -> History:
    """Read the logs below a sink; unreadable ones are skipped."""
    runs = (run_of(read_events(store, run_id)) for run_id in run_ids(store))
    records = [run for run in runs if run is not None]
    return History(runs=tuple(sorted(records, key=lambda run: (run.started, run.run_id))))


def with_unlogged(history: History, *, num_units: int, num_rows: int) -> History:
    """Return the runs, with what killed runs had written but not logged.

    `num_units` and `num_rows` are those that are in the output now.
    """
    runs = []
    after = [(run.units_resumed, run.rows_resumed) for run in history.runs[1:]]
    for run, (units, rows) in zip(history.runs, [*after, (num_units, num_rows)], strict=False):
        units, rows = units - run.units_resumed, rows - run.rows_resumed
        if not run.end and units > run.units_written:
            run = replace(run, units_written=units, rows_written=max(rows, run.rows_written))
        runs.append(run)
    return History(runs=tuple(runs))


def run_of(events: Iterable[Event]) -> RunRecord | None:
    """Return the record of a run from the events of its log; None without "run_started"."""
    started: Event | None = None
    last_ts, values = 0.0, dict[str, Any]()
    samples, units, mode_of = _Samples(), _Units(), dict[int, str]()
    num_modes = 0
    for event in events:
        try:
            last_ts = max(last_ts, float(event["ts"]))
            if event["event"] == "run_started":
                started = started or event
            elif event["event"] == "planned":
                values["units_resumed"] = int(event["units_resumed"])
            elif event["event"] == "unit_done":
                units.add(event)
            elif event["event"] == "sample":
                samples.add(event)
            elif event["event"] == "engine":
                mode_of[int(event["rank"])] = str(event["way"])
                num_modes += 1
            elif event["event"] == "run_ended":
                values["end"] = str(event["reason"])
        except (KeyError, TypeError, ValueError):  # written by another version
            continue
    if started is None:
        return None
    values |= {name: str(started.get(name, "")) for name in _TEXTS}
    return RunRecord(
        run_id=str(started.get("run", "")),
        started=float(started["ts"]),
        seconds=max(0.0, last_ts - float(started["ts"])),
        versions={str(k): str(v) for k, v in dict(started.get("versions") or {}).items()},
        rows_resumed=int(started.get("rows_resumed") or 0),
        samples=tuple(samples.merged),
        modes=tuple(Counter(mode_of.values()).most_common(_MAX_MODES)),
        mode_changes=num_modes - len(mode_of),
        **values,
        **units.values(),
    )


def _merged(first: RunSample, second: RunSample) -> RunSample:
    seconds = first.seconds + second.seconds
    means = {
        name: (getattr(first, name) * first.seconds + getattr(second, name) * second.seconds)
        / max(seconds, 1e-9)
        for name in ("running", "waiting", "kv")
    }
    engines: dict[int, tuple[float, float]] = {}
    for rank, busy_s, ready_s in first.engines + second.engines:
        busy_before, ready_before = engines.get(rank, (0.0, 0.0))
        engines[rank] = busy_before + busy_s, ready_before + ready_s
    of_ranks = tuple((rank, *of_rank) for rank, of_rank in sorted(engines.items()))
    return replace(second, seconds=seconds, engines=of_ranks, **means)


class _Samples:
    """A bounded number of samples: adjacent ones are merged if there are too many."""

    def __init__(self) -> None:
        self.merged: list[RunSample] = []
        self._num_each, self._num_in_last = 1, 0

    def add(self, event: Event) -> None:
        values = {one.name: event[one.name] for one in fields(RunSample) if one.name in event}
        engines = tuple((int(r), float(b), float(s)) for r, b, s in event.get("engines", ()))
        coverage = tuple(QuantileCoverage(**one) for one in event.get("length_coverage", ()))
        sample = RunSample(**values | {"engines": engines, "length_coverage": coverage})
        if 0 < self._num_in_last < self._num_each:
            self.merged[-1] = _merged(self.merged[-1], sample)
            self._num_in_last += 1
            return
        if len(self.merged) >= 2 * _MAX_SAMPLES:
            pairs = zip(self.merged[::2], self.merged[1::2], strict=True)
            self.merged = [_merged(*pair) for pair in pairs]
            self._num_each *= 2
        self.merged.append(sample)
        self._num_in_last = 1


class _Units:
    def __init__(self) -> None:
        self._seconds = array("d")
        self._few: list[UnitTime] = []
        self._slowest: list[tuple[float, int, UnitTime]] = []
        self._num_written = self._num_rows = self._num_found = 0

    def add(self, event: Event) -> None:
        unit = UnitTime(**{name: of(event[name]) for name, of in UnitTime.__annotations__.items()})
        if not event["won"]:
            self._num_found += 1
            return
        self._num_written += 1
        self._num_rows += unit.rows
        self._seconds.append(unit.seconds)
        if len(self._few) <= _MAX_UNITS:
            self._few.append(unit)
        keep = heapq.heappushpop if len(self._slowest) >= _NUM_SLOWEST else heapq.heappush
        keep(self._slowest, (unit.seconds, self._num_written, unit))

    def values(self) -> dict[str, Any]:
        slowest = sorted(self._slowest, key=lambda one: -one[0])
        median, p95 = np.quantile(self._seconds, (0.5, 0.95)) if self._seconds else (0.0, 0.0)
        return {
            "units_written": self._num_written,
            "rows_written": self._num_rows,
            "units_found": self._num_found,
            "median_unit_s": float(median),
            "p95_unit_s": float(p95),
            "slowest": tuple(unit for _, _, unit in slowest),
            "units": tuple(self._few) if len(self._few) <= _MAX_UNITS else (),
        }
