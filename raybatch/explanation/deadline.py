"""The work of a plan, in total and of its first units, and forecasts for a deadline."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from raybatch.config import PlanConfig
from raybatch.explanation.query import JobQuery, core_share_in, placement_of
from raybatch.explanation.record import DeadlineOutlook, RowsInTime
from raybatch.planning.planned import LargePlan, PlannedInput, planned_work
from raybatch.planning.shards import even_stretch, places_in_units
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import TimeEstimate, estimate
from raybatch.policy.cost.work import WorkTotals, merge_work
from raybatch.policy.deadline import EngineChoice, cheapest_in_time, largest_in_time, replica_counts
from raybatch.records.arrays import Bools, Ints

# compared shares of an engine's maximum running rows
_BATCHES = (1, 2, 4)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitWork:
    """The work (rows and tokens) of commit units, in the order in which they run.

    Args:
        unit_rows: int64 [U], number of rows of each unit.
        of_first: returns the work of the first n units, n at least 1.
    """

    unit_rows: Ints
    of_first: Callable[[int], WorkTotals]

    @property
    def num_units(self) -> int:
        return len(self.unit_rows)

    def rows_of_first(self, num_units: int) -> int:
        """Return the number of rows of the first `num_units` units."""
        return int(self.unit_rows[:num_units].sum())


def work_of_plan(plan: PlanConfig, planned: PlannedInput | LargePlan) -> WorkTotals:
    """Return the work (rows and tokens) of all rows of a plan."""
    if isinstance(planned, LargePlan):
        is_grouped = planned.is_reordered(plan)
        return merge_work([part.work if is_grouped else part.work_alone for part in planned.parts])
    return planned_work(
        planned.keys,
        planned.expected_tokens,
        planned.arrangement,
        is_grouped=planned.plan.is_reordered,
    )


def work_of_units(
    plan: PlanConfig,
    planned: PlannedInput | LargePlan,
    *,
    unit_rows: Ints | None = None,
    unit_of_row: Ints | None = None,
    todo: Bools | None = None,
) -> UnitWork:
    """Return the work of the units to run, of a new plan or of a stored one.

    Units of a large plan, whose rows are not in memory, are assumed to be alike.

    Args:
        unit_rows: int64 [U], number of rows of each unit of the plan.
        unit_of_row: int64 [rows of the source], unit of each row; used for a plan in memory.
        todo: bool [U], units to run; None for all.
    """
    if unit_rows is None:
        unit_rows = _units_of(plan, planned)
    chosen = np.arange(len(unit_rows)) if todo is None else np.flatnonzero(todo)
    if isinstance(planned, LargePlan):
        whole, ends = work_of_plan(plan, planned), np.cumsum(unit_rows[chosen])

        def of_first(num_units: int) -> WorkTotals:
            share = float(ends[num_units - 1]) / max(1, planned.num_rows)
            return whole.actual(
                computed_tokens=whole.computed_tokens * share,
                generated_tokens=whole.generated_tokens * share,
                num_rows=max(1, round(whole.num_rows * share)),
            )

        return UnitWork(unit_rows=unit_rows[chosen], of_first=of_first)
    if unit_of_row is None:
        unit_of_row = np.empty(planned.num_rows, np.int64)
        unit_of_row[planned.whole.order], _ = places_in_units(unit_rows)
    place = np.full(len(unit_rows), len(unit_rows))
    place[chosen] = np.arange(len(chosen))
    places = place[unit_of_row[planned.requested]]
    return UnitWork(
        unit_rows=unit_rows[chosen],
        of_first=lambda num_units: planned_work(
            planned.keys,
            planned.expected_tokens,
            planned.arrangement,
            is_grouped=planned.plan.is_reordered,
            chosen=places < num_units,
        ),
    )


def _units_of(plan: PlanConfig, planned: PlannedInput | LargePlan) -> Ints:
    """Return the rows of each unit of a plan that is not stored; approximate for a large plan."""
    if isinstance(planned, LargePlan):
        return even_stretch(planned.num_rows, plan)
    sizes: Ints = np.diff(planned.whole.unit_starts)
    return sizes


def rows_in_time(
    query: JobQuery, costs: CostModel, work: UnitWork, *, deadline_s: float, start_s: float
) -> RowsInTime:
    """Return how many rows and units, from the first on, are predicted to be done in time.

    Args:
        work: work of the units to run, at least one.
        deadline_s: seconds from the start of the run.
        start_s: seconds from the start of the run until engines accept rows.
    """
    placement = placement_of(query)
    core_share = core_share_in(placement, query.spec)

    @cache
    def cost_of(num_units: int) -> TimeEstimate:
        first = work.of_first(num_units)
        return estimate(costs, first, placement.num_replicas, core_share=core_share)

    most = work.num_units
    units = largest_in_time(lambda n: start_s + cost_of(n).wall_s, most, deadline_s)
    possible = largest_in_time(lambda n: start_s + cost_of(n).low_s, most, deadline_s)
    counted = max(1, units)
    wall_s = cost_of(counted).wall_s
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
        row_s=wall_s / max(1, work.rows_of_first(counted)),
    )


def outlook_of(
    query: JobQuery, costs: CostModel | None, work: UnitWork, deadline_s: float
) -> DeadlineOutlook:
    """Return the forecast for a deadline before a job runs, engine starts included."""
    if costs is None or not work.num_units:
        return DeadlineOutlook(deadline_s=deadline_s)
    choices = tuple(_choices(query, costs, work))
    return DeadlineOutlook(
        deadline_s=deadline_s,
        rows=rows_in_time(query, costs, work, deadline_s=deadline_s, start_s=costs.start_s),
        choices=choices,
        chosen=cheapest_in_time(choices, deadline_s),
    )


def _choices(query: JobQuery, costs: CostModel, work: UnitWork) -> list[EngineChoice]:
    """Return forecasts for numbers of engines up to the maximum, with the measured batch sizes.

    Each engine is assumed to have the measured KV cache, however many share a host.
    """
    whole, most_rows = work.of_first(work.num_units), costs.limits.max_num_seqs
    batches = sorted({max(1, most_rows // share) for share in _BATCHES}, reverse=True)
    compared = []
    for number in replica_counts(_most_replicas(query)):
        with_replicas = _with_replicas(query, number)
        core_share = core_share_in(placement_of(with_replicas), with_replicas.spec)
        for batch in batches:
            limited = replace(costs, limits=replace(costs.limits, max_num_seqs=batch))
            cost = estimate(limited, whole, number, core_share=core_share)
            done_after_s = costs.start_s + cost.wall_s
            compared.append(
                EngineChoice(num_replicas=number, max_num_seqs=batch, done_after_s=done_after_s)
            )
    return compared


def _most_replicas(query: JobQuery) -> int:
    """Return the number of engines that fit the cluster or host, or that the job sets if more."""
    there = placement_of(_with_replicas(query, None)).num_replicas
    return max(there, placement_of(query).num_replicas)


def _with_replicas(query: JobQuery, number: int | None) -> JobQuery:
    spec = query.spec
    return replace(query, spec=replace(spec, pool=replace(spec.pool, replicas=number)))
