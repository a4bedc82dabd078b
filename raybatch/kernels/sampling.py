"""Samples a token per row of logits at a random number in [0, 1).

A draw inverts the cumulative probability in the order of token ids, at a number that the host
derives from seed and position. So a token depends only on its row, in any batch.
"""

from typing import NamedTuple

import torch

BLOCK = 256  # tokens per partial sum


class Limits(NamedTuple):
    """Sampling options and one random number of each sampled row.

    All are float64 [S, 1], except `top_k`, int64.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor  # V if not set
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
    """Return the probability of each token divided by that of the most likely one, [S, V]."""
    return (logits - max_logit).div_(temperature.float()).exp_()


def invert(
    weights: torch.Tensor,  # float32 [S, V]
    uniform: torch.Tensor,  # float64 [S, 1]
) -> torch.Tensor:
    """Return the first column where the running sum of `weights` exceeds `uniform` times the total.

    So a uniform number in [0, 1) draws a column with a probability in proportion to its weight.
    Returns int64 [S].
    """
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
    """Sum blocks of tokens in float32 and return float64: [S, V] -> [S, V / BLOCK].

    Each block is a separate reduction, so its rounding does not depend on the number of rows.
    """
    vocab_size = weights.shape[1]
    even = vocab_size - vocab_size % BLOCK
    parts = [weights[:, :even].reshape(len(weights), even // BLOCK, BLOCK).sum(dim=-1)]
    if even < vocab_size:
        parts.append(weights[:, even:].sum(dim=-1, keepdim=True))
    return torch.cat(parts, dim=1).double()


def _last_positive(sums: torch.Tensor) -> torch.Tensor:
    """Return the last column with a positive entry, or 0: [S, 1]."""
    columns = torch.arange(sums.shape[1], device=sums.device)
    return torch.where(sums > 0, columns, 0).amax(dim=-1, keepdim=True)
