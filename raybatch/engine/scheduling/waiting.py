"""Sequences without a slot: the order in which they start, and the blocks that each needs."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.groups import PrefixGroup
from raybatch.engine.sequences.table import Sequence


class WaitingQueue:
    """Three lines, served one after the other.

    resumed: has run before, here or elsewhere; in order of arrival
    ready:   members of groups that have started, so that a prefix lives short
    fresh:   all others in order of arrival, a group at the place of its first member
    """

    def __init__(self) -> None:
        self._resumed: list[tuple[int, Sequence]] = []
        self._ready: deque[PrefixGroup] = deque()
        self._fresh: deque[Sequence | PrefixGroup] = deque()
        self._members: dict[int, deque[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the sequences in the order of their admission, as far as it is decided."""
        for _, record in sorted(self._resumed, key=itemgetter(0)):
            yield record
        for unit in (*self._ready, *self._fresh):
            yield from self._rows(unit)

    def add(self, record: Sequence) -> None:
        """Put a sequence into its line; a member of a group goes to the other members."""
        self._count += 1
        group = record.group
        if record.has_started:
            heapq.heappush(self._resumed, (record.arrival, record))
            return
        if group is None:
            self._fresh.append(record)
        elif group.group_id in self._members:
            self._members[group.group_id].append(record)
        else:
            self._members[group.group_id] = deque([record])
            (self._ready if group.has_started else self._fresh).append(group)

    def peek(self) -> Sequence:
        if self._resumed:
            return self._resumed[0][1]
        return self._rows(self._next_unit())[0]

    def pop(self) -> Sequence:
        """Take the next sequence out; the group of a fresh one is ready from then on."""
        self._count -= 1
        if self._resumed:
            return heapq.heappop(self._resumed)[1]
        unit = self._next_unit()
        (self._ready or self._fresh).popleft()
        if not isinstance(unit, PrefixGroup):
            return unit
        unit.has_started = True
        members = self._members[unit.group_id]
        record = members.popleft()
        if members:
            self._ready.appendleft(unit)
        else:
            del self._members[unit.group_id]
        return record

    def withdraw(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        taken, kept = list[Sequence](), list[Sequence]()
        for record in self:
            (taken if is_wanted(record) else kept).append(record)
        if taken:
            for line in (self._resumed, self._ready, self._fresh, self._members):
                line.clear()
            self._count = 0
            for record in kept:
                self.add(record)
        return sorted(taken, key=lambda record: record.arrival)

    def _next_unit(self) -> Sequence | PrefixGroup:
        return self._ready[0] if self._ready else self._fresh[0]

    def _rows(self, unit: Sequence | PrefixGroup) -> deque[Sequence] | tuple[Sequence]:
        return self._members[unit.group_id] if isinstance(unit, PrefixGroup) else (unit,)


class Need(NamedTuple):
    """Blocks that are there for a sequence, and counts."""

    # blocks of its prefix that hold what it would compute, in order
    hits: list[int]
    # blocks of all its known tokens
    num_total: int
    # of the available blocks, how many it takes
    num_available: int
    # blocks that it uses together with others
    num_shared: int
    # of these, blocks that nobody uses yet
    num_new_shared: int


@dataclass(frozen=True, slots=True)
class Needs:
    _blocks: BlockManager
    _has_cache: bool

    def of(self, record: Sequence) -> Need:
        hits = self.hits(record)
        num_total = -(-record.num_tokens // self._blocks.block_size)
        num_unused = self._blocks.num_unused(hits)
        num_shared = max(record.group.max_blocks if record.group else 0, len(hits))
        return Need(
            hits=hits,
            num_total=num_total,
            num_available=num_total - len(hits) + num_unused,
            num_shared=num_shared,
            num_new_shared=num_shared - len(hits) + num_unused,
        )

    def of_fork(self, record: Sequence, blocks: list[int]) -> Need:
        """Return what a sequence takes that starts with all blocks of its prompt, one a copy."""
        num_full, num_behind = divmod(record.num_tokens, self._blocks.block_size)
        # the last token is never fed back, so that one token alone is not written
        is_written = num_behind > 0 and record.max_len > record.num_tokens + 1
        return Need(
            hits=blocks,
            num_total=len(blocks),
            num_available=int(is_written),
            num_shared=num_full,
            num_new_shared=0,
        )

    def hits(self, record: Sequence) -> list[int]:
        """Return the blocks of a sequence's prefix that are there; hashes its prompt once."""
        hashes = record.prompt_hashes(self._blocks.block_size, has_cache=self._has_cache)
        # the last known token is always computed, because its logits are needed
        max_hits = (record.num_tokens - 1) // self._blocks.block_size
        pinned = record.group.blocks[:max_hits] if record.group else []
        return pinned + self._blocks.find_prefix(hashes[len(pinned) : max_hits])
