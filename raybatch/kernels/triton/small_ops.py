"""RMS norm: the GPU implementation of `raybatch.kernels.small_ops`."""

import torch
import triton

from raybatch.kernels.triton.jit.small_ops import rms_norm_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two, rows_per_program


def rms_norm(
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D], or any shape that broadcasts over x
    eps: float,
) -> torch.Tensor:
    """See `raybatch.kernels.small_ops`; rows of a view [T, D] or [T, H, D] are read in place."""
    dim = x.shape[-1]
    # [T, H, D], where H is 1 for plain rows
    heads = x.reshape(-1, x.shape[-2] if x.dim() > 2 else 1, dim)
    if heads.stride(2) != 1:
        heads = heads.contiguous()
    weights = weight.expand(heads.shape[1:])
    if weights.stride(1) != 1:
        weights = weights.contiguous()
    output = x.new_empty(x.shape)
    num_rows, tile = heads.shape[0] * heads.shape[1], power_of_two(dim)
    if not num_rows:
        return output
    tile_rows = rows_per_program(tile)
    rms_norm_kernel[(triton.cdiv(num_rows, tile_rows),)](
        heads,
        weights,
        output,
        num_rows,
        heads.shape[1],
        eps,
        *heads.stride()[:2],
        weights.stride(0),
        DIM=dim,
        TILE_ROWS=tile_rows,
        TILE_DIM=tile,
        num_warps=4 if tile <= 4096 else 8,
        **OPTIONS,
    )
    return output
