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
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from raybatch.engine.ext.sharing.segments import Segment
from raybatch.engine.forward.decoder import Decoder, FfnService
from raybatch.engine.weights.cutting import dense_part
from raybatch.engine.weights.layer_store import RingLayers
from raybatch.engine.weights.layout import map_tensors, packed_bytes, packed_into
from raybatch.engine.weights.records import FfnTile, FfnWeights, LayerWeights
from raybatch.engine.weights.tile_ring import TileRing
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, ThreadCopies, copies_to
from raybatch.kernels.moe import Chosen
from raybatch.policy.ownership import Ownership, Unit

_Tile = TypeVar("_Tile")
# of a layer in the order of their use, each with its number
LentTiles = Iterable[tuple[int, AbstractContextManager[FfnTile]]]


def tile_of(block: FfnTile, number: int, count: int) -> FfnTile:
    """Return a tile of a whole block: a part of F of a dense one, every `count`-th expert.

    It is a copy, unless it is all of the block.
    """
    if count == 1:
        return block
    if block.experts_gate_up is None:
        return dense_part(block, number, count)
    experts = slice(number, None, count)
    return replace(map_tensors(block, lambda x: x[experts].clone()), experts=experts)


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


def choose_experts(decoder: Decoder, hidden: torch.Tensor, ffn: FfnWeights) -> Chosen | None:
    """Return the experts of normalised rows [T, M]; None where a block has none."""
    if ffn.router is None:
        return None
    moe = decoder.spec.moe
    assert moe is not None, "a layer with a router is sparse"
    return decoder.ops.route(hidden, ffn.router, moe.top_k, moe.norm_topk_prob)


def add_tiles_(
    decoder: Decoder,
    tiles: Callable[[int], LentTiles],
    layer: int,
    x: torch.Tensor,  # [T, M], modified in place
    hidden: torch.Tensor,  # [T, M], normalised
) -> None:
    """Add the feed-forward block of a layer as the sum of its tiles."""
    lent, ffn = list(tiles(layer)), decoder.layers.ffn(layer)
    # added in one order, whichever rank runs a row, and so whichever tile comes first
    made = x.new_zeros(len(lent), *x.shape)
    chosen = choose_experts(decoder, hidden, ffn)
    for number, context in lent:
        with context as tile:
            decoder.add_tile_(made[number], hidden, ffn, tile, chosen)
    for part in made:
        x += part


class SharedLayers(RingLayers):
    """Attention on the device, own tiles in a segment, those of others behind a ring.

    Args:
        layers: only attention, norms and routers are read.
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
        self._is_still = False
        self._orders = [ownership.tiles_of(layer, rank) for layer in range(len(layers))]

    def service(self, decoder: Decoder) -> FfnService | None:
        """Return what runs the blocks of a decoder by their tiles; None where each has one."""
        has_more = self.ownership.num_tiles > 1
        return partial(add_tiles_, decoder, self.tiles) if has_more else None

    def tile(self, layer: int) -> AbstractContextManager[FfnTile]:
        assert self.ownership.num_tiles == 1, "blocks of several tiles run in `service`"
        return self._lent(Unit(layer))

    def tiles(self, layer: int) -> LentTiles:
        return [(tile, self._lent(Unit(layer, tile))) for tile in self._orders[layer]]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Copy nothing, and lend what a slot holds.

        That may be a tile of another form, of which these bytes make no number.
        """
        self._is_still = True
        try:
            yield
        finally:
            self._is_still = False

    def _lent(self, unit: Unit) -> AbstractContextManager[FfnTile]:
        own = self.owned.get(unit)
        if own is None and not self._is_still:
            return self.ring.lend(unit)
        return nullcontext(self.ring.slots.view(unit, 0) if own is None else own)
