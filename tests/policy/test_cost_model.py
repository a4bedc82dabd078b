"""Costs of steps: the fit finds the costs that generated the steps."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import (
    _COUNT_OF,
    CostModel,
    EngineLimits,
    MeasuredStep,
    fit,
    prompt_pairs,
)

LIMITS = EngineLimits(kv_tokens=4096, max_num_seqs=64, block_size=16, max_batched_tokens=512)
TRUTH = CostModel(
    step_s=2e-3,
    prompt_step_s=7e-4,
    knots=(4.0, 8.0, 16.0, 32.0, 64.0, 256.0),
    token_s=(5e-4, 4e-4, 3e-4, 2e-4, 1e-4, 5e-5, 6e-5),
    row_s=2e-5,
    pair_s=1e-7,
    past_pair_s=3e-8,
    context_s=1e-6,
    shared_pair_s=2e-7,
    shared_read_s=3e-6,
    fit_error=0.0,
    limits=LIMITS,
)


def step(**counts):
    return MeasuredStep(**({"seconds": 1.0, "tokens": 1, "rows": 1} | counts))


def steps_of(truth):
    """Return steps that separate all costs, with seconds from `truth`."""
    prefills = [step(tokens=n, **prompt_pairs(np.array([n]))) for n in (16, 64, 256, 1024)]
    short = [step(tokens=16 * n, rows=n, **prompt_pairs(np.full(n, 16))) for n in (8, 64)]
    cached = [step(tokens=256, rows=8, **prompt_pairs(np.full(8, 32), 512))]
    decodes = [
        step(tokens=n, rows=n, context_reads=n * reads)
        for n in (1, 4, 8, 16, 32, 64)
        for reads in (16, 512)
    ]
    shared = [
        step(tokens=n, rows=n, shared_pairs=n * 512, cascade_reads=512, context_reads=16 * n)
        for n in (8, 32)
    ]
    steps = [*prefills, *short, *cached, *decodes, *shared]
    return [replace(s, seconds=truth.predict(s)) for s in steps]


def test_the_costs_behind_exact_steps_are_found():
    found = fit(steps_of(TRUTH), LIMITS)
    for name in ("step_s", "prompt_step_s", "token_s", *_COUNT_OF):
        assert pytest.approx(getattr(TRUTH, name), rel=1e-6) == getattr(found, name)
    assert found.fit_error < 1e-9


def test_steps_that_disagree_leave_a_fit_error():
    steps = [step(seconds=0.9), step(seconds=1.1)]
    assert pytest.approx(0.1, rel=0.05) == fit(steps, LIMITS).fit_error


def test_the_slope_of_the_largest_batches_continues_beyond_them():
    steps = [step(seconds=1 + n, tokens=n, rows=0) for n in (1, 2, 4, 8)]
    found = fit(steps, LIMITS)
    assert pytest.approx(101.0) == found.predict(step(tokens=100, rows=0))


def test_a_slope_is_fitted_only_where_something_was_measured():
    steps = [step(seconds=1 + n, tokens=n, rows=0) for n in (1, 4, 30, 200)]
    assert (4.0, 32.0) == fit(steps, LIMITS).knots


def test_tokens_cost_along_the_chain_of_slopes():
    # 4 below the first knot, 4 to the second, 2 above it
    assert pytest.approx(4 * 5e-4 + 4 * 4e-4 + 2 * 3e-4) == float(TRUTH.tokens_s(10))


def test_no_steps_are_an_error():
    with pytest.raises(ConfigError, match="needs measured steps"):
        fit([], LIMITS)


def test_a_step_without_time_is_an_error():
    with pytest.raises(ConfigError, match=r"must be above 0, got 0"):
        fit([step(seconds=0.0)], LIMITS)


@pytest.mark.parametrize("change", [{"row_s": -1.0}, {"step_s": float("nan")}])
def test_an_impossible_cost_is_refused(change):
    with pytest.raises(ConfigError, match="costs of a cost model must be"):
        replace(TRUTH, **change)


def test_slopes_and_knots_must_fit():
    with pytest.raises(ConfigError, match=r"knots needs 2 slopes \(token_s\), got"):
        replace(TRUTH, knots=(4.0,))


def test_costs_for_sums_are_closer_to_the_mean_of_steps_that_disagree():
    steps = [step(seconds=0.9), step(seconds=1.1)]
    relative, for_sums = (
        fit(steps, LIMITS, for_sums=for_sums).predict(step()) for for_sums in (False, True)
    )
    assert pytest.approx(0.99) == for_sums
    assert pytest.approx(0.98, abs=0.001) == relative
