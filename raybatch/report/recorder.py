"""Records a running run: its log, its heartbeat, and the progress of its units."""

import logging
import os
import socket
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from threading import Lock
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raybatch.durable.run_log import RunLog, beating, live_runs
from raybatch.durable.storage import Store
from raybatch.errors import ConfigError, ReplicaError, RunStopped, error_text
from raybatch.planning.store import StoredPlan
from raybatch.records.pool_stats import POOL_COUNTS, PoolStats
from raybatch.records.types import ReplicaStats, token_counts
from raybatch.report.history import STOPPED
from raybatch.stages.unit_writer import UnitReceipt
from raybatch.telemetry import RunTrace, run_trace

logger = logging.getLogger(__name__)

_MIN_EVERY_S, _MAX_EVERY_S = 0.5, 10.0
# a short run has this many samples
_NUM_SAMPLES = 60
# their messages name options, files and engines, never the text of a row
_TELLABLE = (ConfigError, ReplicaError)
Fields = dict[str, Any]


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
        # the parts of a run may run in two threads, beside that of the pool's watch
        self._lock = Lock()
        self._num_receipts = 0
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
        with self._lock:
            done, is_first = int(np.count_nonzero(is_done)), self.units.total == 0
            resumed = done if is_first else self.units.resumed
            logical, computed = stored.logical_tokens, stored.computed_tokens
            # that of a head says little about all rows
            hit_rate = None if stored.files_left or not logical else 1 - computed / logical
            self.units = replace(
                self.units,
                total=len(is_done),
                done=done,
                resumed=resumed,
                planned_hit_rate=hit_rate,
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
        with self._lock:
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
        # receipts arrive with the last unit of a block
        self._note_done(self.units.resumed + stats.num_units_written)
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
        with self._lock:
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
