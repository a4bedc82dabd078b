"""Queue of sequences without a slot, in order of admission."""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter

from raybatch.engine.sequences.table import PrefixGroup, Sequence


class WaitingQueue:
    """The sequences that wait, in three queues: one is served when those before it are empty.

    resumed: sequences that ran before, here or elsewhere; in order of arrival
    ready:   members of groups that have started, to shorten the life of a prefix
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
        """Yield the sequences in their current order of admission."""
        for _, record in sorted(self._resumed, key=itemgetter(0)):
            yield record
        for unit in (*self._ready, *self._fresh):
            yield from self._rows(unit)

    def add(self, record: Sequence) -> None:
        """Add a sequence to its queue; group members stay together."""
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
        """Remove the next sequence; the group of a fresh one becomes ready."""
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
