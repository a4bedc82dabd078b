"""What a whole input takes, as a few of its rows that were generated tell it."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch.actors.replicas.placement import Placement
from raybatch.backends.registry import type_of
from raybatch.explanation.question import Question, core_share_in, cost_model_of, placement_of
from raybatch.planning.planned import PlannedInput, planned_work
from raybatch.policy.cost.cost_model import CostModel
from raybatch.policy.cost.estimate import Band, TimeEstimate, band, estimate, money
from raybatch.policy.cost.work import WorkTotals
from raybatch.records.arrays import Floats

# standard errors on each side of what is expected
_BAND_ERRORS = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Extrapolation:
    """Tokens, time and cost of a whole input, about; ranges hold what a sample leaves open.

    Args:
        time: None where the speed of full engines is not known, and `no_time` says why.
        slowest_s: by the clock, if engines went on as slowly as with the sample alone; None where
            that is not known either, or `time` says more.
        sampled_tokens: of prompts and answers of the sample, over `sampled_s` seconds of engines at
            work for them; 0.0 where nobody knows.
        money: of engines, or of an endpoint's answers; None where nothing has a price.
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
    question: Question,
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
        question: about the whole input.
        planned: the sample. What its rows share is taken for what the whole input shares, which
            may be more.
        prompt_tokens: of each of its rows, like `generated_tokens`, over all samples.
        busy_s: seconds of engines at work for it, summed over replicas.
        cost: of its answers, where they have prices.
    """
    prompts, prompt_error = _total(prompt_tokens, num_rows)
    outputs, output_error = _total(generated_tokens, num_rows)
    placement = placement_of(question)
    num_replicas = placement.num_replicas
    factor = num_rows / max(1, planned.num_rows)
    costs, no_time = cost_model_of(question)
    time = slowest_s = None
    if costs is not None and generated_tokens.any():
        errors = prompt_error, output_error
        time = _time(question, planned, costs, placement, generated_tokens, factor, errors)
    sampled_s = 0.0 if type_of(question.spec.backend).is_endpoint else busy_s
    if time is None and sampled_s:
        slowest_s = sampled_s * factor / num_replicas
    price = _hourly_price(question, time, num_replicas)
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
    question: Question,
    planned: PlannedInput,
    costs: CostModel,
    placement: Placement,
    generated_tokens: Floats,
    factor: float,
    errors: tuple[float, float],
) -> TimeEstimate:
    """Return the time of `factor` times the rows of a sample, with bounds by its errors.

    The errors are relative, of prompt tokens and of generated ones.
    """
    work = planned_work(
        planned.keys,
        np.maximum(generated_tokens[planned.asked], 1.0),
        planned.arrangement,
        is_grouped=planned.plan.is_reordered,
    )
    least, expected, most = (
        estimate(
            costs,
            _scaled(work, factor, *(1 + sign * error for error in errors)),
            placement.num_replicas,
            core_share=core_share_in(placement, question.spec),
        )
        for sign in (-1, 0, 1)
    )
    return replace(expected, low_s=least.low_s, high_s=most.high_s)


def _hourly_price(question: Question, time: TimeEstimate | None, num_replicas: int) -> Band | None:
    """Return what engines cost by the hour; None where their time or their price is not known."""
    hourly = question.price_per_engine_hour
    if time is None or hourly is None:
        return None
    return Band(
        expected=money(time.wall_s, num_replicas, hourly),
        low=money(time.low_s, num_replicas, hourly),
        high=money(time.high_s, num_replicas, hourly),
    )


def _total(sampled: Floats, num_rows: int) -> tuple[float, float]:
    """Return the sum over all rows, and by which share of it that may be wrong, up to 1."""
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
