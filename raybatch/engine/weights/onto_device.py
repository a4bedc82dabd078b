"""Weights from their files onto a GPU: read by several threads, copied through pinned memory."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from raybatch.engine.memory.pinned import DeviceQueue, PinnedRing, allocate_memory
from raybatch.engine.weights.layout import Part

# one thread reads pages and arranges tensors at a fraction of what a GPU's bus takes
_MAX_THREADS = 8
# of one copy; each thread has pinned memory for two
_PIECE_BYTES = 16 << 20


def load_onto(
    device: torch.device,
    units: Mapping[str, Mapping[str, Part]],
    *,
    stays_on_host: Callable[[str], bool] = lambda _: False,
    queue: DeviceQueue | None = None,
    piece_bytes: int = _PIECE_BYTES,
    num_threads: int | None = None,
) -> dict[str, torch.Tensor]:
    """Return the tensors of all units, by name, in memory of their own; copies may be underway.

    The parts of one unit are built one after the other by one thread, units in any order. A tensor
    that `stays_on_host` is pinned. `queue` is that of the device, None makes one. Raises what a
    unit raises, of the first one in order.
    """
    queue = queue or DeviceQueue(device)
    if num_threads is None:
        num_threads = min(_MAX_THREADS, torch.get_num_threads())

    def load(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
        ring = PinnedRing(queue, 2, least_bytes=piece_bytes)
        made = {}
        for name, (_, dtype, build) in parts.items():
            source = build().to(dtype)
            if stays_on_host(name):
                made[name] = allocate_memory(tuple(source.shape), dtype, device).copy_(source)
            else:
                made[name] = torch.empty_like(
                    source, device=queue.device, memory_format=torch.contiguous_format
                )
                _copy(source, made[name], queue, ring, piece_bytes)
        ring.finish()
        return made

    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(partial(load, parts)) for parts in units.values()]
        try:
            return {name: made for future in futures for name, made in future.result().items()}
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(
    source: torch.Tensor, target: torch.Tensor, queue: DeviceQueue, ring: PinnedRing, size: int
) -> None:
    from_bytes, to_bytes = (
        torch.split(x.contiguous().view(-1).view(torch.uint8), size) for x in (source, target)
    )
    for piece, place in zip(from_bytes, to_bytes, strict=True):
        staged = ring.take(len(piece))[: len(piece)]
        staged.copy_(piece)
        queue.copy(place, staged)
        ring.mark()
