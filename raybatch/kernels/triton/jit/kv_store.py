"""Scatter of keys and values into the paged pool."""

import triton
import triton.language as tl


@triton.jit
def store_kv_kernel(
    k_ptr,
    v_ptr,
    k_pool_ptr,
    v_pool_ptr,
    block_ids_ptr,
    block_offsets_ptr,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    stride_block,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Write one token. With blocks of 16, slot 37 is offset 5 of block 2, for every KV head."""
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, TILE_HEADS), tl.arange(0, TILE_DIM)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    block = tl.load(block_ids_ptr + token)
    offset = tl.load(block_offsets_ptr + token)
    slot = block * stride_block + offset * stride_slot
    targets = slot + heads[:, None] * stride_head + dims[None, :]
    k_sources = token * stride_kt + heads[:, None] * stride_kh + dims[None, :]
    v_sources = token * stride_vt + heads[:, None] * stride_vh + dims[None, :]
    tl.store(k_pool_ptr + targets, tl.load(k_ptr + k_sources, mask=mask), mask=mask)
    tl.store(v_pool_ptr + targets, tl.load(v_ptr + v_sources, mask=mask), mask=mask)
