"""RMS norm, and rotary position embedding of interleaved dimensions.

Checkpoints pair dimension j with j + D/2. Prepared weights are reordered, so that a pair is one
complex number and a rotation one complex product, at a quarter of the cost on a CPU. Scores do not
change, as queries and keys have the same order.
"""

import torch


def rms_norm(
    x: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D], or any shape that broadcasts over x
    eps: float,
) -> torch.Tensor:
    """Scale each row of `x` to a root mean square of 1, then by `weight`.

    Statistics are float32 for any dtype of `x`.
    """
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * scale).to(x.dtype).mul_(weight)


def rotation_table(
    positions: torch.Tensor,  # [T]
    inverse_frequencies: torch.Tensor,  # float32 [D / 2]
    attention_factor: float,
) -> torch.Tensor:
    """Return the rotations of each position, complex64 [T, 1, D/2], times `attention_factor`.

    A rotation by an angle is the complex number cos + i sin.
    """
    angles = positions.to(torch.float32).unsqueeze(-1) * inverse_frequencies
    table = torch.complex(angles.cos(), angles.sin())
    if attention_factor != 1.0:
        table *= attention_factor
    return table.unsqueeze(1)


def rotate_(
    x: torch.Tensor,  # [T, H, D], modified in place, last dimension contiguous
    table: torch.Tensor,  # complex64 [T, 1, D / 2]
) -> None:
    """Rotate every pair of dimensions of `x` by the angle of its token, in place."""
    pairs = x.view(*x.shape[:-1], x.shape[-1] // 2, 2)
    turned = torch.view_as_complex(pairs.to(torch.float32)).mul_(table)
    # for float32 this is a view of `x`
    if x.dtype != torch.float32:
        pairs.copy_(torch.view_as_real(turned))


def interleave_order(head_dim: int) -> torch.Tensor:
    """Return the permutation of dimensions that puts j + D/2 after j: 0 3 1 4 2 5 for D = 6."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)
