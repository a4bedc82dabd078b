"""Memory that all ranks of a host map, where each of them has a line of counts.

It relies on stores that become visible in their order, as those of x86 do.
"""

import contextlib
import mmap
import os
import platform
import time
from collections.abc import Iterable

from raybatch.engine.memory.mapped import MappedMemory, map_other, pid_namespace
from raybatch.engine.ranks.meeting import Meeting
from raybatch.errors import TeamError
from raybatch.records.team import TeamCall

# a rank has a cache line of its own: the operations that it has begun, whether it has left, its
# process and where the number of that is valid
LINE_BYTES = 64
_LINE = LINE_BYTES // 8
_BEGUN, _HAS_LEFT, _PID, _PID_NAMESPACE = range(4)
# seconds of looks before the processor is given to others between looks, those before one sleeps
# between them, as a sleep may take a millisecond, and those of a sleep
_SPIN_S, _AWAKE_S, _SLEEP_S = 2e-4, 0.05, 1e-3


class Lines:
    """The line of each rank, at the start of a memory: written by its rank, read by all.

    Args:
        awake_s: seconds of a wait before one sleeps between looks.
    """

    def __init__(self, memory: mmap.mmap, call: TeamCall, *, awake_s: float = _AWAKE_S) -> None:
        self._rank, self._timeout_s, self.awake_s = call.rank, call.timeout_s, awake_s
        self._counts = memoryview(memory).cast("q")
        self._namespace = pid_namespace()
        self._tell(_PID_NAMESPACE, self._namespace)
        self._tell(_PID, os.getpid())

    def begin(self, number: int) -> None:
        """Tell that this rank has begun the operation of this number."""
        self._tell(_BEGUN, number)

    def has_begun(self, rank: int, number: int) -> bool:
        return self._counts[rank * _LINE + _BEGUN] >= number

    def leave(self) -> None:
        # what it has handed over before is there for others all the same
        self._tell(_HAS_LEFT, True)

    def await_begun(self, ranks: Iterable[int], number: int) -> None:
        """Wait until these ranks have begun an operation; raises TeamError as `Wait` does."""
        for rank in ranks:
            wait = None
            while not self.has_begun(rank, number):
                wait = wait or Wait(self)
                wait.pass_time((rank,))

    def check(self, rank: int, waited_s: float) -> str | None:
        """Return why nothing more will come of a rank; None where it may."""
        place = rank * _LINE
        if self._counts[place + _HAS_LEFT]:
            return f"rank {rank} has left the team"
        if waited_s > self._timeout_s:
            return f"rank {rank} did not answer within {self._timeout_s:g} s"
        if waited_s > self.awake_s and not self._is_there(place):
            return f"the process of rank {rank} has ended"
        return None

    def _tell(self, what: int, number: int) -> None:
        self._counts[self._rank * _LINE + what] = number

    def _is_there(self, place: int) -> bool:
        """Return whether a process runs, as far as its number says that here."""
        pid = self._counts[place + _PID]
        if not pid or self._counts[place + _PID_NAMESPACE] != self._namespace:
            return True
        try:
            os.kill(pid, 0)
            # one that has ended keeps its number until its parent asks for it
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(") ")[2][:1] not in ("Z", "X")
        except ProcessLookupError:
            return False
        except OSError:
            return True


class Wait:
    """One wait for others, in looks with some time between them: awake at first, then asleep."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._began = time.monotonic()
        self._reason = ""

    def pass_time(self, ranks: Iterable[int]) -> None:
        """Let time pass until the next look.

        Raises TeamError: a rank has left, its process has ended, or it takes longer than the
        timeout of the team, and the last look came behind that.
        """
        if self._reason:
            raise TeamError(self._reason)
        waited_s = time.monotonic() - self._began
        if waited_s < min(_SPIN_S, self._lines.awake_s):
            return
        for rank in ranks:
            reason = self._lines.check(rank, waited_s)
            if reason is not None:
                # what it did before may not have been seen
                self._reason = reason
                return
        if waited_s <= self._lines.awake_s:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)


def map_memory(call: TeamCall, meeting: Meeting, num_bytes: int) -> mmap.mmap | None:
    """Return zeroed memory of rank 0 that all ranks of a team map; None where they cannot."""
    if call.rank:
        return _mapped_by_others(call, meeting)
    made = None
    if platform.machine() in ("x86_64", "AMD64"):
        with contextlib.suppress(OSError):
            made = MappedMemory("team", num_bytes)
    try:
        meeting.leave("memory", "" if made is None else made.handle)
        seen = [meeting.find(f"memory of rank {rank}") for rank in range(1, call.size)]
        is_shared = made is not None and all(text == "mapped" for text in seen)
        meeting.leave("memory is shared", str(is_shared))
        return made.memory if made is not None and is_shared else None
    finally:
        if made is not None:
            made.close()


def _mapped_by_others(call: TeamCall, meeting: Meeting) -> mmap.mmap | None:
    handle, memory = meeting.find("memory"), None
    if handle:
        with contextlib.suppress(OSError):
            memory = map_other(handle, is_written=True)
    meeting.leave(f"memory of rank {call.rank}", "missing" if memory is None else "mapped")
    return memory if meeting.find("memory is shared") == "True" else None
