"""Processes that take turns at every operation of a store, and what can go wrong in between.

Everything that happens follows from one random stream, so that a schedule can be played again.
"""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raybatch.errors import MissingDependency

try:
    from greenlet import getcurrent, greenlet
except ImportError as error:
    raise MissingDependency(
        "simulated faults need greenlet; in a clone of raybatch run: pip install ./faultlab"
    ) from error

# in the order in which `FaultRates` are drawn
FAULTS = (
    "crash before",
    "crash after",
    "stall before",
    "stall after",
    "error before",
    "error after",
    "late reply",
)
# a stalled process continues with this chance whenever another takes a turn
_WAKE_CHANCE = 0.03
# far more turns than any schedule takes
_MAX_TURNS = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRates:
    """Chances per operation of a store.

    Args:
        crash: the process ends, half of them after the operation took effect.
        stall: it stops, and continues much later, when others have taken it for dead.
        error: the operation fails, half of them after it took effect.
        delay: others take turns between the effect and the reply.
    """

    crash: float
    stall: float
    error: float
    delay: float

    def limits(self) -> tuple[float, ...]:
        """Return the upper limits of the draws that mean each of `FAULTS`."""
        limits = []
        total = 0.0
        rates = (self.crash, self.crash, self.stall, self.stall, self.error, self.error)
        for rate in rates:
            total += rate / 2
            limits.append(total)
        return (*limits, total + self.delay)


class Process:
    """One process of a schedule.

    Args:
        hub: the scheduler's own stack.
    """

    def __init__(
        self,
        name: str,
        run: Callable[["Process"], None],
        *,
        hub: greenlet,
        is_faulty: bool,
        parent: "Process | None" = None,
    ) -> None:
        self.name = name
        self.is_faulty = is_faulty
        self.is_over = False
        self.failure: Exception | None = None
        self.num_awaited = 0
        self._run = run
        self._parent = parent
        self._is_awaited = parent is not None
        # the scheduler continues when it ends, no matter what started it
        self.thread = greenlet(self._main, hub)

    def release(self) -> "Process | None":
        """Return the parent if it waits for no other process from now on."""
        parent = self._parent
        if parent is None or not self._is_awaited:
            return None
        self._is_awaited = False
        parent.num_awaited -= 1
        return parent if parent.num_awaited == 0 and not parent.is_over else None

    def _main(self) -> None:
        try:
            self._run(self)
        except Exception as error:  # ends this process and no other
            self.failure = error
        self.is_over = True


class World:
    """The scheduler of one schedule.

    Args:
        trace: gets a line per event; None keeps none.
    """

    def __init__(
        self, rng: random.Random, rates: FaultRates, *, trace: list[str] | None = None
    ) -> None:
        self.rng = rng
        self.faults: Counter[str] = Counter()
        self.trace = trace
        self._limits = rates.limits()
        self._hub = getcurrent()
        self._ready: list[Process] = []
        self._stalled: list[Process] = []
        self._all: list[Process] = []
        self._num_turns = 0

    def start(
        self,
        name: str,
        run: Callable[[Process], None],
        *,
        is_faulty: bool,
        parent: Process | None = None,
    ) -> Process:
        """Add a process; it takes its first turn when it is chosen."""
        process = Process(name, run, hub=self._hub, is_faulty=is_faulty, parent=parent)
        if parent is not None:
            parent.num_awaited += 1
        self._ready.append(process)
        self._all.append(process)
        return process

    def close(self) -> None:
        """Let go of the stacks of processes that never ended."""
        for process in self._all:
            if not process.thread.dead:
                process.thread.throw()

    def run(self, until: Process | None = None) -> None:
        """Let processes take turns until `until` is over, or until all that are awake are."""
        rng, ready = self.rng, self._ready
        while ready and not (until is not None and until.is_over):
            self._num_turns += 1
            if self._num_turns > _MAX_TURNS:
                raise RuntimeError("a schedule does not end")
            if self._stalled and rng.random() < _WAKE_CHANCE:
                self.wake(int(rng.random() * len(self._stalled)))
            process = ready[int(rng.random() * len(ready))]
            process.thread.switch()
            if process.is_over:
                self._settle(process)
                self.note(process, f"ends: {process.failure}" if process.failure else "ends")

    def wake_all(self) -> None:
        """Let all stalled processes continue."""
        while self._stalled:
            self.wake(0)

    def wake(self, index: int) -> None:
        """Let one stalled process continue."""
        process = self._stalled.pop(index)
        self._ready.append(process)
        self.note(process, "continues")

    def wait(self, process: Process) -> None:
        """Give up the turn until every child of `process` is over, or taken for dead."""
        if process.num_awaited:
            self._ready.remove(process)
        self._hub.switch()

    def turn(self, process: Process) -> str | None:
        """Let others take turns; return the fault that hits the next operation."""
        self._hub.switch()
        if not process.is_faulty:
            return None
        draw = self.rng.random()
        limits = self._limits
        if draw >= limits[-1]:
            return None
        fault = next(name for name, limit in zip(FAULTS, limits, strict=True) if draw < limit)
        self.faults[fault] += 1
        return fault

    def crash(self, process: Process) -> None:
        """End a process here; it never takes another turn."""
        self.note(process, "crashes")
        process.is_over = True
        self._hub.switch()

    def stall(self, process: Process) -> None:
        """Stop a process here; others take it for dead until it continues."""
        self.note(process, "stalls")
        self._settle(process)
        self._stalled.append(process)
        self._hub.switch()

    def yield_turn(self) -> None:
        """Let others take turns."""
        self._hub.switch()

    def note(self, process: Process, message: Any) -> None:  # noqa: ANN401
        """Add a line to the trace."""
        if self.trace is not None:
            self.trace.append(f"{process.name}: {message}")

    def _settle(self, process: Process) -> None:
        """Take one that is over or stalled out of the line, and let its parent continue."""
        self._ready.remove(process)
        parent = process.release()
        if parent is not None:
            self._ready.append(parent)
