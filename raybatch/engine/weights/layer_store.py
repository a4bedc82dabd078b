"""Lends the weights of layers to the decoder; feed-forward tiles may have to come first.

```
layers of a pass   0   1   2   3   4   5     0 and 3 are resident; the feed-forward blocks of 1, 2,
used now               ^                     4 and 5 pass through: layer 1
slots              | 1 | 2 |                 2 is on its way while 1 computes; 4 may come as soon
                                             as 1 was used
```
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from raybatch.engine.memory.kv_cache import trial_copy_s
from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.engine.weights.records import AttentionWeights, FfnTile, FfnWeights, LayerWeights
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, StreamCopies
from raybatch.engine.weights.weight_ring import WeightRing
from raybatch.policy.ownership import Unit
from raybatch.policy.residence import Residence

_Tile = TypeVar("_Tile")


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightCounters:
    """What was copied to the device since the start."""

    num_copies: int = 0
    num_bytes: int = 0
    # uses whose weights had not arrived
    num_stalls: int = 0
    num_failures: int = 0


class LayerStore(Protocol):
    """Where a decoder gets the weights of its layers; of one thread."""

    is_streamed: bool

    @property
    def counters(self) -> WeightCounters: ...

    def attention(self, layer: int) -> AttentionWeights: ...

    def ffn(self, layer: int) -> FfnWeights:
        """Return the block of a layer for its norm and router; tiles are lent by `tiles`."""

    def tiles(self, layer: int) -> Iterable[tuple[int, AbstractContextManager[FfnTile]]]:
        """Return the tiles of a layer in the order of their use, each with its number.

        A tile may be gone when its context ends. Entering one raises RuntimeError where its weights
        could not be copied; the store goes on.
        """


class ResidentLayers:
    """All layers on the device."""

    is_streamed = False
    counters = WeightCounters()

    def __init__(self, layers: Sequence[LayerWeights]) -> None:
        self._layers = tuple(layers)
        self._tiles = [[(i, nullcontext(t)) for i, t in enumerate(x.ffn.tiles)] for x in layers]

    def attention(self, layer: int) -> AttentionWeights:
        return self._layers[layer].attention

    def ffn(self, layer: int) -> FfnWeights:
        return self._layers[layer].ffn

    def tiles(self, layer: int) -> Iterable[tuple[int, AbstractContextManager[FfnTile]]]:
        return self._tiles[layer]


class TileSlots(Generic[_Tile]):
    """Memory for tiles that pass through, and the tensors of each tile in it.

    Args:
        tiles: by unit, wherever they are; only their shapes are read.
    """

    def __init__(self, tiles: Mapping[Unit, _Tile], num_slots: int, device: torch.device) -> None:
        self._tiles = tiles
        shape = (num_slots, max((packed_bytes(tile) for tile in tiles.values()), default=0))
        if device.type == "cuda":
            self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        else:
            self.memory = allocate_memory(shape, torch.uint8, device)
        # tiles of one form have the same views
        self._forms = {unit: _form_of(tile) for unit, tile in tiles.items()}
        self._views: dict[tuple[object, int], tuple[_Tile, list[torch.Tensor]]] = {}

    def view(self, unit: Unit, slot: int) -> _Tile:
        return self._view(unit, slot)[0]

    def tensors(self, unit: Unit, slot: int) -> list[torch.Tensor]:
        """Return those of `view`, in the order of `tensors_of`."""
        return self._view(unit, slot)[1]

    def _view(self, unit: Unit, slot: int) -> tuple[_Tile, list[torch.Tensor]]:
        key = self._forms[unit], slot
        if key not in self._views:
            view = packed_into(self._tiles[unit], self.memory[slot])
            self._views[key] = view, tensors_of(view)
        return self._views[key]


def _form_of(tile: object) -> object:
    tensors = tuple((x.shape, x.stride(), x.dtype) for x in tensors_of(tile))
    experts = tile.experts if isinstance(tile, FfnTile) else None
    return tensors, None if experts is None else experts.start


class StreamedLayers:
    """Attention on the device, and some feed-forward blocks in host memory behind a ring."""

    is_streamed = True

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        residence: Residence,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], HostCopies] | None = None,
    ) -> None:
        self._layers = tuple(layers)
        self._residence = residence
        units = [Unit(layer) for layer in residence.streamed]
        tiles = {unit: layers[unit.layer].ffn.tile for unit in units}
        self._slots = TileSlots(tiles, residence.num_buffers, device)
        self._tensors = {unit: tensors_of(tile) for unit, tile in tiles.items()}
        if make_copier is None and device.type == "cuda":
            make_copier = partial(StreamCopies, device=device)
        self._copier = (make_copier or HostCopies)(self._pairs)
        self._ring = WeightRing(units, units, residence.num_buffers, self._copier)

    @property
    def counters(self) -> WeightCounters:
        return WeightCounters(
            num_copies=self._copier.num_copies,
            num_bytes=self._copier.num_bytes,
            num_stalls=self._ring.counters.num_stalls,
            num_failures=self._ring.counters.num_failures,
        )

    def attention(self, layer: int) -> AttentionWeights:
        return self._layers[layer].attention

    def ffn(self, layer: int) -> FfnWeights:
        return self._layers[layer].ffn

    def tiles(self, layer: int) -> Iterable[tuple[int, AbstractContextManager[FfnTile]]]:
        if self._residence.is_resident[layer]:
            return [(0, nullcontext(self._layers[layer].ffn.tile))]
        return [(0, self._lend(Unit(layer)))]

    def bytes_per_s(self) -> float:
        """Measure copies of a block, before anything uses the ring; nothing of it is counted."""
        assert not self._copier.num_copies, "the ring holds weights"
        trial = HostCopies(self._pairs)
        copy = partial(trial.copy, Unit(self._residence.streamed[0]), 0)
        seconds = trial_copy_s(copy, self._slots.memory.device)
        return trial.num_bytes / trial.num_copies / seconds

    def check(self) -> None:
        self._ring.check()

    @contextmanager
    def _lend(self, unit: Unit) -> Iterator[FfnTile]:
        with self._ring.use(unit) as slot:
            yield self._slots.view(unit, slot)

    def _pairs(self, unit: Unit, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self._tensors[unit], self._slots.tensors(unit, slot), strict=True))
