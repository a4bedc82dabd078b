"""Extrapolates tokens, time and cost of a whole input from a generated sample."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch.actors.replicas.placement import Placement
from raybatch.backends.registry import type_of
from raybatch.explanation.query import JobQuery, core_share_in, cost_model_of, placement_of
from raybatch.planning.planned import PlannedInput, planned_work
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import Band, TimeEstimate, band, estimate, money
from raybatch.policy.cost.work import WorkTotals
from raybatch.records.arrays import Floats

# standard errors on each side of the expectation
_BAND_ERRORS = 2.0


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
    price = _hourly_price(query, time, num_replicas)
    if cost:
        price = band(cost * factor, max(prompt_error, output_error))
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


def _hourly_price(query: JobQuery, time: TimeEstimate | None, num_replicas: int) -> Band | None:
    """Return the cost of engines by the hour; None if their time or price is unknown."""
    hourly = query.price_per_engine_hour
    if time is None or hourly is None:
        return None
    return Band(
        expected=money(time.wall_s, num_replicas, hourly),
        low=money(time.low_s, num_replicas, hourly),
        high=money(time.high_s, num_replicas, hourly),
    )


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
