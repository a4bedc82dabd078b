"""The weights of a model as the decoder uses them, each layer in two parts.

```
layer   attention: norm, qkv, o          on every device that runs the model
        ffn: norm, router                on every device as well
             tile: gate_up and down,     on the device, in host memory, or at another replica
             or experts
```
"""

from dataclasses import dataclass

import torch

from raybatch.kernels.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Linears qkv of (H + 2G) * D outputs and M inputs, o of M and H * D.

    The norms of queries and keys are qk_norm [H + G, D].
    """

    norm: torch.Tensor
    qkv: Linear
    o: Linear
    qk_norm: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnTile:
    """A feed-forward block without its norm and router, or a part of one: its linears or experts.

    A dense one has gate_up of 2F outputs and M inputs, and down of M and F; a sparse one has
    experts_gate_up [E, 2F, M] and experts_down [E, M, F], whichever way they lie in memory. On a
    CPU these may be in panels of P outputs instead (`raybatch.kernels.linear`): [E, 2F / P, M, P]
    and [E, M / P, F, P]. Where experts are bytes, they have scales [E, 2F] and [E, M]. A part of a
    sparse block has `experts` of all; None are all.
    """

    gate_up: Linear | None = None
    down: Linear | None = None
    experts_gate_up: torch.Tensor | None = None
    experts_down: torch.Tensor | None = None
    experts_gate_up_scales: torch.Tensor | None = None
    experts_down_scales: torch.Tensor | None = None
    experts: slice | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnWeights:
    """A feed-forward block; its tile is a placeholder where it lies elsewhere; router is [E, M]."""

    norm: torch.Tensor
    tile: FfnTile
    router: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights: embed [V, M], norm [M], and the head of V outputs.

    Where both are tied, they are one tensor, and embed may be in the head's panels.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
