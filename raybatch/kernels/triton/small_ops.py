"""RMS norm as in `raybatch.kernels.small_ops`, and tokens by rank, without host sync."""

import torch
import triton

from raybatch.kernels.sampling import Limits
from raybatch.kernels.triton.jit.sampling import rank_kernel
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


_MAX_TILE = 2048


def find_ranks(
    logits: torch.Tensor,  # float32 [S, V], last dimension contiguous
    max_logits: torch.Tensor,  # float32 [S, 1]
    chosen: torch.Tensor,  # float32 [S, 1]
    ranks: torch.Tensor,  # int64 [S, 1]
    is_settled: torch.Tensor,  # bool [S]
    limits: Limits,
) -> torch.Tensor:
    """Return the token ids [S]: of each row that of the logit `chosen` after `ranks` equal logits.

    Rows that are not settled (`is_settled`) are sampled from all their logits instead, as by a full
    stable sort. It is one launch, in which settled rows are fast.
    """
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    rank_kernel[(num_rows,)](
        logits,
        token_ids,
        max_logits.contiguous(),
        chosen.contiguous(),
        ranks.contiguous(),
        is_settled.to(torch.int8),
        *(column.contiguous() for column in limits),
        vocab_size,
        logits.stride(0),
        TILE=min(_MAX_TILE, power_of_two(vocab_size)),
        num_warps=8,
        **OPTIONS,
    )
    return token_ids
