"""How ranks of a group send tensors to each other, and tell each other numbers.

```
channel of ranks 0 -> 2   written 9 | read 4 |  bytes 4..8 lie in its area, which is used round
```

Areas are in memory of the host that all map, or where ranks have GPUs, each in an inbox on the GPU
of the receiver, which the sender writes into.

They live for one epoch.
"""

import mmap
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed

from raybatch.engine.ext.sharing.segments import Segment, make_segment, open_segment
from raybatch.engine.ranks.meeting import Meeting, connect_gloo, failing_as
from raybatch.engine.ranks.shared_memory import LINE_BYTES, Lines, Wait, map_memory
from raybatch.errors import ConfigError, TeamError, error_text
from raybatch.records.team import TeamCall

_c10d: Any = torch.distributed

# numbers that a rank tells at once
_MOST_NUMBERS = 8
# of a channel, and what is copied at once, so that a receiver copies beside the sender
_CHANNEL_BYTES, _PIECE_BYTES = 1 << 18, 1 << 16
# of a channel into an inbox, copied at once: what a GPU is told costs more than to move this
_INBOX_BYTES = 1 << 22
_INT_BYTES = 8
# that bytes are timed, behind a first time
_NUM_TIMES = 5
# what a store has of the last round that any rank began
_BEGUN = "begun"


class Peers(Protocol):
    """Ranks that reach each other; of one thread.

    Every operation raises TeamError when a rank that it needs has died, left, or kept this one
    waiting for longer than the timeout of the group.
    """

    @property
    def kind(self) -> str: ...

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return what each rank tells, in order, once all have begun an exchange.

        All tell as many numbers, 8 at most.
        """

    def is_awaited(self) -> bool:
        """Return whether another rank has begun an exchange that this one has not; at once."""

    def transfer(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Send and receive contiguous tensors, by the rank at the other end; all at once.

        What one rank sends to another arrives in its order, as bytes. It may be in another
        transfer of the receiver.
        """

    def close(self) -> None:
        """Leave; what the others need of this rank from then on fails."""


def make_inbox(size: int, device: torch.device) -> Segment | None:
    """Return what a rank of a group of `size` receives in; None on a CPU, where all map one memory.

    It outlives groups: ranks that begin one have ended all that they sent in the one before.
    """
    if device.type != "cuda":
        return None
    num_bytes = (size - 1) * _INBOX_BYTES
    return make_segment(num_bytes, device, free_bytes=num_bytes)


def connect_peers(
    call: TeamCall, meeting: Meeting, inbox: Segment | None = None, *, awake_s: float | None = None
) -> "SharedPeers | GlooPeers":
    """Return the peers of a group, once all its ranks are there.

    Args:
        inbox: of this rank; all have one, or none.
        awake_s: see `Lines`; None for its default.

    Raises TeamError: a rank does not come, or its inbox cannot be reached from here.
    """
    memory = map_memory(call, meeting, peers_bytes(call.size, has_areas=inbox is None))
    if memory is None:
        return GlooPeers(call, meeting)
    inboxes = None if inbox is None else _open_inboxes(call, meeting, inbox)
    lines = Lines(memory, call) if awake_s is None else Lines(memory, call, awake_s=awake_s)
    return SharedPeers(memory, call, lines, inboxes)


def _open_inboxes(call: TeamCall, meeting: Meeting, own: Segment) -> list[torch.Tensor]:
    """Return the areas of each rank's inbox by sender, uint8 [D - 1, N]."""
    meeting.leave(f"inbox of rank {call.rank}", own.handle)
    found = []
    for rank in range(call.size):
        memory = own.memory
        if rank != call.rank:
            handle = meeting.find(f"inbox of rank {rank}")
            try:
                memory = open_segment(handle, own.memory.device, is_written=True)
            except ConfigError as error:
                raise TeamError(
                    f"rows cannot be sent to rank {rank}: {error_text(error)}"
                ) from error
        found.append(memory.view(call.size - 1, -1))
    return found


class _Channel:
    """Bytes on their way from one rank to another.

    Args:
        area: uint8 [N], of the host or of the receiver's GPU.
    """

    def __init__(self, counts: memoryview, place: int, area: torch.Tensor) -> None:
        self._counts, self._area, self._size = counts, area, len(area)
        self._piece = self._size if area.is_cuda else min(_PIECE_BYTES, self._size)
        # in cache lines of their own
        self._written, self._read = place, place + LINE_BYTES // _INT_BYTES

    def put(self, data: torch.Tensor) -> int:
        """Take the first of these bytes, as many as there is room for; return how many."""
        written = self._counts[self._written]
        count = self._at_once(written, written - self._counts[self._read], len(data))
        if count:
            start = written % self._size
            self._area[start : start + count].copy_(data[:count])
            _finish(data.device)
            self._counts[self._written] = written + count
        return count

    def take(self, data: torch.Tensor) -> int:
        """Fill the first of these bytes with what is there; return how many."""
        read = self._counts[self._read]
        count = self._at_once(read, 0, min(len(data), self._counts[self._written] - read))
        if count:
            start = read % self._size
            data[:count].copy_(self._area[start : start + count])
            _finish(data.device)
            self._counts[self._read] = read + count
        return count

    def _at_once(self, place: int, used: int, count: int) -> int:
        """Return how many bytes lie in one piece from a place on, where some are used."""
        return min(count, self._piece, self._size - used, self._size - place % self._size)


