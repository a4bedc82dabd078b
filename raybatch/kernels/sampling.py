"""A token per row of logits, drawn at a number in [0, 1).

A draw inverts the cumulative probability in the order of token ids, at a number that the host made
from the row's seed and position. So a row's token follows from the row alone, in any batch.
"""

from typing import NamedTuple

import torch

BLOCK = 256  # partial sums over so many tokens


class Limits(NamedTuple):
    """Options and random numbers of rows that draw, float64 [S, 1] but for `top_k`, int64."""

    temperature: torch.Tensor
    top_k: torch.Tensor  # V where there is none
    top_p: torch.Tensor
    min_p: torch.Tensor
    uniform: torch.Tensor

    def take(self, rows: slice) -> "Limits":
        return Limits._make(column[rows] for column in self)


def weights_of(
    logits: torch.Tensor,  # float32 [S, V]
    max_logit: torch.Tensor,  # float32 [S, 1]
    temperature: torch.Tensor,  # float64 [S, 1]
) -> torch.Tensor:
    """Return the probability of each token as a share of the likeliest one's, [S, V]."""
    return (logits - max_logit).div_(temperature.float()).exp_()


def invert(
    weights: torch.Tensor,  # float32 [S, V]
    uniform: torch.Tensor,  # float64 [S, 1]
) -> torch.Tensor:
    """Return the first column where the running sum of `weights` passes `uniform` of the total."""
    vocab_size = weights.shape[1]
    sums = block_sums(weights)
    ends = sums.cumsum(dim=-1)
    target = uniform * ends[:, -1:]
    block = torch.minimum((ends <= target).sum(dim=-1, keepdim=True), _last_positive(sums))
    rest = target - (ends.gather(1, block) - sums.gather(1, block))
    columns = block * BLOCK + torch.arange(BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=vocab_size - 1))
    inside = inside.masked_fill(columns >= vocab_size, 0.0).double()
    offset = (inside.cumsum(dim=-1) <= rest).sum(dim=-1, keepdim=True)
    offset = torch.minimum(offset, _last_positive(inside))
    return (block * BLOCK + offset)[:, 0]


def block_sums(weights: torch.Tensor) -> torch.Tensor:
    """Sum runs of tokens in float32 and hand them on in float64: [S, V] -> [S, V / BLOCK].

    Each partial sum is its own reduction, so the number of rows cannot change its rounding.
    """
    vocab_size = weights.shape[1]
    even = vocab_size - vocab_size % BLOCK
    parts = [weights[:, :even].reshape(len(weights), even // BLOCK, BLOCK).sum(dim=-1)]
    if even < vocab_size:
        parts.append(weights[:, even:].sum(dim=-1, keepdim=True))
    return torch.cat(parts, dim=1).double()


def _last_positive(sums: torch.Tensor) -> torch.Tensor:
    """Return the last column with a positive entry, 0 where there is none: [S, 1]."""
    columns = torch.arange(sums.shape[1], device=sums.device)
    return torch.where(sums > 0, columns, 0).amax(dim=-1, keepdim=True)
