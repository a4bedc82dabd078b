"""KV in host memory (`kv_offload`): the device pool becomes two buffers of one layer each.

```
pool, if KV is on the device          | layer 0 | layer 1 | layer 2 | layer 3 |   N blocks each
window, if KV is in host memory       |      buffer 0     |      buffer 1     |  2 N blocks each
```

A buffer holds one layer's KV of the rows that attend together. It is loaded before, and the KV of
their new tokens is saved after. The next rows, or the next layer, use the other buffer.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raybatch.engine.memory.block_copies import COPY_ERRORS
from raybatch.engine.memory.host_layers import HostLayers
from raybatch.engine.memory.kv_cache import KVCache
from raybatch.errors import error_text
from raybatch.records.arrays import Ints

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
