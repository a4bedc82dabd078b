"""Tokens of ranks, the form for GPUs of `raybatch.kernels.sampling.find_ranks`."""

import torch

from raybatch.kernels.sampling import Limits
from raybatch.kernels.triton.jit.sampling import rank_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two

_MAX_TILE = 4096


def find_ranks(
    logits: torch.Tensor,  # float32 [S, V], last dimension contiguous
    max_logits: torch.Tensor,  # float32 [S]
    chosen: torch.Tensor,  # float32 [S]
    ranks: torch.Tensor,  # int64 [S]
    is_settled: torch.Tensor,  # bool [S]
    limits: Limits,
) -> torch.Tensor:
    """See `raybatch.kernels.sampling`; one launch, in which rows that are settled are short."""
    num_rows, vocab_size = logits.shape
    token_ids = torch.empty_like(ranks)
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
