"""Communication between the ranks of a group: tensors point to point, and a small all-gather.

```
channel of ranks 0 -> 2   written 9 | read 4 |  bytes 4..8 are in its area, a ring buffer
```

Areas are in host memory that all ranks map. With GPUs each area is in an inbox on the receiver's
GPU, which the sender writes into.

Peers live for one generation.
"""

import mmap
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed

from raybatch.errors import ConfigError, RankError, error_text
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous, connect_gloo, failing_as
from raybatch_extensions.ranks.shared_memory import LINE_BYTES, Lines, Wait, map_memory
from raybatch_extensions.sharing.segments import Segment, make_segment, open_segment

_c10d: Any = torch.distributed

# numbers per rank in one all-gather
_MOST_NUMBERS = 8
# bytes of a channel, and of one copy: small, so that sender and receiver overlap
_CHANNEL_BYTES, _PIECE_BYTES = 1 << 18, 1 << 16
# bytes of a GPU channel, copied at once: a launch costs more than moving this
_INBOX_BYTES = 1 << 22
_INT_BYTES = 8
# timed transfers, after one warm-up
_NUM_TIMES = 5
# key in the store: number of the last exchange pass that any rank began
_BEGUN = "begun"


class Peers(Protocol):
    """Communicates with the other ranks; used by one thread.

    Every operation raises RankError if a rank that it needs has died, left, or exceeded the timeout
    of the group.
    """

    @property
    def kind(self) -> str: ...

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Return the numbers of each rank, by rank; blocks until all ranks call it.

        All ranks pass equally many numbers, at most 8.
        """

    def is_awaited(self) -> bool:
        """Return whether a peer waits in `all_gather` for this rank; does not block."""

    def transfer(
        self, sends: Mapping[int, torch.Tensor], receives: Mapping[int, torch.Tensor]
    ) -> None:
        """Send and receive contiguous tensors concurrently, keyed by peer rank.

        Bytes from one rank to another arrive in order. The receiver may take them in a different
        number of transfers.
        """

    def close(self) -> None:
        """Leave; later operations of the peers with this rank fail."""


def make_inbox(size: int, device: torch.device) -> Segment | None:
    """Return the receive buffer of a rank; None on a CPU, where all ranks map one memory.

    It is reused by later generations: ranks finish all sends before they begin one.
    """
    if device.type != "cuda":
        return None
    num_bytes = (size - 1) * _INBOX_BYTES
    return make_segment(num_bytes, device, free_bytes=num_bytes)


def connect_peers(
    call: RankInit,
    rendezvous: Rendezvous,
    inbox: Segment | None = None,
    *,
    awake_s: float | None = None,
) -> "SharedPeers | GlooPeers":
    """Connect the ranks of a group; blocks until all have joined.

    Args:
        call: rank and group to join.
        inbox: receive buffer of this rank; either all ranks have one or none.
        awake_s: see `Lines`; None for its default.

    Raises RankError: a rank does not join, or its inbox cannot be opened here.
    """
    memory = map_memory(call, rendezvous, peers_bytes(call.size, has_areas=inbox is None))
    if memory is None:
        return GlooPeers(call, rendezvous)
    inboxes = None if inbox is None else _open_inboxes(call, rendezvous, inbox)
    lines = Lines(memory, call) if awake_s is None else Lines(memory, call, awake_s=awake_s)
    return SharedPeers(memory, call, lines, inboxes)


def _open_inboxes(call: RankInit, rendezvous: Rendezvous, own: Segment) -> list[torch.Tensor]:
    """Return each rank's inbox, split by sender, uint8 [D - 1, N]."""
    rendezvous.leave(f"inbox of rank {call.rank}", own.handle)
    found = []
    for rank in range(call.size):
        memory = own.memory
        if rank != call.rank:
            handle = rendezvous.find(f"inbox of rank {rank}")
            try:
                memory = open_segment(handle, own.memory.device, is_written=True)
            except ConfigError as error:
                raise RankError(
                    f"cannot open the receive buffer (inbox) of rank {rank}: {error_text(error)}"
                ) from error
        found.append(memory.view(call.size - 1, -1))
    return found


