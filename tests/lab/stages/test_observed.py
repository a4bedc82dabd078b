"""Costs of steps that a pool learns from reports, by the lengths of the rows that ran."""

import numpy as np
import pytest

from raybatch.records.types import ReplicaStats
from raybatch_lab.stages.observed import ObservedSteps

STEP_S, ROW_S, TOKEN_S, CONTEXT_S = 2e-3, 1e-4, 5e-6, 1e-7


def reports(steps, num_reports, *, replica_id=1, seed=0, noise=0.0):
    """Tell reports of an engine with the costs above, each after ten steps of some rows."""
    rng = np.random.default_rng(seed)
    seconds = generated = prompts = 0.0
    for number in range(num_reports):
        rows, length, prompt = (int(rng.integers(1, high)) for high in (32, 4000, 500))
        step_s = STEP_S + ROW_S * rows + TOKEN_S * prompt + CONTEXT_S * rows * length
        seconds += 10 * step_s * (1 + noise * rng.standard_normal())
        generated, prompts = generated + 10 * rows, prompts + 10 * prompt
        stats = ReplicaStats(
            num_steps=10 * (number + 1),
            generated_tokens=int(generated),
            num_chunk_tokens=int(prompts),
            engine_s=seconds,
        )
        steps.note(replica_id, stats, np.full(rows, length))


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_planted_costs_are_found(noise):
    steps = ObservedSteps()
    reports(steps, 60, noise=noise)
    reports(steps, 60, replica_id=2, seed=1, noise=noise)
    found = steps.quality
    assert found.context_s == pytest.approx(CONTEXT_S, rel=3 * noise + 0.01)
    assert found.prompt_token_s == pytest.approx(TOKEN_S, rel=3 * noise + 0.01)
    assert found.held_out_error < 2 * noise + 0.01 < found.constant_error


def test_steps_of_a_busy_host_tell_nothing():
    steps = ObservedSteps()
    reports(steps, 100, noise=0.5)
    assert steps.quality is None


def test_few_reports_tell_nothing():
    steps = ObservedSteps()
    reports(steps, 20)
    assert steps.quality is None


def test_counters_that_fall_are_those_of_another_engine_and_are_left_out():
    steps = ObservedSteps()
    for seed in range(10):
        reports(steps, 12, seed=seed)
    assert steps.quality.context_s == pytest.approx(CONTEXT_S, rel=0.01)


def test_an_engine_without_rows_tells_nothing():
    steps = ObservedSteps()
    for number in range(100):
        stats = ReplicaStats(num_steps=number, engine_s=float(number))
        steps.note(1, stats, np.zeros(0, np.int64))
    assert steps.quality is None
