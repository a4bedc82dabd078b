"""Lends the weights of layers to the decoder; feed-forward blocks may be streamed from host memory.

```
layers of a pass   0   1   2   3   4   5     0 and 3 are resident; the feed-forward blocks of 1, 2,
used now               ^                     4 and 5 are streamed; layer 1 computes
slots              | 1 | 2 |                 2 is copied meanwhile; 4 follows into the slot of 1
```
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from raybatch.engine.memory.kv_cache import trial_copy_s
from raybatch.engine.weights.layout import WeightForm, has_data
from raybatch.engine.weights.records import (
    AttentionWeights,
    FfnShard,
    FfnWeights,
    LayerWeights,
    ModelWeights,
)
from raybatch.engine.weights.shard_buffers import ShardBufferPool
from raybatch.engine.weights.weight_buffers import WeightCounters
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, copies_to
from raybatch.models.config import ModelSpec
from raybatch.policy.memory_budget import WeightPlacement
from raybatch.records.share import Unit


class LayerStore(Protocol):
    """Provides the weights of layers to a decoder; used by one thread."""

    is_streamed: bool

    @property
    def counters(self) -> WeightCounters: ...

    def attention(self, layer: int) -> AttentionWeights: ...

    def ffn(self, layer: int) -> FfnWeights:
        """Return the block of a layer; only its norm and router may be used.

        `shard` lends its linears or experts.
        """

    def shard(self, layer: int) -> AbstractContextManager[FfnShard]:
        """Lend the linears or experts of a layer within a context.

        Entering it raises RuntimeError if the weights could not be copied; the store stays usable.
        """


# places the feed-forward blocks of a model that is loaded without them; returns the model with the
# local ones, and the layers
PlaceWeights = Callable[
    [Path, ModelSpec, WeightForm, ModelWeights, torch.device], tuple[ModelWeights, LayerStore]
]


class OnDevice:
    """Base class of stores whose attention, norms and routers are on the device."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.layers = tuple(layers)

    def attention(self, layer: int) -> AttentionWeights:
        return self.layers[layer].attention

    def ffn(self, layer: int) -> FfnWeights:
        return self.layers[layer].ffn


class ResidentLayers(OnDevice):
    """Lends layers that are all on the device.

    Raises RuntimeError: the weights of a layer are placeholders (meta tensors); torch's products
    on a CPU would accept these.
    """

    is_streamed = False
    counters = WeightCounters()

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        super().__init__(layers)
        for number, layer in enumerate(layers):
            if not (layer.ffn.norm.is_meta or has_data(layer.ffn.shard)):
                raise RuntimeError(
                    f"the weights of layer {number} are not loaded: they are meta tensors"
                )
        self._shards = [nullcontext(layer.ffn.shard) for layer in layers]

    def shard(self, layer: int) -> AbstractContextManager[FfnShard]:
        return self._shards[layer]


class BufferedLayers(OnDevice):
    """Base class of stores that lend some feed-forward blocks from a pool of device buffers."""

    is_streamed = True

    def __init__(self, layers: Sequence[LayerWeights], buffers: ShardBufferPool[FfnShard]) -> None:
        super().__init__(layers)
        self.buffers = buffers

    @property
    def counters(self) -> WeightCounters:
        return self.buffers.counters


class StreamedLayers(BufferedLayers):
    """Lends resident layers, and streams the other feed-forward blocks from host memory."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        placement: WeightPlacement,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], HostCopies] | None = None,
    ) -> None:
        units = [Unit(layer) for layer in placement.streamed]
        blocks = {unit: layers[unit.layer].ffn.shard for unit in units}
        make_copier = make_copier or copies_to(device, on_host=HostCopies)
        buffers = ShardBufferPool(
            blocks, units, units, placement.num_buffers, device, make_copier=make_copier
        )
        super().__init__(layers, buffers)
        self._placement = placement

    def shard(self, layer: int) -> AbstractContextManager[FfnShard]:
        if self._placement.is_resident[layer]:
            return nullcontext(self.ffn(layer).shard)
        return self.buffers.lend(Unit(layer))

    def bytes_per_s(self) -> float:
        """Return the measured speed of copies from host memory to the device.

        It copies a block into the buffer pool, which must be unused; `counters` do not change.
        """
        assert not self.counters.num_copies, "the buffer pool is in use"
        slots = self.buffers.slots
        trial = HostCopies(slots.pairs)
        copy = partial(trial.copy, Unit(self._placement.streamed[0]), 0)
        seconds = trial_copy_s(copy, slots.memory.device)
        return trial.num_bytes / trial.num_copies / seconds
