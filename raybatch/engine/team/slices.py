"""What one rank of a team multiplies: its heads, parts of each feed-forward block and of the head.

```
qkv       [q 0 | q 1 | k 0 | k 1 | v 0 | v 1]   outputs in three ranges; with more ranks than KV
gate_up   [gate 0 | gate 1 | up 0 | up 1]       heads, several ranks have the same KV head
o, down   by inputs, so that each rank makes a part of the sum of every output
head      by outputs; the table of embeddings, norms and routers are whole on every rank
```

Weights of 8 bits are cut like others: a scale belongs to an output, whose parts all have it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from raybatch.engine.weights.layout import tensors_of
from raybatch.engine.weights.loading import LayerWeights, ModelWeights
from raybatch.kernels.linear import Linear
from raybatch.models.config import ModelSpec

# borders at multiples of these keep vector loads and torch's grouped products whole
_UNITS = (16, 4, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceCost:
    """What it took to make the weights of a rank; views of the whole model take nothing."""

    num_bytes: int
    seconds: float


def why_not_cut(spec: ModelSpec, size: int) -> str | None:
    """Return why a model cannot be cut for so many ranks; None where it can."""
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    if size < 2:
        return f"a team has at least 2 ranks, not {size}"
    if num_heads % size:
        return f"{num_heads} query heads cannot be cut for {size} ranks"
    if num_kv_heads % size and size % num_kv_heads:
        return f"{num_kv_heads} KV heads cannot be cut for {size} ranks, nor be repeated for them"
    sizes = [spec.ffn_dim, spec.vocab_size] + ([] if spec.moe is None else [spec.moe.ffn_dim])
    if min(sizes) < size:
        return f"a linear of {min(sizes)} outputs cannot be cut for {size} ranks"
    return None


def cut(total: int, rank: int, size: int, unit: int = 1) -> slice:
    """Return the part of a rank of `total`, with borders at multiples of `unit`.

    The parts differ by a unit at most, and the first is the largest, but where the last unit is
    not whole. Where there are fewer units than ranks, borders are anywhere.

    Example:
        >>> [cut(80, rank, 2, unit=32) for rank in range(2)]
        [slice(0, 64, None), slice(64, 80, None)]
    """
    unit = next(u for u in (unit, *_UNITS) if u <= unit and (total // u >= size or u == 1))
    num_units = -(-total // unit)
    each, more = divmod(num_units, size)
    start = rank * each + min(rank, more)
    stop = start + each + (rank < more)
    return slice(start * unit, min(stop * unit, total))


def heads_of(spec: ModelSpec, rank: int, size: int) -> tuple[slice, slice]:
    """Return the query heads and the KV heads of a rank; the latter may be others' as well."""
    num_queries, num_kv = spec.num_heads // size, max(1, spec.num_kv_heads // size)
    first = rank * spec.num_kv_heads // size
    return slice(rank * num_queries, (rank + 1) * num_queries), slice(first, first + num_kv)


def spec_of(spec: ModelSpec, rank: int, size: int, vocabulary: slice) -> ModelSpec:
    """Return the model as the decoder of a rank sees it."""
    queries, keys = heads_of(spec, rank, size)
    return replace(
        spec,
        num_heads=queries.stop - queries.start,
        num_kv_heads=keys.stop - keys.start,
        vocab_size=vocabulary.stop - vocabulary.start,
    )


def vocabulary_of(weights: ModelWeights, rank: int, size: int) -> slice:
    """Return the tokens whose logits a rank makes; no rank has more than the first."""
    head = weights.head
    return cut(head.num_outputs, rank, size, head.weight.shape[2] if head.is_panelled else 16)


@torch.inference_mode()
def weights_of(
    weights: ModelWeights, spec: ModelSpec, rank: int, size: int
) -> tuple[ModelWeights, SliceCost]:
    """Copy what a rank multiplies out of the weights of the whole model, which stay as they are."""
    began = time.perf_counter()
    layers = tuple(_layer_of(layer, spec, rank, size) for layer in weights.layers)
    head = _outputs(weights.head, [vocabulary_of(weights, rank, size)])
    own = ModelWeights(embed=weights.embed, layers=layers, norm=weights.norm, head=head)
    known = {tensor.untyped_storage().data_ptr() for tensor in tensors_of(weights)}
    copied = [x for x in tensors_of(own) if x.untyped_storage().data_ptr() not in known]
    num_bytes = sum(tensor.nbytes for tensor in copied)
    return own, SliceCost(num_bytes=num_bytes, seconds=time.perf_counter() - began)


