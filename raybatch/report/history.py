"""Records a running run in its log, and reads the history of runs from their logs.

Records of past runs are frozen; their size is independent of the length of a run and its log.
"""

import heapq
import logging
import os
import socket
import time
import uuid
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raybatch.durable.journal import RunLog, beating, live_runs, read_events, run_ids
from raybatch.durable.storage import Store
from raybatch.errors import ConfigError, ReplicaError, RunStopped, error_text
from raybatch.planning.stored import StoredPlan
from raybatch.records.pool_stats import POOL_COUNTS, PoolCounts, PoolStats, QuantileCoverage
from raybatch.records.types import ReplicaStats, token_counts
from raybatch.stages.unit_writer import UnitReceipt
from raybatch.telemetry import RunTrace, run_trace

logger = logging.getLogger(__name__)

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

_MIN_EVERY_S, _MAX_EVERY_S = 0.5, 10.0
# a short run has this many samples
_NUM_SAMPLES = 60
# their messages name options, files and engines, never the text of a row
_TELLABLE = (ConfigError, ReplicaError)

Event = Mapping[str, Any]
Fields = dict[str, Any]


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


class StatsSampler:
    """Turns pool stats into events and samples of a log; counters may restart with an engine."""

    def __init__(self) -> None:
        self._first: PoolStats | None = None
        self._last: PoolStats | None = None
        self._last_s = self._sampled_s = self._cost = 0.0
        self._preemptions = 0
        # by rank, since the last sample
        self._busy, self._ready = defaultdict[int, float](float), defaultdict[int, float](float)

    def observe(
        self, now_s: float, stats: PoolStats, cost: float = 0.0
    ) -> tuple[tuple[Fields, ...], Fields | None]:
        """Record the state at `now_s` seconds after the start of the run, and the cost so far.

        Returns (events of engines that became ready or left, a sample if due, else None).
        """
        self._cost = cost
        events = self._count(now_s, stats)
        every_s = min(_MAX_EVERY_S, max(_MIN_EVERY_S, now_s / _NUM_SAMPLES))
        is_due = now_s - self._sampled_s >= every_s
        return events, self._sample(now_s, stats) if is_due else None

    def rest(self, now_s: float) -> Fields | None:
        """Return a sample of the time since the last one; None if nothing was observed."""
        if self._last is None or self._last_s <= self._sampled_s:
            return None
        return self._sample(min(now_s, self._last_s), self._last)

    def _count(self, now_s: float, stats: PoolStats) -> tuple[Fields, ...]:
        before = self._last
        earlier = {} if before is None else dict(zip(before.ranks, before.replicas, strict=True))
        ready_s = now_s - self._last_s
        for rank, replica in zip(stats.ranks, stats.replicas, strict=True):
            # exclude the work of a warm engine before this run
            old = replica if before is None else earlier.get(rank, ReplicaStats())
            busy_s = _growth(old.busy_s, replica.busy_s)
            self._busy[rank] += min(busy_s, ready_s)
            self._ready[rank] += ready_s
            self._preemptions += int(_growth(old.num_preemptions, replica.num_preemptions))
        self._first = self._first or stats
        self._last, self._last_s = stats, now_s
        gone, new = set(earlier) - set(stats.ranks), set(stats.ranks) - set(earlier)
        changed = [(rank, "gone") for rank in sorted(gone)]
        changed += [(rank, "ready") for rank in sorted(new)]
        return tuple({"rank": rank, "state": state} for rank, state in changed)

    def _sample(self, now_s: float, stats: PoolStats) -> Fields:
        replicas, first = stats.replicas, self._first or stats
        sample = {
            "end_s": now_s,
            "seconds": now_s - self._sampled_s,
            "rows": stats.rows_done,
            **token_counts(stats),
            "cost": self._cost,
            "running": sum(replica.num_running for replica in replicas),
            "waiting": sum(replica.num_waiting for replica in replicas),
            "kv": sum(r.kv_used_fraction for r in replicas) / max(1, len(replicas)),
            "num_ready": stats.num_ready,
            **{name: max(0, getattr(stats, name) - getattr(first, name)) for name in POOL_COUNTS},
            "preemptions": self._preemptions,
            "length_coverage": [asdict(one) for one in stats.length_coverage],
            "engines": [
                [rank, self._busy[rank], ready_s] for rank, ready_s in sorted(self._ready.items())
            ],
        }
        self._busy.clear()
        self._ready.clear()
        self._sampled_s = now_s
        return sample


def _growth(before: float, now: float) -> float:
    """Return the increase of a counter, which restarts at 0 with its engine."""
    return now - before if now >= before else now


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitProgress:
    """Progress of the units of all plans; the total is 0 without a plan.

    Units of earlier runs count as done. `planned_hit_rate` is the share of prompt tokens that the
    plan saves, None without a plan.
    """

    total: int
    done: int
    resumed: int
    rows_resumed: int
    planned_hit_rate: float | None = None


def new_run_id(now_s: float) -> str:
    """Return an id for a run that started at `now_s`; ids of runs sort by time."""
    return f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(now_s))}-{uuid.uuid4().hex[:8]}"


