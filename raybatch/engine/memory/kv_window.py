"""KV in host memory (`kv_offload`): the device pool becomes two buffers of one layer each.

```
pool, if KV is on the device          | layer 0 | layer 1 | layer 2 | layer 3 |   N blocks each
window, if KV is in host memory       |      buffer 0     |      buffer 1     |  2 N blocks each
```

A buffer holds one layer's KV of the rows that attend together. It is loaded before, and the KV of
their new tokens is saved after. The next rows, or the next layer, use the other buffer.
`HostLayers` has all KV, layer by layer.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from raybatch.engine.memory.kv_cache import KVCache, allocate_host_kv
from raybatch.engine.memory.pinned import DeviceQueue, PinnedBufferPool
from raybatch.engine.memory.swap import COPY_ERRORS
from raybatch.errors import error_text
from raybatch.records.arrays import Ints

# layers in flight per direction
_NUM_UNDERWAY = 2
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


class _Arriving(NamedTuple):
    """KV of one layer on its way to pinned host memory; `rows` [2 (K, V), tokens, heads, dim]."""

    layer_idx: int
    slots: torch.Tensor
    rows: torch.Tensor
    arrived: torch.cuda.Event


def words_of(memory: torch.Tensor) -> npt.NDArray[Any]:
    """View rows [..., R] in CPU memory as the widest integers that fill them."""
    row_bytes = memory.shape[-1] * memory.element_size()
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    words: npt.NDArray[Any] = memory.view(torch.uint8).view(word).numpy()
    return words


class HostLayers:
    """Loads and saves the KV of `num_blocks` blocks in host memory; used by one thread.

    Each layer is contiguous, so that neighbouring blocks are copied at memory bandwidth. On a GPU,
    copies run on one stream per direction, and the kernels of a layer wait for its copies.

    Args:
        pool: device pool; host blocks have the shape of its blocks.
    """

    def __init__(self, pool: KVCache, num_blocks: int) -> None:
        num_layers, _, *block = pool.k.shape
        self.num_blocks = num_blocks
        # bytes of one token in one layer
        self.row_bytes = 2 * block[0] * block[2] * pool.k.element_size()
        self._memory = allocate_host_kv((2, num_layers, num_blocks, *block), pool.k)
        self.kv = KVCache(k=self._memory[0], v=self._memory[1])
        self._words = words_of(self._memory)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if pool.k.device.type == "cuda":
            make = torch.cuda.Stream
            self._streams = make(pool.k.device), make(pool.k.device)  # type: ignore[no-untyped-call]
        self._queue = DeviceQueue(pool.k.device)
        self._pinned_in, self._pinned_out = (
            PinnedBufferPool(self._queue, _NUM_UNDERWAY) for _ in range(2)
        )
        self._arriving: list[_Arriving] = []

    @property
    def is_timed(self) -> bool:
        """Return whether copies are synchronous, as within a CPU."""
        return self._streams is None

    def mark(self) -> "torch.cuda.Event | None":
        """Record an event after all kernels so far; None on a CPU, where they are done."""
        return None if self._streams is None else self._queue.mark()

    def load(
        self, layer_idx: int, block_ids: Ints, buffer: KVCache, after: "torch.cuda.Event | None"
    ) -> None:
        """Copy one layer of these host blocks into the first blocks of `buffer`, [W, G, B, R].

        On a GPU the copy starts after the event `after`, and later kernels wait for it.
        """
        ids = torch.from_numpy(block_ids)
        sources = self._memory[:, layer_idx]
        targets = buffer.k[: len(ids)], buffer.v[: len(ids)]
        if self._streams is None:
            for source, target in zip(sources, targets, strict=True):
                torch.index_select(source, 0, ids, out=target)
            return
        num_bytes = targets[0].nbytes
        memory = self._pinned_in.take(2 * num_bytes)
        device = buffer.k.device
        for half, (source, target) in enumerate(zip(sources, targets, strict=True)):
            staged = memory[half * num_bytes : (half + 1) * num_bytes]
            torch.index_select(source, 0, ids, out=staged.view(target.dtype).view(target.shape))
        stream, _ = self._streams
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for half, target in enumerate(targets):
                staged = memory[half * num_bytes : (half + 1) * num_bytes]
                pinned = staged.view(target.dtype).view(target.shape)
                target.copy_(pinned, non_blocking=True)
            self._pinned_in.mark()
        torch.cuda.current_stream(device).wait_stream(stream)

    def save(self, layer_idx: int, buffer: KVCache, slots: torch.Tensor, host_slots: Ints) -> None:
        """Copy one layer of KV of some tokens to the host; `finish` waits for completion.

        A slot is block * B + offset: `slots` in `buffer` [W, G, B, R], on its device, `host_slots`
        in host memory.
        """
        device, block_size = buffer.k.device, buffer.k.shape[2]
        if self._streams is None:
            # for few tokens numpy is three times faster than torch
            (ids, places_in), (host_ids, places_out) = (
                divmod(of, block_size) for of in (slots.numpy(), host_slots)
            )
            for words, half in zip(self._words[:, layer_idx], (buffer.k, buffer.v), strict=True):
                words[host_ids, :, places_out] = words_of(half)[ids, :, places_in]
            return
        blocks, offsets = slots // block_size, slots % block_size
        rows = torch.stack((buffer.k[blocks, :, offsets], buffer.v[blocks, :, offsets]))
        places = torch.from_numpy(host_slots)
        self._put_arrived(keep=_NUM_UNDERWAY - 1)
        pinned = self._pinned_out.take_like(rows)
        _, stream = self._streams
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            pinned.copy_(rows, non_blocking=True)
            arrived = self._pinned_out.mark()
        rows.record_stream(stream)
        self._arriving.append(_Arriving(layer_idx, places, pinned, arrived))

    def finish(self) -> None:
        """Wait until all saves are complete."""
        self._put_arrived(keep=0)

    def clear(self, block_ids: Ints) -> None:
        self._memory[:, :, torch.from_numpy(block_ids)] = 0

    def _put_arrived(self, *, keep: int) -> None:
        """Write arrived rows into their blocks, except for the last `keep` layers."""
        while len(self._arriving) > keep:
            layer = self._arriving[0]
            layer.arrived.synchronize()
            self._put(layer.layer_idx, layer.slots, layer.rows)
            del self._arriving[0]

    def _put(self, layer_idx: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        block_size = self._memory.shape[-2]
        blocks, offsets = slots // block_size, slots % block_size
        for memory, half in zip(self._memory[:, layer_idx], rows, strict=True):
            memory[blocks, :, offsets] = half


_NUM_BUFFERS = 2
# attempts of one copy before the step fails
_MAX_TRIES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowMoves:
    """Copies between host memory and a buffer that some rows need in each layer.

    A slot is block * B + offset.
    """

    load_host: Ints  # int64 [X], host blocks to load into the first X blocks of a buffer
    save_host: Ints  # int64 [T], host slots of the new tokens
    # whether other rows of the step write some of these blocks, in the same layers
    follows_writer: bool = False


@dataclass(kw_only=True, slots=True)
class WindowCounters:
    """Copies between host memory and the window since the start."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    num_failures: int = 0
    copy_s: float = 0.0  # CPU seconds of copies; 0 on a GPU, where they overlap


