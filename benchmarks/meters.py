"""Measures CPU seconds of a process tree and of all other processes, from outside.

If other processes used the machine during a repetition, its CPU seconds and counters are valid, but
its wall time is not. So every result has the foreign load during its run.
"""

import threading
import time
from typing import Self

import psutil

# foreign load in cores above which a repetition's wall time is marked as noisy
QUIET_CORES = 0.1


def machine_cpu_s() -> float:
    """Return the CPU seconds that all processes of the machine have used since it started."""
    times = psutil.cpu_times()
    others = (getattr(times, name, 0.0) for name in ("nice", "irq", "softirq", "steal"))
    return float(times.user + times.system + sum(others))


def tree(pid: int) -> list[psutil.Process]:
    """Return the process `pid` and its live descendants; none if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Sampler:
    """Context manager that calls `sample` in a thread at an interval."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_done.set()
        self._thread.join()

    def sample(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        while not self._is_done.wait(self._interval_s):
            self.sample()


class TreeMeter(Sampler):
    """Context manager that samples the CPU time of another process's tree.

    A process that was seen in the tree stays in it after its parent has ended, because engines
    outlive the workers that started them. At exit the meter sets `wall_s`, `cpu_s` (of the tree,
    including processes that have ended) and `foreign_cores` (mean load of all processes except the
    tree and the caller).
    """

    def __init__(self, pid: int, interval_s: float = 0.25) -> None:
        super().__init__(interval_s)
        self._pid = pid
        self._members: set[psutil.Process] = set()
        self._cpu_s: dict[psutil.Process, float] = {}
        self._history: list[tuple[float, float]] = []
        self.wall_s = self.cpu_s = self.foreign_cores = 0.0

    def __enter__(self) -> Self:
        self.sample()
        self._machine_s, self._own_s = machine_cpu_s(), time.process_time()
        return super().__enter__()

    def __exit__(self, *exc_info: object) -> None:
        super().__exit__()
        self.sample()
        (start, first_s), (end, last_s) = self._history[0], self._history[-1]
        self.wall_s = end - start
        self.cpu_s = last_s - first_s
        own_s = time.process_time() - self._own_s
        foreign_s = machine_cpu_s() - self._machine_s - self.cpu_s - own_s
        self.foreign_cores = max(0.0, foreign_s / self.wall_s)

    def cpu_s_between(self, start: float, end: float) -> float:
        """Return the tree's CPU seconds between two `time.monotonic()` times, to one sample."""
        return self._cpu_s_at(end) - self._cpu_s_at(start)

    def _cpu_s_at(self, moment: float) -> float:
        later = (cpu_s for stamp, cpu_s in self._history if stamp >= moment)
        return next(later, self._history[-1][1])

    def sample(self) -> None:
        self._members.update(tree(self._pid))
        for process in list(self._members):
            try:
                # the pid of an ended process may belong to another process now
                if process.is_running():
                    times = process.cpu_times()
                    self._cpu_s[process] = times.user + times.system
                    continue
            except psutil.Error:
                pass  # it ended between the two lines
            self._members.remove(process)
        self._history.append((time.monotonic(), sum(self._cpu_s.values())))


def wait_quiet(max_wait_s: float, window_s: float = 1.0) -> bool:
    """Wait until the machine is nearly idle in two windows; return False after `max_wait_s`.

    Call it while the measured peers wait for a command: their idle load counts as foreign.
    """
    deadline = time.monotonic() + max_wait_s
    num_quiet = 0
    while num_quiet < 2:
        if time.monotonic() >= deadline:
            return False
        machine_s, own_s = machine_cpu_s(), time.process_time()
        time.sleep(window_s)
        used_s = machine_cpu_s() - machine_s - (time.process_time() - own_s)
        num_quiet = num_quiet + 1 if used_s / window_s < 2 * QUIET_CORES else 0
    return True
