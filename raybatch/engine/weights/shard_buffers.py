"""Device slots for blocks or shards that are stored elsewhere, each lent while it is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Generic, TypeVar

import torch

from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.weights.layout import packed_bytes, packed_into, tensors_of
from raybatch.engine.weights.records import FfnShard
from raybatch.engine.weights.weight_buffers import WeightBufferPool, WeightCounters
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies
from raybatch.records.share import Unit

_Shard = TypeVar("_Shard")


class ShardSlots(Generic[_Shard]):
    """Device memory of `num_slots` slots, each of which can hold the shard of any one unit.

    Args:
        sources: shard of each unit in the memory from which it is copied.
    """

    def __init__(
        self, sources: Mapping[Unit, _Shard], num_slots: int, device: torch.device
    ) -> None:
        self._sources = sources
        shape = (num_slots, max((packed_bytes(shard) for shard in sources.values()), default=0))
        if device.type == "cuda":
            self.memory = torch.empty(shape, dtype=torch.uint8, device=device)
        else:
            self.memory = allocate_memory(shape, torch.uint8, device)
        # shards of equal form share views
        numbers = dict[object, int]()
        self._forms = {
            unit: numbers.setdefault(_form_of(shard), len(numbers))
            for unit, shard in sources.items()
        }
        self._tensors = {unit: tensors_of(shard) for unit, shard in sources.items()}
        self._views: dict[tuple[int, int], tuple[_Shard, list[torch.Tensor]]] = {}

    def view(self, unit: Unit, slot: int) -> _Shard:
        """Return a shard whose tensors are views of a slot's memory, with the shapes of `unit`."""
        return self._view(unit, slot)[0]

    def pairs(self, unit: Unit, slot: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (source, target) of each tensor of `unit`, for a copy into `slot`."""
        return list(zip(self._tensors[unit], self._view(unit, slot)[1], strict=True))

    def _view(self, unit: Unit, slot: int) -> tuple[_Shard, list[torch.Tensor]]:
        key = self._forms[unit], slot
        if key not in self._views:
            # a thread copies into them, even if they are first made in inference mode
            with torch.inference_mode(False):
                view = packed_into(self._sources[unit], self.memory[slot])
            self._views[key] = view, tensors_of(view)
        return self._views[key]


def _form_of(shard: object) -> object:
    tensors = tuple((x.shape, x.stride(), x.dtype) for x in tensors_of(shard))
    experts = shard.experts if isinstance(shard, FfnShard) else None
    return tensors, None if experts is None else experts.start


class ShardBufferPool(Generic[_Shard]):
    """Lends shards from slots on the device and fetches them ahead of use.

    See `WeightBufferPool` for `fetches` and `uses`.

    Args:
        sources: shard of each unit in the memory from which it is copied.
        make_copier: returns what copies units to slots; it is called with `ShardSlots.pairs`.
    """

    def __init__(
        self,
        sources: Mapping[Unit, _Shard],
        fetches: Sequence[Unit],
        uses: Sequence[Unit],
        num_slots: int,
        device: torch.device,
        *,
        make_copier: Callable[[CopyPairs], HostCopies],
    ) -> None:
        self.slots = ShardSlots(sources, num_slots, device)
        self.copier = make_copier(self.slots.pairs)
        self._pool = WeightBufferPool(fetches, uses, num_slots, self.copier)
        # `use` yields the slot number, for callers that keep data per slot
        self.use, self.check = self._pool.use, self._pool.check

    @property
    def counters(self) -> WeightCounters:
        copier = self.copier
        return replace(
            self._pool.counters, num_copies=copier.num_copies, num_bytes=copier.num_bytes
        )

    @property
    def num_slots(self) -> int:
        return len(self.slots.memory)

    @property
    def num_bytes(self) -> int:
        """Device bytes of all slots."""
        return self.slots.memory.nbytes

    @contextmanager
    def lend(self, unit: Unit) -> Iterator[_Shard]:
        """Lend a shard within a context; raises RuntimeError if it could not be copied."""
        with self.use(unit) as slot:
            yield self.slots.view(unit, slot)

    def close(self) -> None:
        """Stop background copies."""
        self.copier.close()
