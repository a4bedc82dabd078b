"""What a plan gives engines to do, in whole and by its first units."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from raybatch.config import PlanConfig
from raybatch.planning.planned import LargePlan, PlannedInput, planned_work
from raybatch.planning.shards import even_stretch, places_in_units
from raybatch.policy.cost.work import WorkTotals, merge_work
from raybatch.records.arrays import Bools, Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class UnitWork:
    """Units in the order in which they run.

    Args:
        unit_rows: int64 [U], rows of each.
        of_first: returns the work of the first so many units, at least one.
    """

    unit_rows: Ints
    of_first: Callable[[int], WorkTotals]

    @property
    def num_units(self) -> int:
        return len(self.unit_rows)

    def rows_of_first(self, num_units: int) -> int:
        """Return the rows of the first so many units."""
        return int(self.unit_rows[:num_units].sum())


def work_of_plan(plan: PlanConfig, planned: PlannedInput | LargePlan) -> WorkTotals:
    """Return the work of all rows of a plan."""
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
    """Return the work of units, as the plan has them or as they lie below a sink.

    Units of a large plan, whose rows are not here, are taken for alike.

    Args:
        unit_rows: int64 [U], rows of each unit of the plan.
        unit_of_row: int64 [rows of the source], unit of each row; heeded for a plan in memory.
        todo: bool [U], units that are to run; None for all.
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
    places = place[unit_of_row[planned.asked]]
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
    """Return the rows of each unit of a plan that is not stored; of a large one, about."""
    if isinstance(planned, LargePlan):
        return even_stretch(planned.num_rows, plan)
    sizes: Ints = np.diff(planned.whole.unit_starts)
    return sizes
