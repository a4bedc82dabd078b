"""Copies KV blocks between the device pool and a host pool, exact or rounded to 8 bits.

The host pool has the shape [L, N, G, B, R] as well, but is contiguous by block: keys and values of
all layers of a run of host blocks are one piece. A move is one gather and one scatter for any
number of layers, and on a GPU one transfer per run. For an 8-bit pool the device rounds the rows
and converts them back.

If all KV is in host memory, `raybatch.engine.memory.host_layers` is used instead.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.memory.kv_cache import KVCache, allocate_host_kv, bits_of, trial_copy_s
from raybatch.kernels.byte_numbers import dequantise, quantise, row_width
from raybatch.records.arrays import Ints

# blocks of a trial copy
_TRIAL_BLOCKS = 4
# blocks rounded at once, as rounding needs several times their memory
_ROUNDED_BLOCKS = 16


class KVTiers:
    """Swaps blocks between a device pool and a host pool; used by one thread.

    On a GPU, transfers run on a separate stream: moves wait for each other and for earlier steps,
    and the next step waits only for loaded blocks. `num_host_blocks` blocks are in host memory,
    pinned for a GPU; may be 0. `dtype` is that of the host pool, which may be an 8-bit one; None
    takes that of the device.
    """

    def __init__(
        self, device: KVCache, num_host_blocks: int, *, dtype: torch.dtype | None = None
    ) -> None:
        num_layers, _, *block = device.k.shape
        dtype = dtype or device.k.dtype
        self._is_rounded = dtype != device.k.dtype
        if self._is_rounded:
            block[-1] = row_width(block[-1], dtype)
        self.num_host_blocks = num_host_blocks
        self.block_bytes = 2 * num_layers * torch.Size(block).numel() * dtype.itemsize
        self._device = device
        shape = (num_host_blocks, 2, num_layers, *block)  # [N, 2, L, G, B, R]
        self._memory = allocate_host_kv(shape, device.k, dtype)
        self.host = KVCache(
            k=self._memory[:, 0].transpose(0, 1), v=self._memory[:, 1].transpose(0, 1)
        )
        self._stream: torch.cuda.Stream | None = None
        if device.k.device.type == "cuda":
            self._stream = torch.cuda.Stream(device.k.device)  # type: ignore[no-untyped-call]

    def save_blocks(self, block_ids: Ints, host_ids: Ints) -> None:
        """Copy each device block `block_ids[i]` to the host block `host_ids[i]`."""
        if self._stream is None and not self._is_rounded:
            for start, stop, first in _runs(host_ids):
                ids = torch.from_numpy(block_ids[start:stop])
                places = slice(first, first + stop - start)
                torch.index_select(self._device.k, 1, ids, out=self.host.k[:, places])
                torch.index_select(self._device.v, 1, ids, out=self.host.v[:, places])
            return
        for piece in self._pieces(len(host_ids)):
            self._save_piece(block_ids[piece], host_ids[piece])

    def load_blocks(self, host_ids: Ints, block_ids: Ints) -> None:
        """Copy each host block `host_ids[i]` to the device block `block_ids[i]`."""
        if self._stream is None and not self._is_rounded:
            for start, stop, first in _runs(host_ids):
                ids = torch.from_numpy(block_ids[start:stop])
                places = slice(first, first + stop - start)
                self._device.k.index_copy_(1, ids, self.host.k[:, places])
                self._device.v.index_copy_(1, ids, self.host.v[:, places])
            return
        for piece in self._pieces(len(host_ids)):
            self._load_piece(host_ids[piece], block_ids[piece])

    def _pieces(self, num_blocks: int) -> Iterator[slice]:
        """Yield the slices staged at once: everything, or the limit for rounding."""
        size = _ROUNDED_BLOCKS if self._is_rounded else num_blocks
        for start in range(0, num_blocks, max(size, 1)):
            yield slice(start, start + size)

    def _save_piece(self, block_ids: Ints, host_ids: Ints) -> None:
        stream, device = self._stream, self._device.k.device
        ids = torch.from_numpy(block_ids).to(device)
        pools = (self._device.k, self._device.v)
        # [n, 2, L, G, B, R]; gathered in the order of steps, so the next one may write the blocks
        staged = torch.stack([pool.index_select(1, ids).transpose(0, 1) for pool in pools], dim=1)
        if self._is_rounded:
            staged = quantise(staged, self._memory.dtype)
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for start, stop, first in _runs(host_ids):
                rows = self._memory[first : first + stop - start]
                rows.copy_(staged[start:stop], non_blocking=True)
        if stream is not None:
            staged.record_stream(stream)

    def _load_piece(self, host_ids: Ints, block_ids: Ints) -> None:
        stream, device = self._stream, self._device.k.device
        with torch.cuda.stream(stream):
            shape = (len(host_ids), *self._memory.shape[1:])
            staged = torch.empty(shape, dtype=self._memory.dtype, device=device)
            for start, stop, first in _runs(host_ids):
                rows = self._memory[first : first + stop - start]
                staged[start:stop].copy_(rows, non_blocking=True)
        if stream is not None:
            current = torch.cuda.current_stream(device)
            current.wait_stream(stream)
            staged.record_stream(current)
        if self._is_rounded:
            staged = dequantise(staged, self._device.k.shape[-1], self._device.k.dtype)
        ids = torch.from_numpy(block_ids).to(device)
        self._device.k.index_copy_(1, ids, staged[:, 0].transpose(0, 1))
        self._device.v.index_copy_(1, ids, staged[:, 1].transpose(0, 1))

    def read_host_blocks(self, host_ids: Ints) -> npt.NDArray[Any]:
        """Return copies of host blocks as integers with the same bits, [n, 2, L, G, B, R]."""
        if self._stream is not None:
            # a save may still be in flight
            self._stream.synchronize()
        return bits_of(self._memory[torch.from_numpy(host_ids)])

    def copy_bytes_per_s(self) -> float:
        """Measure the bytes per second of copies to the host and back; both pools must be idle.

        The device pool is not changed.
        """
        ids = np.arange(min(_TRIAL_BLOCKS, self.num_host_blocks, self._device.k.shape[1]))

        def there_and_back() -> None:
            self.save_blocks(ids, ids)
            self.load_blocks(ids, ids)

        num_bytes = 2 * len(ids) * self.block_bytes
        return num_bytes / trial_copy_s(there_and_back, self._device.k.device)


def _runs(host_ids: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and first host block of each run of neighbouring host blocks."""
    cuts = np.flatnonzero(np.diff(host_ids) != 1) + 1
    starts = [0, *cuts.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(host_ids)], strict=True):
        yield start, stop, int(host_ids[start])