class KVWindow:
    """Loads the KV of some rows, one layer at a time, and saves their new tokens; single-threaded.

    On a GPU, copies run on separate streams and the kernels of a layer wait for its copies. A
    failed copy is retried; copies are idempotent.

    Args:
        pool: device pool, [L, N, G, B, R], contiguous.

    Source:
        BatchGen (arXiv:2606.21712), sections 5.1 and 5.2; here prompts and decodes share the
        buffers.
    """

    def __init__(self, pool: KVCache, host: HostLayers) -> None:
        num_layers, num_blocks = pool.k.shape[:2]
        self.counters = WindowCounters()
        self.num_blocks = num_layers * num_blocks // _NUM_BUFFERS
        self.host = host
        shape = pool.k.shape[2:]
        pools = [
            pool.view(-1, *shape)[: _NUM_BUFFERS * self.num_blocks] for pool in (pool.k, pool.v)
        ]
        keys, values = (memory.view(_NUM_BUFFERS, self.num_blocks, *shape) for memory in pools)
        # [W, G, B, R] each
        self._buffers = [KVCache(k=k, v=v) for k, v in zip(keys, values, strict=True)]
        # all layers of such a cache are the same memory
        self._caches = [
            KVCache(
                k=buffer.k.expand(num_layers, *buffer.k.shape),
                v=buffer.v.expand(num_layers, *buffer.v.shape),
            )
            for buffer in self._buffers
        ]
        self._next = 0
        # per buffer: event after its last reader
        self._marks = [host.mark() for _ in self._buffers]

    @property
    def cache(self) -> KVCache:
        """A cache with the shape of a buffer in each layer, for ops that prepare a step."""
        return self._caches[0]

    def enter(self, layer_idx: int, moves: WindowMoves) -> KVCache:
        """Load the KV of one layer into a buffer; return a cache in which all layers are it."""
        buffer = self._buffers[self._next]
        if moves.follows_writer:
            self.host.finish()
        if len(moves.load_host):
            after = self._marks[self._next]
            self._copy(lambda: self.host.load(layer_idx, moves.load_host, buffer, after))
            num_rows = len(moves.load_host) * buffer.k.shape[2]
            self.counters.loaded_bytes += num_rows * self.host.row_bytes
        return self._caches[self._next]

    def leave(self, layer_idx: int, slots: torch.Tensor, moves: WindowMoves) -> None:
        """Save the new tokens of the layer that was entered, from these slots [T] of its buffer."""
        buffer = self._buffers[self._next]
        self._copy(lambda: self.host.save(layer_idx, buffer, slots, moves.save_host))
        self.counters.saved_bytes += len(slots) * self.host.row_bytes
        self._marks[self._next] = self.host.mark()
        self._next = (self._next + 1) % len(self._buffers)

    def finish(self) -> None:
        """Wait until all saves are complete."""
        self.host.finish()

    def _copy(self, copy: Callable[[], None]) -> None:
        began = time.thread_time()
        try:
            self._try(copy)
        finally:
            if self.host.is_timed:
                self.counters.copy_s += time.thread_time() - began

    def _try(self, copy: Callable[[], None]) -> None:
        for attempt in range(1, _MAX_TRIES + 1):
            try:
                return copy()
            except COPY_ERRORS as error:
                self.counters.num_failures += 1
                if attempt == _MAX_TRIES:
                    raise
                logger.warning("retrying a failed copy of KV: %s", error_text(error))
                # finished saves free memory for the retry
                self.host.finish()
