"""Rotation of neighbouring dimensions, in place."""

import triton
import triton.language as tl


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
