"""Seconds of work on a device, without the launches of the host: replays of captured graphs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raybatch.engine.forward.step_graphs import CudaGraphs

# what a graph that is timed runs takes at least so long, and at most so many runs
_LEAST_S, _MOST_RUNS = 2e-3, 64
_NUM_REPLAYS = 7

Run = Callable[[], object]


class RepeatedCalls:
    """Stands in for graphs on a CPU: what was captured is called again."""

    def capture(self, function: Run) -> "RepeatedCall":
        function()
        return RepeatedCall(function)


@dataclass(frozen=True)
class RepeatedCall:
    replay: Run


def graphs_on(device: torch.device) -> CudaGraphs | RepeatedCalls:
    return CudaGraphs(device) if device.type == "cuda" else RepeatedCalls()


@torch.inference_mode()
def replayed_s(device: torch.device, runs: Sequence[Run]) -> float:
    """Return the median seconds of a run; `runs` do the same on data of their own, in turns.

    There are enough of them that the caches of the device hold no one's data until its turn comes.
    """
    if device.type == "cpu":
        began = time.perf_counter()
        runs[0]()
        return time.perf_counter() - began
    for run in runs:
        run()
    torch.cuda.synchronize(device)
    once_s = _events_s(lambda: [run() for run in runs]) / len(runs)
    rounds = max(1, min(_MOST_RUNS, round(_LEAST_S / max(once_s, 1e-6))) // len(runs))

    def all_rounds() -> None:
        for _ in range(rounds):
            for run in runs:
                run()

    graph = CudaGraphs(device).capture(all_rounds)
    graph.replay()
    samples = [_events_s(graph.replay) for _ in range(_NUM_REPLAYS)]
    return statistics.median(samples) / (rounds * len(runs))


def _events_s(run: Run) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Best measured rates of the device."""

    operations_per_s: float
    bytes_per_s: float

    def floor_s(self, *, operations: float, num_bytes: float) -> float:
        """Return the larger of the two least times."""
        return max(operations / self.operations_per_s, num_bytes / self.bytes_per_s)
