"""Tiles that lie elsewhere, each lent from a slot on the device while it is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.engine.weights.records import FfnTile
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies
from raybatch.engine.weights.weight_ring import WeightCounters, WeightRing
from raybatch.policy.ownership import Unit

_Tile = TypeVar("_Tile")


class TileSlots(Generic[_Tile]):
    """Memory for tiles that pass through.

    Args:
        sources: the tiles where they lie, by unit.
    """

    def __init__(self, sources: Mapping[Unit, _Tile], num_slots: int, device: torch.device) -> None:
        self._sources = sources
        shape = (num_slots, max((packed_bytes(tile) for tile in sources.values()), default=0))
        if device.type == "cuda":
            self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        else:
            self.memory = allocate_memory(shape, torch.uint8, device)
        # tiles of one form have the same views
        numbers = dict[object, int]()
        self._forms = {
            unit: numbers.setdefault(_form_of(tile), len(numbers)) for unit, tile in sources.items()
        }
        self._tensors = {unit: tensors_of(tile) for unit, tile in sources.items()}
        self._views: dict[tuple[int, int], tuple[_Tile, list[torch.Tensor]]] = {}

    def view(self, unit: Unit, slot: int) -> _Tile:
        """Return the tile of a unit in a slot."""
        return self._view(unit, slot)[0]

    def pairs(self, unit: Unit, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what is copied of a unit, and to where in a slot."""
        return list(zip(self._tensors[unit], self._view(unit, slot)[1], strict=True))

    def _view(self, unit: Unit, slot: int) -> tuple[_Tile, list[torch.Tensor]]:
        key = self._forms[unit], slot
        if key not in self._views:
            # copies go there from a thread, whoever asks first
            with torch.inference_mode(False):
                view = packed_into(self._sources[unit], self.memory[slot])
            self._views[key] = view, tensors_of(view)
        return self._views[key]


def _form_of(tile: object) -> object:
    tensors = tuple((x.shape, x.stride(), x.dtype) for x in tensors_of(tile))
    experts = tile.experts if isinstance(tile, FfnTile) else None
    return tensors, None if experts is None else experts.start


class TileRing(Generic[_Tile]):
    """Slots, and who uses which of them; see `WeightRing` for the orders.

    Args:
        sources: the tiles where they lie, by unit.
        make_copier: of what is copied of a unit to a slot.
    """

    def __init__(
        self,
        sources: Mapping[Unit, _Tile],
        fetches: Sequence[Unit],
        uses: Sequence[Unit],
        num_slots: int,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], HostCopies],
    ) -> None:
        self.slots = TileSlots(sources, num_slots, device)
        self.copier = make_copier(self.slots.pairs)
        self._ring = WeightRing(fetches, uses, num_slots, self.copier)
        # the number of a slot, for who has something of its own for each
        self.use, self.check = self._ring.use, self._ring.check

    @property
    def counters(self) -> WeightCounters:
        copier = self.copier
        return replace(
            self._ring.counters, num_copies=copier.num_copies, num_bytes=copier.num_bytes
        )

    @property
    def num_slots(self) -> int:
        return len(self.slots.memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, on the device."""
        return self.slots.memory.nbytes

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[_Tile]:
        """Lend a tile until the block ends; raises RuntimeError where it could not be copied."""
        with self.use(unit) as slot:
            yield self.slots.view(unit, slot)

    def close(self) -> None:
        """End what copies in the background."""
        self.copier.close()
