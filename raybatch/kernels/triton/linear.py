"""Dense linears: the GPU implementation of `raybatch.kernels.linear`.

Float products use cuBLAS. 8-bit weights are converted in registers, without a copy.
"""

import torch
import triton

from raybatch.kernels import linear as reference
from raybatch.kernels.linear import Linear
from raybatch.kernels.triton.jit.moe import scaled_linear_kernel
from raybatch.kernels.triton.jit.small_ops import gate_kernel
from raybatch.kernels.triton.launch import OPTIONS, dot_tile, power_of_two


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """See `raybatch.kernels.linear`."""
    if layer.scales is None or layer.is_panelled:
        return reference.linear(x, layer)
    output = x.new_empty(len(x), layer.num_outputs)
    _scaled(x, layer, layer.scales, output, is_added=False)
    return output


def add_linear_(
    x: torch.Tensor,  # [T, out], modified in place
    hidden: torch.Tensor,  # [T, in]
    layer: Linear,
) -> None:
    """See `raybatch.kernels.linear`."""
    if layer.scales is None or layer.is_panelled:
        reference.add_linear_(x, hidden, layer)
    else:
        _scaled(hidden, layer, layer.scales, x, is_added=True)


def add_mlp_(
    x: torch.Tensor,  # [T, M], modified in place
    hidden: torch.Tensor,  # [T, M], the normalised input
    gate_up: Linear,  # of 2F outputs; gate and up share no panel
    down: Linear,  # of M outputs
) -> None:
    """See `raybatch.kernels.linear`; three kernel launches."""
    add_linear_(x, gated(linear(hidden, gate_up)), down)


def gated(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, [R, F], of rows [R, 2F] that hold gate, then up."""
    num_outputs = x.shape[1] // 2
    output = x.new_empty(len(x), num_outputs)
    tile = min(1024, power_of_two(num_outputs))
    if len(x):
        gate_kernel[(len(x), triton.cdiv(num_outputs, tile))](
            x, output, num_outputs, x.stride(0), TILE=tile, num_warps=4, **OPTIONS
        )
    return output


def _scaled(
    x: torch.Tensor, layer: Linear, scales: torch.Tensor, output: torch.Tensor, *, is_added: bool
) -> None:
    (num_rows, num_inputs), num_outputs = x.shape, layer.num_outputs
    if not num_rows:
        return
    tile_rows = min(128, dot_tile(num_rows))
    # few rows are memory bound: more programs read weights concurrently
    tile_out = min(32 if tile_rows == 16 else 64 if tile_rows <= 64 else 128, dot_tile(num_outputs))
    tile_in = min(256 // x.element_size(), dot_tile(num_inputs))
    grid = triton.cdiv(num_outputs, tile_out), triton.cdiv(num_rows, tile_rows)
    scaled_linear_kernel[grid](
        x if x.stride(1) == 1 else x.contiguous(),
        layer.weight,
        scales,
        scales if layer.bias is None else layer.bias,
        output,
        num_rows,
        x.stride(0) if x.stride(1) == 1 else num_inputs,
        *layer.weight.stride(),
        output.stride(0),
        NUM_INPUTS=num_inputs,
        NUM_OUTPUTS=num_outputs,
        HAS_BIAS=layer.bias is not None,
        IS_ADDED=is_added,
        TILE_ROWS=tile_rows,
        TILE_OUT=tile_out,
        TILE_IN=tile_in,
        num_warps=8 if tile_rows == 128 else 4,
        num_stages=3,
        **OPTIONS,
    )
