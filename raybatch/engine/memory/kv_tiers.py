"""Copies KV blocks between the pool of the device and a pool in host memory.

The host's pool has the same record and the same legend, [L, N, G, B, R], but lies block by block in
memory: what a run of host blocks holds, keys and values of all layers, is one piece. So a move is
one gather and one scatter for any number of layers, and on a GPU one transfer for each run.

While prompts are computed whose KV goes to the host, the device's pool is a `LayerWindow`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raybatch.engine.memory.kv_cache import KVCache, trial_copy_s
from raybatch.engine.memory.pinned import DeviceQueue, PinnedRing, allocate_memory
from raybatch.engine.sequences.schedule import LayerMoves
from raybatch.errors import ConfigError
from raybatch.records.arrays import Ints

# of a trial copy
_TRIAL_BLOCKS = 4
# layers on their way to the host at once
_NUM_LAYERS_UNDERWAY = 2


class _Arriving(NamedTuple):
    """A layer of some blocks on its way to pinned memory; `rows` are [n, 2, G, B, R]."""

    layer_idx: int
    host_ids: Ints
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
        self._arriving: list[_Arriving] = []
        if device.k.device.type == "cuda":
            self._stream = torch.cuda.Stream(device.k.device)  # type: ignore[no-untyped-call]
        self._ring = PinnedRing(DeviceQueue(device.k.device), _NUM_LAYERS_UNDERWAY)

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

    def read_blocks(self, block_ids: Ints) -> npt.NDArray[Any]:
        """Return blocks of the device as bits, [n, 2, L, G, B, R]."""
        ids = torch.from_numpy(block_ids).to(self._device.k.device)
        pools = (self._device.k, self._device.v)
        rows = torch.stack([pool.index_select(1, ids).transpose(0, 1) for pool in pools], dim=1)
        return _bits(rows.cpu())

    def read_host_blocks(self, host_ids: Ints) -> npt.NDArray[Any]:
        """Return blocks of the host as `read_blocks` does."""
        self._wait()
        return _bits(self._memory[torch.from_numpy(host_ids)])

    def write_blocks(self, rows: npt.NDArray[Any], block_ids: Ints) -> None:
        """Put what `read_blocks` returned into as many blocks of the device."""
        device = self._device.k.device
        ids, values = torch.from_numpy(block_ids).to(device), self._values(rows).to(device)
        self._device.k.index_copy_(1, ids, values[:, 0].transpose(0, 1))
        self._device.v.index_copy_(1, ids, values[:, 1].transpose(0, 1))

    def write_host_blocks(self, rows: npt.NDArray[Any], host_ids: Ints) -> None:
        """Put what `read_blocks` returned into as many blocks of the host."""
        self._wait()
        self._memory[torch.from_numpy(host_ids)] = self._values(rows)

    def _values(self, rows: npt.NDArray[Any]) -> torch.Tensor:
        # a copy, because torch takes no memory that is read only
        return torch.tensor(rows).view(self._memory.dtype)

    def _wait(self) -> None:
        if self._stream is not None:
            # a block may still be on its way to the host
            self._stream.synchronize()

    def copy_host_blocks(self, source_ids: Ints, target_ids: Ints) -> None:
        self._wait()
        self._memory[torch.from_numpy(target_ids)] = self._memory[torch.from_numpy(source_ids)]

    def save_layer(self, layer_idx: int, half: KVCache, block_ids: Ints, host_ids: Ints) -> None:
        """Copy one layer of blocks to the host; `finish_layers` waits until it is there.

        `half` is where the layer is, [W, G, B, R].
        """
        stream, device = self._stream, half.k.device
        ids = torch.from_numpy(block_ids).to(device)
        if stream is None:
            targets = torch.from_numpy(host_ids)
            self.host.k[layer_idx].index_copy_(0, targets, half.k.index_select(0, ids))
            self.host.v[layer_idx].index_copy_(0, targets, half.v.index_select(0, ids))
            return
        self._scatter(keep=_NUM_LAYERS_UNDERWAY - 1)
        # gathered in the order of kernels, so a later layer may write the half
        staged = torch.stack((half.k.index_select(0, ids), half.v.index_select(0, ids)), dim=1)
        memory = self._ring.take(staged.nbytes)[: staged.nbytes]
        rows = memory.view(staged.dtype).view(staged.shape)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            rows.copy_(staged, non_blocking=True)
            arrived = self._ring.mark()
        staged.record_stream(stream)
        self._arriving.append(_Arriving(layer_idx, host_ids, rows, arrived))

    def load_layer(self, layer_idx: int, host_ids: Ints, half: KVCache, block_ids: Ints) -> None:
        """Copy one layer of blocks of the host into `half`, [W, G, B, R], ids one by one."""
        sources, ids = torch.from_numpy(host_ids), torch.from_numpy(block_ids)
        if self._stream is None:
            half.k.index_copy_(0, ids, self.host.k[layer_idx].index_select(0, sources))
            half.v.index_copy_(0, ids, self.host.v[layer_idx].index_select(0, sources))
            return
        device = half.k.device
        # [n, 2, G, B, R]; queued behind the kernels that read this half before
        staged = self._memory[sources, :, layer_idx].to(device)
        ids = ids.to(device)
        half.k.index_copy_(0, ids, staged[:, 0])
        half.v.index_copy_(0, ids, staged[:, 1])

    def finish_layers(self) -> None:
        """Wait until the host has all copies of `save_layer`."""
        self._scatter(keep=0)

    def copy_bytes_per_s(self) -> float:
        """Measure copies there and back; both pools must be idle, the device's stays as it is."""
        ids = np.arange(min(_TRIAL_BLOCKS, self.num_host_blocks, self._device.k.shape[1]))

        def there_and_back() -> None:
            self.save_blocks(ids, ids)
            self.load_blocks(ids, ids)

        num_bytes = 2 * len(ids) * self.block_bytes
        return num_bytes / trial_copy_s(there_and_back, self._device.k.device)

    def _scatter(self, *, keep: int) -> None:
        """Put layers that have arrived into the host's pool, but for the last ones."""
        while len(self._arriving) > keep:
            layer = self._arriving.pop(0)
            layer.arrived.synchronize()
            self._memory[torch.from_numpy(layer.host_ids), :, layer.layer_idx] = layer.rows


