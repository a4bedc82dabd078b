"""Normalisation and rotation of rows, and the scatter of keys and values into the paged pool."""

import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    num_heads,
    eps,
    stride_xt,
    stride_xh,
    stride_wh,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_DIM: tl.constexpr,
):
    """Normalise TILE_ROWS rows; row r is head r % num_heads of token r // num_heads."""
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims = tl.arange(0, TILE_DIM)
    tokens, heads = rows // num_heads, rows % num_heads
    is_dim = (dims < DIM)[None, :]
    mask = (rows < num_rows)[:, None] & is_dim
    places = tokens[:, None] * stride_xt + heads[:, None] * stride_xh + dims[None, :]
    x = tl.load(x_ptr + places, mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) * (1.0 / DIM) + eps)
    weights = tl.load(
        weight_ptr + heads[:, None] * stride_wh + dims[None, :], mask=is_dim, other=0.0
    ).to(tl.float32)
    # rounded in between, as the reference does
    scaled = (x * scale[:, None]).to(x_ptr.dtype.element_ty).to(tl.float32)
    made = (scaled * weights).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + rows[:, None] * DIM + dims[None, :], made, mask=mask)


@triton.jit
def rotate_kernel(
    x_ptr,
    table_ptr,
    num_rows,
    num_heads,
    stride_xt,
    stride_xh,
    stride_table,
    NUM_PAIRS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_PAIRS: tl.constexpr,
):
    """Turn TILE_ROWS heads; row r is head r % num_heads of token r // num_heads.

    A table row is cos, sin, cos, sin, ... of the token's angles.
    """
    rows = tl.program_id(0).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    pairs = tl.arange(0, TILE_PAIRS)
    tokens, heads = rows // num_heads, rows % num_heads
    mask = (rows < num_rows)[:, None] & (pairs < NUM_PAIRS)[None, :]
    turns = table_ptr + tokens[:, None] * stride_table + 2 * pairs[None, :]
    cosine = tl.load(turns, mask=mask, other=0.0)
    sine = tl.load(turns + 1, mask=mask, other=0.0)
    first = x_ptr + tokens[:, None] * stride_xt + heads[:, None] * stride_xh + 2 * pairs[None, :]
    real = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    imaginary = tl.load(first + 1, mask=mask, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(first, (real * cosine - imaginary * sine).to(dtype), mask=mask)
    tl.store(first + 1, (real * sine + imaginary * cosine).to(dtype), mask=mask)


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
