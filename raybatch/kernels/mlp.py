"""The gated feed-forward block of a dense layer."""

import torch

from raybatch.kernels.panels import gated_linear

# bounds the [T, 2F] temporary; larger chunks gain nothing, as the linears are at peak speed
_MAX_ROWS = 1024


def add_mlp_(
    x: torch.Tensor,  # [T, M], modified in place
    hidden: torch.Tensor,  # [T, M], the normalised input
    gate_up: torch.Tensor,  # [2F, M], or in panels [2F / P, M, P]
    down: torch.Tensor,  # [M, F]
    gate_up_bias: torch.Tensor | None,  # [2F]
    down_bias: torch.Tensor | None,  # [M]
) -> None:
    """Add down(silu(gate(hidden)) * up(hidden)) to `x`."""
    for start in range(0, x.shape[0], _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        gated = gated_linear(hidden[rows], gate_up, gate_up_bias)
        add_linear_(x[rows], gated, down, down_bias)


def add_linear_(
    x: torch.Tensor,  # [T, M], modified in place
    hidden: torch.Tensor,  # [T, F]
    weight: torch.Tensor,  # [M, F]
    bias: torch.Tensor | None,  # [M]
) -> None:
    """Add a linear layer's output to `x`; the product accumulates into it, without a temporary."""
    x.addmm_(hidden, weight.t())
    if bias is not None:
        x.add_(bias)
