"""The head of a large input: its first rows, which run while the other rows are planned."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from threading import Event, Thread

from raybatch.planning.planned import LargePlan, RunSpec
from raybatch.planning.run import fit_units, is_small, run_planned
from raybatch.planning.store import StoredPlan

_logger = logging.getLogger(__name__)

# rows of a head, which share no computed prefixes with the other rows, so a small part of all
_SHARE, _MOST_ROWS, _LEAST_ROWS = 1 / 128, 8192, 64
_POLL_S = 0.5
# for rows that run when the other part of the input fails
_END_S = 30.0


def head_rows(job: RunSpec) -> int:
    """Return how many rows of an input have a plan of their own; 0 if it is planned at once.

    An input that the driver plans alone is, and one whose plan needs lengths of all rows.
    """
    source, plan = job.source, job.plan
    if plan.mode == "off" or plan.lengths == "probe" or source.choice or is_small(source, plan):
        return 0
    row_bytes = sum(part.num_bytes for part in source.slices) / max(1, source.num_rows)
    most = min(_MOST_ROWS, int(plan.max_driver_bytes / max(1.0, row_bytes)))
    number = min(int(source.num_rows * _SHARE), most)
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


def run_beside(
    head: RunSpec,
    rest: RunSpec,
    plans: tuple[StoredPlan | None, StoredPlan | None],
    *,
    is_fed: Callable[[], bool],
    is_stopped: Callable[[], bool],
    stop: Callable[[], None],
) -> LargePlan | None:
    """Run a head while the rest is planned, and then the rest beside it; return what was planned.

    An error of one ends both.

    Args:
        plans: of head and rest, as stored; None for one to make.
        is_fed: whether rows have reached the pool. Before that the rest is not planned, as its
            tasks would take all CPUs that feeders need to start.
        is_stopped: whether the run is to end; a rest without a plan is then left for another run.
        stop: lets no further unit start.
    """
    from raybatch.planning.large import run_large  # Ray is slow to load

    of_head, ended = Future[StoredPlan](), Future[LargePlan | None]()
    head_ended, has_failed, has_begun = Event(), Event(), Event()
    if plans[1] is not None:
        has_begun.set()

    def first_unit() -> int | None:
        before = of_head.result()
        if is_stopped() or has_failed.is_set():
            return None
        has_begun.set()
        return before.first_unit + before.num_units

    def run_rest() -> None:
        try:
            of_head.result()
            while not is_fed() and not head_ended.wait(_POLL_S):
                pass
            job = replace(rest, plan=fit_units(rest.plan, rest.source), after_head=first_unit)
            ended.set_result(run_large(job, plans[1]))
        except BaseException as error:  # for the other thread
            ended.set_exception(error)
            with suppress(Exception):  # the pool may have failed itself
                stop()

    _logger.info(
        "running the first %d rows while %d are planned", head.source.num_rows, rest.source.num_rows
    )
    Thread(target=run_rest, name="raybatch-rest", daemon=True).start()
    try:
        run_planned(replace(head, on_stored=of_head.set_result), plans[0])
        head_ended.set()
        # what is being planned cannot be interrupted
        while not ended.done() and (has_begun.is_set() or not is_stopped()):
            wait([ended], timeout=_POLL_S)
        return ended.result() if ended.done() else None
    except BaseException as error:
        if not of_head.done():
            of_head.set_exception(error)
        has_failed.set()
        head_ended.set()
        with suppress(Exception):
            stop()
        if has_begun.is_set():
            wait([ended], timeout=_END_S)
        raise
