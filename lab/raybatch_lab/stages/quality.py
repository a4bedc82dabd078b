"""Seconds of one iteration by sums over its batch: the linear model that stages are planned with.

A stage is known by sums over its rows alone, so its time has to be linear in sums; estimates of a
job stay with `raybatch.policy.cost.cost_model.CostModel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import MeasuredStep
from raybatch.policy.cost.roofline import solve_nonnegative
from raybatch.records.arrays import Bools, Floats
from raybatch_lab.stages.heterogeneity import MixCurve, variation

_HELD_OUT_SHARE = 0.25
# multiples of it meet no period that a program of measurements has
_IRRATIONAL = 3**0.5
# twice the costs, and as many again to judge them by
_MIN_STEPS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class StepQuality:
    """Seconds of a step by its contents, for rows of equal lengths: D0 to D4 of CascadeInfer."""

    step_s: float
    row_s: float  # per sequence that gets a token
    prompt_token_s: float
    prompt_pair_s: float  # per prompt token and token that it attends to
    context_s: float  # per KV token that a decoding sequence attends to
    held_out_error: float = 0.0  # mean of relative errors over steps that were held out
    constant_error: float = 0.0  # of one number for all steps, over the same ones

    @property
    def costs(self) -> Floats:
        return np.array(
            [self.step_s, self.row_s, self.prompt_token_s, self.prompt_pair_s, self.context_s]
        )

    def iteration_s(self, steps: Sequence[MeasuredStep]) -> Floats:
        """Return the predicted seconds of each step, [N]; the `seconds` of steps are not read."""
        return _features(steps) @ self.costs

    def __str__(self) -> str:
        return (
            f"held-out steps are off by {self.held_out_error:.1%} on average, a constant by "
            f"{self.constant_error:.1%}"
        )


def fit_quality(steps: Sequence[MeasuredStep]) -> StepQuality:
    """Fit non-negative costs to measured steps, by least squares of relative errors.

    A quarter of the steps is held out to judge the fit. Steps with cascade attention are left out,
    since their KV reads are not a sum over rows.

    Raises:
        ConfigError: there are too few steps, or one took no time.

    Source: CascadeInfer, section 4.1, with the seconds of iterations in place
    of latency: a job has no user who waits for a token.
    """
    steps = [step for step in steps if not step.shared_pairs]
    if len(steps) < _MIN_STEPS:
        raise ConfigError(
            f"fitting step costs needs at least {_MIN_STEPS} measured steps, got {len(steps)}"
        )
    seconds = np.array([step.seconds for step in steps])
    if not (seconds > 0).all():
        raise ConfigError(f"a measured step has {seconds.min()} seconds; they must be above 0")
    features = _features(steps)
    is_held_out = held_out(len(steps))

    def held_out_error(columns: Floats) -> tuple[Floats, float]:
        fitted, ones = ~is_held_out, np.ones(len(steps))
        weighted = columns / seconds[:, None]
        costs = solve_nonnegative(weighted[fitted], ones[fitted])
        return costs, float(np.abs(weighted[is_held_out] @ costs - 1.0).mean())

    costs, error = held_out_error(features)
    step_s, row_s, prompt_token_s, prompt_pair_s, context_s = costs.tolist()
    return StepQuality(
        step_s=step_s,
        row_s=row_s,
        prompt_token_s=prompt_token_s,
        prompt_pair_s=prompt_pair_s,
        context_s=context_s,
        held_out_error=error,
        constant_error=held_out_error(features[:, :1])[1],
    )


def held_out(num_steps: int) -> Bools:
    """Return a mask of the steps held out to judge a fit, about a quarter, [num_steps]."""
    return np.arange(num_steps) * _IRRATIONAL % 1.0 >= 1.0 - _HELD_OUT_SHARE


def decode_seconds(sums: Floats, quality: StepQuality, curve: MixCurve) -> Floats:
    """Return the seconds of steps that decode rows of unequal lengths; 0 for no rows.

    Args:
        sums: number of rows, sum of their lengths, and sum of the squares, [3, ...].
    """
    rows, total, squares = sums
    factor = curve.at(variation(rows, total, squares))
    seconds = quality.row_s * rows + quality.context_s * factor * total
    return np.where(rows > 0, quality.step_s + seconds, 0.0)


def _features(steps: Sequence[MeasuredStep]) -> Floats:
    """Return F0 to F4 of each step, [N, 5]."""
    return np.array(
        [
            (
                1.0,
                step.rows,
                # a forward batch has one token of each sequence that decodes
                max(0.0, step.tokens - step.rows),
                step.pairs + step.past_pairs,
                step.context_reads,
            )
            for step in steps
        ],
        float,
    )
