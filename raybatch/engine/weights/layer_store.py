"""Lends the weights of layers to the decoder; feed-forward blocks may be streamed from host memory.

```
layers of a pass   0   1   2   3   4   5     0 and 3 are resident; the feed-forward blocks of 1, 2,
used now               ^                     4 and 5 are streamed; layer 1 computes
slots              | 1 | 2 |                 2 is copied meanwhile; 4 follows into the slot of 1
```
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import torch

from raybatch.engine.memory.kv_cache import trial_copy_s
from raybatch.engine.memory.pinned import allocate_memory
from raybatch.engine.weights.layout import (
    AttentionWeights,
    FfnShard,
    FfnWeights,
    LayerWeights,
    ModelWeights,
    WeightForm,
    has_data,
    packed_bytes,
    packed_into,
    tensors_of,
)
from raybatch.engine.weights.weight_buffers import WeightBufferPool, WeightCounters
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, copies_to
from raybatch.models.config import ModelSpec
from raybatch.policy.memory_budget import WeightPlacement
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
