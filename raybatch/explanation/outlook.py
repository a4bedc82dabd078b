"""Forecasts of time and cost, for the query of an explanation.

They are of the first units of a plan, for a deadline, and of a whole input, from a sample.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from raybatch.actors.replicas.placement import Placement
from raybatch.backends.registry import type_of
from raybatch.config import PlanConfig
from raybatch.explanation.query import (
    JobQuery,
    core_share_in,
    cost_model_of,
    placement_of,
    work_of_plan,
)
from raybatch.explanation.record import DeadlineOutlook, RowsInTime
from raybatch.planning.planned import LargePlan, PlannedInput, planned_work
from raybatch.planning.shards import even_stretch, places_in_units
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import Band, TimeEstimate, band, estimate, money
from raybatch.policy.cost.work import WorkTotals
from raybatch.policy.deadline import EngineChoice, cheapest_in_time, largest_in_time, replica_counts
from raybatch.records.arrays import Bools, Floats, Ints

# standard errors on each side of the expectation
_BAND_ERRORS = 2.0
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


def _work_of_rows(planned: PlannedInput, chosen: Bools | None) -> WorkTotals:
    return planned_work(
        planned.keys,
        planned.expected_tokens,
        planned.arrangement,
        is_grouped=planned.plan.is_reordered,
        chosen=chosen,
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
        # of a plan that is not stored; approximate for a large one
        unit_rows = (
            even_stretch(planned.num_rows, plan)
            if isinstance(planned, LargePlan)
            else np.diff(planned.whole.unit_starts)
        )
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
        of_first=lambda num_units: _work_of_rows(planned, places < num_units),
    )


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
    # as many as fit the cluster or host, or that the job sets if more
    placed = (placement_of(one) for one in (query, _with_replicas(query, None)))
    for number in replica_counts(max(placement.num_replicas for placement in placed)):
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


def _with_replicas(query: JobQuery, number: int | None) -> JobQuery:
    spec = query.spec
    return replace(query, spec=replace(spec, pool=replace(spec.pool, replicas=number)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """Estimates of tokens, time and cost of a whole input, with ranges by the sampling error.

    Args:
        time: None if the speed of full engines is unknown; `no_time` is the reason.
        slowest_s: wall-clock seconds at the speed of the sample; None if unknown, or if `time` is
            set.
        sampled_tokens: prompt plus output tokens of the sample; they took `sampled_s` engine
            seconds. Both are 0.0 if unknown.
        money: cost of engines, or of an endpoint's answers; None without prices.
    """

    num_rows: int
    num_sampled: int
    num_replicas: int
    prompt_tokens: Band
    generated_tokens: Band
    time: TimeEstimate | None = None
    no_time: str = ""
    slowest_s: float | None = None
    sampled_tokens: float = 0.0
    sampled_s: float = 0.0
    money: Band | None = None


def extrapolate(
    query: JobQuery,
    planned: PlannedInput,
    *,
    prompt_tokens: Floats,
    generated_tokens: Floats,
    busy_s: float,
    cost: float,
    num_rows: int,
) -> Extrapolation:
    """Extrapolate from a sample to `num_rows` rows; no engine is started to measure its speed.

    Args:
        query: about the whole input.
        planned: the plan of the sample. The whole input is assumed to share prefixes to the same
            degree; it may share more.
        prompt_tokens: prompt tokens of each row of the sample.
        generated_tokens: output tokens of each row of the sample, summed over its n answers.
        busy_s: engine seconds of the sample, summed over replicas.
        cost: cost of its answers; 0 if they have no prices.
    """
    prompts, prompt_error = _total(prompt_tokens, num_rows)
    outputs, output_error = _total(generated_tokens, num_rows)
    placement = placement_of(query)
    num_replicas = placement.num_replicas
    factor = num_rows / max(1, planned.num_rows)
    costs, no_time = cost_model_of(query)
    time = slowest_s = None
    if costs is not None and generated_tokens.any():
        errors = prompt_error, output_error
        time = _time(query, planned, costs, placement, generated_tokens, factor, errors)
    sampled_s = 0.0 if type_of(query.spec.backend).is_endpoint else busy_s
    if time is None and sampled_s:
        slowest_s = sampled_s * factor / num_replicas
    price, hourly = None, query.price_per_engine_hour
    if cost:
        price = band(cost * factor, max(prompt_error, output_error))
    elif time is not None and hourly is not None:
        seconds = (time.wall_s, time.low_s, time.high_s)
        expected, low, high = (money(one, num_replicas, hourly) for one in seconds)
        price = Band(expected=expected, low=low, high=high)
    return Extrapolation(
        num_rows=num_rows,
        num_sampled=planned.num_rows,
        num_replicas=num_replicas,
        prompt_tokens=band(prompts, prompt_error),
        generated_tokens=band(outputs, output_error),
        time=time,
        no_time=no_time,
        slowest_s=slowest_s,
        sampled_tokens=float(prompt_tokens.sum() + generated_tokens.sum()),
        sampled_s=sampled_s,
        money=price,
    )


def _time(
    query: JobQuery,
    planned: PlannedInput,
    costs: CostModel,
    placement: Placement,
    generated_tokens: Floats,
    factor: float,
    errors: tuple[float, float],
) -> TimeEstimate:
    """Return the time of `factor` times the rows of a sample, with bounds by its errors.

    The errors of prompt and generated tokens are relative.
    """
    work = planned_work(
        planned.keys,
        np.maximum(generated_tokens[planned.requested], 1.0),
        planned.arrangement,
        is_grouped=planned.plan.is_reordered,
    )
    least, expected, most = (
        estimate(
            costs,
            _scaled(work, factor, *(1 + sign * error for error in errors)),
            placement.num_replicas,
            core_share=core_share_in(placement, query.spec),
        )
        for sign in (-1, 0, 1)
    )
    return replace(expected, low_s=least.low_s, high_s=most.high_s)


def _total(sampled: Floats, num_rows: int) -> tuple[float, float]:
    """Return the estimated sum over all rows, and its relative error, up to 1."""
    total, number = float(sampled.sum()), len(sampled)
    mean, expected = total / number, total * num_rows / number
    if number == num_rows or not mean:
        return expected, 0.0
    if number == 1:
        return expected, 1.0
    left = (num_rows - number) / (num_rows - 1)
    deviation = float(sampled.std(ddof=1)) / number**0.5 * left**0.5
    return expected, min(1.0, _BAND_ERRORS * deviation / mean)


def _scaled(work: WorkTotals, factor: float, prompt: float, generated: float) -> WorkTotals:
    num_rows = max(1, round(work.num_rows * factor))
    return work.actual(
        computed_tokens=work.computed_tokens * factor * prompt,
        generated_tokens=work.generated_tokens * factor * generated,
        num_rows=num_rows,
    )
