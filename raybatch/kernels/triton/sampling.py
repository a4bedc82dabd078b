"""Finds tokens by rank on the device, without host sync."""

import torch

from raybatch.kernels.sampling import Limits
from raybatch.kernels.triton.jit.sampling import rank_kernel
from raybatch.kernels.triton.launch import OPTIONS, power_of_two

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
