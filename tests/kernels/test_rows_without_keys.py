"""Attention of decode rows without unshared keys, or without keys within the window."""

import math

import pytest
import torch

from raybatch.kernels.attention import TORCH_DECODE, attend, prepare_attention
from raybatch.kernels.byte_numbers import FP8, INT8, is_quantised, quantise, read_rows
from raybatch.kernels.native.decode_attention import decode_form
from tests import tolerances
from tests.kernels.keyless_rows import BLOCK_SIZE, STEPS, part_of

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 6, 2, 16
POOLS = {"float32": torch.float32, "int8": INT8, "fp8": FP8}


@pytest.fixture(params=["torch", "compiled"])
def form(request):
    """A function from the dtype of a pool to a form of decode attention."""

    def of(dtype):
        if request.param == "torch":
            return TORCH_DECODE
        found = decode_form(
            head_dim=HEAD_DIM,
            num_grouped=NUM_HEADS // NUM_KV_HEADS,
            block_size=BLOCK_SIZE,
            kv_dtype=dtype,
        )
        return found or pytest.skip("no C compiler here")

    return of


def made_pools(dtype, num_blocks=12):
    torch.manual_seed(0)
    pools = torch.randn(2, num_blocks, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return quantise(pools, dtype) if is_quantised(dtype) else pools


def check_shared_runs(form, step, dtype, window):
    """Compare the rows of a step with dense attention."""
    k_pool, v_pool = made_pools(dtype)
    q = torch.randn(len(step.tables), NUM_HEADS, HEAD_DIM)
    positions = torch.tensor(step.positions())
    prepared = prepare_attention(
        step.plan(),
        positions=positions,
        slot_mapping=positions,
        pool=k_pool,
        windows=(window,),
        decode=form,
    )
    kv = q[:, :NUM_KV_HEADS]
    actual = attend(q, kv, kv, k_pool, v_pool, prepared, window)
    keys, values = (read_rows(pool, HEAD_DIM, torch.float32) for pool in (k_pool, v_pool))
    expected = step.expected(q, keys, values, window)
    tolerance = tolerances.of_sums(torch.float32, HEAD_DIM + len(keys) * BLOCK_SIZE)
    tolerances.assert_close(actual, expected, tolerance)


@pytest.mark.parametrize("window", [None, 3, 6, 40])
@pytest.mark.parametrize("dtype", POOLS.values(), ids=POOLS.keys())
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_rows_whose_keys_are_in_shared_segments(form, step, dtype, window):
    check_shared_runs(form(dtype), step, dtype, window)


@pytest.mark.parametrize("dtype", POOLS.values(), ids=POOLS.keys())
@pytest.mark.parametrize("entries", [[], [(2, 1, 3, 0)]], ids=["all rows", "one row"])
def test_a_row_without_blocks_gets_zeros_without_weight(form, entries, dtype):
    k_pool, v_pool = made_pools(dtype)
    q, positions = torch.randn(3, NUM_HEADS, HEAD_DIM), torch.tensor([3, 2, 3])
    chosen = form(dtype)
    walk = chosen.plan(part_of(entries), positions=positions, pool=k_pool, windows=(None,))
    output, lse = chosen.attend(q, k_pool, v_pool, walk, None)
    owners = {owner for _, owner, _, _ in entries}
    is_empty = torch.tensor([row not in owners for row in range(3)])
    assert not output[is_empty].any()
    assert lse[is_empty].isneginf().all()
    assert lse[~is_empty].isfinite().all()


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_broken_kv_is_seen(form, broken):
    k_pool, v_pool = made_pools(torch.float32)
    k_pool[2, 1, 1, 3] = broken
    chosen = form(torch.float32)
    part, positions = part_of([(2, 0, 3, 0), (4, 1, 3, 0)]), torch.tensor([2, 2])
    walk = chosen.plan(part, positions=positions, pool=k_pool, windows=(None,))
    q = torch.ones(2, NUM_HEADS, HEAD_DIM)
    output, _ = chosen.attend(q, k_pool, v_pool, walk, None)
    assert not output[0, NUM_HEADS // 2 :].isfinite().any()
    assert output[0, : NUM_HEADS // 2].isfinite().all()
    assert output[1].isfinite().all()
