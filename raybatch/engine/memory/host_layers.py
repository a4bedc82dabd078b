"""Host memory that holds all KV, layer by layer; copies blocks to the device and tokens back."""

from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from raybatch.engine.memory.kv_cache import KVCache, allocate_host_kv
from raybatch.engine.memory.pinned import DeviceQueue, PinnedBufferPool
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
        memory = self._pinned_out.take(rows.nbytes)[: rows.nbytes]
        pinned = memory.view(rows.dtype).view(rows.shape)
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
