"""The head of a large input: its first rows, which run while the other rows are planned."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Event, Lock, Thread

from raybatch.config import PlanConfig
from raybatch.errors import RunStopped
from raybatch.planning.planned import LargePlan, RunSpec
from raybatch.planning.run import fit_units, is_small, run_planned
from raybatch.planning.store import StoredPlan

_logger = logging.getLogger(__name__)

# rows of a head: few, as the plan of the other rows cannot group them with these
_SHARE, _MOST_ROWS, _LEAST_ROWS = 1 / 128, 8192, 64
_POLL_S = 0.5
# most seconds to wait for units that end early
_END_S = 3.0


def may_have_head(plan: PlanConfig) -> bool:
    """Return whether rows may run while others are planned; a probe runs rows for its plan."""
    return plan.mode != "off" and plan.lengths != "probe"


def head_rows(job: RunSpec) -> int:
    """Return how many of the first rows of an input get a separate plan.

    None do if planning all takes a few seconds, or needs the lengths of all.
    """
    source, plan = job.source, job.plan
    if not may_have_head(plan) or source.choice or is_small(source, plan):
        return 0
    row_bytes = sum(part.num_bytes for part in source.slices) / source.num_rows
    number = min(int(source.num_rows * _SHARE), _MOST_ROWS, int(plan.max_driver_bytes / row_bytes))
    return number if number >= _LEAST_ROWS else 0


def split_head(job: RunSpec, portions: Mapping[str, range]) -> list[dict[str, range]]:
    """Return the positions of the first rows and of the other ones, or of all if none go first.

    `portions` are the positions of all rows of the job in each file, by name.
    """
    number, stops = head_rows(job), dict[str, int]()
    if not number:
        return [dict(portions)]
    for part in job.source.slices:
        if number <= 0:
            break
        stops[part.name] = part.first_row + min(number, part.num_rows)
        number -= part.num_rows
    head = {name: range(portions[name].start, stop) for name, stop in stops.items()}
    rest = {n: range(stops.get(n, rows.start), rows.stop) for n, rows in portions.items()}
    return [head, {name: rows for name, rows in rest.items() if len(rows)}]


@dataclass(kw_only=True)
class HeadRun:
    """Runs a head while the rest is planned, and then the rest beside it: call `run` once.

    An error of one ends both.

    Args:
        plans: of head and rest, as stored; None for one to make.
        rows_received: rows that have reached the pool. Until the first row of the head has, the
            rest is not planned, as its tasks would take all CPUs that feeders need to start.
        is_stopped: whether the run is to end; a rest without a plan is then left for another run.
        stop: lets no further unit start.
    """

    head: RunSpec
    rest: RunSpec
    plans: tuple[StoredPlan | None, StoredPlan | None]
    rows_received: Callable[[], int]
    is_stopped: Callable[[], bool]
    stop: Callable[[], None]
    _ended: Future[LargePlan | None] = field(default_factory=Future)
    _head_ended: Event = field(default_factory=Event)
    # rows of the rest run, or no longer may; both are set under the lock
    _lock: Lock = field(default_factory=Lock)
    _has_begun: bool = False
    _is_over: bool = False

    def run(self) -> LargePlan | None:
        """Return the plan of the rest, None if it was stored or is left for another run."""
        try:
            run_planned(replace(self.head, on_stored=self._begin_rest), self.plans[0])
            self._head_ended.set()
            while not self._ended.done() and not (self.is_stopped() and self._leaves_rest()):
                wait([self._ended], timeout=_POLL_S)
        except BaseException:
            with self._lock:
                self._is_over = True
            self._head_ended.set()
            with suppress(Exception):  # the pool may have failed itself
                self.stop()
            if self._has_begun:
                wait([self._ended], timeout=_END_S)
            raise
        return self._ended.result() if self._ended.done() else None

    def _leaves_rest(self) -> bool:
        """Let no row of the rest run; return False if some do already."""
        with self._lock:
            self._is_over = not self._has_begun
            return self._is_over

    def _raise_if_over(self) -> None:
        if self._is_over or self.is_stopped():
            raise RunStopped("the run ended before the rest of the input")

    def _begin_rest(self, head: StoredPlan) -> None:
        """Start to plan and run the rest in a thread, once the head has a plan."""
        plan = fit_units(self.rest.plan, self.rest.source)
        first_unit = head.first_unit + head.num_units
        self.rest = replace(self.rest, plan=plan, first_unit=first_unit, on_stored=self._begin_rows)
        _logger.info("running %d rows while planning %d", head.num_rows, self.rest.source.num_rows)
        before = self.rows_received()
        Thread(target=self._run_rest, args=(before,), name="raybatch-rest", daemon=True).start()

    def _run_rest(self, before: int) -> None:
        try:
            from raybatch.planning.large import plan_large, run_large  # Ray is slow to load

            while self.rows_received() <= before and not self._head_ended.wait(_POLL_S):
                pass
            self._raise_if_over()
            planned, stored = None, self.plans[1]
            if stored is None:
                planned = plan_large(self.rest, raise_if_over=self._raise_if_over)
            self._raise_if_over()
            self._ended.set_result(run_large(self.rest, stored, planned))
        except RunStopped:
            self._ended.set_result(None)
        except BaseException as error:  # for the other thread
            self._ended.set_exception(error)
            with suppress(Exception):
                self.stop()

    def _begin_rows(self, _: StoredPlan) -> None:
        with self._lock:
            self._raise_if_over()
            self._has_begun = True
