"""Pinned memory: its bytes, and buffers that are reused only after the copies from them."""

import ctypes
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from raybatch.engine.memory.pinned import IndexUploads, PinnedBufferPool, allocate_memory
from tests.engine.lazy_queue import LazyQueue

CPU, SECOND_GPU = torch.device("cpu"), torch.device("cuda:1")


class FakeDriver:
    """The memory functions of `torch.cuda.cudart()`."""

    def __init__(self, code=0):
        self.code = code
        self.pinned = {}

    def cudaHostRegister(self, address, num_bytes, flags):  # noqa: N802
        assert 0 == flags
        # mapped pages
        ctypes.memset(address, 0, num_bytes)
        if not self.code:
            self.pinned[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address):  # noqa: N802
        # unmapped pages would end the process here
        ctypes.memset(address, 1, self.pinned.pop(address))


@pytest.fixture
def driver(monkeypatch):
    fake = FakeDriver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    fake.devices = []
    monkeypatch.setattr(torch.cuda, "device", lambda d: fake.devices.append(d) or nullcontext())
    return fake


@pytest.mark.parametrize("shape", [(3, 1000), (5,), (1 << 12, 3)])
def test_memory_is_pinned_to_the_byte_and_unpinned_before_its_pages_are_freed(shape, driver):
    tensor = allocate_memory(shape, torch.float16, SECOND_GPU)
    assert (shape, torch.float16) == (tuple(tensor.shape), tensor.dtype)
    assert {tensor.data_ptr(): tensor.nbytes} == driver.pinned
    assert [SECOND_GPU] == driver.devices
    last = tensor[-1:]
    del tensor
    assert 1 == len(driver.pinned)
    del last
    assert {} == driver.pinned


def test_memory_of_a_cpu_is_not_pinned(driver):
    allocate_memory((7,), torch.int64, CPU).fill_(3)
    assert 0 == allocate_memory((0, 4), torch.int64, CPU).numel()
    assert {} == driver.pinned


def test_memory_that_the_driver_refuses_is_reported_with_its_bytes(driver):
    driver.code = 2
    with pytest.raises(
        RuntimeError, match=r"4096 bytes.*cudaHostRegister returned 2.*host_kv_bytes"
    ):
        allocate_memory((4096,), torch.uint8, SECOND_GPU)


def test_a_buffer_is_not_reused_before_its_copies_are_done():
    queue = LazyQueue()
    uploads = IndexUploads(CPU, queue)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 99, 1 + i % 7, np.int32) for i in range(40)]
    made = [uploads.upload(array, CPU) for array in arrays]
    # one copy each; the host has waited only for copies from a reused buffer
    assert len(arrays) == len(queue.pending)
    assert len(arrays) - 6 == queue.num_done == len(queue.waits)
    queue.run_to(len(arrays))
    for array, tensor in zip(arrays, made, strict=True):
        assert torch.int32 == tensor.dtype
        assert array.tolist() == tensor.tolist()


def test_a_buffer_grows_with_the_requested_size():
    queue = LazyQueue()
    buffers = PinnedBufferPool(queue, 2)
    for num_bytes in (10, 20, 9000, 4096, 8000):
        assert len(buffers.take(num_bytes)) >= num_bytes
        buffers.mark()
    assert [4096, 4096, 18000] == queue.sizes


def test_indices_of_a_cpu_are_not_copied():
    array = np.arange(5)
    assert array.ctypes.data == IndexUploads(CPU).upload(array, CPU).data_ptr()


def test_numbers_are_written_into_the_same_tensor():
    for uploads, queue in ((IndexUploads(CPU), None), (IndexUploads(CPU, q := LazyQueue()), q)):
        target = torch.zeros(3, dtype=torch.int32)
        uploads.write(target, np.array([4, 5, 6], np.int32))
        if queue is not None:
            queue.run_to(1)
        assert [4, 5, 6] == target.tolist()
