"""What it takes to compute the KV of a sequence again."""

from dataclasses import replace

import pytest

from raybatch.policy.cost.cost_model import CostModel, EngineLimits, recompute_time

LIMITS = EngineLimits(kv_tokens=4096, max_num_seqs=64, block_size=16, max_batched_tokens=512)
COSTS = CostModel(
    step_s=1e-3,
    knots=(),
    token_s=(2e-5,),
    row_s=5.0,
    pair_s=1e-8,
    past_pair_s=1e-8,
    context_s=5.0,
    shared_pair_s=5.0,
    shared_read_s=5.0,
    fit_error=0.0,
    limits=LIMITS,
)


def test_computing_again_takes_the_steps_that_the_token_budget_asks_for():
    # 512 and 88 tokens; the second chunk sees the first
    pairs = 512 * 513 / 2 + 88 * 512 + 88 * 89 / 2
    expected = 2 * 1e-3 + 600 * 2e-5 + pairs * 1e-8
    assert pytest.approx(expected) == recompute_time(COSTS, 600)


def test_without_a_token_budget_all_is_one_step():
    costs = replace(COSTS, limits=replace(LIMITS, max_batched_tokens=None))
    expected = 1e-3 + 600 * 2e-5 + 600 * 601 / 2 * 1e-8
    assert pytest.approx(expected) == recompute_time(costs, 600)


def test_nothing_takes_no_time():
    assert 0.0 == recompute_time(COSTS, 0)
