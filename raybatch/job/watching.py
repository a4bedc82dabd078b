"""Watches a run: its pool, start and end times, limits, deadline, and SIGTERM."""

import logging
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import NamedTuple, Self

import numpy as np

from raybatch.config import LimitConfig
from raybatch.errors import ConfigError, error_text
from raybatch.explanation.outlook import rows_in_time, work_of_units
from raybatch.explanation.query import JobQuery, cost_model_of
from raybatch.explanation.record import RowsInTime
from raybatch.pictures.wording import duration
from raybatch.planning.planned import LargePlan, PlannedInput
from raybatch.planning.store import StoredPlan, read_shards, read_units
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.deadline import Spent, UnitDeadline, reason_to_stop
from raybatch.records.arrays import Bools
from raybatch.records.pool_stats import PoolStats

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[PoolStats, int], None]

_POLL_S = 0.25
_PROGRESS_EVERY_S = 1.0


def is_working(stats: PoolStats, received_before: int = 0) -> bool:
    """Return whether an engine is ready and has received rows of this run.

    `received_before` are the prompt tokens that the pool had received before the run.
    """
    # rows without tokens never reach an engine
    return stats.num_ready > 0 and stats.prompt_tokens_received > received_before


@dataclass(slots=True)
class RunClock:
    """Times of one run, in seconds since its start; None until they are known."""

    started_s: float | None = None
    """When a ready engine received the first row."""
    ended_s: float | None = None
    """When the last row was done."""
    _origin_s: float = field(default_factory=time.monotonic)

    def elapsed_s(self) -> float:
        return time.monotonic() - self._origin_s


@dataclass(kw_only=True)
class PoolWatch:
    """Polls the stats of a pool in a thread during a run; use as a context manager."""

    read_stats: Callable[[], PoolStats]
    num_rows: int
    callback: ProgressCallback
    """Called about every second, and at the end of a run without an exception."""
    clock: RunClock
    rows_done: int = 0
    """Rows of this run, at the last poll."""
    rows_received: int = 0
    """Rows of this run that the pool has got, at the last poll."""
    _has_failed: bool = False

    def __post_init__(self) -> None:
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="raybatch-progress", daemon=True)

    def __enter__(self) -> Self:
        self._before = self.read_stats()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        if kind is None:
            self._report(self.read_stats())

    def _poll(self) -> None:
        next_callback_s = 0.0
        while not self._is_done.wait(_POLL_S):
            try:
                stats = self.read_stats()
            except Exception:  # the run itself reports errors of the pool
                logger.debug("could not read the pool's state", exc_info=True)
                continue
            clock, now_s = self.clock, self.clock.elapsed_s()
            self.rows_done = stats.rows_done - self._before.rows_done
            self.rows_received = stats.rows_received - self._before.rows_received
            works = is_working(stats, self._before.prompt_tokens_received)
            if works and clock.started_s is None:
                clock.started_s = now_s
            if stats.rows_done < stats.rows_received:
                clock.ended_s = None
            elif works and clock.ended_s is None:
                clock.ended_s = now_s
            if now_s >= next_callback_s:
                self._report(stats)
                next_callback_s = now_s + _PROGRESS_EVERY_S

    def _report(self, stats: PoolStats) -> None:
        try:
            self.callback(stats, self.num_rows)
        except Exception as error:  # a failed callback must not end the run
            if not self._has_failed:
                logger.warning("the progress callback failed: %s", error_text(error))
            self._has_failed = True


class WavesSoFar(NamedTuple):
    """The pool's stats of retried rows, and numbers of rows that will not be retried any more."""

    again: PoolStats
    rows_written: int
    rows_failed: int


