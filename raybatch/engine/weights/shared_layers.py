"""Feed-forward tiles that a group of replicas shares: each is at its owner, and lent to all.

```
own tiles       in this rank's segment, multiplied from there; the others read it
others' tiles   copied from their owners' segments into slots, ahead of their use; an owner takes no
                part in it, and no rank waits for how far another one is
```

Source: Weight-as-a-Service of SiDP (section 4.2).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from raybatch.engine.memory.segments import Segment
from raybatch.engine.weights.layer_store import RingLayers
from raybatch.engine.weights.layout import packed_bytes, packed_into
from raybatch.engine.weights.records import FfnTile, LayerWeights
from raybatch.engine.weights.tile_ring import TileRing
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, ThreadCopies, copies_to
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


def ring_of_others(
    sources: Mapping[Unit, _Tile],
    ownership: Ownership,
    rank: int,
    num_slots: int,
    device: torch.device,
    *,
    make_copier: Callable[[CopyPairs], HostCopies] | None = None,
) -> TileRing[_Tile]:
    """Return the ring of a rank for tiles that lie at their owners.

    Args:
        num_slots: see `Ownership.check_slots`; more than there are tiles are not made.
    """
    return TileRing(
        sources,
        ownership.fetches(rank),
        ownership.uses(rank),
        min(num_slots, len(sources)),
        device,
        make_copier=make_copier or copies_to(device, on_host=ThreadCopies),
    )


class SharedLayers(RingLayers):
    """Attention on the device, own tiles in a segment, those of others behind a ring.

    Args:
        layers: whose tiles give the forms; only attention, norms and routers are read.
        owned: the tiles of this rank, on the device.
        sources: the tiles of the others, at their owners.
        num_slots: on the device for tiles of others.
        segment: that the owned tiles are in, kept for those who open it.
    """

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
    ) -> None:
        super().__init__(layers, ring_of_others(sources, ownership, rank, num_slots, device))
        self.ownership, self.rank = ownership, rank
        self.owned, self.sources = dict(owned), dict(sources)
        self._segment = segment
        self._orders = [ownership.tiles_of(layer, rank) for layer in range(len(layers))]

    def tiles(self, layer: int) -> Iterable[tuple[int, AbstractContextManager[FfnTile]]]:
        return [(tile, self._lent(Unit(layer, tile))) for tile in self._orders[layer]]

    def _lent(self, unit: Unit) -> AbstractContextManager[FfnTile]:
        own = self.owned.get(unit)
        return self.ring.lend(unit) if own is None else nullcontext(own)
