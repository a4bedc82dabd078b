"""Normalisation and rotation, the form for GPUs of `raybatch.kernels.small_ops`."""

import torch
import triton

from raybatch.kernels.triton.jit.small_ops import rms_norm_kernel, rotate_kernel
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


def rotate_(
    x: torch.Tensor,  # [T, H, D], modified in place, last dimension contiguous
    table: torch.Tensor,  # complex64 [T, 1, D / 2]
) -> None:
    """Turn every pair of dimensions of `x` by the angle of its token."""
    num_tokens, num_heads, head_dim = x.shape
    num_rows = num_tokens * num_heads
    if not num_rows:
        return
    turns = torch.view_as_real(table).flatten(1)
    tile = power_of_two(head_dim // 2)
    tile_rows = rows_per_program(tile, 2048)
    rotate_kernel[(triton.cdiv(num_rows, tile_rows),)](
        x,
        turns,
        num_rows,
        num_heads,
        *x.stride()[:2],
        turns.stride(0),
        NUM_PAIRS=head_dim // 2,
        TILE_ROWS=tile_rows,
        TILE_PAIRS=tile,
        num_warps=4,
        **OPTIONS,
    )
