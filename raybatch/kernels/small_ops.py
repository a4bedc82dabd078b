"""Root-mean-square normalisation, and rotary position embedding of side-by-side dimensions.

Checkpoints pair dimension j with j + D/2. The weights are reordered once, when they are prepared,
so that a pair is one complex number and a rotation one complex product, a quarter of the cost of
the form with two halves on a CPU. Scores do not change, as queries and keys share the order.
"""

import torch


def rms_norm(
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D], or any shape that broadcasts over x
    eps: float,
) -> torch.Tensor:
    """Scale each row of `x` to a root mean square of 1, then by `weight`.

    The statistics are float32 whatever the dtype of `x`.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)


def rotation_table(
    positions: torch.Tensor,  # [T]
    inverse_frequencies: torch.Tensor,  # float32 [D / 2]
    attention_factor: float,
) -> torch.Tensor:
    """Return the unit complex numbers of each position, times the factor: complex64 [T, 1, D/2]."""
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    table = torch.complex(angles.cos(), angles.sin())
    if attention_factor != 1.0:
        table *= attention_factor
    return table.unsqueeze(1)


def rotate_(
    x: torch.Tensor,  # [T, H, D], modified in place, last dimension contiguous
    table: torch.Tensor,  # complex64 [T, 1, D / 2]
) -> None:
    """Turn every pair of dimensions of `x` by the angle of its token."""
    pairs = x.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    turned = torch.view_as_complex(pairs.to(torch.float32)).mul_(table)
    # of float32 that is `x` itself
    if x.dtype != torch.float32:
        pairs.copy_(torch.view_as_real(turned))


def interleave_order(head_dim: int) -> torch.Tensor:
    """Return the order that puts dimension j + D/2 behind j: for D = 6 it is 0 3 1 4 2 5."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)