def _bits(rows: torch.Tensor) -> npt.NDArray[Any]:
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[rows.element_size()]
    array: npt.NDArray[Any] = rows.contiguous().view(bits).numpy()
    return array


def _runs(host_ids: Ints) -> Iterator[tuple[int, int, int]]:
    """Yield start, stop and first host block of each run of neighbouring host blocks."""
    cuts = np.flatnonzero(np.diff(host_ids) != 1) + 1
    starts = [0, *cuts.tolist()]
    for start, stop in zip(starts, [*starts[1:], len(host_ids)], strict=True):
        yield start, stop, int(host_ids[start])


class LayerWindow:
    """Lends the memory of a pool to two layers, as a pool of more blocks for fewer layers.

    ```
    pool, while sequences decode      | layer 0 | layer 1 | layer 2 | layer 3 |   N blocks each
    window, while prompts are computed|  layers 0, 2, ... |  layers 1, 3, ... |   2 N blocks each
    ```

    Nothing decodes while prompts are computed, so the pool holds nothing. A layer writes the KV of
    a step into one half, from where it goes to host memory, and the next layer has the other half
    meanwhile. What a step reads of earlier chunks comes back from the host, layer by layer.

    Args:
        pool: of the device, [L, N, G, B, R], contiguous.

    Source:
        BatchGen (arXiv:2606.21712), section 5.2; that the window lies in the pool of decoding
        sequences is this library's.
    """

    def __init__(self, pool: KVCache, tiers: KVTiers) -> None:
        num_layers, num_blocks = pool.k.shape[:2]
        self._tiers = tiers
        self.num_blocks = num_layers * num_blocks // min(2, num_layers)
        # all blocks of the pool, [W, G, B, R] of each half
        memory = [torch.split(x.view(-1, *x.shape[2:]), self.num_blocks) for x in (pool.k, pool.v)]
        halves = list(zip(*memory, strict=True))[: min(2, num_layers)]
        self._halves = [KVCache(k=k, v=v) for k, v in halves]
        # every layer of such a cache is the same memory
        self._caches = [
            KVCache(k=k.expand(num_layers, *k.shape), v=v.expand(num_layers, *v.shape))
            for k, v in halves
        ]

    def cache(self, layer_idx: int) -> KVCache:
        """Return where a layer writes and reads, in the form that the decoder takes."""
        return self._caches[layer_idx % len(self._caches)]

    def load(self, layer_idx: int, moves: LayerMoves) -> None:
        if len(moves.load_blocks):
            half = self._halves[layer_idx % len(self._halves)]
            self._tiers.load_layer(layer_idx, moves.load_host, half, moves.load_blocks)

    def save(self, layer_idx: int, moves: LayerMoves) -> None:
        half = self._halves[layer_idx % len(self._halves)]
        self._tiers.save_layer(layer_idx, half, moves.save_blocks, moves.save_host)

    def finish(self) -> None:
        self._tiers.finish_layers()
