"""Feed-forward shards that a weight-sharing group holds once: each at its owner, lent to all ranks.

```
own shards      used in place, in this rank's segment, which the peers read
peers' shards   fetched from their owners' segments into slots, ahead of use; the owner does not
                take part, so ranks never wait for each other
```

Source: Weight-as-a-Service of SiDP (section 4.2).
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from raybatch.engine.forward.decoder import Decoder, FfnService
from raybatch.engine.weights.layer_store import BufferedLayers, ShardBufferPool
from raybatch.engine.weights.layout import (
    FfnShard,
    FfnWeights,
    LayerWeights,
    map_tensors,
    packed_bytes,
    packed_into,
)
from raybatch.engine.weights.weight_copies import CopyPairs, HostCopies, Transfer, copies_to
from raybatch.kernels.moe import Chosen
from raybatch.records.share import Unit
from raybatch_extensions.cutting import dense_part
from raybatch_extensions.sharing.ownership import Ownership
from raybatch_extensions.sharing.segments import Segment

_Shard = TypeVar("_Shard")
# shards of a layer in order of use, each with its number
LentShards = Iterable[tuple[int, AbstractContextManager[FfnShard]]]


def shard_of(block: FfnShard, number: int, count: int) -> FfnShard:
    """Return shard `number` of `count` of a feed-forward block.

    It is a range of the intermediate dimension of a dense block, or every `count`-th expert of a
    sparse one; a copy unless `count` is 1.
    """
    if count == 1:
        return block
    if block.experts_gate_up is None:
        return dense_part(block, number, count)
    experts = slice(number, None, count)
    return replace(map_tensors(block, lambda x: x[experts].clone()), experts=experts)


def placed(shards: Mapping[Unit, _Shard], memory: torch.Tensor) -> dict[Unit, _Shard]:
    """Return, by unit, views of the shards that are packed into `memory` one after the other.

    `shards` have their shapes and dtypes, in the order of packing.
    """
    start, found = 0, dict[Unit, _Shard]()
    for unit, shard in shards.items():
        stop = start + packed_bytes(shard)
        found[unit] = packed_into(shard, memory[start:stop])
        start = stop
    return found


class ThreadCopies(HostCopies):
    """Copies within CPU memory ahead of use, by a thread on another core.

    torch releases the GIL while it copies.
    """

    def __init__(self, pairs: CopyPairs) -> None:
        super().__init__(pairs)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raybatch-weights")

    def start(self, unit: Unit, slot: int, after: object) -> Transfer:
        begun = threading.Event()

        def copy() -> None:
            begun.set()
            self.copy(unit, slot)

        future: Future[None] = self._thread.submit(copy)
        return Transfer(has_begun=begun.is_set, is_done=future.done, wait=future.result)

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def peer_buffers(
    sources: Mapping[Unit, _Shard],
    ownership: Ownership,
    rank: int,
    num_slots: int,
    device: torch.device,
    *,
    make_copier: Callable[[CopyPairs], HostCopies] | None = None,
) -> ShardBufferPool[_Shard]:
    """Return the buffer pool into which a rank fetches the shards of its peers.

    Args:
        sources: shards of the peers, in their segments.
        num_slots: see `Ownership.check_slots`; at most one per shard is made.
    """
    return ShardBufferPool(
        sources,
        ownership.fetches(rank),
        ownership.uses(rank),
        min(num_slots, len(sources)),
        device,
        make_copier=make_copier or copies_to(device, on_host=ThreadCopies),
    )


def choose_experts(decoder: Decoder, hidden: torch.Tensor, ffn: FfnWeights) -> Chosen | None:
    """Return the experts that the router chooses for normalised rows [T, M]; None if dense."""
    if ffn.router is None:
        return None
    moe = decoder.spec.moe
    assert moe is not None, "a layer with a router needs a MoeSpec"
    return decoder.ops.route(hidden, ffn.router, moe.top_k, moe.norm_topk_prob)


def add_shards_(
    decoder: Decoder,
    shards: Callable[[int], LentShards],
    layer: int,
    x: torch.Tensor,  # [T, M], modified in place
    hidden: torch.Tensor,  # [T, M], normalised
) -> None:
    """Add the feed-forward output of a layer to `x` as the sum over its shards."""
    lent, ffn = list(shards(layer)), decoder.layers.ffn(layer)
    # sum in shard order on every rank, whichever shard is used first, for equal results
    made = x.new_zeros(len(lent), *x.shape)
    chosen = choose_experts(decoder, hidden, ffn)
    for number, context in lent:
        with context as shard:
            decoder.add_shard_(made[number], hidden, ffn, shard, chosen)
    for part in made:
        x += part


class SharedLayers(BufferedLayers):
    """Lends the shards of shared layers: own ones in place, those of peers from a buffer pool.

    Args:
        layers: provide attention, norms and routers.
        owned: shards of this rank, on the device.
        sources: shards of the peers, in their segments.
        num_slots: device slots for shards of peers.
        segment: holds the owned shards; kept alive for the peers.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        ownership: Ownership,
        rank: int,
        owned: Mapping[Unit, FfnShard],
        sources: Mapping[Unit, FfnShard],
        device: torch.device,
        *,
        num_slots: int,
        segment: Segment | None = None,
    ) -> None:
        super().__init__(layers, peer_buffers(sources, ownership, rank, num_slots, device))
        self.ownership, self.rank = ownership, rank
        self.owned, self.sources = dict(owned), dict(sources)
        self._segment = segment
        self._is_still = False
        self._orders = [ownership.shards_of(layer, rank) for layer in range(len(layers))]

    def service(self, decoder: Decoder) -> FfnService | None:
        """Return a function that runs blocks shard by shard; None if a block is one shard."""
        has_more = self.ownership.num_shards > 1
        return partial(add_shards_, decoder, self.shards) if has_more else None

    def shard(self, layer: int) -> AbstractContextManager[FfnShard]:
        assert self.ownership.num_shards == 1, "blocks of several shards run in `service`"
        return self._lent(Unit(layer))

    def shards(self, layer: int) -> LentShards:
        return [(shard, self._lent(Unit(layer, shard))) for shard in self._orders[layer]]

    @contextmanager
    def still(self) -> Iterator[None]:
        """Suspend fetching and lend slots as they are, for time measurements.

        A lent slot may hold another shard, whose bytes may be NaN as numbers of this one.
        """
        self._is_still = True
        try:
            yield
        finally:
            self._is_still = False

    def _lent(self, unit: Unit) -> AbstractContextManager[FfnShard]:
        own = self.owned.get(unit)
        if own is None and not self._is_still:
            return self.buffers.lend(unit)
        return nullcontext(self.buffers.slots.view(unit, 0) if own is None else own)
