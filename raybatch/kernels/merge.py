"""Joins two parts of one attention by their log-sum-exp."""

import torch

__all__ = ["merge_parts"]


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
