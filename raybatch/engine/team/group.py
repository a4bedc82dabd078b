"""How the ranks of a team talk: three operations, by shared memory, gloo, or NCCL for its sums.

A group lives for one epoch of one team, and groups come and go in a process: none of them is
torch's default group. Within a host, shared memory is 30 to 80 times as quick as gloo.
"""

import contextlib
import mmap
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed

from raybatch.engine.team.meeting import Meeting, failing_as
from raybatch.errors import TeamError
from raybatch.records.team import TeamCall

# its types are not all declared
_c10d: Any = torch.distributed

_SHARED_FOLDER = Path("/dev/shm")
# bytes that a rank hands over at once; more goes in several pieces
_AREA_BYTES = 1 << 20
# a rank has a cache line of its own: the operations that it has begun, whether it has left, its
# process and where the number of that is valid
_LINE_BYTES = 64
_LINE = _LINE_BYTES // 8
_BEGUN, _HAS_LEFT, _PID, _PID_NAMESPACE = range(4)
# looks at a count before the processor is given to others between looks, the seconds before one
# sleeps between them, as a sleep may take a millisecond, and those of a sleep
_NUM_SPINS, _AWAKE_S, _SLEEP_S = 2000, 0.05, 1e-3


class TeamGroup(Protocol):
    """What ranks do together, in the same order; of one thread.

    Every operation raises TeamError when a rank has died, left, or kept the others waiting for
    longer than the timeout of the team.
    """

    @property
    def kind(self) -> str: ...

    def sum_(self, x: torch.Tensor) -> None:
        """Replace a contiguous `x` by the sum over the ranks, which is the same bits on each."""

    def broadcast_(self, x: torch.Tensor) -> None:
        """Replace a contiguous `x` of the host by that of rank 0."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return the `x` of all ranks on rank 0, of one shape each; nothing on the others."""

    def close(self) -> None:
        """Leave; what the others wait for from then on fails."""


# of a call, where its ranks meet, and the device of the engine
Connect = Callable[[TeamCall, Meeting, torch.device], TeamGroup]


def connect(call: TeamCall, meeting: Meeting, device: torch.device) -> TeamGroup:
    """Return the group of a team, once all its ranks are there."""
    shared = _shared_memory(call, meeting)
    group: TeamGroup = shared or GlooGroup(call, meeting)
    if device.type != "cuda":
        return group
    try:
        return NcclGroup(call, meeting, group, device)
    except TeamError:
        group.close()
        raise


class GlooGroup:
    """Ranks that reach each other by TCP alone."""

    kind = "gloo"

    def __init__(self, call: TeamCall, meeting: Meeting) -> None:
        self._rank, self._size = call.rank, call.size
        timeout = timedelta(seconds=call.timeout_s)
        with failing_as("the ranks of a team could not be connected"):
            store = _c10d.PrefixStore("gloo", meeting.store)
            self._group = _c10d.ProcessGroupGloo(store, call.rank, call.size, timeout)

    def sum_(self, x: torch.Tensor) -> None:
        self._wait(lambda: self._group.allreduce([x]))

    def broadcast_(self, x: torch.Tensor) -> None:
        self._wait(lambda: self._group.broadcast(x, 0))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        made = [torch.empty_like(x) for _ in range(self._size)] if not self._rank else []
        self._wait(lambda: self._group.gather(made, x, 0))
        return made

    def close(self) -> None:
        del self._group

    def _wait(self, begin: Callable[[], Any]) -> None:
        with failing_as("a rank of the team did not answer"):
            begin().wait()


class NcclGroup:
    """Sums between GPUs by NCCL, and all else between hosts by another group."""

    kind = "nccl"

    def __init__(
        self, call: TeamCall, meeting: Meeting, control: TeamGroup, device: torch.device
    ) -> None:
        self._control = control
        timeout = timedelta(seconds=call.timeout_s)
        with failing_as("the GPUs of a team could not be connected"), torch.cuda.device(device):
            store = _c10d.PrefixStore("nccl", meeting.store)
            options = _c10d.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = _c10d.ProcessGroupNCCL(store, call.rank, call.size, options)

    def sum_(self, x: torch.Tensor) -> None:
        with failing_as("a rank of the team did not answer"):
            self._group.allreduce([x]).wait()

    def broadcast_(self, x: torch.Tensor) -> None:
        self._control.broadcast_(x)

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return self._control.gather(x.cpu())

    def close(self) -> None:
        self._control.close()
        self._group.abort()


