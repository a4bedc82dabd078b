"""Steps of an engine, forecast: literal small runs, and what every run must keep."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.cost.cost_model import EngineLimits
from raybatch.policy.cost.step_forecast import forecast_steps
from raybatch.policy.cost.work import work_totals

LIMITS = EngineLimits(kv_tokens=10**6, max_num_seqs=4, block_size=16, max_batched_tokens=100)


def work(num_rows, prompt, output):
    return work_totals(np.full(num_rows, prompt), np.broadcast_to(output, num_rows))


def test_a_row_alone_takes_its_chunks_and_a_step_per_further_token():
    forecast = forecast_steps(work(1, 250, 4), LIMITS)
    assert [100, 100, 50, 0, 0, 0] == forecast.prefill_tokens.tolist()
    assert [0, 0, 0, 1, 1, 1] == forecast.decode_rows.tolist()


def test_decodes_go_before_prompts_in_the_budget():
    limits = replace(LIMITS, max_batched_tokens=11)
    forecast = forecast_steps(work(2, 10, 4), limits)
    assert [11, 9, 0, 0, 0] == forecast.prefill_tokens.tolist()
    assert [0, 1, 2, 2, 1] == forecast.decode_rows.tolist()


def test_no_more_sequences_run_than_there_are_slots():
    forecast = forecast_steps(work(8, 10, 5), LIMITS)
    assert [0, 4, 4, 4, 4, 0, 4, 4, 4, 4] == forecast.decode_rows.tolist()


def test_a_backend_without_a_budget_takes_all_prompts_at_once():
    forecast = forecast_steps(work(4, 500, 2), replace(LIMITS, max_batched_tokens=None))
    assert [2000, 0] == forecast.prefill_tokens.tolist()


def test_memory_bounds_the_batch():
    # two sequences of 40 tokens and half a block
    limits = replace(LIMITS, kv_tokens=112)
    forecast = forecast_steps(work(8, 32, 8), limits)
    assert 2 == forecast.decode_rows.max()


def test_what_no_longer_fits_is_computed_again():
    limits = replace(LIMITS, kv_tokens=100)
    forecast = forecast_steps(work(4, 20, 40), limits)
    assert forecast.recomputed_tokens > 0
    tokens = forecast.prefill_tokens.sum() + forecast.decode_rows.sum()
    assert 80 + 4 * 39 + forecast.recomputed_tokens == tokens


def test_a_preempted_row_computes_its_prompt_and_its_output_again():
    # two blocks each at the start, a third one after 13 steps, and none of six for a fourth; one
    # full block of the prompt is found again, as the other row needs no more than five; the last
    # token was never computed
    forecast = forecast_steps(work(2, 20, 40), replace(LIMITS, kv_tokens=100))
    assert 20 + 29 - 1 - 16 == forecast.recomputed_tokens


def test_admission_leaves_what_rows_grow_by_in_the_next_steps():
    # a row of 14 tokens takes one of ten blocks, and another one after three steps
    limits = replace(LIMITS, kv_tokens=160, max_num_seqs=64)
    assert 5 * 14 == forecast_steps(work(20, 14, 8), limits).prefill_tokens[0]
    # those that end before that fill the budget
    assert 100 == forecast_steps(work(20, 14, 2), limits).prefill_tokens[0]


def test_a_row_that_does_not_fit_runs_alone():
    forecast = forecast_steps(work(2, 50, 3), replace(LIMITS, kv_tokens=10))
    assert 1 == forecast.decode_rows.max()


def test_a_shared_prefix_takes_memory_once_and_for_all_rows_of_its_group():
    # four rows of 16 own tokens and 8 outputs; a prefix of 96 leaves four of ten blocks to them
    shared = {"shared_tokens": np.full(8, 96), "num_members": np.full(8, 4)}
    cached = np.array([0, 96, 96, 96] * 2)
    totals = work_totals(np.full(8, 112), np.full(8, 8), cached_tokens=cached, **shared)
    limits = replace(LIMITS, max_batched_tokens=1000)
    assert 4 == forecast_steps(totals, limits).decode_rows.max()
    tight = forecast_steps(totals, replace(limits, kv_tokens=160))
    assert 2 == tight.decode_rows.max()
    assert 2 * 96 + 8 * 16 == tight.prefill_tokens.sum()


def test_nothing_to_do_takes_no_step():
    empty = work_totals(np.zeros(0, int), np.zeros(0))
    assert 0 == forecast_steps(empty, LIMITS).num_steps


@given(
    num_rows=st.integers(1, 60),
    prompt=st.integers(1, 200),
    longest=st.integers(1, 40),
    kv_tokens=st.integers(50, 2000),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_every_token_is_computed_once_and_again_when_preempted(
    num_rows, prompt, longest, kv_tokens, seed
):
    outputs = np.random.default_rng(seed).integers(1, longest + 1, num_rows)
    totals = work_totals(np.full(num_rows, prompt), outputs)
    forecast = forecast_steps(totals, replace(LIMITS, kv_tokens=kv_tokens))
    tokens = forecast.prefill_tokens.sum() + forecast.decode_rows.sum()
    # each prompt gives a first token
    once = num_rows * prompt + outputs.sum() - num_rows
    assert pytest.approx(once + forecast.recomputed_tokens) == tokens


@pytest.mark.parametrize("output", [40, np.tile([5, 20, 200, 15], 10_000)])
def test_a_long_run_is_forecast_from_its_middle(output):
    totals = work(40_000, 60, output)
    limits = replace(LIMITS, max_num_seqs=32)
    forecast = forecast_steps(totals, limits)
    bound = totals.generated_tokens / 32
    assert pytest.approx(bound, rel=0.02) == forecast.num_steps
    tokens = float(forecast.weight @ forecast.prefill_tokens)
    assert pytest.approx(totals.computed_tokens, rel=0.02) == tokens
    assert len(forecast.decode_rows) < bound / 5


@pytest.mark.parametrize(
    ("kv_tokens", "max_num_seqs", "output"), [(8192, 1, 4096), (4096, 64, 2000), (65536, 256, 8192)]
)
def test_long_outputs_in_small_batches_are_forecast_from_few_steps(kv_tokens, max_num_seqs, output):
    limits = EngineLimits(
        kv_tokens=kv_tokens, max_num_seqs=max_num_seqs, block_size=16, max_batched_tokens=2048
    )
    forecast = forecast_steps(work(3000, 100, output), limits)
    assert len(forecast.weight) < 400_000
    generated = forecast.weight @ forecast.decode_rows
    assert pytest.approx(3000 * (output - 1), rel=0.05) == generated


def test_few_rows_stand_for_all_lengths():
    limits = EngineLimits(kv_tokens=10**6, max_num_seqs=1, block_size=16, max_batched_tokens=2048)
    outputs = np.random.default_rng(0).exponential(8000, 3000).clip(1).round()
    forecast = forecast_steps(work(3000, 100, outputs), limits)
    assert len(forecast.weight) < 400_000
    assert pytest.approx(outputs.sum(), rel=0.02) == forecast.num_steps