def _layer_of(layer: LayerWeights, spec: ModelSpec, rank: int, size: int) -> LayerWeights:
    queries, keys = heads_of(spec, rank, size)
    values = slice(spec.num_kv_heads + keys.start, spec.num_kv_heads + keys.stop)
    heads = (queries, *(_behind(x, spec.num_heads) for x in (keys, values)))
    dims = [slice(x.start * spec.head_dim, x.stop * spec.head_dim) for x in heads]
    norms = layer.qk_norm
    if norms is not None:
        norms = torch.cat([norms[heads[0]], norms[heads[1]]])
    own = replace(
        layer,
        qkv=_outputs(layer.qkv, dims),
        o=_inputs(layer.o, dims[0], has_bias=rank == 0),
        qk_norm=norms,
    )
    if layer.gate_up is not None and layer.down is not None:
        ffn_dim = layer.gate_up.num_outputs // 2
        width = layer.gate_up.weight.shape[2] if layer.gate_up.is_panelled else _UNITS[0]
        part = cut(ffn_dim, rank, size, width)
        gate_up = _outputs(layer.gate_up, [part, _behind(part, ffn_dim)])
        down = _inputs(layer.down, part, has_bias=rank == 0)
        own = replace(own, gate_up=gate_up, down=down)
    if layer.experts_gate_up is not None and layer.experts_down is not None:
        own = _experts_of(own, layer.experts_gate_up, layer.experts_down, spec, rank, size)
    return own


def _experts_of(
    layer: LayerWeights,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    spec: ModelSpec,
    rank: int,
    size: int,
) -> LayerWeights:
    """Cut every expert by its hidden size; all ranks route alike."""
    assert spec.moe is not None, "experts of a dense model"
    up_panels, down_panels = gate_up.dim() == 4, down.dim() == 4
    ffn_dim = spec.moe.ffn_dim
    part = cut(ffn_dim, rank, size, gate_up.shape[3] if up_panels else _UNITS[0])
    parts = [part, _behind(part, ffn_dim)]
    up = _take_outputs(gate_up, parts, is_panelled=up_panels)
    own_down = _take_inputs(down, part, is_panelled=down_panels)
    # products of all experts at once want both in one form
    if up.dim() == 3 and down_panels:
        own_down = _as_rows(own_down)[:, : spec.model_dim].contiguous()
    scales = layer.experts_gate_up_scales
    if scales is not None:
        scales = torch.cat([scales[:, outputs] for outputs in parts], dim=1)
    return replace(layer, experts_gate_up=up, experts_down=own_down, experts_gate_up_scales=scales)


def _behind(part: slice, count: int) -> slice:
    return slice(part.start + count, part.stop + count)


def _outputs(layer: Linear, ranges: Sequence[slice]) -> Linear:
    """Return the linear that makes these outputs alone, one range behind the other."""
    if len(ranges) == 1 and layer.can_start_at(ranges[0].start):
        return layer.take(ranges[0])
    weight = _take_outputs(layer.weight, ranges, is_panelled=layer.is_panelled)
    pick = partial(_picked, ranges=ranges)
    num_outputs = sum(outputs.stop - outputs.start for outputs in ranges)
    return Linear(weight, num_outputs, pick(layer.bias), pick(layer.scales))


def _picked(values: torch.Tensor | None, ranges: Sequence[slice]) -> torch.Tensor | None:
    return None if values is None else torch.cat([values[outputs] for outputs in ranges])


def _inputs(layer: Linear, part: slice, *, has_bias: bool) -> Linear:
    """Return the linear that multiplies these inputs alone; one of the ranks adds the bias."""
    weight = _take_inputs(layer.weight, part, is_panelled=layer.is_panelled)
    return replace(layer, weight=weight, bias=layer.bias if has_bias else None)


def _take_outputs(
    weight: torch.Tensor, ranges: Sequence[slice], *, is_panelled: bool
) -> torch.Tensor:
    """Return outputs in the form of the weight; in rows where panels would be cut."""
    if is_panelled:
        width = weight.shape[-1]
        if not any(x.start % width or x.stop % width for x in ranges):
            panels = [slice(x.start // width, x.stop // width) for x in ranges]
            return torch.cat([weight[..., x, :, :] for x in panels], dim=-3)
        weight = _as_rows(weight)
    if weight.stride(-1) == 1:
        return torch.cat([weight[..., x, :] for x in ranges], dim=-2)
    # it lies as [in, out], which decides its speed
    return torch.cat([weight.mT[..., x] for x in ranges], dim=-1).mT


def _take_inputs(weight: torch.Tensor, part: slice, *, is_panelled: bool) -> torch.Tensor:
    if is_panelled:
        return weight[..., part, :].contiguous()
    if weight.stride(-1) == 1:
        return weight[..., part].contiguous()
    return weight.mT[..., part, :].contiguous().mT


def _as_rows(panels: torch.Tensor) -> torch.Tensor:
    """Return panels [..., N, in, P] as rows [..., N * P, in]."""
    return panels.mT.flatten(-3, -2)
