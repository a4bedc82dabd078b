"""Rows at the end of a pool of 2^32 elements: addresses of blocks have 64 bits."""

import mmap

import pytest
import torch

from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch.kernels.small_ops import rotation_table
from tests.kernels.triton.interpreted import attention as kernels

BLOCK, NUM_KV_HEADS, HEAD_DIM = 64, 2, 64
NUM_BLOCKS = (1 << 32) // (BLOCK * NUM_KV_HEADS * HEAD_DIM)
MAP_NORESERVE = 0x4000


def sparse_pool(num_blocks):
    """A sparse pool of float16: only written pages use memory."""
    shape = num_blocks, NUM_KV_HEADS, BLOCK, HEAD_DIM
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    pages = mmap.mmap(-1, 2 * torch.Size(shape).numel(), flags=flags)
    return torch.frombuffer(pages, dtype=torch.float16).view(shape)


def run(pools, shift):
    """Compute decodes, chunks and a shared prefix in blocks from `shift`; return output and KV."""
    torch.manual_seed(0)
    k_pool, v_pool = pools
    for pool in pools:
        pool[shift : shift + 4] = torch.randn(4, *pool.shape[1:]).half()
    rows = torch.arange(2)
    decode = DecodePart(
        block_ids=torch.tensor([shift, shift + 1]),
        owners=rows,
        num_valid=torch.tensor([3, 64]),
        is_contiguous=True,
        first_positions=torch.tensor([64, 64]),
    )
    chunk = torch.arange(2, 7)
    segments = (
        PrefixSegment(query_idx=rows, block_ids=torch.tensor([shift + 2]), num_tokens=64),
        PrefixSegment(query_idx=chunk, block_ids=torch.tensor([shift + 2]), num_tokens=64, chunk=0),
    )
    plan = AttentionPlan(
        num_decode=2, decode=decode, prefill=PrefillPart(starts=(2,), lens=(5,)), segments=segments
    )
    positions = torch.tensor([66, 127, 64, 65, 66, 67, 68])
    slots = torch.cat(
        (shift * BLOCK + torch.tensor([2, 127]), (shift + 3) * BLOCK + torch.arange(5))
    )
    prepared = kernels.prepare_attention(
        plan, positions=positions, slot_mapping=slots, pool=k_pool, windows=(None,)
    )
    projected = torch.randn(7, 8, HEAD_DIM).half()
    turns = rotation_table(positions, torch.ones(HEAD_DIM // 2), 1.0)
    heads = kernels.finish_heads(projected, 4, None, 0.0, turns, k_pool, v_pool, prepared)
    made = kernels.attend(*heads, k_pool, v_pool, prepared, None)
    return made, *(pool[shift : shift + 4].clone() for pool in pools)


def test_rows_at_the_end_of_a_pool_beyond_32_bits(device):
    if device.type == "cuda":
        pytest.skip("memory of a GPU is not sparse")
    far = sparse_pool(NUM_BLOCKS), sparse_pool(NUM_BLOCKS)
    assert far[0].numel() == 1 << 32
    near = run((sparse_pool(4), sparse_pool(4)), 0)
    for made, expected in zip(run(far, NUM_BLOCKS - 4), near, strict=True):
        assert torch.equal(made, expected)
    assert near[0].abs().sum() > 1
