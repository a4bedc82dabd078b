"""Linears with weights as [out, in] or in panels: [N, in, P], a contiguous matrix per P outputs.

Few rows read panels in memory order, which a plain matrix of many outputs does not allow; output
`n * P + j` is made by `weight[n, :, j]`.
"""

import torch
from torch.nn import functional


def linear(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows [R, in] times a weight of either form, [R, out]."""
    if weight.dim() == 2:
        return functional.linear(rows, weight)
    return join_panels(times_panels(rows, weight))


def gated_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return silu(gate) * up, [R, F], where a weight of either form holds gate, then up."""
    if weight.dim() == 2:
        gate, up = functional.linear(rows, weight, bias).chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)
    panels = times_panels(rows, weight)
    if bias is not None:
        panels += bias.view(len(panels), 1, -1)
    return gate_panels_(panels)


def times_panels(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows [R, in] times a weight [N, in, P] as panels [N, R, P]."""
    return torch.bmm(rows.expand(len(weight), -1, -1), weight)


def join_panels(panels: torch.Tensor) -> torch.Tensor:
    """Turn panels [N, R, P] into rows [R, N * P]."""
    return panels.transpose(0, 1).flatten(1)


def gate_panels_(panels: torch.Tensor) -> torch.Tensor:
    """Turn panels of gate, then of up, [2N, R, P], into rows silu(gate) * up, [R, N * P].

    The panels are overwritten.
    """
    gate, up = panels.chunk(2)
    return join_panels(functional.silu(gate, inplace=True).mul_(up))
