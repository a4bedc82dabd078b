"""Root-mean-square normalisation."""

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
    if x.dtype == torch.float32:
        return (x * scale).mul_(weight)
    return (x * scale).to(x.dtype).mul_(weight)