class LimitWatch:
    """Compare the time, tokens and cost of a run with its limits; call `observe` regularly.

    `before` are the pool's stats at the start. If no limit is reached, `ending` is called; a text
    that it returns ends the run as a limit does. `reason` is why the run is being stopped; None
    while it is not.
    """

    def __init__(
        self,
        limits: LimitConfig,
        before: PoolStats,
        *,
        ending: Callable[[], str | None] | None = None,
    ) -> None:
        self._limits = limits
        self._ending = ending
        self._before = before
        self._began_s = time.monotonic()
        self.spent = Spent()
        self.reason: str | None = None

    def observe(self, stats: PoolStats, waves: WavesSoFar | None = None) -> str | None:
        """Update from the pool's stats; return why the run has to stop, or None.

        Once it has returned a reason, it returns None.
        """
        self.spent = Spent(
            wall_s=time.monotonic() - self._began_s,
            # a pool that has stopped meanwhile restarts its counters at 0
            engine_s=max(0.0, stats.busy_s - self._before.busy_s),
            # an upper bound of the price of an elastic pool
            num_replicas=max(stats.num_replicas, stats.most_replicas),
            tokens=stats.prompt_tokens + stats.generated_tokens,
            cost=stats.cost,
            rows_done=stats.rows_done,
            rows_failed=sum(stats.errors.values()),
        )
        if waves is not None:
            again = waves.again.prompt_tokens + waves.again.generated_tokens
            self.spent = replace(
                self.spent,
                tokens=self.spent.tokens + again,
                cost=self.spent.cost + waves.again.cost,
                rows_done=waves.rows_written,
                rows_failed=waves.rows_failed,
            )
        if self.reason is not None:
            return None
        self.reason = reason_to_stop(self._limits, self.spent)
        if self.reason is None and self._ending is not None:
            self.reason = self._ending()
        if self.reason is not None:
            logger.warning(
                "stopping after the current units: %s; run the same job again to resume",
                self.reason,
            )
        return self.reason


class StopSignal:
    """Stop a run between units on SIGTERM; use as a context manager around the run.

    A second SIGTERM ends the run at once, as Ctrl-C does, and so does the first one while no rows
    are running. It does nothing outside of the main thread, which alone gets signals. `stop` lets
    no further unit start; it is called in a separate thread. `is_at_work` returns whether rows are
    running.
    """

    def __init__(self, stop: Callable[[], None], is_at_work: Callable[[], bool]) -> None:
        self._stop = stop
        self._is_at_work = is_at_work
        self.has_arrived = False
        self._is_over = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="raybatch-sigterm", daemon=True)
        self._is_handling = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        if self._is_handling:
            # a handler set outside of Python cannot be restored: the default one is
            self._previous = signal.signal(signal.SIGTERM, self._handle) or signal.SIG_DFL
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_handling:
            signal.signal(signal.SIGTERM, self._previous)
            self._is_over = True
            self._wake.set()
            self._thread.join()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # the main thread may hold any lock, also one of Ray's: nothing is called from here
        is_first, self.has_arrived = not self.has_arrived, True
        if not is_first or not self._is_at_work():
            raise KeyboardInterrupt
        self._wake.set()

    def _wait(self) -> None:
        self._wake.wait()
        if not self._is_over:
            self._stop()
            logger.warning(
                "SIGTERM: no further unit starts, and finished rows of open units are kept; run "
                "the same command to resume. A second SIGTERM, or Ctrl-C, ends the run at once"
            )


