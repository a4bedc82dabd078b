"""Lends the weights of layers to the decoder; feed-forward tiles may have to come first.

```
layers of a pass   0   1   2   3   4   5     0 and 3 are resident; the feed-forward blocks of 1, 2,
used now               ^                     4 and 5 pass through: layer 1
slots              | 1 | 2 |                 2 is on its way while 1 computes; 4 may come as soon
                                             as 1 was used
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
    FfnTile,
    FfnWeights,
    LayerWeights,
    ModelWeights,
)
from raybatch.engine.weights.tile_ring import TileRing
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, copies_to
from raybatch.engine.weights.weight_ring import WeightCounters
from raybatch.models.config import ModelSpec
from raybatch.policy.memory_budget import Residence
from raybatch.policy.ownership import Unit


class LayerStore(Protocol):
    """Where a decoder gets the weights of its layers; of one thread."""

    is_streamed: bool

    @property
    def counters(self) -> WeightCounters: ...

    def attention(self, layer: int) -> AttentionWeights: ...

    def ffn(self, layer: int) -> FfnWeights:
        """Return the block of a layer for its norm and router; its tile is lent by `tile`."""

    def tile(self, layer: int) -> AbstractContextManager[FfnTile]:
        """Lend the tile of a layer, which may be gone when its context ends.

        Entering it raises RuntimeError where weights could not be copied; the store goes on.
        """


# of a model in a folder, loaded but for the tiles of its blocks: says where these lie, and returns
# the model with those that are here
PlaceWeights = Callable[
    [Path, ModelSpec, WeightForm, ModelWeights, torch.device], tuple[ModelWeights, LayerStore]
]


class OnDevice:
    """Layers whose attention, norms and routers are on the device."""

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self.layers = tuple(layers)

    def attention(self, layer: int) -> AttentionWeights:
        return self.layers[layer].attention

    def ffn(self, layer: int) -> FfnWeights:
        return self.layers[layer].ffn


class ResidentLayers(OnDevice):
    """All layers on the device.

    Raises RuntimeError: a tile is a placeholder. Products of torch on a CPU take one for a matrix.
    """

    is_streamed = False
    counters = WeightCounters()

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        super().__init__(layers)
        for number, layer in enumerate(layers):
            if not (layer.ffn.norm.is_meta or has_data(layer.ffn.tile)):
                raise RuntimeError(f"weights of layer {number} are elsewhere (meta)")
        self._tiles = [nullcontext(layer.ffn.tile) for layer in layers]

    def tile(self, layer: int) -> AbstractContextManager[FfnTile]:
        return self._tiles[layer]


class RingLayers(OnDevice):
    """Layers some of whose tiles pass through a ring."""

    is_streamed = True

    def __init__(self, layers: Sequence[LayerWeights], ring: TileRing[FfnTile]) -> None:
        super().__init__(layers)
        self.ring = ring

    @property
    def counters(self) -> WeightCounters:
        return self.ring.counters


class StreamedLayers(RingLayers):
    """Attention on the device, and some feed-forward blocks in host memory behind a ring."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        residence: Residence,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], HostCopies] | None = None,
    ) -> None:
        units = [Unit(layer) for layer in residence.streamed]
        blocks = {unit: layers[unit.layer].ffn.tile for unit in units}
        make_copier = make_copier or copies_to(device, on_host=HostCopies)
        ring = TileRing(
            blocks, units, units, residence.num_buffers, device, make_copier=make_copier
        )
        super().__init__(layers, ring)
        self._residence = residence

    def tile(self, layer: int) -> AbstractContextManager[FfnTile]:
        if self._residence.is_resident[layer]:
            return nullcontext(self.ffn(layer).tile)
        return self.ring.lend(Unit(layer))

    def bytes_per_s(self) -> float:
        """Measure copies of a block, before anything uses the ring; nothing of it is counted."""
        assert not self.counters.num_copies, "the ring holds weights"
        slots = self.ring.slots
        trial = HostCopies(slots.pairs)
        copy = partial(trial.copy, Unit(self._residence.streamed[0]), 0)
        seconds = trial_copy_s(copy, slots.memory.device)
        return trial.num_bytes / trial.num_copies / seconds
