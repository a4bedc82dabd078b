"""Costs of an iteration, fitted to steps."""

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import MeasuredStep
from raybatch_lab.stages.heterogeneity import FLAT
from raybatch_lab.stages.quality import decode_seconds, fit_quality, held_out
from tests.lab.stages.pools import QUALITY, curve_to

PLANTED = np.array([2e-3, 3e-5, 4e-6, 2e-9, 5e-7])


def steps_of(rng, num_steps=80, noise=0.0):
    """Return steps over batches of doubling lengths and sizes, as the paper profiles them."""
    steps = []
    for _ in range(num_steps):
        rows, length = 2 ** rng.integers(0, 8), 100 * 2 ** rng.integers(0, 6)
        prompts = int(rng.integers(0, 2)) * length
        contexts = rows * length
        features = np.array([1.0, rows, prompts, prompts * (prompts + 1) / 2, contexts])
        seconds = float(features @ PLANTED) * (1 + noise * rng.standard_normal())
        steps.append(
            MeasuredStep(
                seconds=seconds,
                tokens=float(prompts + rows),
                rows=float(rows),
                pairs=features[3],
                context_reads=float(contexts),
            )
        )
    return steps


def test_planted_costs_are_found(rng):
    np.testing.assert_allclose(fit_quality(steps_of(rng)).costs, PLANTED, rtol=1e-6)


def test_planted_costs_are_found_under_noise(rng):
    found = fit_quality(steps_of(rng, 400, noise=0.03)).costs
    np.testing.assert_allclose(found, PLANTED, rtol=0.15)


def test_held_out_steps_are_told_far_better_than_by_a_constant(rng):
    found = fit_quality(steps_of(rng, 400, noise=0.05))
    assert "held-out steps are off by " in str(found)
    assert "a constant by " in str(found)
    assert 0.02 < found.held_out_error < 0.06
    assert found.constant_error > 0.5


def test_held_out_steps_are_no_part_of_the_fit(rng):
    steps = steps_of(rng)
    spoilt = [
        MeasuredStep(seconds=99.0, tokens=step.tokens, rows=step.rows) if is_out else step
        for step, is_out in zip(steps, held_out(len(steps)), strict=True)
    ]
    np.testing.assert_allclose(fit_quality(spoilt).costs, PLANTED, rtol=1e-6)


def test_steps_that_read_a_prefix_together_are_left_out(rng):
    shared = MeasuredStep(seconds=9.0, tokens=8.0, rows=8.0, shared_pairs=800.0)
    steps = [shared, *steps_of(rng), shared]
    np.testing.assert_allclose(fit_quality(steps).costs, PLANTED, rtol=1e-6)


def test_no_cost_is_negative(rng):
    # steps that take less the more they do
    steps = [
        MeasuredStep(seconds=1.0 / rows, tokens=rows, rows=rows, context_reads=100 * rows)
        for rows in range(1, 30)
    ]
    assert (fit_quality(steps).costs >= 0).all()


def test_iterations_take_what_was_fitted(rng):
    steps = steps_of(rng)
    expected = [step.seconds for step in steps]
    np.testing.assert_allclose(fit_quality(steps).iteration_s(steps), expected, rtol=1e-6)


def test_too_few_steps_are_refused(rng):
    with pytest.raises(ConfigError, match="at least 12 measured steps, got 11"):
        fit_quality(steps_of(rng, 11))


def test_a_step_without_time_is_refused(rng):
    still = MeasuredStep(seconds=0.0, tokens=1.0, rows=1.0)
    with pytest.raises(ConfigError, match="must be above 0"):
        fit_quality([*steps_of(rng), still])


def test_unlike_lengths_take_longer_by_the_factor_of_attention_alone():
    sums = np.array([[2.0], [400.0], [100.0**2 + 300.0**2]])  # a variation of a half
    like, unlike = (decode_seconds(sums, QUALITY, curve)[0] for curve in (FLAT, curve_to(3.0)))
    assert unlike - like == pytest.approx(QUALITY.context_s * 400.0)


def test_no_rows_take_no_time():
    assert 0.0 == decode_seconds(np.zeros((3, 1)), QUALITY, FLAT)[0]


@pytest.mark.parametrize("period", [2, 3, 4, 5, 6, 7, 8, 9, 10, 12])
def test_steps_of_every_kind_are_held_out_however_they_alternate(period):
    places = np.flatnonzero(held_out(80)) % period
    assert set(range(period)) == set(places.tolist())
    assert 20 == len(places)
