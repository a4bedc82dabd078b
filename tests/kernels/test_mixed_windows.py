"""Layers with a sliding window beside layers without one, in one step with shared contexts."""

import pytest
import torch

from raybatch.kernels.attention import attend, prepare_attention
from tests.kernels.test_group_attention import BLOCK_SIZE, NUM_MEMBERS, Members


def attended(members, windows, window):
    positions = torch.arange(members.cached, members.cached + members.num_queries)
    slots = [
        table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        for table in members.tables
    ]
    prepared = prepare_attention(
        members.plan,
        positions=positions.repeat(NUM_MEMBERS),
        slot_mapping=torch.cat(slots),
        pool=members.k_pool,
        windows=windows,
    )
    pools = members.k_pool, members.v_pool
    return attend(members.q, members.k, members.v, *pools, prepared, window)


@pytest.mark.parametrize("window", [40, 150])
def test_a_window_holds_in_its_layers_whatever_other_layers_have(window):
    members = Members(prefix=128, suffix=30, num_queries=5, heads=(4, 2), head_dim=16, group_size=2)
    alone = attended(members, (window,), window)
    assert torch.equal(alone, attended(members, (None, window), window))
    plain = attended(members, (None,), None)
    assert torch.equal(plain, attended(members, (None, window), None))
    assert not torch.allclose(alone, plain)
