"""Shared memory of the ranks of a host, with a line of counters per rank.

Requires total store order, as on x86.
"""

import contextlib
import mmap
import os
import platform
import time
from collections.abc import Iterable

from raybatch.errors import RankError
from raybatch_extensions.ranks.mapped import MappedMemory, map_other, pid_namespace
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous

# one cache line per rank: operations begun, whether it has left, its process id and the namespace
# in which that is valid
LINE_BYTES = 64
_LINE = LINE_BYTES // 8
_BEGUN, _HAS_LEFT, _PID, _PID_NAMESPACE = range(4)
# seconds of polling before yielding the CPU, before sleeping between polls (a sleep may take 1 ms),
# and of one sleep
_SPIN_S, _AWAKE_S, _SLEEP_S = 2e-4, 0.05, 1e-3


class Lines:
    """Synchronises the ranks of a group through shared memory, by polling.

    Each rank has one cache line there, which it alone writes and all ranks read.

    Args:
        awake_s: seconds of polling before a wait sleeps between polls.
    """

    def __init__(self, memory: mmap.mmap, call: RankInit, *, awake_s: float = _AWAKE_S) -> None:
        self._rank, self._timeout_s, self.awake_s = call.rank, call.timeout_s, awake_s
        self._counts = memoryview(memory).cast("q")
        self._namespace = pid_namespace()
        self._tell(_PID_NAMESPACE, self._namespace)
        self._tell(_PID, os.getpid())

    def begin(self, number: int) -> None:
        """Announce that this rank has begun the operation `number`."""
        self._tell(_BEGUN, number)

    def has_begun(self, rank: int, number: int) -> bool:
        return self._counts[rank * _LINE + _BEGUN] >= number

    def leave(self) -> None:
        # data written before stays readable for the others
        self._tell(_HAS_LEFT, True)

    def await_begun(self, ranks: Iterable[int], number: int) -> None:
        """Wait until these ranks have begun operation `number`; RankError: one never will."""
        for rank in ranks:
            wait = None
            while not self.has_begun(rank, number):
                wait = wait or Wait(self)
                wait.pass_time((rank,))

    def check(self, rank: int, waited_s: float) -> str | None:
        """Return why `rank` will not answer after a wait of `waited_s`; None if it still may."""
        place = rank * _LINE
        if self._counts[place + _HAS_LEFT]:
            return f"rank {rank} has left the group"
        if waited_s > self._timeout_s:
            return f"rank {rank} did not answer within {self._timeout_s:g} s"
        if waited_s > self.awake_s and not self._is_there(place):
            return f"the process of rank {rank} has exited"
        return None

    def _tell(self, what: int, number: int) -> None:
        self._counts[self._rank * _LINE + what] = number

    def _is_there(self, place: int) -> bool:
        """Return whether a process runs; True if its id is of another namespace."""
        pid = self._counts[place + _PID]
        if not pid or self._counts[place + _PID_NAMESPACE] != self._namespace:
            return True
        try:
            os.kill(pid, 0)
            # a zombie keeps its id until its parent reaps it
            with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
                return file.read().rpartition(") ")[2][:1] not in ("Z", "X")
        except ProcessLookupError:
            return False
        except OSError:
            return True


class Wait:
    """One wait for other ranks by polling: busy at first, then with sleeps."""

    def __init__(self, lines: Lines) -> None:
        self._lines = lines
        self._began = time.monotonic()
        self._reason = ""

    def pass_time(self, ranks: Iterable[int]) -> None:
        """Pause between two polls for an answer of `ranks`.

        Raises RankError: one of them has left, exited or timed out. The call that notices it only
        returns, so that the caller polls once more; the next call raises.
        """
        if self._reason:
            raise RankError(self._reason)
        waited_s = time.monotonic() - self._began
        if waited_s < min(_SPIN_S, self._lines.awake_s):
            return
        for rank in ranks:
            reason = self._lines.check(rank, waited_s)
            if reason is not None:
                # poll once more: it may have answered before
                self._reason = reason
                return
        if waited_s <= self._lines.awake_s:
            os.sched_yield()
        else:
            time.sleep(_SLEEP_S)


def map_memory(call: RankInit, rendezvous: Rendezvous, num_bytes: int) -> mmap.mmap | None:
    """Return zeroed memory that all ranks of a group share; None on all if one cannot map it."""
    if call.rank:
        return _mapped_by_others(call, rendezvous)
    made = None
    if platform.machine() in ("x86_64", "AMD64"):
        with contextlib.suppress(OSError):
            made = MappedMemory("team", num_bytes)
    try:
        rendezvous.leave("memory", "" if made is None else made.handle)
        seen = [rendezvous.find(f"memory of rank {rank}") for rank in range(1, call.size)]
        is_shared = made is not None and all(text == "mapped" for text in seen)
        rendezvous.leave("memory is shared", str(is_shared))
        return made.memory if made is not None and is_shared else None
    finally:
        if made is not None:
            made.close()


def _mapped_by_others(call: RankInit, rendezvous: Rendezvous) -> mmap.mmap | None:
    handle, memory = rendezvous.find("memory"), None
    if handle:
        with contextlib.suppress(OSError):
            memory = map_other(handle, is_written=True)
    rendezvous.leave(f"memory of rank {call.rank}", "missing" if memory is None else "mapped")
    return memory if rendezvous.find("memory is shared") == "True" else None
