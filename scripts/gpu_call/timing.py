"""Times work on a device without the launches of the host, by replays of captured graphs."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from raybatch.engine.forward.step_graphs import CudaGraphs

# replays that are timed together: fewest seconds, and most replays
_LEAST_S, _MOST_RUNS = 2e-3, 64
_NUM_REPLAYS = 7

Run = Callable[[], object]


class RepeatedCalls:
    """Replaces CUDA graphs on a CPU: a replay calls the captured function again."""

    def capture(self, function: Run) -> "RepeatedCall":
        function()
        return RepeatedCall(function)


@dataclass(frozen=True)
class RepeatedCall:
    replay: Run


def graphs_on(device: torch.device) -> CudaGraphs | RepeatedCalls:
    return CudaGraphs(device) if device.type == "cuda" else RepeatedCalls()


@torch.inference_mode()
def cold_s(device: torch.device, runs: Sequence[Run]) -> float:
    """Return the median seconds of a run; `runs` do the same on separate data, in turns.

    Pass enough of them that the device's caches no longer hold the data of a run when its turn
    comes.
    """
    if device.type == "cpu":
        began = time.perf_counter()
        runs[0]()
        return time.perf_counter() - began
    for run in runs:
        run()
    graph = CudaGraphs(device).capture(lambda: [run() for run in runs])
    once_s = _replays_s(graph.replay, 3)
    rounds = max(1, min(_MOST_RUNS, round(_LEAST_S / max(once_s, 1e-6))))
    samples = [_replays_s(graph.replay, rounds) for _ in range(_NUM_REPLAYS)]
    return statistics.median(samples) / len(runs)


def _replays_s(replay: Run, number: int) -> float:
    """Return the seconds of one of `number` replays, which are queued behind another one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # while this replay runs, the host queues the others, so their launches are not timed
    replay()
    begin.record()
    for _ in range(number):
        replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / number
