"""Products with 8-bit weights."""

import triton
import triton.language as tl

from raybatch.kernels.triton.jit.attention import load_tile


@triton.jit
def load_weight(ptr, places, mask, dtype: tl.constexpr):
    """Load a tile of a weight, converted to `dtype`; scales of 8-bit weights are not applied."""
    tile = tl.load(ptr + places, mask=mask, other=0.0)
    # Triton cannot convert 8 bits to all dtypes directly
    return tile if tile.dtype == dtype else tile.to(tl.float32).to(dtype)


@triton.jit(do_not_specialize=["num_rows"])
def scaled_linear_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_x,
    stride_weight,
    stride_in,
    stride_out,
    NUM_INPUTS: tl.constexpr,
    NUM_OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_ADDED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUT: tl.constexpr,
    TILE_IN: tl.constexpr,
):
    """Compute one tile of x times an 8-bit weight [out, in] with scales per output.

    With IS_ADDED it is added to the output, otherwise written.
    """
    rows = tl.program_id(1).to(tl.int64) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = tl.program_id(0) * TILE_OUT + tl.arange(0, TILE_OUT)
    is_row, is_output = rows < num_rows, outputs < NUM_OUTPUTS
    total = tl.zeros((TILE_ROWS, TILE_OUT), dtype=tl.float32)
    for start in range(0, NUM_INPUTS, TILE_IN):
        inputs = start + tl.arange(0, TILE_IN)
        is_input = inputs < NUM_INPUTS
        x_places = rows[:, None] * stride_x + inputs[None, :]
        x = load_tile(x_ptr, x_places, is_row[:, None] & is_input[None, :])
        places = outputs[None, :].to(tl.int64) * stride_weight + inputs[:, None] * stride_in
        mask = is_input[:, None] & is_output[None, :]
        weight = load_weight(weight_ptr, places, mask, x.dtype)
        total += tl.dot(x, weight, input_precision="tf32x3")
    total *= tl.load(scales_ptr + outputs, mask=is_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + outputs, mask=is_output, other=0.0).to(tl.float32)[None, :]
    targets = out_ptr + rows[:, None] * stride_out + outputs[None, :]
    mask = is_row[:, None] & is_output[None, :]
    if IS_ADDED:
        total += tl.load(targets, mask=mask, other=0.0).to(tl.float32)
    tl.store(targets, total.to(out_ptr.dtype.element_ty), mask=mask)
