"""The KV pool, the memory that is free for it, and a host pool that its blocks are swapped to.

If all KV is in host memory, `raybatch.engine.memory.kv_window` is used instead of the host pool.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raybatch.config import EngineConfig, KVCacheDType
from raybatch.engine.memory.pinned import allocate_memory
from raybatch.errors import ConfigError
from raybatch.kernels.byte_numbers import FP8, INT8, dequantise, quantise, row_width
from raybatch.models.config import ModelSpec
from raybatch.records.arrays import Ints

_CGROUP = Path("/sys/fs/cgroup")
# assumed for a host that does not report its memory
_UNKNOWN_BYTES = 8 << 30
# copies of a trial; the fastest counts
_NUM_TRIALS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCache:
    """Keys and values, each [layers, blocks, KV heads, tokens of a block, width of a row].

    Other texts write [L, N, G, B, R]. Only the model writes to them.
    """

    k: torch.Tensor
    v: torch.Tensor


def bits_of(rows: torch.Tensor) -> npt.NDArray[Any]:
    """View numbers of any dtype as integers with the same bits, for numpy."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[rows.element_size()]
    array: npt.NDArray[Any] = rows.contiguous().view(bits).numpy()
    return array


def gather_blocks(pool: KVCache, block_ids: Ints) -> torch.Tensor:
    """Copy blocks of a pool to a tensor on its device, [n, 2, L, G, B, R].

    Axis 1 has keys and values; for the others see `KVCache`.
    """
    ids = torch.from_numpy(block_ids).to(pool.k.device)
    return torch.stack([x.index_select(1, ids).transpose(0, 1) for x in (pool.k, pool.v)], dim=1)


def scatter_blocks(pool: KVCache, rows: torch.Tensor, block_ids: Ints) -> None:
    """Write the result of `gather_blocks` into equally many blocks of a pool."""
    ids = torch.from_numpy(block_ids).to(pool.k.device)
    for i, x in enumerate((pool.k, pool.v)):
        x.index_copy_(1, ids, rows[:, i].transpose(0, 1))


def read_blocks(pool: KVCache, block_ids: Ints) -> npt.NDArray[Any]:
    """Return `gather_blocks` on the host, as integers with the same bits."""
    return bits_of(gather_blocks(pool, block_ids).cpu())


def write_blocks(pool: KVCache, rows: npt.NDArray[Any], block_ids: Ints) -> None:
    """Write the result of `read_blocks` into equally many blocks of a pool."""
    # a copy, because torch does not accept read-only memory
    scatter_blocks(pool, torch.tensor(rows).view(pool.k.dtype).to(pool.k.device), block_ids)


def copy_blocks(pool: KVCache, source_ids: Ints, target_ids: Ints) -> None:
    """Copy blocks within a pool, int64 [n] each, after the steps so far."""
    both = torch.from_numpy(np.concatenate((source_ids, target_ids))).to(pool.k.device)
    sources, targets = both.chunk(2)
    for x in (pool.k, pool.v):
        x.index_copy_(1, targets, x.index_select(1, sources))


def pick_kv_dtype(name: KVCacheDType, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a KV pool for a model whose weights have `dtype`."""
    return {"auto": dtype, "int8": INT8, "fp8": FP8}[name]


def allocate_kv_cache(
    spec: ModelSpec, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Allocate a pool whose slots hold finite numbers.

    On a CPU, the system allocates pages when a block is first used.
    """
    width = row_width(spec.head_dim, dtype)
    shape = (spec.num_layers, num_blocks, spec.num_kv_heads, block_size, width)
    if device.type == "cpu":
        make = partial(allocate_memory, shape, dtype, device)
        return KVCache(k=make(), v=make())
    zeros = partial(torch.zeros, shape, dtype=dtype, device=device)
    return KVCache(k=zeros(), v=zeros())


def allocate_host_kv(
    shape: tuple[int, ...], pool: torch.Tensor, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Allocate zeroed host memory for KV of a device pool, pinned for a GPU.

    A `dtype` of None takes that of the pool. Raises ConfigError: the host has too little memory.
    """
    try:
        return allocate_memory(shape, dtype or pool.dtype, pool.device)
    # torch raises RuntimeError for pinned memory, and OverflowError for huge sizes
    except (OSError, OverflowError, RuntimeError) as error:
        num_bytes = math.prod(shape) * (dtype or pool.dtype).itemsize
        raise ConfigError(
            f"cannot allocate engine.host_kv_bytes={num_bytes} on this host ({error}); lower it"
        ) from error


def trial_copy_s(copy: Callable[[], object], device: torch.device) -> float:
    """Return the minimum seconds of a few copies from or to a device.

    An untimed copy comes first, because it allocates pages or reads from disk.
    """
    seconds = []
    for _ in range(1 + _NUM_TRIALS):
        began = time.perf_counter()
        copy()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return max(min(seconds[1:]), 1e-9)


def max_sequence_len(config: EngineConfig, model_tokens: int) -> int:
    """Return the longest prompt plus output, for a model that supports `model_tokens`."""
    return min(config.max_model_len or model_tokens, model_tokens)


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the KV bytes of one token over all layers, in a pool of `dtype`."""
    width = row_width(spec.head_dim, dtype)
    return 2 * spec.num_layers * spec.num_kv_heads * width * dtype.itemsize


def free_memory_bytes(device: torch.device) -> int:
    """Return the free bytes of a GPU, or the bytes that this process may still use on the host.

    A container's limit counts as the host's size. If the system does not report free memory, as on
    macOS, half of the host's size is assumed.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    candidates = [_meminfo("MemAvailable"), _available_in_cgroup()]
    known = [value for value in candidates if value is not None]
    return min(known) if known else (host_memory_bytes() or _UNKNOWN_BYTES) // 2


def host_memory_bytes() -> int | None:
    """Return the total memory of the host, or a container's limit; None if unknown."""
    candidates = [_meminfo("MemTotal") or _physical_bytes(), _cgroup_limit()]
    return min((value for value in candidates if value is not None), default=None)


def _meminfo(name: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
    return next(found, None)


def _physical_bytes() -> int | None:
    """Return the memory of a host without /proc, such as macOS."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", ()):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_limit() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)


def _available_in_cgroup() -> int | None:
    limit = _cgroup_limit()
    if limit is None:
        return None
    try:
        used = int((_CGROUP / "memory.current").read_text(encoding="ascii"))
        statistics = (_CGROUP / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return None
    # file pages, such as mapped weights, are reclaimed under memory pressure
    reclaimable = sum(
        int(line.split()[1])
        for line in statistics
        if line.startswith(("inactive_file ", "active_file "))
    )
    return max(limit - used + reclaimable, 0)


# blocks of a trial copy
_TRIAL_BLOCKS = 4
# blocks rounded at once, as rounding needs several times their memory
_ROUNDED_BLOCKS = 16


class KVTiers:
    """Swaps blocks between a device pool and a host pool, exact or rounded; used by one thread.

    The host pool is contiguous by block: keys and values of all layers of a run of host blocks are
    one piece. A move is one gather and one scatter for any number of layers, and on a GPU one
    transfer per run. For an 8-bit pool the device rounds the rows and converts them back.

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
        # gathered in the order of steps, so the next one may write the blocks
        staged = gather_blocks(self._device, block_ids)
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
        scatter_blocks(self._device, staged, block_ids)

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
