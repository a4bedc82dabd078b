"""Memory of one process that others read, and that nothing is left of."""

import json
import multiprocessing
import os
import signal

import pytest
import torch

from raybatch.errors import ConfigError
from raybatch_extensions.sharing.layers import placed
from raybatch_extensions.sharing.segments import HostSegment, make_segment, open_segment
from tests.warm_processes import start_warm

CPU = torch.device("cpu")


def test_what_an_owner_writes_is_there_for_others():
    segment = HostSegment(1000, free_bytes=1 << 30)
    opened = open_segment(segment.handle, CPU)
    segment.memory.copy_(torch.arange(1000) % 251)
    assert torch.equal(opened, segment.memory)
    assert opened.data_ptr() != segment.memory.data_ptr()


def test_what_is_open_outlives_its_owner_and_opens_no_more():
    segment = HostSegment(64, free_bytes=1 << 30)
    opened, handle = open_segment(segment.handle, CPU), segment.handle
    segment.memory.fill_(7)
    del segment
    assert opened.tolist() == [7] * 64
    with pytest.raises(ConfigError, match=r"cannot map .* leave engine\.weights out"):
        open_segment(handle, CPU)


def test_a_process_of_another_container_is_not_taken_for_the_owner():
    segment = HostSegment(64, free_bytes=1 << 30)
    namespace, *rest = json.loads(segment.handle)
    with pytest.raises(ConfigError, match="runs in another container"):
        open_segment(json.dumps((namespace + 1, *rest)), CPU)


def test_a_segment_beyond_the_memory_of_the_host_is_refused_with_both_figures():
    with pytest.raises(ConfigError, match=r"owns 1000 bytes of weights, .* 1040 bytes free"):
        HostSegment(1000, free_bytes=1040)


def test_no_bytes_are_a_segment_as_well():
    segment = make_segment(0, CPU, free_bytes=1 << 20)
    assert (segment.memory.numel(), placed({}, open_segment(segment.handle, CPU))) == (0, {})


def own(connection):
    segment = HostSegment(4096, free_bytes=1 << 30)
    segment.memory.fill_(3)
    connection.send(segment.handle)
    connection.recv()


def test_an_owner_that_is_killed_leaves_its_bytes_to_readers_and_no_name():
    ours, theirs = multiprocessing.Pipe()
    process = start_warm(own, theirs)
    handle = ours.recv()
    opened = open_segment(handle, CPU)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert opened.tolist() == [3] * 4096
    with pytest.raises(
        ConfigError, match=f"cannot map the memory of process {json.loads(handle)[1]}"
    ):
        open_segment(handle, CPU)


def own_on_gpu(connection):
    segment = make_segment(1 << 20, torch.device("cuda", 0), free_bytes=0)
    segment.memory.fill_(5)
    torch.cuda.synchronize()
    connection.send(segment.handle)
    connection.recv()


@pytest.mark.gpu
def test_memory_of_a_gpu_is_read_by_another_process():
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=own_on_gpu, args=(theirs,))
    process.start()
    device = torch.device("cuda", 0)
    opened = open_segment(ours.recv(), device)
    assert int(opened.min()) == int(opened.max()) == 5
    copied = torch.empty_like(opened).copy_(opened)
    ours.send("")
    process.join()
    assert int(copied.sum(dtype=torch.int64)) == 5 << 20
