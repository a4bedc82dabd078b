"""How the ranks of a team talk: three operations, by shared memory, gloo, or NCCL for its sums.

A group lives for one epoch of one team, and groups come and go in a process: none of them is
torch's default group. Within a host, shared memory is 30 to 80 times as quick as gloo.
"""

import mmap
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed

from raybatch.engine.ranks.meeting import Meeting, connect_gloo, failing_as
from raybatch.engine.ranks.shared_memory import LINE_BYTES, Lines, map_memory
from raybatch.errors import TeamError
from raybatch.records.team import TeamCall

# its types are not all declared
_c10d: Any = torch.distributed

# bytes that a rank hands over at once; more goes in several pieces
_AREA_BYTES = 1 << 20


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
    memory = map_memory(call, meeting, shared_bytes(call.size))
    group: TeamGroup = GlooGroup(call, meeting) if memory is None else SharedGroup(memory, call)
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
        self._group = connect_gloo(call, meeting)

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
    """

    kind = "shared memory"

    def __init__(self, memory: mmap.mmap, call: TeamCall) -> None:
        self._rank = call.rank
        self._others = [rank for rank in range(call.size) if rank != call.rank]
        self._lines = Lines(memory, call)
        offset, stop = call.size * LINE_BYTES, shared_bytes(call.size)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[offset:stop]
        self._areas = buffer.view(2, call.size, _AREA_BYTES)
        self._number = 0

    def sum_(self, x: torch.Tensor) -> None:
        flat = x.view(-1)
        size = _AREA_BYTES // x.element_size()
        for start in range(0, len(flat), size):
            piece = flat[start : start + size]
            areas = self._hand_over(piece).view(x.dtype)[:, : len(piece)]
            self._lines.await_begun(self._others, self._number)
            torch.sum(areas, dim=0, out=piece)

    def broadcast_(self, x: torch.Tensor) -> None:
        flat = x.view(-1).view(torch.uint8)
        for start in range(0, len(flat), _AREA_BYTES):
            piece = flat[start : start + _AREA_BYTES]
            areas = self._hand_over(None if self._rank else piece)
            if self._rank:
                self._lines.await_begun([0], self._number)
                piece.copy_(areas[0, : len(piece)])

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = x.contiguous().view(-1).view(torch.uint8)
        made = [] if self._rank else [flat.clone(), *(torch.empty_like(flat) for _ in self._others)]
        for start in range(0, len(flat), _AREA_BYTES):
            piece = slice(start, min(start + _AREA_BYTES, len(flat)))
            areas = self._hand_over(flat[piece])
            if not self._rank:
                self._lines.await_begun(self._others, self._number)
                for rank in self._others:
                    made[rank][piece].copy_(areas[rank, : piece.stop - piece.start])
        return [part.view(x.dtype).view(x.shape) for part in made]

    def close(self) -> None:
        self._lines.leave()

    def _hand_over(self, piece: torch.Tensor | None) -> torch.Tensor:
        """Begin the next operation with what is this rank's of it; return the areas of all."""
        self._lines.await_begun(self._others, self._number)
        self._number += 1
        areas = self._areas[self._number % 2]
        if piece is not None:
            data = piece.view(torch.uint8)
            areas[self._rank, : len(data)].copy_(data)
        self._lines.begin(self._number)
        return areas


def shared_bytes(size: int) -> int:
    """Return the bytes of the memory that so many ranks share."""
    return size * (LINE_BYTES + 2 * _AREA_BYTES)