class _Channel:
    """Ring buffer of bytes from one rank to another.

    Args:
        area: uint8 [N], in host memory or on the receiver's GPU.
    """

    def __init__(self, counts: memoryview, place: int, area: torch.Tensor) -> None:
        self._counts, self._area, self._size = counts, area, len(area)
        self._piece = self._size if area.is_cuda else min(_PIECE_BYTES, self._size)
        # in separate cache lines
        self._written, self._read = place, place + LINE_BYTES // _INT_BYTES

    def put(self, data: torch.Tensor) -> int:
        """Write as many leading bytes of `data` as fit; return their number."""
        written = self._counts[self._written]
        count = self._at_once(written, written - self._counts[self._read], len(data))
        if count:
            start = written % self._size
            self._area[start : start + count].copy_(data[:count])
            _finish(data.device)
            self._counts[self._written] = written + count
        return count

    def take(self, data: torch.Tensor) -> int:
        """Read the available bytes into the start of `data`; return their number."""
        read = self._counts[self._read]
        count = self._at_once(read, 0, min(len(data), self._counts[self._written] - read))
        if count:
            start = read % self._size
            data[:count].copy_(self._area[start : start + count])
            _finish(data.device)
            self._counts[self._read] = read + count
        return count

    def _at_once(self, place: int, used: int, count: int) -> int:
        """Return how many bytes are contiguous from a place on, at most one copy."""
        return min(count, self._piece, self._size - used, self._size - place % self._size)


def seconds_of_channel(num_bytes: int, device: torch.device) -> float:
    """Measure the seconds to write `num_bytes` bytes of a device into a channel and read them.

    On a GPU its own memory stands for that of a peer.
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
    """Ranks of one host that communicate through shared memory.

    Memory layout: one line per rank, its numbers of even and odd gathers, then the byte counts of
    the channels and, without inboxes, their areas.

    Args:
        inboxes: per rank, split by sender, uint8 [D - 1, N].
    """

    kind = "shared memory"

    def __init__(
        self,
        memory: mmap.mmap,
        call: RankInit,
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

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        # overwrite the numbers of two gathers ago: all ranks have begun the last one
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
    """Return the bytes of shared memory for a group of `size` ranks.

    `has_areas`: it has the data of the channels too, because there are no inboxes.
    """
    num_channels = size * (size - 1)
    of_ranks = size * (LINE_BYTES + 2 * _MOST_NUMBERS * _INT_BYTES)
    return of_ranks + num_channels * (2 * LINE_BYTES + has_areas * _CHANNEL_BYTES)


class GlooPeers:
    """Ranks that communicate over TCP (gloo) and a store.

    GPU tensors are staged in host memory.
    """

    kind = "gloo"

    def __init__(self, call: RankInit, rendezvous: Rendezvous) -> None:
        self._size, self._number = call.size, 0
        self._rendezvous = rendezvous
        if not call.rank:
            rendezvous.leave(_BEGUN, "0")
        self._group: Any = connect_gloo(call, rendezvous)

    def all_gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self._number += 1
        # no rank is further ahead: it would wait for this one
        self._rendezvous.leave(_BEGUN, str(self._number))
        own = torch.tensor(numbers, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self._size)]
        with failing_as("a rank of the group did not answer"):
            self._group.allgather([gathered], [own]).wait()
        return [x.tolist() for x in gathered]

    def is_awaited(self) -> bool:
        return int(self._rendezvous.find(_BEGUN)) > self._number

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
                # pending operations keep connections open, on which peers may wait
                works.clear()
        for rank, x in staged.items():
            if x is not receives[rank]:
                receives[rank].copy_(x)

    def close(self) -> None:
        self._group = None


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1).view(torch.uint8)


def _finish(device: torch.device) -> None:
    """Wait for a copy before it is announced to peers."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        stream.synchronize()