class RunRecorder:
    """Write the log of one run; use as a context manager around the run.

    It never decides about rows or units; errors of the store end the log, not the run.

    Args:
        about: description of the job for the first line; secrets are redacted.
        clock: seconds since 1970.

    Attributes:
        units: progress of units; empty without a plan.
        rows_written: rows of units that this run has written, or found written.
        limit: limit or signal that ended the run early; None for none.
    """

    def __init__(
        self,
        store: Store,
        run_id: str,
        *,
        about: Mapping[str, Any],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self.run_id, self._about = store, run_id, about
        rows_resumed = int(about.get("rows_resumed", 0))
        self.units = UnitProgress(total=0, done=0, resumed=0, rows_resumed=rows_resumed)
        self._clock, self._log = clock, RunLog(store, run_id, clock)
        self._began_s = clock()
        self._sampler = StatsSampler()
        self._num_receipts = self._done_before = 0
        self._modes: dict[int, str] = {}
        self.rows_written = self.rows_failed = 0
        self._trace: RunTrace | None = None
        self._end = "finished"
        self.limit: str | None = None
        self._lasting = ExitStack()

    def __enter__(self) -> Self:
        self._began_s = self._clock()
        self._trace = run_trace(self._began_s)
        self._warn_of_others()
        host, pid = socket.gethostname(), os.getpid()
        self._tell("run_started", host=host, pid=pid, **self._about)
        self._log.flush()
        self._lasting.enter_context(beating(self._store, self.run_id, self._clock, self._log))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if (last := self._sampler.rest(self._elapsed_s())) is not None:
            self._tell("sample", **last)
        reason = self._end
        if isinstance(error, KeyboardInterrupt | RunStopped):
            reason = "interrupted"
        elif error is not None:
            is_tellable = isinstance(error, _TELLABLE)
            reason = f"failed: {error_text(error) if is_tellable else type(error).__name__}"
        level = "info" if reason == "finished" else "error"
        self._tell("run_ended", level=level, reason=reason, seconds=self._elapsed_s())
        self._log.flush()
        self._lasting.close()

    def stopping(self, limit: str) -> None:
        """Record that no further unit starts, and the limit or signal that is the reason."""
        self.limit = limit
        self._tell("stopping", level="warning", limit=limit)

    def incomplete(self) -> None:
        self._end = "incomplete" if self.limit is None else f"{STOPPED}{self.limit}"

    def planned(self, stored: StoredPlan, is_done: npt.NDArray[np.bool_]) -> None:
        """Record the plan that runs next, and which units of the whole output are written."""
        done, is_first = int(np.count_nonzero(is_done)), self.units.total == 0
        resumed = done if is_first else self.units.resumed
        logical, computed = stored.logical_tokens, stored.computed_tokens
        self._done_before = done
        hit_rate = 1 - computed / logical if logical else None
        self.units = replace(
            self.units, total=len(is_done), done=done, resumed=resumed, planned_hit_rate=hit_rate
        )
        self._tell(
            "planned",
            plan=stored.hash,
            rows=stored.num_rows,
            units=len(is_done),
            units_resumed=resumed,
            prompt_tokens=logical,
            computed_tokens=computed,
        )

    def unit_done(self, receipt: UnitReceipt) -> None:
        self._num_receipts += 1
        self.rows_written += receipt.num_rows
        self.rows_failed += receipt.num_errors
        self._note_done(self.units.resumed + self._num_receipts)
        self._tell(
            "unit_done",
            unit=receipt.unit,
            rows=receipt.num_rows,
            won=receipt.won,
            errors=receipt.num_errors,
            prompt_tokens=receipt.prompt_tokens,
            cached_tokens=receipt.cached_tokens,
            generated_tokens=receipt.generated_tokens,
            start_s=receipt.started - self._began_s,
            seconds=receipt.ended - receipt.started,
            host=receipt.host,
            pid=receipt.pid,
        )

    def observe(self, stats: PoolStats, *, cost: float = 0.0) -> None:
        """Record the pool's stats and the cost so far; write a sample if due."""
        # receipts arrive with the last unit of a block; the pool's counter restarts per plan
        self._note_done(self._done_before + stats.num_units_written)
        events, sample = self._sampler.observe(self._elapsed_s(), stats, cost)
        for rank, replica in zip(stats.ranks, stats.replicas, strict=True):
            # an engine has no rows before its first step
            if (
                replica.num_steps
                and replica.execution_mode
                and replica.execution_mode != self._modes.get(rank)
            ):
                self._modes[rank] = replica.execution_mode
                self._tell("engine", rank=rank, way=replica.execution_mode)
                logger.info("engine %d runs with %s", rank, replica.execution_mode)
        for event in events:
            level = "info" if event["state"] == "ready" else "warning"
            self._tell("replica", level=level, **event)
        if sample is not None:
            self._tell("sample", **sample)

    def _tell(self, event: str, *, level: str = "info", **values: Any) -> None:  # noqa: ANN401
        self._log.write(event, level=level, **values)
        if self._trace is not None:
            self._trace.tell(event, self._clock(), values)

    def _note_done(self, done: int) -> None:
        units = self.units
        self.units = replace(units, done=min(max(done, units.done), units.total))

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s

    def _warn_of_others(self) -> None:
        try:
            for other in live_runs(self._store, self._began_s):
                if other.seems_dead:
                    logger.info("the last run was killed: %s", other)
                    continue
                logger.warning(
                    "another run is active, or died just now: %s. If both continue, each unit is "
                    "still written once, but its rows may be generated twice",
                    other,
                )
        except Exception as error:  # only the warning is lost
            logger.info("cannot read the heartbeats of other runs: %s", error_text(error))
