"""Copies KV blocks between the pool of the device and a pool in host memory.

The host's pool has the same record and the same legend, [L, N, G, B, R], but lies block by block in
memory: what a run of host blocks holds, keys and values of all layers, is one piece. So a move is
one gather and one scatter for any number of layers, and on a GPU one transfer for each run.

Where KV lives in host memory alone, the device's pool is a `raybatch.engine.memory.kv_window`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from raybatch.engine.memory.kv_cache import KVCache, trial_copy_s
from raybatch.engine.memory.pinned import DeviceQueue, PinnedRing, allocate_memory
from raybatch.errors import ConfigError
from raybatch.records.arrays import Ints

# of a trial copy
_TRIAL_BLOCKS = 4
# layers on their way to the host at once
_NUM_LAYERS_UNDERWAY = 2


class _Arriving(NamedTuple):
    """A layer of some tokens on its way to pinned memory; `rows` are [T, 2, G, R]."""

    layer_idx: int
    host_slots: Ints
    rows: torch.Tensor
    arrived: torch.cuda.Event


class KVTiers:
    """A device's pool with a host's behind it; owned by one thread.

    On a GPU, transfers run on a stream of their own: moves wait for each other and for the steps
    before them, and the next step waits only for what was brought back. `num_host_blocks`: blocks
    in host memory, pinned where the device is a GPU; may be 0.
    """

    def __init__(self, device: KVCache, num_host_blocks: int) -> None:
        num_layers, _, *block = device.k.shape
        self.num_host_blocks = num_host_blocks
        self.block_bytes = 2 * num_layers * torch.Size(block).numel() * device.k.element_size()
        self._device = device
        shape = (num_host_blocks, 2, num_layers, *block)  # [N, 2, L, G, B, R]
        try:
            self._memory = allocate_memory(shape, device.k.dtype, device.k.device)
        # torch has an error of its own for pinned memory, and so has what no address can name
        except (OSError, OverflowError, RuntimeError) as error:
            raise ConfigError(
                f"engine.host_kv_bytes asks for {num_host_blocks * self.block_bytes} bytes, which "
                f"this host does not give ({error}); lower it"
            ) from error
        self.host = KVCache(
            k=self._memory[:, 0].transpose(0, 1), v=self._memory[:, 1].transpose(0, 1)
        )
        self._stream: torch.cuda.Stream | None = None
        # layers that are brought in do not wait for those that are taken out
        self._load_stream: torch.cuda.Stream | None = None
        self._arriving: list[_Arriving] = []
        if device.k.device.type == "cuda":
            self._stream = torch.cuda.Stream(device.k.device)  # type: ignore[no-untyped-call]
            self._load_stream = torch.cuda.Stream(device.k.device)  # type: ignore[no-untyped-call]
        self._queue = DeviceQueue(device.k.device)
        self._ring = PinnedRing(self._queue, _NUM_LAYERS_UNDERWAY)
        self._load_ring = PinnedRing(self._queue, _NUM_LAYERS_UNDERWAY)

    def save_blocks(self, block_ids: Ints, host_ids: Ints) -> None:
        """Copy blocks of the device into as many of the host, each to the one at its place."""
        stream, device = self._stream, self._device.k.device
        if stream is None:
            for start, stop, first in _runs(host_ids):
                ids = torch.from_numpy(block_ids[start:stop])
                places = slice(first, first + stop - start)
                torch.index_select(self._device.k, 1, ids, out=self.host.k[:, places])
                torch.index_select(self._device.v, 1, ids, out=self.host.v[:, places])
            return
        ids = torch.from_numpy(block_ids).to(device)
        pools = (self._device.k, self._device.v)
        # [n, 2, L, G, B, R]; gathered in the order of steps, so the next one may write the blocks
        staged = torch.stack([pool.index_select(1, ids).transpose(0, 1) for pool in pools], dim=1)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for start, stop, first in _runs(host_ids):
                rows = self._memory[first : first + stop - start]
                rows.copy_(staged[start:stop], non_blocking=True)
        staged.record_stream(stream)

    def load_blocks(self, host_ids: Ints, block_ids: Ints) -> None:
        """Copy blocks of the host into as many of the device, each to the one at its place."""
        stream, device = self._stream, self._device.k.device
        if stream is None:
            for start, stop, first in _runs(host_ids):
                ids = torch.from_numpy(block_ids[start:stop])
                places = slice(first, first + stop - start)
                self._device.k.index_copy_(1, ids, self.host.k[:, places])
                self._device.v.index_copy_(1, ids, self.host.v[:, places])
            return
        with torch.cuda.stream(stream):
            shape = (len(host_ids), *self._memory.shape[1:])
            staged = torch.empty(shape, dtype=self._memory.dtype, device=device)
            for start, stop, first in _runs(host_ids):
                rows = self._memory[first : first + stop - start]
                staged[start:stop].copy_(rows, non_blocking=True)
        current = torch.cuda.current_stream(device)
        current.wait_stream(stream)
        staged.record_stream(current)
        ids = torch.from_numpy(block_ids).to(device)
        self._device.k.index_copy_(1, ids, staged[:, 0].transpose(0, 1))
        self._device.v.index_copy_(1, ids, staged[:, 1].transpose(0, 1))

    def copy_host_blocks(self, source_ids: Ints, target_ids: Ints) -> None:
        if self._stream is not None:
            # a block may still be on its way to the host
            self._stream.synchronize()
        self._memory[torch.from_numpy(target_ids)] = self._memory[torch.from_numpy(source_ids)]

    def load_layer(
        self, layer_idx: int, host_ids: Ints, buffer: KVCache, after: "torch.cuda.Event | None"
    ) -> None:
        """Copy one layer of blocks of the host into the first blocks of `buffer`, [W, G, B, R].

        On a GPU the copy begins behind `after`, and the kernels that follow wait for it.
        """
        sources = torch.from_numpy(host_ids)
        halves = ((self.host.k, buffer.k), (self.host.v, buffer.v))
        stream = self._load_stream
        if stream is None:
            for source, target in halves:
                torch.index_select(source[layer_idx], 0, sources, out=target[: len(sources)])
            return
        shape = (2, len(sources), *buffer.k.shape[1:])
        num_bytes = 2 * buffer.k[: len(sources)].nbytes
        staged = self._load_ring.take(num_bytes)[:num_bytes].view(buffer.k.dtype).view(shape)
        for half, (source, _) in enumerate(halves):
            torch.index_select(source[layer_idx], 0, sources, out=staged[half])
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for half, (_, target) in enumerate(halves):
                target[: len(sources)].copy_(staged[half], non_blocking=True)
            self._load_ring.mark()
        torch.cuda.current_stream(buffer.k.device).wait_stream(stream)

    def save_rows(self, layer_idx: int, buffer: KVCache, slots: Ints, host_slots: Ints) -> None:
        """Copy one layer of tokens to the host; `finish_rows` waits until they are there.

        A slot is block * B + offset, in `buffer` [W, G, B, R] and in the host's pool.
        """
        stream, device = self._stream, buffer.k.device
        block_size = buffer.k.shape[2]
        blocks, offsets = (torch.from_numpy(x).to(device) for x in divmod(slots, block_size))
        # [T, 2, G, R]
        rows = torch.stack((buffer.k[blocks, :, offsets], buffer.v[blocks, :, offsets]), dim=1)
        if stream is None:
            self._put_rows(layer_idx, host_slots, rows)
            return
        self._put_arrived(keep=_NUM_LAYERS_UNDERWAY - 1)
        memory = self._ring.take(rows.nbytes)[: rows.nbytes]
        pinned = memory.view(rows.dtype).view(rows.shape)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            pinned.copy_(rows, non_blocking=True)
            arrived = self._ring.mark()
        rows.record_stream(stream)
        self._arriving.append(_Arriving(layer_idx, host_slots, pinned, arrived))

    def finish_rows(self) -> None:
        """Wait until the host has all copies of `save_rows`."""
        self._put_arrived(keep=0)

    def mark(self) -> "torch.cuda.Event | None":
        """Return a mark behind all kernels so far; None on a CPU, where they are done."""
        return None if self._stream is None else self._queue.mark()

    def copy_bytes_per_s(self) -> float:
        """Measure copies there and back; both pools must be idle, the device's stays as it is."""
        ids = np.arange(min(_TRIAL_BLOCKS, self.num_host_blocks, self._device.k.shape[1]))

        def there_and_back() -> None:
            self.save_blocks(ids, ids)
            self.load_blocks(ids, ids)

        num_bytes = 2 * len(ids) * self.block_bytes
        return num_bytes / trial_copy_s(there_and_back, self._device.k.device)

    def _put_arrived(self, *, keep: int) -> None:
        """Put rows that have arrived into the host's pool, but for the last layers."""
        while len(self._arriving) > keep:
            layer = self._arriving.pop(0)
            layer.arrived.synchronize()
            self._put_rows(layer.layer_idx, layer.host_slots, layer.rows)

    def _put_rows(self, layer_idx: int, host_slots: Ints, rows: torch.Tensor) -> None:
        blocks, offsets = map(torch.from_numpy, divmod(host_slots, self._memory.shape[-2]))
        self._memory[blocks, :, layer_idx, :, offsets] = rows


def _runs(host_ids: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and first host block of each run of neighbouring host blocks."""
    cuts = np.flatnonzero(np.diff(host_ids) != 1) + 1
    starts = [0, *cuts.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(host_ids)], strict=True):
        yield start, stop, int(host_ids[start])
