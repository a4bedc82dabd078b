"""The measuring program: it finds the costs behind a backend, within its time."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.backends.cost_cache import limits_of, measure_backend
from raybatch.backends.fake import FakeBackend, FakeOptions
from raybatch.errors import MeasureError
from raybatch.policy.cost.cost_model import _COUNT_OF, CostModel, EngineLimits, fit
from raybatch.policy.cost.estimate import estimate
from raybatch.policy.cost.work import work_totals
from raybatch.records.types import Request, Sampling
from tests.backends.timed_backend import TimedBackend

LIMITS = EngineLimits(kv_tokens=65536, max_num_seqs=256, block_size=64, max_batched_tokens=2048)
FAST = CostModel(
    step_s=2e-3,
    knots=(16.0, 64.0),
    token_s=(1e-4, 6e-5, 4e-5),
    row_s=2e-5,
    pair_s=6e-8,
    past_pair_s=2e-8,
    context_s=8e-7,
    shared_pair_s=5e-8,
    shared_read_s=2e-6,
    fit_error=0.0,
    limits=LIMITS,
)
SLOW = replace(
    FAST,
    step_s=2e-2,
    token_s=(3e-3, 1e-3, 6e-4),
    row_s=1e-4,
    pair_s=3e-7,
    # no time is left to measure it
    past_pair_s=3e-7,
    context_s=4e-6,
    shared_pair_s=3e-7,
    shared_read_s=1e-5,
)


def measured(truth, **options):
    backend = TimedBackend(truth, **options)
    steps = measure_backend(backend, truth.limits, clock=backend.clock)
    return backend, steps, fit(steps, truth.limits)


def run(truth, num_rows, prompt, output, shared=0):
    """Run rows; return the seconds, and the totals of their plan."""
    backend = TimedBackend(truth)
    random = np.random.default_rng(0)
    sampling = Sampling(max_tokens=output, ignore_eos=True)
    group_id = 1 if shared else None
    backend.submit(
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=random.integers(0, 99, prompt).astype(np.int32),
            sampling=sampling,
            group_id=group_id,
            prefix_len=shared,
        )
        for i in range(num_rows)
    )
    while backend.num_unfinished():
        backend.poll()
    cached = np.full(num_rows, shared)
    cached[0] = 0
    work = work_totals(
        np.full(num_rows, prompt),
        np.full(num_rows, output),
        cached_tokens=cached,
        shared_tokens=np.full(num_rows, shared),
        num_members=np.full(num_rows, num_rows),
    )
    return backend.now, work


@pytest.mark.parametrize("truth", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(
    ("rows", "prompt", "output", "shared"),
    [(200, 128, 64, 0), (16, 1000, 4, 0), (3, 20, 300, 0), (128, 1056, 16, 1024)],
)
def test_a_run_takes_what_the_measured_costs_say(truth, rows, prompt, output, shared):
    _, _, model = measured(truth)
    seconds, work = run(truth, rows, prompt, output, shared)
    assert pytest.approx(seconds, rel=0.08) == estimate(model, work).engine_s


def test_noise_of_some_percent_leaves_the_estimate_within_ten():
    _, _, model = measured(FAST, noise=0.03)
    seconds, work = run(FAST, 200, 128, 64)
    assert pytest.approx(seconds, rel=0.1) == estimate(model, work).engine_s


@pytest.mark.parametrize("truth", [FAST, SLOW], ids=["fast", "slow"])
def test_every_cost_is_told_apart(truth):
    _, _, model = measured(truth)
    for name in ("step_s", *_COUNT_OF):
        assert pytest.approx(getattr(truth, name), rel=1e-3) == getattr(model, name)


@pytest.mark.parametrize("truth", [FAST, SLOW], ids=["fast", "slow"])
def test_measuring_stays_near_its_time(truth):
    backend, _, _ = measured(truth)
    assert backend.now < 13.0


def test_a_slow_backend_is_measured_with_fewer_steps():
    very_slow = replace(SLOW, step_s=1.0)
    backend, steps, _ = measured(very_slow)
    assert len(steps) < len(measured(FAST)[1])
    assert backend.now < 25.0


def test_the_backend_is_idle_afterwards():
    backend, _, _ = measured(FAST)
    assert 0 == backend.num_unfinished()


def test_the_same_seed_measures_the_same():
    assert measured(FAST)[1] == measured(FAST)[1]


@pytest.mark.parametrize("kv_tokens", [64, 256, 1024])
def test_a_small_cache_is_measured_as_far_as_it_goes(kv_tokens):
    truth = replace(FAST, limits=replace(LIMITS, kv_tokens=kv_tokens, block_size=16))
    _, steps, _ = measured(truth, max_model_len=kv_tokens)
    assert max(step.tokens for step in steps) <= kv_tokens


def test_a_context_too_small_for_any_prompt_is_an_error():
    with pytest.raises(MeasureError, match="may have only 8 tokens"):
        measured(FAST, max_model_len=8)


def test_a_prompt_that_fails_is_an_error_with_its_cause():
    with pytest.raises(MeasureError, match="ValueError: no"):
        measured(FAST, error="ValueError: no")


class Stuck(TimedBackend):
    def poll(self):
        return []


def test_a_backend_that_does_not_get_on_is_an_error():
    backend = Stuck(FAST)
    with pytest.raises(MeasureError, match="did not finish a measured prompt within"):
        measure_backend(backend, LIMITS, clock=backend.clock)


def test_the_fake_backend_can_be_measured():
    backend = FakeBackend(FakeOptions())
    limits = limits_of(backend, None)
    ticks = iter(range(10**6))
    steps = measure_backend(backend, limits, clock=lambda: next(ticks) * 1e-4)
    # each poll takes one tick of this clock, whatever it computes
    assert pytest.approx(1e-4, rel=1e-3) == fit(steps, limits).step_s
    assert {64} == {max(step.rows for step in steps)}
