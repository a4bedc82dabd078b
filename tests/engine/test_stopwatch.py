"""Ways to do the same take turns, and the least time of each counts."""

import time

import pytest
import torch

from raybatch.engine.profile.layer_bench import Stopwatch, clock_of


class Host:
    """A clock that runs move, and every run's turn."""

    def __init__(self):
        self.now, self.calls = 0.0, []

    def run(self, name, *seconds):
        """Takes the given seconds turn by turn, the last ones for ever."""

        def work(turn):
            self.calls.append((name, turn))
            self.now += seconds[min(turn, len(seconds) - 1)]

        return work


def compare(host, runs, budget_s=1e9, num_repeats=3):
    return Stopwatch(lambda: host.now, num_repeats).compare(runs, budget_s)


def test_ways_take_turns_and_the_least_of_each_counts_without_the_first():
    host = Host()
    runs = [host.run("a", 1, 5, 3, 4), host.run("b", 1, 8, 2, 9)]
    assert (3.0, 2.0) == compare(host, runs)
    assert ["a", "b"] * 4 == [name for name, _ in host.calls]
    assert [0, 0, 1, 1, 2, 2, 3, 3] == [turn for _, turn in host.calls]


@pytest.mark.parametrize(("budget_s", "count"), [(0, 1), (7.9, 1), (8, 2), (15.9, 2), (16, 3)])
def test_the_last_ways_are_left_out_where_time_is_short_but_never_the_first(budget_s, count):
    host = Host()
    runs = [host.run("a", 1), host.run("b", 1), host.run("c", 2)]
    assert count == len(compare(host, runs, budget_s))


def test_one_thread_counts_its_own_seconds_and_several_those_of_the_clock():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert time.process_time is clock_of(torch.device("cpu"))
        torch.set_num_threads(2)
        assert time.perf_counter is clock_of(torch.device("cpu"))
    finally:
        torch.set_num_threads(threads)
