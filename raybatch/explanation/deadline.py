"""Forecasts which rows of a plan are done by a deadline, and on which engines all of them are."""

from dataclasses import replace
from functools import cache

from raybatch.explanation.in_time import DeadlineOutlook, RowsInTime
from raybatch.explanation.question import Question, core_share_in, placement_of
from raybatch.explanation.unit_work import UnitWork
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import CostEstimate, estimate
from raybatch.policy.deadline import EngineChoice, cheapest_in_time, largest_in_time, replica_counts

# shares of the rows that an engine can have at once
_BATCHES = (1, 2, 4)


def rows_in_time(
    question: Question, costs: CostModel, work: UnitWork, *, deadline_s: float, start_s: float
) -> RowsInTime:
    """Return the largest set of first units that is predicted to be done in time.

    Args:
        work: of the units that are to run, at least one.
        start_s: seconds of the deadline that are gone before engines take rows.
    """
    placement = placement_of(question)
    core_share = core_share_in(placement, question.spec)

    @cache
    def cost_of(num_units: int) -> CostEstimate:
        first = work.of_first(num_units)
        return estimate(costs, first, placement.num_replicas, core_share=core_share)

    most = work.num_units
    units = largest_in_time(lambda n: start_s + cost_of(n).wall_s.expected, most, deadline_s)
    possible = largest_in_time(lambda n: start_s + cost_of(n).wall_s.low, most, deadline_s)
    told = max(1, units)
    wall_s = cost_of(told).wall_s.expected
    return RowsInTime(
        deadline_s=deadline_s,
        start_s=start_s,
        num_rows=work.rows_of_first(most),
        rows_in_time=work.rows_of_first(units),
        num_units=most,
        units_in_time=units,
        num_possible=max(units, possible),
        done_after_s=start_s + wall_s,
        first_unit_rows=work.rows_of_first(1),
        row_s=wall_s / max(1, work.rows_of_first(told)),
    )


def outlook_of(
    question: Question, costs: CostModel | None, work: UnitWork, deadline_s: float
) -> DeadlineOutlook:
    """Return what is known of a deadline before a job runs, with engines that start for it."""
    if costs is None or not work.num_units:
        return DeadlineOutlook(deadline_s=deadline_s)
    choices = tuple(_choices(question, costs, work))
    return DeadlineOutlook(
        deadline_s=deadline_s,
        rows=rows_in_time(question, costs, work, deadline_s=deadline_s, start_s=costs.start_s),
        choices=choices,
        chosen=cheapest_in_time(choices, deadline_s),
    )


def _choices(question: Question, costs: CostModel, work: UnitWork) -> list[EngineChoice]:
    """Return numbers of engines up to what is there, each with the batches that were measured.

    The KV cache of an engine is taken for the measured one, however many share a host.
    """
    whole, most_rows = work.of_first(work.num_units), costs.limits.max_num_seqs
    batches = sorted({max(1, most_rows // share) for share in _BATCHES}, reverse=True)
    found = []
    for number in replica_counts(_most_replicas(question)):
        asked = _with_replicas(question, number)
        core_share = core_share_in(placement_of(asked), asked.spec)
        for batch in batches:
            limited = replace(costs, limits=replace(costs.limits, max_num_seqs=batch))
            cost = estimate(limited, whole, number, core_share=core_share)
            done_after_s = costs.start_s + cost.wall_s.expected
            found.append(
                EngineChoice(num_replicas=number, max_num_seqs=batch, done_after_s=done_after_s)
            )
    return found


def _most_replicas(question: Question) -> int:
    """Return the engines for which cluster or host has room, or those that the job asks for."""
    there = placement_of(_with_replicas(question, None)).num_replicas
    return max(there, placement_of(question).num_replicas)


def _with_replicas(question: Question, number: int | None) -> Question:
    spec = question.spec
    return replace(question, spec=replace(spec, pool=replace(spec.pool, replicas=number)))