def seconds_of_channel(num_bytes: int, device: torch.device) -> float:
    """Return the seconds that tensors of a device take into a channel and out of it; measured.

    On a GPU its own memory stands for that of another one.
    """
    counts = memoryview(bytearray(2 * LINE_BYTES)).cast("q")
    size = _INBOX_BYTES if device.type == "cuda" else _CHANNEL_BYTES
    channel = _Channel(counts, 0, torch.zeros(size, dtype=torch.uint8, device=device))
    data, seconds = torch.zeros(num_bytes, dtype=torch.uint8, device=device), list[float]()
    for _ in range(1 + _NUM_TIMES):
        began = time.perf_counter()
        sent = received = data
        while len(received):
            sent = sent[channel.put(sent) :]
            received = received[channel.take(received) :]
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


class SharedPeers:
    """Ranks of one host, which write into a memory that all of them map.

    Memory: a line of each rank, its numbers of even and odd exchanges, then the channels' counts
    and, without inboxes, their areas.

    Args:
        inboxes: of each rank, by sender, uint8 [D - 1, N].
    """

    kind = "shared memory"

    def __init__(
        self,
        memory: mmap.mmap,
        call: TeamCall,
        lines: Lines,
        inboxes: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._rank, self._size, self._lines = call.rank, call.size, lines
        self._others = [rank for rank in range(call.size) if rank != call.rank]
        self._counts = memoryview(memory).cast("q")
        self._number = 0
        start = call.size * LINE_BYTES // _INT_BYTES
        self._numbers = [start, start + call.size * _MOST_NUMBERS]
        places = start + 2 * call.size * _MOST_NUMBERS
        if inboxes is None:
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            areas = buffer[peers_bytes(call.size, has_areas=False) :]
            inboxes = list(areas.view(call.size, call.size - 1, _CHANNEL_BYTES))
        per_channel = 2 * LINE_BYTES // _INT_BYTES

        def channel(source: int, target: int) -> _Channel:
            sender = source - (source > target)
            number = target * (call.size - 1) + sender
            return _Channel(self._counts, places + number * per_channel, inboxes[target][sender])

        self._to = {rank: channel(call.rank, rank) for rank in self._others}
        self._from = {rank: channel(rank, call.rank) for rank in self._others}

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        # nobody reads what was told two exchanges ago, as all have begun the last one
        self._number += 1
        start = self._numbers[self._number % 2]
        for i, number in enumerate(numbers):
            self._counts[start + self._rank * _MOST_NUMBERS + i] = number
        self._lines.begin(self._number)
        self._lines.await_begun(self._others, self._number)
        places = [start + rank * _MOST_NUMBERS for rank in range(self._size)]
        return [self._counts[place : place + len(numbers)].tolist() for place in places]

    def is_awaited(self) -> bool:
        return any(self._lines.has_begun(rank, self._number + 1) for rank in self._others)

    def transfer(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        parts = [(rank, self._to[rank].put, _bytes_of(x)) for rank, x in sends.items()]
        parts += [(rank, self._from[rank].take, _bytes_of(x)) for rank, x in receives.items()]
        parts = [part for part in parts if len(part[2])]
        wait = None
        while parts:
            moved = [move(data) for _, move, data in parts]
            if any(moved):
                wait = None
                left = zip(parts, moved, strict=True)
                parts = [(r, move, x[n:]) for (r, move, x), n in left if n < len(x)]
            else:
                wait = wait or Wait(self._lines)
                wait.pass_time([rank for rank, _, _ in parts])

    def close(self) -> None:
        self._lines.leave()


def peers_bytes(size: int, *, has_areas: bool = True) -> int:
    """Return the bytes of the memory that so many ranks share, with areas of channels or not."""
    num_channels = size * (size - 1)
    of_ranks = size * (LINE_BYTES + 2 * _MOST_NUMBERS * _INT_BYTES)
    return of_ranks + num_channels * (2 * LINE_BYTES + has_areas * _CHANNEL_BYTES)


class GlooPeers:
    """Ranks that reach each other by TCP alone, and have a store.

    Tensors of GPUs go through memory of the host.
    """

    kind = "gloo"

    def __init__(self, call: TeamCall, meeting: Meeting) -> None:
        self._size, self._number = call.size, 0
        self._meeting = meeting
        if not call.rank:
            meeting.leave(_BEGUN, "0")
        self._group: Any = connect_gloo(call, meeting)

    def exchange(self, numbers: Sequence[int]) -> list[list[int]]:
        self._number += 1
        # nobody is further on, as it would wait for this rank
        self._meeting.leave(_BEGUN, str(self._number))
        own = torch.tensor(numbers, dtype=torch.int64)
        told = [torch.empty_like(own) for _ in range(self._size)]
        with failing_as("a rank of the group did not answer"):
            self._group.allgather([told], [own]).wait()
        return [x.tolist() for x in told]

    def is_awaited(self) -> bool:
        return int(self._meeting.find(_BEGUN)) > self._number

    def transfer(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        staged = {
            rank: x if x.device.type == "cpu" else torch.empty_like(x, device="cpu")
            for rank, x in receives.items()
        }
        with failing_as("a rank of the group did not answer"):
            works = [self._group.recv([x], rank, 0) for rank, x in staged.items() if x.numel()]
            works += [
                self._group.send([x.cpu()], rank, 0) for rank, x in sends.items() if x.numel()
            ]
            try:
                while works:
                    works.pop(0).wait()
            finally:
                # what is under way keeps connections open, which others may wait at
                works.clear()
        for rank, x in staged.items():
            if x is not receives[rank]:
                receives[rank].copy_(x)

    def close(self) -> None:
        self._group = None


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _finish(device: torch.device) -> None:
    """Wait for a copy, before others are told of it."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
