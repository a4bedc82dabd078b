"""The clock that times steps."""

import time

import torch

from raybatch.engine.profile.module_profile import clock_of


def test_one_thread_counts_its_own_seconds_and_several_those_of_the_clock():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert time.process_time is clock_of(torch.device("cpu"))
        torch.set_num_threads(2)
        assert time.perf_counter is clock_of(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
