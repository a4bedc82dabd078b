"""Pinned host memory for GPU copies: exact-size allocations, and a pool of staging buffers."""

import mmap
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

# index tensors in flight: those of two steps
_NUM_UPLOADS = 6


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one of this thread, as Triton and CUDA graphs require."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def allocate_memory(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Allocate a host tensor for copies from and to `device`, pinned for a GPU.

    torch would round a pinned block up to a power of two. On a CPU, the system allocates pages on
    first use. Raises OSError, OverflowError, RuntimeError: out of memory, or it cannot be pinned.
    """
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if sys.platform == "win32" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda" and num_bytes > 0)
    # torch.zeros would touch every page of a pool that may be half of the host's memory
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    if device.type != "cuda":
        return torch.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), dtype=dtype).view(shape)
    pages = _PinnedPages(-1, num_bytes, flags=flags)
    tensor = torch.frombuffer(pages, dtype=dtype).view(shape)
    with current_device(device):
        pages.pin(tensor.data_ptr(), num_bytes)
    return tensor


class _PinnedPages(mmap.mmap):
    """Pages that are unregistered from the driver before the system frees them."""

    _address = 0

    def pin(self, address: int, num_bytes: int) -> None:
        driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(driver.cudaHostRegister(address, num_bytes, 0))
        if code:
            raise RuntimeError(
                f"could not pin {num_bytes} bytes of host memory (cudaHostRegister returned "
                f"{code}); lower engine.host_kv_bytes, or raise the limit with ulimit -l"
            )
        self._address = address

    def __del__(self) -> None:
        if self._address:
            # at process exit the driver may already be gone
            driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            driver.cudaHostUnregister(self._address)


class DeviceQueue:
    """Queues copies on a GPU's current stream; the host waits for events only."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def empty(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return allocate_memory((num_bytes,), torch.uint8, self.device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event:
        """Record an event after everything queued on the current stream."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor | None = None
    # event after the copies that read or write it
    last_use: torch.cuda.Event | None = None

    def wait(self) -> None:
        if self.last_use is not None:
            self.last_use.synchronize()
            self.last_use = None


class PinnedBufferPool:
    """Hands out pinned staging buffers in turn; reuses one when the GPU is done with it."""

    def __init__(
        self, queue: DeviceQueue, num_buffers: int, *, least_bytes: int = mmap.PAGESIZE
    ) -> None:
        self._queue = queue
        self._least_bytes = least_bytes
        self._buffers = [_Buffer() for _ in range(num_buffers)]

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return at least `num_bytes` of uint8 memory, owned by the caller until `mark`."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        buffer.wait()
        if buffer.memory is None or len(buffer.memory) < num_bytes:
            least = self._least_bytes
            # twice the requested size, as pinning is slow
            buffer.memory = self._queue.pinned(2 * num_bytes if num_bytes > least else least)
        return buffer.memory

    def take_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory of `take` with the shape and dtype of a tensor."""
        return self.take(tensor.nbytes)[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def mark(self) -> torch.cuda.Event:
        """Declare that all uses of the last buffer are queued; return the event after them."""
        self._buffers[-1].last_use = mark = self._queue.mark()
        return mark

    def finish(self) -> None:
        """Wait until the GPU is done with all buffers."""
        for buffer in self._buffers:
            buffer.wait()


class IndexUploads:
    """Uploads the index tensors of steps to a device, each by one asynchronous copy.

    On a CPU they are used in place. `queue` is that of a GPU; None makes one.
    """

    def __init__(self, device: torch.device, queue: DeviceQueue | None = None) -> None:
        if queue is None and device.type == "cuda":
            queue = DeviceQueue(device)
        self._queue = queue
        self._pinned = None if queue is None else PinnedBufferPool(queue, _NUM_UPLOADS)

    def upload(self, array: npt.NDArray[np.integer], device: torch.device) -> torch.Tensor:
        """Return the numbers as a device tensor; on a GPU the array may be modified afterwards."""
        if self._queue is None:
            return torch.from_numpy(array).to(device)
        target = self._queue.empty(array.nbytes).view(torch.from_numpy(array).dtype)
        self.write(target, array)
        return target

    def write(self, target: torch.Tensor, array: npt.NDArray[np.integer]) -> None:
        """Write the numbers into a device tensor of the same length and dtype."""
        source = torch.from_numpy(array)
        if self._queue is None or self._pinned is None:
            target.copy_(source)
            return
        staged = self._pinned.take_like(source)
        staged.copy_(source)
        self._queue.copy(target, staged)
        self._pinned.mark()
