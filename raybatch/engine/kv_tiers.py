"""Copies KV blocks between the pool of the device and a pool in host memory.

The host's pool has the same record and the same legend, [L, N, G, B, R], but lies block by block in
memory: what a run of host blocks holds, keys and values of all layers, is one piece. So a move is
one gather and one scatter, whatever the number of layers, and on a GPU one transfer for each run.
"""

import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.kv_cache import KVCache, allocate_memory
from raybatch.errors import ConfigError

__all__ = ["KVTiers"]

Int64s = npt.NDArray[np.int64]

# blocks of a trial copy, and trials of which the quickest counts
_TRIAL_BLOCKS, _NUM_TRIALS = 4, 3


class KVTiers:
    """A device's pool with a host's behind it; owned by one thread.

    On a GPU, transfers run on a stream of their own: moves wait for each other and for the steps
    before them, and the next step waits only for what was brought back.

    Args:
        device: the pool that the model reads and writes.
        num_host_blocks: blocks in host memory, pinned where the device is a GPU; may be 0.
    """

    def __init__(self, device: KVCache, num_host_blocks: int) -> None:
        num_layers, _, *block = device.k.shape
        self.num_host_blocks = num_host_blocks
        self.block_bytes = 2 * num_layers * torch.Size(block).numel() * device.k.element_size()
        self._device = device
        shape = (num_host_blocks, 2, num_layers, *block)  # [N, 2, L, G, B, R]
        try:
            self._memory = allocate_memory(shape, device.k.dtype, device.k.device)
        # torch has an error of its own for pinned memory
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"engine.host_kv_bytes asks for {num_host_blocks * self.block_bytes} bytes, which "
                f"this host does not give ({error}); lower it"
            ) from error
        self.host = KVCache(
            k=self._memory[:, 0].transpose(0, 1), v=self._memory[:, 1].transpose(0, 1)
        )
        self._stream: torch.cuda.Stream | None = None
        if device.k.device.type == "cuda":
            self._stream = torch.cuda.Stream(device.k.device)  # type: ignore[no-untyped-call]

    def save(self, block_ids: Int64s, host_ids: Int64s) -> None:
        """Copy blocks of the device into as many of the host, ids one by one."""
        if self._stream is not None:
            self._save_async(self._stream, block_ids, host_ids)
            return
        for start, stop, first in _runs(host_ids):
            ids = torch.from_numpy(block_ids[start:stop])
            last = first + stop - start
            torch.index_select(self._device.k, 1, ids, out=self.host.k[:, first:last])
            torch.index_select(self._device.v, 1, ids, out=self.host.v[:, first:last])

    def load(self, host_ids: Int64s, block_ids: Int64s) -> None:
        """Copy blocks of the host into as many of the device, ids one by one."""
        if self._stream is not None:
            self._load_async(self._stream, host_ids, block_ids)
            return
        for start, stop, first in _runs(host_ids):
            ids = torch.from_numpy(block_ids[start:stop])
            last = first + stop - start
            self._device.k.index_copy_(1, ids, self.host.k[:, first:last])
            self._device.v.index_copy_(1, ids, self.host.v[:, first:last])

    def bytes_per_s(self) -> float:
        """Measure copies there and back; both pools must be idle, the device's stays as it is."""
        count = min(_TRIAL_BLOCKS, self.num_host_blocks, self._device.k.shape[1])
        ids = np.arange(count)
        seconds = []
        for _ in range(1 + _NUM_TRIALS):
            began = time.perf_counter()
            self.save(ids, ids)
            self.load(ids, ids)
            if self._stream is not None:
                torch.cuda.synchronize(self._device.k.device)
            seconds.append(time.perf_counter() - began)
        # the first one takes the pages of the host's pool from the system
        return 2 * count * self.block_bytes / max(min(seconds[1:]), 1e-9)

    def _save_async(self, stream: torch.cuda.Stream, block_ids: Int64s, host_ids: Int64s) -> None:
        device = self._device.k.device
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

    def _load_async(self, stream: torch.cuda.Stream, host_ids: Int64s, block_ids: Int64s) -> None:
        device = self._device.k.device
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


def _runs(host_ids: Int64s) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and first host block of each run of neighbouring host blocks."""
    cuts = np.flatnonzero(np.diff(host_ids) != 1) + 1
    starts = [0, *cuts.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(host_ids)], strict=True):
        yield start, stop, int(host_ids[start])
