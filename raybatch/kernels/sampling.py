"""A token per row of logits: the most likely one, or one drawn at a number in [0, 1).

A draw inverts the cumulative probability in the order of token ids, at a number that the host made
from the row's seed and position. So a row's token follows from the row alone, in any batch. Top-k
and top-p need an order by probability and are not here.
"""

from typing import NamedTuple

import torch

BLOCK = 256  # partial sums over so many tokens


class Draws(NamedTuple):
    """What was drawn.

    Args:
        token_ids: int64 [S]; any token for a broken row.
        max_logits: float32 [S], the largest logit of each row: not finite for a broken one.
        logprobs: float32 [S], log-softmax of the raw logits at each token.
    """

    token_ids: torch.Tensor
    max_logits: torch.Tensor
    logprobs: torch.Tensor


def draw_tokens(
    logits: torch.Tensor,  # float32 [S, V]
    temperature: torch.Tensor,  # float64 [S]; 0 takes the most likely token, the first of equals
    min_p: torch.Tensor,  # float64 [S]; tokens below this share of the likeliest are left out
    uniform: torch.Tensor,  # float64 [S], in [0, 1)
) -> Draws:
    """Return one token for each row; a NaN counts as the largest logit, so that it is seen."""
    best = logits.argmax(dim=-1, keepdim=True)
    max_logit = logits.gather(1, best)
    is_greedy = temperature.unsqueeze(1) == 0
    divisor = torch.where(is_greedy, 1.0, temperature.unsqueeze(1))
    weights = weights_of(logits, max_logit, divisor)
    weights.masked_fill_(weights < min_p.unsqueeze(1).float(), 0.0)
    drawn = invert(weights, uniform.unsqueeze(1)).unsqueeze(1)
    token_ids = torch.where(is_greedy, best, drawn)
    logprobs = logits.gather(1, token_ids) - logits.logsumexp(dim=-1, keepdim=True)
    return Draws(token_ids[:, 0], max_logit[:, 0], logprobs[:, 0])


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
