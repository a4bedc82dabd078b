"""Decode rows without unshared keys, or without keys within the window."""

import pytest
import torch

from raybatch.kernels.attention_plan import AttentionPlan
from raybatch.kernels.step_index import StepIndex, parts_of
from raybatch.kernels.triton import attention as kernels
from raybatch.kernels.triton.launch import Pools
from tests.kernels.keyless_rows import BLOCK_SIZE, STEPS, part_of
from tests.kernels.triton.support import assert_close, spread_over

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 16


@pytest.fixture
def pools(device):
    torch.manual_seed(0)
    return torch.randn(2, 12, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=device)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_rows_whose_keys_are_in_shared_segments(step, window, pools, device):
    q = torch.randn(len(step.tables), NUM_HEADS, HEAD_DIM, device=device)
    positions = torch.tensor(step.positions(), device=device)
    prepared = kernels.prepare_attention(
        step.plan(), positions=positions, slot_mapping=positions, pool=pools[0], windows=(window,)
    )
    kv = q[:, :NUM_KV_HEADS]
    actual = kernels.attend(q, kv, kv, pools[0], pools[1], prepared, window)
    assert_close(actual, step.expected(q.cpu(), pools[0].cpu(), pools[1].cpu(), window))


@pytest.mark.parametrize("num_programs", [1, 4])
@pytest.mark.parametrize("entries", [[], [(2, 1, 3, 0), (3, 1, 1, 4)]], ids=["all", "some"])
def test_a_row_without_blocks_gets_zeros_without_weight(
    entries, num_programs, pools, device, monkeypatch
):
    spread_over(num_programs, monkeypatch)
    plan = AttentionPlan(num_decode=3, decode=part_of(entries), prefill=None, segments=())
    index = StepIndex(plan, num_rows=3, num_kv_heads=NUM_KV_HEADS, block_size=BLOCK_SIZE)
    parts = parts_of(index.size, torch.from_numpy(index.array()).to(device))
    positions = torch.tensor([3, 4, 3], device=device)
    q = torch.randn(3, NUM_HEADS, HEAD_DIM, device=device)
    output, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    kernels.attend_decode_into(output, lse, q, Pools(*pools), index.size, parts, positions, None)
    owners = {owner for _, owner, _, _ in entries}
    is_empty = torch.tensor([row not in owners for row in range(3)])
    assert not output[is_empty].any()
    assert lse[is_empty].isneginf().all()
    assert lse[~is_empty].isfinite().all()
