"""Loads weights from files onto a GPU: several threads read, pinned buffers stage the copies."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from raybatch.engine.memory.pinned import DeviceQueue, PinnedBufferPool, allocate_memory
from raybatch.engine.weights.layout import Part

# one thread reads and rearranges tensors at a fraction of the PCIe bandwidth
_MAX_THREADS = 8
# bytes of one copy; each thread has two pinned buffers
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
    """Return the tensors of all units, by name, on `device`; copies may still be in flight.

    A unit is a group of tensors that one thread builds in order; units are built concurrently.
    Tensors whose name `stays_on_host` accepts stay in pinned host memory. `queue` is the queue of
    the device for the copies; None makes one. Raises the error of the first failing unit in order.
    """
    queue = queue or DeviceQueue(device)
    if num_threads is None:
        num_threads = min(_MAX_THREADS, torch.get_num_threads())

    def load(parts: Mapping[str, Part]) -> dict[str, torch.Tensor]:
        staging = PinnedBufferPool(queue, 2, least_bytes=piece_bytes)
        made = {}
        for name, (_, dtype, build) in parts.items():
            source = build().to(dtype)
            if stays_on_host(name):
                made[name] = allocate_memory(tuple(source.shape), dtype, device).copy_(source)
            else:
                made[name] = torch.empty_like(
                    source, device=queue.device, memory_format=torch.contiguous_format
                )
                _copy(source, made[name], queue, staging, piece_bytes)
        staging.finish()
        return made

    with ThreadPoolExecutor(num_threads) as threads:
        futures = [threads.submit(partial(load, parts)) for parts in units.values()]
        try:
            return {name: made for future in futures for name, made in future.result().items()}
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _copy(
    source: torch.Tensor,
    target: torch.Tensor,
    queue: DeviceQueue,
    staging: PinnedBufferPool,
    size: int,
) -> None:
    from_bytes, to_bytes = (
        torch.split(x.contiguous().view(-1).view(torch.uint8), size) for x in (source, target)
    )
    for piece, place in zip(from_bytes, to_bytes, strict=True):
        staged = staging.take(len(piece))[: len(piece)]
        staged.copy_(piece)
        queue.copy(place, staged)
        staging.mark()
