"""Times runs of modules: medians of samples, within a budget of seconds."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from raybatch.policy.cost.roofline import MeasuredWork, Work

# a sample shorter than this is made of several runs, so that the clock's own steps do not count
_MIN_SAMPLE_S = 1e-3
_LEAST_RUN_S = 1e-6

Clock = Callable[[], float]
Run = Callable[[int], object]


def clock_of(device: torch.device) -> Clock:
    """Return CPU seconds of this process for one thread of a CPU, which other load does not change.

    Several threads take the time by the clock, as does a GPU, which is synchronised first.
    """
    if device.type == "cpu":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


class Stopwatch:
    """Times runs.

    Args:
        num_repeats: samples of each size, after a first run that does not count.
    """

    def __init__(self, clock: Clock, num_repeats: int) -> None:
        self._clock = clock
        self._num_repeats = num_repeats

    def measure(
        self, sizes: Sequence[tuple[int, Work]], prepare: Callable[[int], Run], budget_s: float
    ) -> tuple[MeasuredWork, ...]:
        """Measure sizes in order until the budget is spent; the first one always.

        Args:
            sizes: tokens and work of each, the smallest first.
            prepare: makes what is run from the position of a size; a run gets a number that
                counts up.
            budget_s: seconds for all of them.
        """
        points: list[MeasuredWork] = []
        left_s = budget_s
        for idx, (tokens, work) in enumerate(sizes):
            began = self._clock()
            seconds = self._median_s(prepare(idx), left_s if points else float("inf"))
            if seconds is None:
                break
            left_s -= self._clock() - began
            points.append(MeasuredWork(tokens=tokens, work=work, seconds=seconds))
        return tuple(points)

    def compare(self, runs: Sequence[Run], budget_s: float) -> tuple[float, ...]:
        """Return the least seconds of runs that take turns, so that drift meets all alike.

        The least and not the median: what else the host does only adds to a run, and ways that
        differ by a few per cent are to be distinguished.

        Args:
            runs: ways to do the same; each gets a number that counts up.
            budget_s: seconds for all of them; the last ones are left out until the rest fits, but
                never the first.
        """
        first_s = []
        for run in runs:
            began = self._clock()
            run(0)
            first_s.append(self._clock() - began)
            if sum(first_s) * (1 + self._num_repeats) > budget_s and len(first_s) > 1:
                first_s.pop()
                break
        samples: list[list[float]] = [[] for _ in first_s]
        for repeat in range(self._num_repeats):
            for run, times in zip(runs, samples, strict=False):
                start = self._clock()
                run(1 + repeat)
                times.append(self._clock() - start)
        return tuple(map(min, samples))

    def _median_s(self, run: Run, left_s: float) -> float | None:
        """Return the median seconds of a run; None where the samples would take too long."""
        began = self._clock()
        run(0)
        first_s = self._clock() - began
        if first_s * (1 + self._num_repeats) > left_s:
            return None
        num_runs = max(1, round(_MIN_SAMPLE_S / max(first_s, _LEAST_RUN_S)))
        samples = []
        for repeat in range(self._num_repeats):
            start = self._clock()
            for i in range(num_runs):
                run(1 + repeat * num_runs + i)
            samples.append((self._clock() - start) / num_runs)
        return statistics.median(samples)
