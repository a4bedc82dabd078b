"""A sequence gets its KV back the quicker way."""

from dataclasses import replace
from itertools import product

import pytest

from raybatch.errors import ConfigError
from raybatch.policy.cost.cost_model import CostModel, EngineLimits, is_copy_quicker, recompute_time
from raybatch.policy.cost.roofline import link

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
# DeepSeek-R1, 61 layers of 576 numbers of 16 bit (mechanisms B32)
R1_BYTES_PER_TOKEN = 61 * 576 * 2


@pytest.mark.parametrize(
    ("tokens", "bandwidth"), list(product((1, 64, 512, 2048, 30_000), (1e6, 1e8, 1e9, 5e9, 5e10)))
)
def test_the_way_taken_is_the_quicker_one(tokens, bandwidth):
    kv_bytes = tokens * R1_BYTES_PER_TOKEN
    recompute_s = recompute_time(COSTS, tokens)
    copy = link(bandwidth, fixed_s=1e-3)
    found = is_copy_quicker(kv_bytes=kv_bytes, link=copy, recompute_s=recompute_s)
    assert (kv_bytes / bandwidth + 1e-3 <= recompute_s) == found


def test_a_long_sequence_is_copied_over_a_fast_link_and_computed_beside_a_slow_one():
    kv_bytes = 2048 * R1_BYTES_PER_TOKEN
    assert pytest.approx(2.9e-3, rel=0.02) == link(50e9).copy_s(kv_bytes)
    assert is_copy_quicker(kv_bytes=kv_bytes, link=link(50e9), recompute_s=0.112)
    assert not is_copy_quicker(kv_bytes=kv_bytes, link=link(1e9), recompute_s=0.112)


def test_a_tie_leaves_the_processor_to_others():
    assert is_copy_quicker(kv_bytes=1e9, link=link(1e9), recompute_s=1.0)


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


@pytest.mark.parametrize("wrong", [{"kv_bytes": -1.0}, {"recompute_s": -1.0}])
def test_negative_numbers_are_refused(wrong):
    with pytest.raises(ConfigError, match="at least 0"):
        is_copy_quicker(**({"kv_bytes": 1.0, "recompute_s": 1.0, "link": link(1.0)} | wrong))
