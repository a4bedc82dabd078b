"""Softmax over scores of which a row may see none, and merging of parts that may be empty.

Whatever attends goes through here: a row without a visible key has weights of 0, an output of 0 and
a log-sum-exp of -inf, never a NaN, which says that a number of the model is broken.
"""

import math

import torch


def base_of(highest: torch.Tensor) -> torch.Tensor:
    """Return what the scores of a row are taken relative to: its highest score, 0 where none is."""
    return highest.masked_fill(highest == -math.inf, 0.0)


def shares_of(sums: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return `sums` over the total of their row's weights, in place; 0 where that is 0."""
    return sums.div_(total.masked_fill(total == 0.0, 1.0))


def log_sum_exp(base: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return the log-sum-exp of rows by the total of their weights relative to `base`."""
    return total.log().add_(base)


def masked_softmax(
    scores: torch.Tensor,  # float32 [..., P], -inf where a key is hidden; overwritten
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weights [..., P] and their log-sum-exp [...]; P is at least 1."""
    base = base_of(scores.amax(dim=-1, keepdim=True))
    weights = scores.sub_(base).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    return shares_of(weights, total), log_sum_exp(base, total).squeeze(-1)


def merge_parts(
    output: torch.Tensor,  # [..., D]
    lse: torch.Tensor,  # float32 [...]
    other: torch.Tensor,  # [..., D]
    other_lse: torch.Tensor,  # float32 [...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over both sets of positions, and its log-sum-exp (natural log).

    Associative and commutative. A part without any position has a log-sum-exp of -inf and any
    finite output; it has no weight.
    """
    # two empty parts differ by NaN, and either output will do
    difference = (other_lse - lse).nan_to_num_(nan=0.0)
    weight = torch.sigmoid(difference).unsqueeze(-1).to(output.dtype)
    return torch.lerp(output, other, weight), torch.logaddexp(lse, other_lse)