@dataclass(kw_only=True, slots=True)
class RunDeadline:
    """Chooses the units of a run that can be done before its deadline.

    Args:
        deadline_s: seconds from the start of `clock`.
        query: options of the job for forecasts, which need an earlier measurement of its speed.
        read_stats: returns the stats of the run's pool.
        forecast: rows of the current plan that are predicted to be done; None without a prediction.
        has_passed: the deadline has passed, so running units were requested to end.
        has_offered: `offered` has returned units of an earlier plan.
    """

    deadline_s: float
    query: JobQuery
    clock: RunClock
    read_stats: Callable[[], PoolStats]
    forecast: RowsInTime | None = None
    has_passed: bool = False
    has_offered: bool = False

    def offered(
        self, stored: StoredPlan, planned: PlannedInput | LargePlan | None, todo: Bools
    ) -> Bools:
        """Return which units of `todo` to start: the first ones, as many as may be done in time.

        Logs the number of rows predicted to be done. Without a prediction all of `todo` are
        returned.

        Raises:
            ConfigError: no unit is predicted to be done in time.
        """
        self.forecast = None
        if not todo.any():
            return todo
        costs, why_not = cost_model_of(self.query)
        if costs is None or planned is None:
            why_not = (
                why_not
                or "the driver does not hold the rows of a plan that is off, or large and resumed"
            )
            logger.info(
                "deadline_s: the run time cannot be predicted (%s), so a unit starts only if, at "
                "the measured rate of this run, it will be done within %s of the start",
                why_not,
                duration(self.deadline_s),
            )
            return todo
        forecast = self.forecast = self._forecast(costs, stored, planned, todo)
        if not forecast.units_in_time and self.has_offered:
            logger.warning(
                "deadline_s: stopping the run, because no unit of the next input files would be "
                "done in time; run the same job again to resume"
            )
            return np.zeros_like(todo)
        if not forecast.units_in_time:
            raise ConfigError(
                f"deadline_s={self.deadline_s:g} is too short: the first unit of "
                f"{forecast.first_unit_rows} rows is predicted to be done after "
                f"{forecast.done_after_s:.1f} s, {forecast.start_s:.1f} s of them before its first "
                f"row; set deadline_s={math.ceil(forecast.done_after_s)} or more, or smaller units "
                "(plan.unit_rows) for a new output"
            )
        is_all = forecast.units_in_time == forecast.num_units
        logger.log(logging.INFO if is_all else logging.WARNING, "deadline_s: %s", forecast)
        # a run that is faster than predicted does more units, up to a likely number
        rank = np.cumsum(todo) - 1
        offered: Bools = todo & (rank < forecast.num_possible)
        self.has_offered = True
        return offered

    def _forecast(
        self, costs: CostModel, stored: StoredPlan, planned: PlannedInput | LargePlan, todo: Bools
    ) -> RowsInTime:
        """Return which units to do end in time from now on, with engines still starting."""
        sink, unit_of_row = self.query.job.sink, None
        if isinstance(planned, PlannedInput):
            shard = read_shards(sink, stored, 0, stored.num_rows)
            unit_of_row = shard.column("unit").to_numpy()
        work = work_of_units(
            self.query.job.plan,
            planned,
            unit_rows=read_units(sink, stored).unit_rows,
            unit_of_row=unit_of_row,
            todo=todo,
        )
        now_s, is_ready = self.clock.elapsed_s(), self.read_stats().num_ready > 0
        return rows_in_time(
            self.query,
            costs,
            work,
            deadline_s=self.deadline_s,
            start_s=now_s if is_ready else max(now_s, costs.start_s),
        )

    def of_units(self) -> UnitDeadline:
        """Return the deadline as a wall-clock time, for all hosts, and the predicted speed."""
        now_s, began_s = time.time(), self.clock.elapsed_s()
        forecast = self.forecast
        return UnitDeadline(
            ends_at=now_s - began_s + self.deadline_s,
            ready_at=now_s if forecast is None else now_s - began_s + forecast.start_s,
            row_s=None if forecast is None else forecast.row_s,
        )

    def reason_to_end(self) -> str | None:
        """Return the reason why running units have to end; None before the deadline."""
        if self.clock.elapsed_s() < self.deadline_s:
            return None
        self.has_passed = True
        return f"deadline_s: {self.deadline_s:g} s have passed"

    def account(self, *, rows_done: int, rows_open: int) -> str:
        """Return a message about a run that left `rows_open` rows because of its deadline."""
        why = "would not be done in time by the rate of the run"
        if self.forecast is not None:
            why = "would not be done in time, as predicted and by the rate of the run"
        if self.has_passed:
            why = "were not done by then"
        return (
            f"deadline_s: {rows_done} rows were done in {self.clock.elapsed_s():.1f} s of "
            f"{self.deadline_s:g}; {rows_open} stay open, which {why}"
        )
