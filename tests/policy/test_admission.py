"""From how many tokens on a step is full."""

import pytest

from raybatch.policy.cost.layers import WEIGHT_READ_TOKENS, full_step_tokens


@pytest.mark.parametrize(
    ("kv_bytes", "used_fraction", "times"), [(0, 1, 1), (32, 1, 3), (0, 0.25, 4), (32, 0.25, 12)]
)
def test_a_step_is_full_from_more_tokens_on_where_it_reads_more(kv_bytes, used_fraction, times):
    tokens = full_step_tokens(weight_bytes=16, kv_bytes=kv_bytes, used_fraction=used_fraction)
    assert tokens == times * WEIGHT_READ_TOKENS
