"""Records of a model's weights as the decoder uses them.

```
layer   attention: norm, qkv, o          on every device that runs the model
        ffn: norm, router                on every device as well
             shard: gate_up and down,    on the device, in host memory, or at another replica
             or experts
```
"""

from dataclasses import dataclass

import torch

from raybatch.kernels.linear import Linear


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionWeights:
    """Weights of an attention block: qkv [(H + 2G) * D, M] and o [M, H * D], as [outputs, inputs].

    qk_norm [H + G, D] holds the norms of queries and keys.
    """

    norm: torch.Tensor
    qkv: Linear
    o: Linear
    qk_norm: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FfnShard:
    """Linears or experts of a feed-forward block, or of one shard of it; without norm and router.

    A dense block has gate_up with 2F outputs and M inputs, and down with M outputs and F inputs. A
    sparse one has experts_gate_up [E, 2F, M] and experts_down [E, M, F], in any memory order. On a
    CPU these may be in panels of P outputs (`raybatch.kernels.linear`): [E, 2F/P, M, P] and [E,
    M/P, F, P]. Quantized experts have scales [E, 2F] and [E, M]. `experts` are the indices of the
    experts in a sparse shard; None: all.
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
    """Weights of a feed-forward block; router is [E, M].

    `shard` is a placeholder without data if its weights are elsewhere.
    """

    norm: torch.Tensor
    shard: FfnShard
    router: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWeights:
    attention: AttentionWeights
    ffn: FfnWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelWeights:
    """All weights: embed [V, M], norm [M], and the head with V outputs.

    If tied, embed and head are one tensor, and embed may be in the head's panels.
    """

    embed: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Linear
