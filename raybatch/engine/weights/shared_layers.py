"""Feed-forward tiles that a group of replicas shares: each is at its owner, and lent to all.

```
own tiles       in this rank's segment, multiplied from there; the others read it
others' tiles   copied from their owners' segments into slots, ahead of their use; an owner takes no
                part in it, and no rank waits for how far another one is
```

Source: Weight-as-a-Service of SiDP (section 4.2).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TypeVar

import torch

from raybatch.engine.weights.layer_store import TileSlots, WeightCounters
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.engine.weights.records import AttentionWeights, FfnTile, FfnWeights, LayerWeights
from raybatch.engine.weights.segments import Segment
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, StreamCopies, ThreadCopies
from raybatch.engine.weights.weight_ring import RingCounters, WeightRing
from raybatch.policy.ownership import Ownership, Unit

_Tile = TypeVar("_Tile")


def placed(tiles: Mapping[Unit, _Tile], memory: torch.Tensor) -> dict[Unit, _Tile]:
    """Return tiles of these forms that lie in a segment one after the other, in the order given."""
    start, found = 0, dict[Unit, _Tile]()
    for unit, tile in tiles.items():
        stop = start + packed_bytes(tile)
        found[unit] = packed_into(tile, memory[start:stop])
        start = stop
    return found


class SharedLayers:
    """Attention on the device, own tiles in a segment, those of others behind a ring.

    Args:
        layers: whose tiles give the forms; only attention, norms and routers are read.
        owned: the tiles of this rank, on the device.
        sources: the tiles of the others, at their owners.
        num_slots: on the device for tiles of others, see `Ownership.check_slots`.
        segment: that the owned tiles are in, kept for those who open it.
    """

    is_streamed = True

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        ownership: Ownership,
        rank: int,
        owned: Mapping[Unit, FfnTile],
        sources: Mapping[Unit, FfnTile],
        device: torch.device,
        *,
        num_slots: int,
        segment: Segment | None = None,
        make_copier: Callable[[CopyPairs], HostCopies] | None = None,
    ) -> None:
        self.ownership, self.rank = ownership, rank
        self._segment = segment
        self._layers = tuple(layers)
        self.owned, self.sources = dict(owned), dict(sources)
        self._slots = TileSlots(self.sources, num_slots, device)
        self._tensors = {unit: tensors_of(tile) for unit, tile in self.sources.items()}
        if make_copier is None and device.type == "cuda":
            make_copier = partial(StreamCopies, device=device)
        self._copier = (make_copier or ThreadCopies)(self.pairs)
        fetches, uses = ownership.fetches(rank), ownership.uses(rank)
        self._ring = WeightRing(fetches, uses, num_slots, self._copier)
        self._orders = [ownership.tiles_of(layer, rank) for layer in range(len(layers))]

    @property
    def counters(self) -> WeightCounters:
        return WeightCounters(
            num_copies=self._copier.num_copies,
            num_bytes=self._copier.num_bytes,
            num_stalls=self._ring.counters.num_stalls,
            num_failures=self._ring.counters.num_failures,
        )

    @property
    def ring_counters(self) -> RingCounters:
        return self._ring.counters

    @property
    def num_slots(self) -> int:
        return len(self._slots.memory)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the slots on the device."""
        return self._slots.memory.nbytes

    @property
    def slot_address(self) -> int:
        return self._slots.memory.data_ptr()

    def attention(self, layer: int) -> AttentionWeights:
        return self._layers[layer].attention

    def ffn(self, layer: int) -> FfnWeights:
        return self._layers[layer].ffn

    def tiles(self, layer: int) -> Iterable[tuple[int, AbstractContextManager[FfnTile]]]:
        return [(tile, self._lent(Unit(layer, tile))) for tile in self._orders[layer]]

    def check(self) -> None:
        self._ring.check()

    def close(self) -> None:
        self._copier.close()

    def _lent(self, unit: Unit) -> AbstractContextManager[FfnTile]:
        own = self.owned.get(unit)
        return self._lend(unit) if own is None else nullcontext(own)

    @contextmanager
    def _lend(self, unit: Unit) -> Iterator[FfnTile]:
        with self._ring.use(unit) as slot:
            yield self._slots.view(unit, slot)

    def pairs(self, unit: Unit, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what is copied of a unit, and to where in a slot."""
        return list(zip(self._tensors[unit], self._slots.tensors(unit, slot), strict=True))
