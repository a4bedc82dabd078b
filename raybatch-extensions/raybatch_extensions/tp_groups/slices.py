"""Weight slices of one rank of a TP group: heads, parts of feed-forward blocks and of the LM head.

```
qkv       [q 0 | q 1 | k 0 | k 1 | v 0 | v 1]   outputs in three ranges; with more ranks than KV
gate_up   [gate 0 | gate 1 | up 0 | up 1]       heads, several ranks have the same KV head
o, down   by inputs: each rank computes a partial sum of every output
head      by outputs; embeddings, norms and routers are replicated
```

8-bit weights are cut the same way: scales are per output, and every part keeps them.
"""

import time
from dataclasses import dataclass, replace

import torch

from raybatch.engine.weights.layout import FfnShard, LayerWeights, ModelWeights, tensors_of
from raybatch.models.config import ModelSpec
from raybatch_extensions.cutting import (
    UNITS,
    as_rows,
    behind,
    cut,
    dense_part,
    inputs_of,
    outputs_of,
    take_inputs,
    take_outputs,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceCost:
    """Cost of copying a rank's weight slices; slices that are views of the model cost nothing."""

    num_bytes: int
    seconds: float


def why_not_cut(spec: ModelSpec, size: int) -> str | None:
    """Return why a model cannot be cut for `size` ranks; None if it can."""
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    if size < 2:
        return f"a TP group needs at least 2 ranks, got {size}"
    if num_heads % size:
        return f"{num_heads} query heads cannot be cut for {size} ranks"
    if num_kv_heads % size and size % num_kv_heads:
        return f"{num_kv_heads} KV heads can be neither cut nor replicated for {size} ranks"
    sizes = [spec.ffn_dim, spec.vocab_size] + ([] if spec.moe is None else [spec.moe.ffn_dim])
    if min(sizes) < size:
        return f"a linear of {min(sizes)} outputs cannot be cut for {size} ranks"
    return None


def heads_of(spec: ModelSpec, rank: int, size: int) -> tuple[slice, slice]:
    """Return (query heads, KV heads) of a rank; a KV head may belong to several ranks."""
    num_queries, num_kv = spec.num_heads // size, max(1, spec.num_kv_heads // size)
    first = rank * spec.num_kv_heads // size
    return slice(rank * num_queries, (rank + 1) * num_queries), slice(first, first + num_kv)


def spec_of(spec: ModelSpec, rank: int, size: int, vocabulary: slice) -> ModelSpec:
    """Return the model spec for the decoder of a rank, with its heads and vocabulary range."""
    queries, keys = heads_of(spec, rank, size)
    return replace(
        spec,
        num_heads=queries.stop - queries.start,
        num_kv_heads=keys.stop - keys.start,
        vocab_size=vocabulary.stop - vocabulary.start,
    )


def vocabulary_of(weights: ModelWeights, rank: int, size: int) -> slice:
    """Return the vocabulary range of a rank; rank 0 has the largest."""
    head = weights.head
    return cut(head.num_outputs, rank, size, head.weight.shape[2] if head.is_panelled else 16)


@torch.inference_mode()
def weights_of(
    weights: ModelWeights, spec: ModelSpec, rank: int, size: int
) -> tuple[ModelWeights, SliceCost]:
    """Return (weights of a rank, cost): copies of its slices of the whole model's weights."""
    began = time.perf_counter()
    layers = tuple(_layer_of(layer, spec, rank, size) for layer in weights.layers)
    head = outputs_of(weights.head, [vocabulary_of(weights, rank, size)])
    own = ModelWeights(embed=weights.embed, layers=layers, norm=weights.norm, head=head)
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(weights)}
    copied = [x for x in tensors_of(own) if x.untyped_storage().data_ptr() not in known]
    num_bytes = sum(tensor.nbytes for tensor in copied)
    return own, SliceCost(num_bytes=num_bytes, seconds=time.perf_counter() - began)


def _layer_of(layer: LayerWeights, spec: ModelSpec, rank: int, size: int) -> LayerWeights:
    queries, keys = heads_of(spec, rank, size)
    values = slice(spec.num_kv_heads + keys.start, spec.num_kv_heads + keys.stop)
    heads = (queries, *(behind(x, spec.num_heads) for x in (keys, values)))
    dims = [slice(x.start * spec.head_dim, x.stop * spec.head_dim) for x in heads]
    whole = layer.attention
    norms = whole.qk_norm
    if norms is not None:
        norms = torch.cat([norms[heads[0]], norms[heads[1]]])
    attention = replace(
        whole,
        qkv=outputs_of(whole.qkv, dims),
        o=inputs_of(whole.o, dims[0], has_bias=rank == 0),
        qk_norm=norms,
    )
    shard = layer.ffn.shard
    is_dense = shard.experts_gate_up is None
    own = dense_part(shard, rank, size) if is_dense else _experts_of(shard, spec, rank, size)
    return LayerWeights(attention=attention, ffn=replace(layer.ffn, shard=own))


def _experts_of(shard: FfnShard, spec: ModelSpec, rank: int, size: int) -> FfnShard:
    """Cut every expert by its hidden size; all ranks route identically."""
    gate_up, down = shard.experts_gate_up, shard.experts_down
    assert spec.moe is not None, "a dense model has no experts"
    assert gate_up is not None, "a sparse shard has experts"
    assert down is not None, "a sparse shard has experts"
    up_panels, down_panels = gate_up.dim() == 4, down.dim() == 4
    ffn_dim = spec.moe.ffn_dim
    part = cut(ffn_dim, rank, size, gate_up.shape[3] if up_panels else UNITS[0])
    parts = [part, behind(part, ffn_dim)]
    up = take_outputs(gate_up, parts, is_panelled=up_panels)
    own_down = take_inputs(down, part, is_panelled=down_panels)
    # batched expert products need both in the same layout
    if up.dim() == 3 and down_panels:
        own_down = as_rows(own_down)[:, : spec.model_dim].contiguous()
    scales = shard.experts_gate_up_scales
    if scales is not None:
        scales = torch.cat([scales[:, outputs] for outputs in parts], dim=1)
    return replace(shard, experts_gate_up=up, experts_down=own_down, experts_gate_up_scales=scales)
