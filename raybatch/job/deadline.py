"""The deadline of one run: the units that are offered to it, and what is told of the others."""

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.explanation.deadline import rows_in_time
from raybatch.explanation.in_time import RowsInTime
from raybatch.explanation.question import Question, cost_model_of
from raybatch.explanation.unit_work import work_of_units
from raybatch.job.watching import RunClock
from raybatch.pictures.wording import duration
from raybatch.planning.planned import LargePlan, PlannedInput
from raybatch.planning.store import read_shards, read_units
from raybatch.planning.stored import StoredPlan
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.deadline import UnitDeadline
from raybatch.records.arrays import Bools
from raybatch.records.pool_stats import PoolStats

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class RunDeadline:
    """Offers units to a run that has to end in time; it counts from the begin of `clock`.

    Args:
        question: about the job; its speed is known where it was measured before.
        read_stats: of the pool of the run.
        forecast: of the plan that runs; None where nothing is predicted.
        has_passed: units at work were asked to end.
        has_offered: units of a plan before.
    """

    deadline_s: float
    question: Question
    clock: RunClock
    read_stats: Callable[[], PoolStats]
    forecast: RowsInTime | None = None
    has_passed: bool = False
    has_offered: bool = False

    def offered(
        self, stored: StoredPlan, planned: PlannedInput | LargePlan | None, todo: Bools
    ) -> Bools:
        """Return the first units to do that may be done in time, and log how many rows will be.

        Raises:
            ConfigError: not one unit is predicted to be done in time.
        """
        self.forecast = None
        if not todo.any():
            return todo
        costs, why_not = cost_model_of(self.question)
        if costs is None or planned is None:
            why_not = why_not or "of a plan that is off, or large and begun, no rows are here"
            logger.info(
                "deadline_s: nothing is predicted (%s); units begin while the rate of the run says "
                "that they will be done within %s",
                why_not,
                duration(self.deadline_s),
            )
            return todo
        forecast = self.forecast = self._forecast(costs, stored, planned, todo)
        if not forecast.units_in_time and self.has_offered:
            logger.warning("deadline_s: no unit of the next plan will be done in time")
            return np.zeros_like(todo)
        if not forecast.units_in_time:
            raise ConfigError(
                f"deadline_s is {self.deadline_s:g}, and the first unit of "
                f"{forecast.first_unit_rows} rows is predicted to be done after "
                f"{forecast.done_after_s:.1f} s, {forecast.start_s:.1f} s of them before its first "
                f"row; set deadline_s={math.ceil(forecast.done_after_s)} or more, or smaller units "
                "(plan.unit_rows) for an output that is not begun"
            )
        is_all = forecast.units_in_time == forecast.num_units
        logger.log(logging.INFO if is_all else logging.WARNING, "deadline_s: %s", forecast)
        # a run that is quicker than predicted does more, as far as it is likely
        rank = np.cumsum(todo) - 1
        offered: Bools = todo & (rank < forecast.num_possible)
        self.has_offered = True
        return offered

    def _forecast(
        self, costs: CostModel, stored: StoredPlan, planned: PlannedInput | LargePlan, todo: Bools
    ) -> RowsInTime:
        """Return which units to do are in time from now on, with engines that start meanwhile."""
        sink, unit_of_row = self.question.job.sink, None
        if isinstance(planned, PlannedInput):
            shard = read_shards(sink, stored, 0, stored.num_rows)
            unit_of_row = shard.column("unit").to_numpy()
        work = work_of_units(
            self.question.job.plan,
            planned,
            unit_rows=read_units(sink, stored).unit_rows,
            unit_of_row=unit_of_row,
            todo=todo,
        )
        now_s, is_ready = self.clock.elapsed_s(), self.read_stats().num_ready > 0
        return rows_in_time(
            self.question,
            costs,
            work,
            deadline_s=self.deadline_s,
            start_s=now_s if is_ready else max(now_s, costs.start_s),
        )

    def of_units(self) -> UnitDeadline:
        """Return the deadline by the clock of all hosts, with what is predicted."""
        now_s, began_s = time.time(), self.clock.elapsed_s()
        forecast = self.forecast
        return UnitDeadline(
            ends_at=now_s - began_s + self.deadline_s,
            ready_at=now_s if forecast is None else now_s - began_s + forecast.start_s,
            row_s=None if forecast is None else forecast.row_s,
        )

    def reason_to_end(self) -> str | None:
        """Return why units at work have to end; None while there is time."""
        if self.clock.elapsed_s() < self.deadline_s:
            return None
        self.has_passed = True
        return f"deadline_s: {self.deadline_s:g} s have passed"

    def account(self, *, rows_done: int, rows_open: int) -> str:
        """Return what came of a run that left rows open because of its deadline."""
        why = "would not be done in time by the rate of the run"
        if self.forecast is not None:
            why = "would not be done in time, as predicted and by the rate of the run"
        if self.has_passed:
            why = "were not done by then"
        return (
            f"deadline_s: {rows_done} rows were done in {self.clock.elapsed_s():.1f} s of "
            f"{self.deadline_s:g}; {rows_open} stay open, which {why}"
        )
