"""Root-mean-square normalisation of rows."""

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
