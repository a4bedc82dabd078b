"""Rotary position embedding, the form for GPUs of `raybatch.kernels.rotary`."""

import torch
import triton

from raybatch.kernels.triton.jit.rotary import rotate_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two, rows_per_program


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
        x.stride(0),
        x.stride(1),
        turns.stride(0),
        NUM_PAIRS=head_dim // 2,
        TILE_ROWS=tile_rows,
        TILE_PAIRS=tile,
        num_warps=4,
        **OPTIONS,
    )
