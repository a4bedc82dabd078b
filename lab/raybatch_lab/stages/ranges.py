"""Assigns waiting rows to the replicas of their range of lengths, and ranges to replicas.

```
shared queue --> queues of the replicas of a stage  a row waits where it makes most of its tokens
             --> queue of a stage without replica   until a replica of it has started
```

A replica that has little to do takes rows that wait for others, so that none idles. One of a later
stage keeps a few slots free, as a row moves with its KV only to a free slot.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from raybatch.actors.queue.row_states import ALONE, DONE, ReplicaLoad, RowStates
from raybatch.actors.queue.waiting_queues import GroupBatch, GroupQueue, NoRanges, WaitingQueues
from raybatch.actors.wire.records import Credit, RowRange
from raybatch.policy.pool.spread import MAX_MOVES
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.plan import StagePlan, stage_for

# of the rows of another replica, up to which one has so few that it may take those that wait for it
_FEW_ROWS = 1 / 4
# change of a bound that resorts waiting rows
_MOVED_BOUND = 1 / 8
# of the slots of replicas that rows grow into, those that are kept free for such rows: at most as
# many as move at once
_KEPT_SHARE = 4
# runs of rows of one stage are dealt to its replicas in this number of parts for each
_NUM_PARTS = 4
# rows that a plan looks at
_MAX_ROWS = 4096


class StageMap:
    """Assigns replicas to the stages of a plan, while replicas start and exit: call `follow`.

    Example:
        >>> stages = StageMap(StagePlan(
        ...     stages=(Stage(above=0, up_to=64, num_replicas=1),
        ...             Stage(above=64, up_to=128, num_replicas=1)), seconds=1.0))
        >>> stages.follow([7, 9]), stages.follow([9, 12])
        ({7: 0, 9: 1}, {9: 1, 12: 0})
    """

    def __init__(self, plan: StagePlan) -> None:
        self.num_stages = len(plan.stages)
        self._wanted = [stage.num_replicas for stage in plan.stages]
        self._stage_of: dict[int, int] = {}

    def follow(self, replica_ids: Sequence[int]) -> Mapping[int, int]:
        """Return the stage of each live replica by id.

        A known replica keeps its stage; a new one joins the stage that lacks most replicas.
        """
        kept = {r: stage for r, stage in self._stage_of.items() if r in set(replica_ids)}
        missing = self._wanted.copy()
        for stage in kept.values():
            missing[stage] -= 1
        for replica_id in replica_ids:
            if replica_id not in kept:
                stage = missing.index(max(missing))
                kept[replica_id] = stage
                missing[stage] -= 1
        self._stage_of = kept
        return dict(kept)


class Ranges(NoRanges):
    """Sorts waiting rows into the queues of replicas, by the stages of their lengths.

    Args:
        decide: called before rows are handed out; it may call `begin` or `end`.
        able: returns the ids of replicas that take rows.
        load_of: returns the load of a replica.
        speed_of: returns the speed of a replica, 1 for the usual one.
        is_expected: returns whether more replicas are about to be ready.
        slots_of: returns the maximum concurrent sequences of a replica, None if not reported.
    """

    def __init__(
        self,
        *,
        decide: Callable[[WaitingQueues], None],
        able: Callable[[], Sequence[int]],
        load_of: Callable[[int], ReplicaLoad],
        speed_of: Callable[[int], float],
        is_expected: Callable[[], bool],
        slots_of: Callable[[int], int | None],
    ) -> None:
        self.stage_of: Mapping[int, int] = {}
        self.bounds: Floats = np.zeros(0)
        self._able, self._load_of, self._speed_of = able, load_of, speed_of
        self._decide, self._is_expected, self._slots_of = decide, is_expected, slots_of
        self._map: StageMap | None = None
        # lines that have rows of a stage, and the stages and bounds that they were sorted by
        self._queues: set[int] = set()
        self._sorted_by: tuple[object, Floats] = (None, np.zeros(0))

    @property
    def num_stages(self) -> int:
        """Return the number of stages; 0 while there are none."""
        return 0 if self._map is None else self._map.num_stages

    def begin(self, plan: StagePlan) -> None:
        """Begin the stages of a plan; waiting rows are sorted by them from now on."""
        self._map = StageMap(plan)
        self.bounds = np.array(plan.bounds, float)
        self._sorted_by = (None, self.bounds)

    def end(self) -> None:
        """End the stages; rows that wait for a replica may then go to any replica."""
        self._map = None

    def sort(self, waiting: WaitingQueues, credits: Mapping[int, Credit]) -> Mapping[int, Credit]:
        self._decide(waiting)
        if self._map is None:
            self._release(waiting)
            return credits
        self.stage_of = self._map.follow(self._able())
        if self.stage_of:
            self._sort(waiting)
        return {
            r: less for r, credit in credits.items() if (less := self._less(r, credit)).rows > 0
        }

    def _sort(self, waiting: WaitingQueues) -> None:
        by = ((tuple(self.stage_of.items()), self._is_expected()), self.bounds)
        if by[0] != self._sorted_by[0] or self._has_moved():
            self._release(waiting)
            self._sorted_by = by
        if waiting.shared:
            dealer = _Dealer(waiting, self.stage_of, self._load_of, self._speed_of)
            for group_batch in waiting.shared.take_all():
                self._sort_group_batch(group_batch, waiting.batches, dealer)
            self._queues |= dealer.used

    def has_waiting(self, waiting: WaitingQueues) -> bool:
        return any(waiting.own(replica_id) for replica_id in self._queues)

    def may_take(self, replica_id: int, of: int) -> bool:
        """Return whether replica `replica_id` may take rows that wait for replica `of`.

        It may if both are of one stage, or if it has few rows compared with `of`. Rows of a stage
        without replicas may go to any replica without rows.
        """
        if self._map is None or self.stage_of.get(of) == self.stage_of.get(replica_id):
            return True
        num_rows = self._load_of(replica_id).num_rows
        if of not in self.stage_of:
            return num_rows == 0
        return num_rows < _FEW_ROWS * self._load_of(of).num_rows

    def kept_slots(self, replica_id: int) -> int:
        """Return the slots that a replica keeps free for rows that grow into its stage.

        0 in the first stage, or if its slots are unknown.
        """
        num_slots = self._slots_of(replica_id)
        if not self.stage_of.get(replica_id) or num_slots is None or num_slots < 2:
            return 0
        return min(MAX_MOVES, max(1, num_slots // _KEPT_SHARE))

    def _less(self, replica_id: int, credit: Credit) -> Credit:
        """Return the credit of a replica without its kept slots."""
        num_slots = self._slots_of(replica_id)
        if not self.stage_of.get(replica_id):
            return credit
        # the number is reported soon
        num_rows = 1 if num_slots is None else num_slots - self.kept_slots(replica_id)
        left = num_rows - self._load_of(replica_id).num_rows
        return replace(credit, rows=min(credit.rows, left))

    def _has_moved(self) -> bool:
        before = self._sorted_by[1]
        return bool((np.abs(self.bounds - before) > _MOVED_BOUND * before).any())

    def _release(self, waiting: WaitingQueues) -> None:
        for replica_id in sorted(self._queues):
            waiting.release(replica_id)
        self._queues.clear()

    def _sort_group_batch(
        self, group_batch: GroupBatch, batches: Mapping[int, RowStates], dealer: "_Dealer"
    ) -> None:
        stages = [
            self._stages(batches[row_range.batch_id], row_range)
            for row_range in group_batch.row_ranges
        ]
        if group_batch.group != ALONE:
            # members of a group stay together, in the stage that suits most of them
            counts = np.bincount(np.concatenate(stages), minlength=self.num_stages)
            dealer.deal_group(group_batch, self._present(int(counts.argmax())))
            return
        for row_range, of_rows in zip(group_batch.row_ranges, stages, strict=True):
            borders = np.flatnonzero(np.diff(of_rows)) + 1
            for start, stop in pairwise([0, *borders.tolist(), len(of_rows)]):
                piece = RowRange(
                    row_range.batch_id, row_range.start + start, row_range.start + stop
                )
                dealer.deal(piece, self._present(int(of_rows[start])))

    def _stages(self, batch: RowStates, row_range: RowRange) -> Ints:
        rows = slice(row_range.start, row_range.stop)
        # half of its tokens are made at less, the others at more
        return stage_for(self.bounds, batch.prompt[rows] + batch.output[rows] // 2)

    def _present(self, stage: int) -> int:
        """Return a stage itself where it has replicas or will have some, else the nearest one."""
        there = set(self.stage_of.values())
        if stage in there or self._is_expected():
            return stage
        return min(there, key=lambda other: (abs(other - stage), -other))


class _Dealer:
    """Deals rows to queues of replicas, each time to the one that would finish first."""

    def __init__(
        self,
        waiting: WaitingQueues,
        stage_of: Mapping[int, int],
        load_of: Callable[[int], ReplicaLoad],
        speed_of: Callable[[int], float],
    ) -> None:
        self.used: set[int] = set()
        self._waiting, self._load_of, self._speed_of = waiting, load_of, speed_of
        self._heaps: dict[int, list[tuple[float, int]]] = {}
        for replica_id, stage in stage_of.items():
            self._heaps.setdefault(stage, []).append((self._seconds(replica_id), replica_id))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def deal(self, piece: RowRange, stage: int) -> None:
        """Distribute neighbouring rows without a group over the queues of a stage's replicas."""
        num_parts = _NUM_PARTS * len(self._heaps.get(stage, ())) or 1
        size = max(1, -(-(piece.stop - piece.start) // num_parts))
        for start in range(piece.start, piece.stop, size):
            part = RowRange(piece.batch_id, start, min(piece.stop, start + size))
            own = self._next(stage)
            group_batch = own[len(own) - 1] if own else None
            if group_batch is None or group_batch.group != ALONE:
                group_batch = GroupBatch(
                    ALONE, arrival=self._waiting.batches[part.batch_id].arrival
                )
                own.insert(group_batch)
            # rows that were handed out before have waited
            has_waited = bool(self._waiting.batches[part.batch_id].attempts[part.start])
            own.extend(group_batch, part, at_head=has_waited)
            self._note(stage)

    def deal_group(self, group_batch: GroupBatch, stage: int) -> None:
        own = self._next(stage)
        if group_batch.group in own.groups():
            for row_range in group_batch.row_ranges:
                own.add(row_range)
        else:
            own.insert(group_batch)
        self._note(stage)

    def _next(self, stage: int) -> GroupQueue:
        heap = self._heaps.get(stage)
        # ids of replicas begin at 1
        replica_id = heap[0][1] if heap else -1 - stage
        self.used.add(replica_id)
        return self._waiting.own(replica_id)

    def _note(self, stage: int) -> None:
        if heap := self._heaps.get(stage):
            replica_id = heap[0][1]
            heapq.heapreplace(heap, (self._seconds(replica_id), replica_id))

    def _seconds(self, replica_id: int) -> float:
        cost = self._load_of(replica_id).cost + self._waiting.own(replica_id).cost
        return cost / self._speed_of(replica_id)


def lengths_of(batches: Mapping[int, RowStates]) -> RowLengths | None:
    """Return the prompt and expected output lengths of unfinished rows; None if there are none.

    Of more than some thousand rows it returns an even sample.
    """
    parts = []
    for batch in batches.values():
        rows = np.flatnonzero(batch.state != DONE)
        parts.append(np.stack([batch.prompt[rows], batch.output[rows]]))
    found = np.concatenate(parts, axis=1) if parts else np.zeros((2, 0), np.int64)
    if not found.shape[1]:
        return None
    order = np.argsort(found.sum(axis=0), kind="stable")
    order = order[:: -(-len(order) // _MAX_ROWS)]
    prompts, outputs = np.maximum(1, found[:, order])
    return RowLengths(prompts, outputs)
