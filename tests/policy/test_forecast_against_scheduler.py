"""The forecast of steps and the scheduler whose rules it follows: exactly the same steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.step_forecast import StepSimulation, forecast_steps
from raybatch.policy.cost.work import work_totals
from tests.policy.scheduler_run import run_scheduler
from tests.tiers import examples

rows = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=30)
# tokens shared by a group, and further tokens of each row
groups = st.lists(
    st.tuples(
        st.integers(0, 60),
        st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def limits_for(draw, longest, times=1):
    """Limits of an engine whose pool holds `times` of the longest row, and up to 40 blocks more."""
    block_size = draw(st.sampled_from((1, 2, 4, 8, 16, 32)))
    num_blocks = times * -(-longest // block_size) + draw(st.integers(0, 40))
    max_num_seqs = draw(st.integers(1, 20))
    return EngineLimits(
        kv_tokens=num_blocks * block_size,
        max_num_seqs=max_num_seqs,
        block_size=block_size,
        max_batched_tokens=max_num_seqs + draw(st.sampled_from((0, 3, 50, 300))),
    )


def compare(prompts, outputs, limits, **sharing):
    """Return the result of the scheduler and the forecast, in the same form."""
    real = run_scheduler(prompts, outputs, limits, **sharing)
    forecast = StepSimulation(prompts, outputs, limits, **sharing)
    forecast.run()
    computed = sum(forecast.prefill_tokens) + sum(forecast.decode_rows)
    needed = sum(prompts) + sum(outputs) - len(prompts) + sum(forecast.recomputed_tokens)
    return vars(real), {
        "decode_rows": forecast.decode_rows,
        "prefill_tokens": forecast.prefill_tokens,
        "num_ended": forecast.num_ended,
        "num_preemptions": forecast.num_preemptions,
        "recomputed_tokens": sum(forecast.recomputed_tokens),
        "cached_tokens": needed - computed,
    }


def compare_groups(data, groups, *, times):
    rows = [
        (prefix + own, output, prefix, group)
        for group, (prefix, members) in enumerate(groups)
        for own, output in members
    ]
    prompts, outputs, prefixes, ids = map(list, zip(*rows, strict=True))
    longest = max(p + o for p, o in zip(prompts, outputs, strict=True))
    limits = data.draw(limits_for(longest, times))
    return compare(prompts, outputs, limits, prefixes=prefixes, groups=ids)


@given(st.data(), rows)
@settings(max_examples=examples(60, full=3000))
def test_the_forecast_is_what_the_scheduler_does(data, rows):
    prompts, outputs = map(list, zip(*rows, strict=True))
    limits = data.draw(limits_for(max(map(sum, rows))))
    real, forecast = compare(prompts, outputs, limits)
    assert real == forecast


@given(st.data(), groups)
@settings(max_examples=examples(60, full=3000))
def test_prefixes_of_groups_are_computed_and_held_as_by_the_scheduler(data, groups):
    real, forecast = compare_groups(data, groups, times=2)
    assert real == forecast


@given(st.data(), groups)
@settings(max_examples=examples(30, full=2000))
def test_steps_are_close_to_those_of_the_scheduler_if_prefixes_are_evicted(data, groups):
    """The scheduler evicts blocks of a prefix; the forecast only counts them."""
    real, forecast = compare_groups(data, groups, times=1)
    assert pytest.approx(len(real["num_ended"]), rel=0.1, abs=2) == len(forecast["num_ended"])


def log_normal(rng, num_rows, mean, spread):
    lengths = rng.lognormal(np.log(mean) - spread**2 / 2, spread, num_rows)
    return lengths.clip(1, 10 * mean).astype(int)


@pytest.mark.parametrize("kv_tokens", [10**6, 2400], ids=["roomy", "tight"])
@pytest.mark.parametrize("spread", [0.0, 0.5, 1.0])
def test_prompts_of_unlike_lengths_take_the_steps_of_their_mean(kv_tokens, spread, rng):
    """Totals have only the mean of prompts, an error of 3 % of the steps at most."""
    prompts, outputs = log_normal(rng, 400, 40, spread), log_normal(rng, 400, 20, 0.3)
    limits = EngineLimits(
        kv_tokens=kv_tokens, max_num_seqs=32, block_size=16, max_batched_tokens=128
    )
    real = run_scheduler(prompts.tolist(), outputs.tolist(), limits)
    forecast = forecast_steps(work_totals(prompts, outputs), limits)
    assert pytest.approx(len(real.decode_rows), rel=0.03) == forecast.num_steps


@pytest.mark.parametrize("seed", range(4))
def test_the_end_of_a_run_depends_on_which_rows_come_last(seed):
    """Totals have no order; a long output among the last rows runs alone for up to its length."""
    rng = np.random.default_rng(seed)
    prompts, outputs = log_normal(rng, 400, 40, 1.0), log_normal(rng, 400, 20, 1.0)
    limits = EngineLimits(kv_tokens=2400, max_num_seqs=32, block_size=16, max_batched_tokens=128)
    real = run_scheduler(prompts.tolist(), outputs.tolist(), limits)
    forecast = forecast_steps(work_totals(prompts, outputs), limits)
    assert pytest.approx(len(real.decode_rows), abs=outputs.max()) == forecast.num_steps


def test_the_memory_of_prefixes_is_in_a_forecast_from_totals(rng):
    """Without the memory of prefixes, twice the rows would run at once, in half the steps."""
    prompts, outputs = log_normal(rng, 256, 40, 0.3) + 512, log_normal(rng, 256, 20, 0.3)
    members = np.full(256, 8)
    shared = np.full(256, 512)
    cached = np.where(np.arange(256) % 8, 512, 0)
    limits = EngineLimits(kv_tokens=1280, max_num_seqs=64, block_size=16, max_batched_tokens=256)
    ids = (np.arange(256) // 8).tolist()
    real = run_scheduler(
        prompts.tolist(), outputs.tolist(), limits, prefixes=shared.tolist(), groups=ids
    )
    totals = work_totals(
        prompts, outputs, cached_tokens=cached, shared_tokens=shared, num_members=members
    )
    forecast = forecast_steps(totals, limits)
    assert real.cached_tokens == cached.sum()
    assert pytest.approx(len(real.decode_rows), rel=0.05) == forecast.num_steps