class SharedGroup:
    """Ranks of one host, which write into a memory that all of them map.

    ```
    counts | 7 | 8 | 7 |        operations that each rank has begun; what it hands over in
    areas  | a | b | c |  even  operation 8 lies in its even area, and stays there until all
           | a | b | c |  odd   have begun operation 9, so that nobody reads operation 8 any more
    ```

    It relies on stores that become visible in their order, as those of x86 do.
    """

    kind = "shared memory"

    def __init__(self, memory: mmap.mmap, call: TeamCall) -> None:
        self._memory, self._rank, self._timeout_s = memory, call.rank, call.timeout_s
        self._others = [rank for rank in range(call.size) if rank != call.rank]
        self._counts = memoryview(memory).cast("q")
        offset, stop = call.size * _LINE_BYTES, shared_bytes(call.size)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[offset:stop]
        self._areas = buffer.view(2, call.size, _AREA_BYTES)
        self._number = 0
        self._namespace = _pid_namespace()
        self._tell(_PID_NAMESPACE, self._namespace)
        self._tell(_PID, os.getpid())

    def sum_(self, x: torch.Tensor) -> None:
        flat = x.view(-1)
        size = _AREA_BYTES // x.element_size()
        for start in range(0, len(flat), size):
            piece = flat[start : start + size]
            areas = self._hand_over(piece).view(x.dtype)[:, : len(piece)]
            self._await(self._others, self._number)
            torch.sum(areas, dim=0, out=piece)

    def broadcast_(self, x: torch.Tensor) -> None:
        flat = x.view(-1).view(torch.uint8)
        for start in range(0, len(flat), _AREA_BYTES):
            piece = flat[start : start + _AREA_BYTES]
            areas = self._hand_over(None if self._rank else piece)
            if self._rank:
                self._await([0], self._number)
                piece.copy_(areas[0, : len(piece)])

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = x.contiguous().view(-1).view(torch.uint8)
        made = [] if self._rank else [flat.clone(), *(torch.empty_like(flat) for _ in self._others)]
        for start in range(0, len(flat), _AREA_BYTES):
            piece = slice(start, min(start + _AREA_BYTES, len(flat)))
            areas = self._hand_over(flat[piece])
            if not self._rank:
                self._await(self._others, self._number)
                for rank in self._others:
                    made[rank][piece].copy_(areas[rank, : piece.stop - piece.start])
        return [part.view(x.dtype).view(x.shape) for part in made]

    def close(self) -> None:
        # what it has handed over before is there for others all the same
        self._tell(_HAS_LEFT, True)

    def _hand_over(self, piece: torch.Tensor | None) -> torch.Tensor:
        """Begin the next operation with what is this rank's of it; return the areas of all."""
        self._await(self._others, self._number)
        self._number += 1
        areas = self._areas[self._number % 2]
        if piece is not None:
            data = piece.view(torch.uint8)
            areas[self._rank, : len(data)].copy_(data)
        self._tell(_BEGUN, self._number)
        return areas

    def _tell(self, what: int, number: int) -> None:
        self._counts[self._rank * _LINE + what] = number

    def _await(self, ranks: Iterable[int], number: int) -> None:
        """Wait until others have begun the operation of this number."""
        for rank in ranks:
            place, num_looks, began = rank * _LINE, 0, 0.0
            while self._counts[place] < number:
                num_looks += 1
                if num_looks <= _NUM_SPINS:
                    continue
                # it may have begun the operation before it left
                if self._counts[place + _HAS_LEFT] and self._counts[place] < number:
                    raise TeamError(f"rank {rank} has left the team")
                began = began or time.monotonic()
                waited_s = time.monotonic() - began
                if waited_s > self._timeout_s:
                    raise TeamError(f"rank {rank} did not answer within {self._timeout_s:g} s")
                if waited_s <= _AWAKE_S:
                    os.sched_yield()
                    continue
                if not self._is_there(place):
                    raise TeamError(f"the process of rank {rank} has ended")
                time.sleep(_SLEEP_S)

    def _is_there(self, place: int) -> bool:
        """Return whether a process runs, as far as its number says that here."""
        pid = self._counts[place + _PID]
        if not pid or self._counts[place + _PID_NAMESPACE] != self._namespace:
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _pid_namespace() -> int:
    """Return what tells processes that see each other's numbers; 0 where nothing does."""
    with contextlib.suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def shared_bytes(size: int) -> int:
    """Return the bytes of the memory that so many ranks share."""
    return size * (_LINE_BYTES + 2 * _AREA_BYTES)


def _shared_memory(call: TeamCall, meeting: Meeting) -> SharedGroup | None:
    """Return a group in shared memory where all ranks can map one file; None elsewhere.

    The file has no name any more once all have it, so nothing is left of a team that dies.
    """
    if call.rank:
        return _mapped_by_others(call, meeting)
    name, descriptor, path = "", None, ""
    if sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64"):
        with contextlib.suppress(OSError):
            descriptor, path = tempfile.mkstemp(prefix="raybatch-team-", dir=_SHARED_FOLDER)
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                # memory that the system does not have would end the process at a later write
                os.posix_fallocate(descriptor, 0, shared_bytes(call.size))
                name = path
        meeting.leave("memory", name)
        seen = [meeting.find(f"memory of rank {rank}") for rank in range(1, call.size)]
        is_shared = bool(name) and all(text == "mapped" for text in seen)
        meeting.leave("memory is shared", str(is_shared))
        if not is_shared or descriptor is None:
            return None
        with _failing_to_map():
            return SharedGroup(mmap.mmap(descriptor, shared_bytes(call.size)), call)
    finally:
        if descriptor is not None:
            os.close(descriptor)
            os.unlink(path)


def _mapped_by_others(call: TeamCall, meeting: Meeting) -> SharedGroup | None:
    name, memory = meeting.find("memory"), None
    if name:
        with contextlib.suppress(OSError, ValueError), open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), shared_bytes(call.size))
    meeting.leave(f"memory of rank {call.rank}", "mapped" if memory is not None else "missing")
    if meeting.find("memory is shared") != "True" or memory is None:
        return None
    with _failing_to_map():
        return SharedGroup(memory, call)


def _failing_to_map() -> contextlib.AbstractContextManager[None]:
    return failing_as("the memory of a team cannot be mapped")
