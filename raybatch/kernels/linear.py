"""Dense linears, the gated feed-forward block made of two, and the embedding of tokens.

A weight is [out, in] or in panels: [N, in, P], a contiguous matrix per P outputs, so that products
of few rows read memory in order. Output `n * P + j` is computed from `weight[n, :, j]`.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from raybatch.kernels.byte_numbers import dequantise_weight

# bounds the [T, 2F] temporary; larger chunks are not faster
_MAX_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Linear:
    """The weights of one linear.

    Args:
        weight: [out, in], or in panels of P outputs, [N, in, P]; the last one may be padded.
        bias: [out].
        scales: float32 [out] of quantized weights (see `raybatch.kernels.byte_numbers`).
    """

    weight: torch.Tensor
    num_outputs: int
    bias: torch.Tensor | None = None
    scales: torch.Tensor | None = None

    @property
    def is_panelled(self) -> bool:
        return self.weight.dim() == 3

    def can_start_at(self, output: int) -> bool:
        """Return whether `take` may begin at `output`: in panels, only at the first of a panel."""
        return not (self.is_panelled and output % self.weight.shape[2])

    def take(self, outputs: slice) -> "Linear":
        """Return a linear with only these outputs.

        Raises:
            ValueError: they do not begin at the first output of a panel.
        """
        start, stop, _ = outputs.indices(self.num_outputs)
        if stop - start == self.num_outputs:
            return self
        width = self.weight.shape[2] if self.is_panelled else 1
        if not self.can_start_at(start):
            raise ValueError(
                f"outputs in panels of {width} can be taken from the start of a panel on, not from "
                f"output {start}"
            )
        weight = self.weight[start // width : -(-stop // width)]
        of_outputs = (x if x is None else x[start:stop] for x in (self.bias, self.scales))
        return Linear(weight, stop - start, *of_outputs)

    def weight_for(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the weight in the dtype of the rows that it is multiplied with."""
        if self.scales is None:
            return self.weight
        return dequantise_weight(self.weight, self.scales, rows.dtype)


def linear(x: torch.Tensor, layer: Linear) -> torch.Tensor:
    """Return the outputs [T, out] of the inputs `x` [T, in]."""
    if not layer.is_panelled:
        return functional.linear(x, layer.weight_for(x), layer.bias)
    outputs = times_weight(x, layer.weight_for(x))[:, : layer.num_outputs]
    return outputs if layer.bias is None else outputs.add_(layer.bias)


def add_linear_(
    x: torch.Tensor,  # [T, out], modified in place
    hidden: torch.Tensor,  # [T, in]
    layer: Linear,
) -> None:
    """Add the outputs of `layer` for `hidden` to `x`, without a temporary if not in panels."""
    if layer.is_panelled:
        x.add_(linear(hidden, layer))
        return
    x.addmm_(hidden, layer.weight_for(x).t())
    if layer.bias is not None:
        x.add_(layer.bias)


def add_mlp_(
    x: torch.Tensor,  # [T, M], modified in place
    hidden: torch.Tensor,  # [T, M], the normalised input
    gate_up: Linear,  # of 2F outputs; gate and up share no panel
    down: Linear,  # of M outputs
) -> None:
    """Add down(silu(gate(hidden)) * up(hidden)) to `x`."""
    weight = gate_up.weight_for(hidden)
    down = Linear(down.weight_for(hidden), down.num_outputs, down.bias)
    for start in range(0, x.shape[0], _MAX_ROWS):
        rows = slice(start, start + _MAX_ROWS)
        add_linear_(x[rows], gated_linear(hidden[rows], weight, gate_up.bias), down)


def embed_tokens(
    token_ids: torch.Tensor,  # int64 [T]
    table: torch.Tensor,  # [V, M], or in panels of P tokens [V / P, M, P]
) -> torch.Tensor:
    """Return the embeddings of the tokens, [T, M]: rows of the table [V, M], or in panels."""
    if table.dim() == 2:
        return functional.embedding(token_ids, table)
    width = table.shape[2]
    return table[token_ids // width, :, token_ids % width]


def times_weight(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return rows [R, in] times a weight, [out, in] or in panels: [R, out]."""
    if weight.dim() == 2:
        return functional.linear(rows, weight)
    return join_panels(times_panels(rows, weight))


def gated_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return silu(gate) * up, [R, F], of rows [R, in].

    The outputs of `weight`, [2F, in] or in panels, are gate, then up.
    """
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
    """Return silu(gate) * up as rows [R, N * P], of panels of gate, then of up, [2N, R, P].

    The panels are overwritten.
    """
    gate, up = panels.chunk(2)
    return join_panels(functional.silu(gate, inplace=True).mul_(up))
