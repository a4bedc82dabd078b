"""Waiting rows of a pool: for any replica, for the one with their prefix, or to run alone.

A group is live at replicas that hold rows of it: they have its prefix in memory. For a while after
its last row a replica still counts as having it, since the prefix may be cached.

Rows wait in group batches: members of one prefix group, or neighbours without a group. Rows that
run alone are suspects, which may have crashed replicas, and the canary.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress, pairwise

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.row_states import ALONE, RowStates, row_ranges_of
from raybatch.actors.wire.records import Credit, RowRange
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.plan import match_prefixes, plan_in_flight
from raybatch.records.arrays import Ints

_MAX_PAST = 4096
# rows that may overtake earlier rows to the replica of their group, until the group reaches the
# head of the queue again
_MAX_JOINED = 1024
_NEW_FRACTION = 1 / 4
# groupings of a row before it is old
_MAX_GROUPINGS = 4
# share of a prompt; a short live prefix must not keep a row from a longer waiting one
_MIN_JOINED_FRACTION = 1 / 2

Batches = Mapping[int, RowStates]
_Alone = tuple[RowRange, ...]


@dataclass(slots=True, eq=False)
class GroupBatch:
    """Waiting rows of one prefix group, or some without a group; sums exclude the prefix.

    Args:
        arrival: `RowStates.arrival` of its earliest row batch.
        is_new: its rows have no plan, and have not been grouped yet.
        num_passed: number of pulls that skipped it for later ones.
    """

    group: int
    prefix_len: int = 0
    arrival: int = 0
    is_new: bool = False
    num_passed: int = 0
    row_ranges: deque[RowRange] = field(default_factory=deque)
    num_rows: int = 0
    tokens: int = 0
    cost: int = 0


class GroupQueue:
    """A queue of group batches, at most one of each group.

    Sums are over all group batches; `cost` excludes prefixes.
    """

    def __init__(self, batches: Batches) -> None:
        self.num_rows = self.cost = self.prefix_tokens = 0
        self._batches = batches
        self._group_batches: deque[GroupBatch] = deque()
        self._of_group: dict[int, GroupBatch] = {}

    def __len__(self) -> int:
        return len(self._group_batches)

    def __getitem__(self, place: int) -> GroupBatch:
        """Return the group batch at a position; fast near the head."""
        return self._group_batches[place]

    def groups(self) -> Set[int]:
        return self._of_group.keys()

    def add(self, row_range: RowRange, *, at_head: bool = False, is_new: bool = False) -> None:
        """Add rows of one group to its group batch, or as a new one at the end or the head."""
        batch = self._batches[row_range.batch_id]
        group = int(batch.group[row_range.start])
        group_batch = self._of_group.get(group)
        if group_batch is None:
            prefix_len = int(batch.prefix[row_range.start])
            group_batch = GroupBatch(group, prefix_len, arrival=batch.arrival, is_new=is_new)
            self.insert(group_batch, at_head=at_head)
        self.extend(group_batch, row_range, at_head=at_head)

    def insert(self, group_batch: GroupBatch, *, at_head: bool = False) -> None:
        """Add a group batch at the end or the head; the queue must have none of its group."""
        if group_batch.group != ALONE:
            self._of_group[group_batch.group] = group_batch
        self.num_rows += group_batch.num_rows
        self.cost += group_batch.cost
        self.prefix_tokens += group_batch.prefix_len
        put = self._group_batches.appendleft if at_head else self._group_batches.append
        put(group_batch)

    def extend(
        self, group_batch: GroupBatch, row_range: RowRange, *, at_head: bool = False
    ) -> None:
        """Add rows to a group batch of this queue, after or before its other rows."""
        self._weigh(group_batch, row_range, 1)
        group_batch.arrival = min(group_batch.arrival, self._batches[row_range.batch_id].arrival)
        put = group_batch.row_ranges.appendleft if at_head else group_batch.row_ranges.append
        put(row_range)

    def pop(self, place: int = 0) -> GroupBatch:
        group_batch = self._group_batches[place]
        del self._group_batches[place]
        self._of_group.pop(group_batch.group, None)
        self.num_rows -= group_batch.num_rows
        self.cost -= group_batch.cost
        self.prefix_tokens -= group_batch.prefix_len
        return group_batch

    def pop_group(self, group: int) -> GroupBatch:
        """Remove and return the group batch of a group. Complexity: O(group batches)."""
        return self.pop(self._group_batches.index(self._of_group[group]))

    def cut(
        self, place: int, *, tokens: int, rows: int, cost: int, at_least: int = 0
    ) -> list[RowRange]:
        """Remove and return the first rows of the group batch at `place`, within all budgets.

        Args:
            tokens: budget of prompt tokens without the prefix.
            rows: budget of rows.
            cost: budget of cost.
            at_least: 1 takes one row even if it exceeds the budgets.
        """
        group_batch = self._group_batches[place]
        taken: list[RowRange] = []
        while group_batch.row_ranges:
            head = group_batch.row_ranges[0]
            batch = self._batches[head.batch_id]
            reach = batch.reach(head.start, tokens=tokens, cost=cost)
            least = head.start + (0 if taken else at_least)
            stop = max(min(head.stop, head.start + rows, reach), least)
            if stop <= head.start:
                break
            piece = head._replace(stop=stop)
            taken.append(piece)
            group_batch.row_ranges.popleft()
            if stop < head.stop:
                group_batch.row_ranges.appendleft(head._replace(start=stop))
            self._weigh(group_batch, piece, -1)
            rows -= stop - head.start
            tokens -= batch.tokens_between(head.start, stop)
            cost -= batch.cost_between(head.start, stop)
        if not group_batch.row_ranges:
            self.pop(place)
        return taken

    def take_row(self, row: int) -> RowRange:
        """Remove and return the row at index `row` among all rows. Complexity: O(queued rows)."""
        for place, group_batch in enumerate(self._group_batches):
            for index, row_range in enumerate(group_batch.row_ranges):
                if row < row_range.stop - row_range.start:
                    first = row_range.start + row
                    taken = RowRange(row_range.batch_id, first, first + 1)
                    del group_batch.row_ranges[index]
                    for left in (
                        row_range._replace(start=taken.stop),
                        row_range._replace(stop=taken.start),
                    ):
                        if left.start < left.stop:
                            group_batch.row_ranges.insert(index, left)
                    self._weigh(group_batch, taken, -1)
                    if not group_batch.row_ranges:
                        self.pop(place)
                    return taken
                row -= row_range.stop - row_range.start
        raise IndexError("the queue has fewer rows")

    def remove_batch(self, batch_id: int) -> None:
        """Remove all rows of one row batch. Complexity: O(row ranges in the queue)."""
        for group_batch in self._group_batches:
            gone = [each for each in group_batch.row_ranges if each.batch_id == batch_id]
            for row_range in gone:
                self._weigh(group_batch, row_range, -1)
            if gone:
                left = (each for each in group_batch.row_ranges if each.batch_id != batch_id)
                group_batch.row_ranges = deque(left)
        for group_batch in self.take_all():
            if group_batch.row_ranges:
                self.insert(group_batch)

    def reweigh(self) -> None:
        """Recompute the cost of all group batches. O(row ranges in the queue)."""
        self.cost = 0
        for group_batch in self._group_batches:
            costs = (
                self._batches[s.batch_id].cost_between(s.start, s.stop)
                for s in group_batch.row_ranges
            )
            group_batch.cost = sum(costs)
            self.cost += group_batch.cost

    def take_all(self) -> list[GroupBatch]:
        group_batches = list(self._group_batches)
        self._group_batches.clear()
        self._of_group.clear()
        self.num_rows = self.cost = self.prefix_tokens = 0
        return group_batches

    def _weigh(self, group_batch: GroupBatch, row_range: RowRange, sign: int) -> None:
        batch = self._batches[row_range.batch_id]
        num_rows = sign * (row_range.stop - row_range.start)
        cost = sign * batch.cost_between(row_range.start, row_range.stop)
        group_batch.num_rows += num_rows
        group_batch.tokens += sign * batch.tokens_between(row_range.start, row_range.stop)
        group_batch.cost += cost
        self.num_rows += num_rows
        self.cost += cost


class PrefixAffinity:
    """Tracks which replicas have the prefix of a group: of running and of recently ended groups."""

    def __init__(self) -> None:
        self.num_cuts = 0
        self.cut_tokens = 0
        self._live: dict[int, list[int]] = {}
        # oldest first
        self._past: dict[int, int] = {}
        self._joined: dict[int, int] = {}

    def of(self, group: int) -> int | None:
        """Return the replica that first got rows of a group, None if none is known."""
        live = self._live.get(group)
        return live[0] if live else self._past.get(group)

    def groups(self) -> tuple[Set[int], Set[int]]:
        """Return the groups with a known replica: (those with running rows, those without)."""
        return self._live.keys(), self._past.keys()

    def start(
        self, replica_id: int, started: Iterable[tuple[int, int]], *, is_computed: bool = True
    ) -> None:
        """Note groups that are new at a replica, as (group, prefix tokens).

        `is_computed` is False if their rows arrive with KV, so that no prefix is computed.
        """
        for group, prefix_len in started:
            self._past.pop(group, None)
            replica_ids = self._live.setdefault(group, [])
            if replica_ids and is_computed:
                self.num_cuts += 1
                self.cut_tokens += prefix_len
            replica_ids.append(replica_id)

    def end(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note groups of which a replica has finished its last row; it still has their prefix."""
        for group in groups:
            self.leave(replica_id, [group])
            if group not in self._live:
                self._past[group] = replica_id
        while len(self._past) > _MAX_PAST:
            group = next(iter(self._past))
            del self._past[group]
            self._joined.pop(group, None)

    def leave(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note groups of which a replica gave back all rows, so that it has no prefix of them."""
        for group in groups:
            live = self._live[group]
            live.remove(replica_id)
            if not live:
                del self._live[group]

    def forget(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note that a replica, which had rows of `groups`, has exited."""
        self.leave(replica_id, groups)
        self._past = {g: r for g, r in self._past.items() if r != replica_id}
        self._joined = {g: n for g, n in self._joined.items() if self.of(g) is not None}

    def join(self, group: int, num_rows: int) -> int | None:
        """Return the replica to whose queue `num_rows` more rows of a group may be added.

        None if none is known, or if too many rows of the group have overtaken waiting rows.
        """
        replica_id = self.of(group)
        num_joined = self._joined.get(group, 0)
        if replica_id is None or num_joined >= _MAX_JOINED:
            return None
        self._joined[group] = num_joined + num_rows
        return replica_id

    def take_turn(self, group: int) -> None:
        """Note that a group reached the head of the queue, so that `join` permits rows again."""
        self._joined.pop(group, None)


class NoRanges:
    """Rules about which replica may take which waiting rows; here any replica may take any row."""

    def sort(self, queue: "WaitingQueues", credits: Mapping[int, Credit]) -> Mapping[int, Credit]:
        """Assign rows of the shared queue to queues of replicas; return the credits to serve."""
        return credits

    def has_waiting(self, queue: "WaitingQueues") -> bool:
        """Return whether rows that these rules put into queues of replicas still wait."""
        return False

    def may_take(self, replica_id: int, of: int) -> bool:
        """Return whether replica `replica_id` may take rows that wait for replica `of`."""
        return True


class WaitingQueues:
    """The waiting rows of a pool: one shared queue, and one for each replica.

    A row whose group runs at a replica waits in the queue of that replica, which takes from it
    first. Other replicas take rows from it before they become idle.
    """

    def __init__(self, batches: Batches, affinity: PrefixAffinity) -> None:
        self.batches = batches
        self.shared = GroupQueue(batches)
        self.affinity = affinity
        self.ranges = NoRanges()
        self._own: dict[int, GroupQueue] = {}

    def __bool__(self) -> bool:
        return bool(self.shared) or any(self._own.values())

    def own(self, replica_id: int) -> GroupQueue:
        if replica_id not in self._own:
            self._own[replica_id] = GroupQueue(self.batches)
        return self._own[replica_id]

    def others(self, replica_id: int) -> list[int]:
        """Return other replicas from whose queues a replica may take rows, highest cost first."""
        ids = [r for r, queue in self._own.items() if queue and r != replica_id]
        ids = [r for r in ids if self.ranges.may_take(replica_id, r)]
        return sorted(ids, key=lambda r: -self._own[r].cost)

    def cost_for(self, replica_ids: Iterable[int]) -> int:
        """Return the cost of all rows that wait for these replicas or for any replica.

        It includes the prefixes of the shared queue.
        """
        own = sum(self._own[r].cost for r in replica_ids if r in self._own)
        return self.shared.cost + self.shared.prefix_tokens + own

    def num_rows(self) -> int:
        return self.shared.num_rows + sum(queue.num_rows for queue in self._own.values())

    def add(self, row_range: RowRange, *, is_new: bool = False) -> None:
        """Add rows at the end of a queue, or to waiting rows of their group.

        `is_new` rows have no plan, and get groups before they are handed out.
        """
        batch = self.batches[row_range.batch_id]
        for start, stop in batch.runs(row_range.start, row_range.stop):
            replica_id = self.affinity.join(int(batch.group[start]), stop - start)
            queue = self.shared if replica_id is None else self.own(replica_id)
            queue.add(
                RowRange(row_range.batch_id, start, stop), is_new=is_new and replica_id is None
            )

    def put_back(self, row_ranges: Sequence[RowRange]) -> None:
        """Put rows that were handed out back at the head of the queues, in this order."""
        for row_range in reversed(row_ranges):
            batch = self.batches[row_range.batch_id]
            for start, stop in reversed(batch.runs(row_range.start, row_range.stop)):
                replica_id = self.affinity.of(int(batch.group[start]))
                queue = self.shared if replica_id is None else self.own(replica_id)
                queue.add(RowRange(row_range.batch_id, start, stop), at_head=True)

    def release(self, replica_id: int) -> None:
        """Move all rows that wait for a replica to the head of the shared queue."""
        for group_batch in reversed(self.own(replica_id).take_all()):
            for row_range in reversed(group_batch.row_ranges):
                self.shared.add(row_range, at_head=True)
        del self._own[replica_id]

    def free(self, replica_id: int, groups: Iterable[int]) -> None:
        """Move the rows of some groups that wait for a replica to the head of the shared queue."""
        queue = self.own(replica_id)
        for group in groups:
            if group in queue.groups():
                for row_range in reversed(queue.pop_group(group).row_ranges):
                    self.shared.add(row_range, at_head=True)

    def remove_batch(self, batch_id: int) -> None:
        """Remove all rows of one row batch. Complexity: O(row ranges in the queues)."""
        for queue in (self.shared, *self._own.values()):
            queue.remove_batch(batch_id)

    def reweigh(self) -> None:
        """Recompute all sums after the cost of rows has changed. O(waiting row ranges)."""
        for queue in (self.shared, *self._own.values()):
            queue.reweigh()

    def take_at(self, place: float) -> RowRange:
        """Remove and return the row at a relative position: 0 for the head, 1 for the last row."""
        row = round(place * (self.num_rows() - 1))
        for queue in (self.shared, *self._own.values()):
            if row < queue.num_rows:
                return queue.take_row(row)
            row -= queue.num_rows
        raise IndexError("no row waits")


class Isolation:
    """Rows that must run alone: sets of suspects in their order, and before them one canary."""

    def __init__(self) -> None:
        self.canary: RowRange | None = None
        self._suspects: deque[_Alone] = deque()

    def __bool__(self) -> bool:
        return self.canary is not None or bool(self._suspects)

    def __iter__(self) -> Iterator[RowRange]:
        if self.canary is not None:
            yield self.canary
        for row_ranges in self._suspects:
            yield from row_ranges

    def add_suspects(self, row_ranges: list[RowRange]) -> None:
        """Add suspects before all others, as two sets of half of them each."""
        middle = (len(row_ranges) + 1) // 2
        for half in (row_ranges[middle:], row_ranges[:middle]):
            if half:
                self._suspects.appendleft(tuple(half))

    def put_back(self, row_ranges: list[RowRange], *, is_canary: bool) -> None:
        """Put unstarted rows that a replica was to run alone back before all others."""
        if is_canary:
            (self.canary,) = row_ranges
        else:
            self._suspects.appendleft(tuple(row_ranges))

    def take(self) -> _Alone:
        """Remove and return the next rows that an idle replica must run alone; () if none wait."""
        if self.canary is not None:
            canary, self.canary = self.canary, None
            return (canary,)
        return self._suspects.popleft() if self._suspects else ()

    def drop(self, batch_id: int) -> None:
        kept = (tuple(s for s in of if s.batch_id != batch_id) for of in self._suspects)
        self._suspects = deque(row_ranges for row_ranges in kept if row_ranges)
        if self.canary is not None and self.canary.batch_id == batch_id:
            self.canary = None


class Regrouping:
    """Adds row batches to the waiting queues (`add`), and forms their prefix groups (`refresh`).

    New rows without a plan join a group that waits or has a replica, if its prefix covers most of
    their prompt. Others wait ungrouped at the end, until they are a quarter of the queue or reach
    its head. Then the queue is grouped and ordered again:

        before   | g5 | g2 | g7 | new rows |
        after    | oldest | g9 | g7 | g2 | g8 |   rows of g5, g2, g7 and new ones, most output first

    So a row takes part in a few groupings, at any length of the queue. Then it counts as old: old
    group batches go first, in their order, and later rows cannot delay them.
    """

    def __init__(self, batches: Batches, waiting: WaitingQueues, affinity: PrefixAffinity) -> None:
        self.num_groupings = 0
        self._batches = batches
        self._waiting = waiting
        self._affinity = affinity
        self._num_new = 0

    def add(self, batch_id: int, rows: npt.NDArray[np.intp]) -> None:
        """Add rows of a new batch to the queues; rows with a plan keep the groups of the plan."""
        batch = self._batches[batch_id]
        row_ranges = row_ranges_of(batch_id, rows)
        if batch.keys is None:
            for row_range in row_ranges:
                self._waiting.add(row_range)
            return
        known = (self._waiting.shared.groups(), *self._affinity.groups())
        group, prefix = match_prefixes(batch.keys, known)
        joins = (group >= 0) & (prefix >= batch.prompt * _MIN_JOINED_FRACTION)
        batch.assign(np.flatnonzero(joins), group[joins], prefix[joins])
        for row_range in row_ranges:
            for start, stop in batch.runs(row_range.start, row_range.stop):
                is_new = not joins[start]
                self._waiting.add(RowRange(batch_id, start, stop), is_new=is_new)
                self._num_new += (stop - start) * is_new

    def refresh(self) -> None:
        """Form groups in the shared queue again if enough rows are new; near-linear time."""
        shared = self._waiting.shared
        if not self._num_new or not shared:
            return
        if self._num_new >= shared.num_rows * _NEW_FRACTION or shared[0].is_new:
            self._num_new = 0
            self.num_groupings += 1
            self._regroup()

    def _regroup(self) -> None:
        oldest = self.num_groupings - _MAX_GROUPINGS
        shared = self._waiting.shared
        group_batches = shared.take_all()
        young = [each for each in group_batches if each.arrival >= oldest]
        has_keys = [self._batches[u.row_ranges[0].batch_id].keys is not None for u in young]
        first = has_keys.index(True) if any(has_keys) else len(young)
        old = [each for each in group_batches if each.arrival < oldest]
        for group_batch in old + young[:first]:
            shared.insert(group_batch)
        self._add_grouped(list(compress(young, has_keys)))
        for group_batch, is_grouped in zip(young[first:], has_keys[first:], strict=True):
            if not is_grouped:
                shared.insert(group_batch)

    def _add_grouped(self, group_batches: list[GroupBatch]) -> None:
        """Plan the rows of these group batches, and queue them in the order of the plan."""
        row_ranges = sorted(s for group_batch in group_batches for s in group_batch.row_ranges)
        if not row_ranges:
            return
        sizes = [s.stop - s.start for s in row_ranges]
        batch_ids = np.repeat([s.batch_id for s in row_ranges], sizes)
        rows = np.concatenate([np.arange(s.start, s.stop) for s in row_ranges])
        borders = [*np.unique(batch_ids, return_index=True)[1].tolist(), len(rows)]
        parts = [(self._batches[int(batch_ids[a])], rows[a:b]) for a, b in pairwise(borders)]
        kept = [batch.keys.take(of_batch) for batch, of_batch in parts if batch.keys is not None]
        assert len(kept) == len(parts), "only rows with block keys are grouped"
        keys = BlockKeys.concat(kept)
        outputs = np.concatenate([batch.output[of_batch] for batch, of_batch in parts])
        plan = plan_in_flight(keys, outputs)
        for (batch, of_batch), (a, b) in zip(parts, pairwise(borders), strict=True):
            batch.assign(of_batch, plan.group_id[a:b], plan.prefix_len[a:b])
        ordered = (column[plan.order] for column in (batch_ids, rows, plan.group_id))
        self._add_in_order(*ordered)

    def _add_in_order(self, batch_ids: Ints, rows: Ints, groups: Ints) -> None:
        alone: GroupBatch | None = None
        columns = (batch_ids, rows - np.arange(len(rows)), groups)
        is_border = np.logical_or.reduce([np.diff(column) != 0 for column in columns])
        for start, stop in pairwise([0, *(np.flatnonzero(is_border) + 1).tolist(), len(rows)]):
            first = int(rows[start])
            row_range = RowRange(int(batch_ids[start]), first, first + stop - start)
            arrival = self._batches[row_range.batch_id].arrival
            if groups[start] != ALONE:
                alone = None
                self._waiting.add(row_range)
                continue
            if alone is None or alone.arrival != arrival:
                alone = GroupBatch(ALONE, arrival=arrival)
                self._waiting.shared.insert(alone)
            self._waiting.shared.extend(alone, row_range)
