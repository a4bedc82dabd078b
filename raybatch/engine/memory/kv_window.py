"""KV that lives in host memory: the pool of the device as a ring of buffers, each for one layer.

```
pool, where KV lives on the device    | layer 0 | layer 1 | layer 2 | layer 3 |   N blocks each
window, where it lives in host memory |      buffer 0     |      buffer 1     |  2 N blocks each
```

Rows that attend together have the KV of one layer in a buffer: it is brought in before, and that of
their new tokens is taken out after. The next rows, or the next layer, have the other buffer.
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
# of one copy, before the step fails
_MAX_TRIES = 3

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class WindowMoves:
    """What some rows move in each layer; a slot is block * B + offset."""

    load_host: Ints  # int64 [X], host blocks that come into the first X blocks of a buffer
    save_host: Ints  # int64 [T], of the new tokens in host memory
    # whether other rows of the step write some of these blocks, in the same layers
    follows_writer: bool = False


@dataclass(kw_only=True, slots=True)
class WindowCounters:
    """What went between host memory and the window since the start."""

    loaded_bytes: int = 0
    saved_bytes: int = 0
    num_failures: int = 0
    copy_s: float = 0.0  # CPU seconds of copies; 0 on a GPU, where they run beside


class KVWindow:
    """Lends a layer of the KV of some rows on the device; owned by one thread.

    On a GPU, copies run on a stream of their own and the kernels of a layer wait for theirs. A copy
    that fails is made again; nothing is lost by that, as each writes what it would have written.

    Args:
        pool: of the device, [L, N, G, B, R], contiguous.

    Source:
        BatchGen (arXiv:2606.21712), sections 5.1 and 5.2; that prompts and decodes share one ring
        is this library's.
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
        # every layer of such a cache is the same memory
        self._caches = [
            KVCache(
                k=buffer.k.expand(num_layers, *buffer.k.shape),
                v=buffer.v.expand(num_layers, *buffer.v.shape),
            )
            for buffer in self._buffers
        ]
        self._next = 0
        # of each buffer, when its last reader is done
        self._marks = [host.mark() for _ in self._buffers]

    @property
    def cache(self) -> KVCache:
        """What looks like any of the buffers to an op that prepares a step."""
        return self._caches[0]

    def enter(self, layer_idx: int, moves: WindowMoves) -> KVCache:
        """Bring a layer in, and return where it is, in the form that the decoder takes."""
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
        """Take the new tokens of the layer that was entered last out of these slots, [T]."""
        buffer = self._buffers[self._next]
        self._copy(lambda: self.host.save(layer_idx, buffer, slots, moves.save_host))
        self.counters.saved_bytes += len(slots) * self.host.row_bytes
        self._marks[self._next] = self.host.mark()
        self._next = (self._next + 1) % len(self._buffers)

    def finish(self) -> None:
        """Wait until host memory has all that was taken out."""
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
                logger.warning("KV is copied again, because a copy failed: %s", error_text(error))
                # the next try may get the memory of a layer that is still on its way
                self.host.finish()
