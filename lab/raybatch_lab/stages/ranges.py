"""Rows that wait, each for the replicas of its range of lengths; and which replica has which range.

```
line of all --> lines of the replicas of a stage    a row waits where it is to make most tokens
            --> line of a stage without replica     until one is there that is about to start
```

A replica that has little to do takes rows that wait for others, so that none idles. One of a later
stage keeps a few seats free, as a row moves with its KV to a free seat alone.
"""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from raybatch.actors.queue.row_states import ALONE, DONE, ReplicaLoad, RowStates
from raybatch.actors.queue.waiting_line import Bundle, BundleLine, NoRanges, WaitingLine
from raybatch.actors.wire.records import Room, Span
from raybatch.policy.pool.spread import MAX_MOVES
from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.plan import StagePlan, stage_for

# of the rows of another replica, up to which one has so few that it may take those that wait for it
_FEW_ROWS = 1 / 4
# of a bound, from which change on rows that wait are sorted anew
_MOVED_BOUND = 1 / 8
# of the seats of replicas that rows grow into, those that are kept free for such rows: at most as
# many as move at once
_KEPT_SHARE = 4
# runs of rows of one stage are dealt to its replicas in so many parts for each
_NUM_PARTS = 4
# rows that a plan looks at
_MAX_ROWS = 4096


class StageMap:
    """The stage of each replica, as the plan has them; replicas come and go.

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
        """Return the stage of each of these replicas; a new one gets where most are missing."""
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
    """Sorts rows that wait by the lengths at which they are to run.

    Args:
        decide: begins or ends stages, by the rows of the line that are about to go out.
        able: returns the replicas that take rows.
        load_of: what a replica has.
        speed_of: a replica, beside one of usual speed.
        is_expected: returns whether more replicas are about to be ready.
        seats_of: sequences that a replica runs at once, None where it has not told.
    """

    def __init__(
        self,
        *,
        decide: Callable[[WaitingLine], None],
        able: Callable[[], Sequence[int]],
        load_of: Callable[[int], ReplicaLoad],
        speed_of: Callable[[int], float],
        is_expected: Callable[[], bool],
        seats_of: Callable[[int], int | None],
    ) -> None:
        self.stage_of: Mapping[int, int] = {}
        self.bounds: Floats = np.zeros(0)
        self._able, self._load_of, self._speed_of = able, load_of, speed_of
        self._decide, self._is_expected, self._seats_of = decide, is_expected, seats_of
        self._map: StageMap | None = None
        # lines that have rows of a stage, and what they were sorted by
        self._lines: set[int] = set()
        self._sorted_by: tuple[object, Floats] = (None, np.zeros(0))

    @property
    def num_stages(self) -> int:
        """Return how many stages there are; 0 while there are none."""
        return 0 if self._map is None else self._map.num_stages

    def begin(self, plan: StagePlan) -> None:
        """Take the stages of a plan; rows that wait are sorted by them from now on."""
        self._map = StageMap(plan)
        self.bounds = np.array(plan.bounds, float)
        self._sorted_by = (None, self.bounds)

    def end(self) -> None:
        """Have no stages; what waits in lines of replicas may go anywhere."""
        self._map = None

    def sort(self, line: WaitingLine, rooms: Mapping[int, Room]) -> Mapping[int, Room]:
        self._decide(line)
        if self._map is None:
            self._release(line)
            return rooms
        self.stage_of = self._map.follow(self._able())
        if self.stage_of:
            self._sort(line)
        return {r: less for r, room in rooms.items() if (less := self._less(r, room)).rows > 0}

    def _sort(self, line: WaitingLine) -> None:
        by = ((tuple(self.stage_of.items()), self._is_expected()), self.bounds)
        if by[0] != self._sorted_by[0] or self._has_moved():
            self._release(line)
            self._sorted_by = by
        if line.fresh:
            dealer = _Dealer(line, self.stage_of, self._load_of, self._speed_of)
            for bundle in line.fresh.take_all():
                self._sort_bundle(bundle, line.batches, dealer)
            self._lines |= dealer.used

    def has_waiting(self, line: WaitingLine) -> bool:
        return any(line.own(replica_id) for replica_id in self._lines)

    def may_take(self, replica_id: int, of: int) -> bool:
        """Return whether a replica may have rows that wait for another one.

        It may where both are of one stage, and where it has few rows beside the other. One that has
        none asks for its own at this moment. Rows of a stage without replicas go to one without
        rows.
        """
        if self._map is None or self.stage_of.get(of) == self.stage_of.get(replica_id):
            return True
        num_rows = self._load_of(replica_id).num_rows
        if of not in self.stage_of:
            return num_rows == 0
        return num_rows < _FEW_ROWS * self._load_of(of).num_rows

    def kept_seats(self, replica_id: int) -> int:
        """Return the seats that a replica keeps free for rows that grow, 0 in the first stage."""
        num_seats = self._seats_of(replica_id)
        if not self.stage_of.get(replica_id) or num_seats is None or num_seats < 2:
            return 0
        return min(MAX_MOVES, max(1, num_seats // _KEPT_SHARE))

    def _less(self, replica_id: int, room: Room) -> Room:
        """Return the room of a replica without the seats that it keeps, and without rows beyond."""
        num_seats = self._seats_of(replica_id)
        if not self.stage_of.get(replica_id):
            return room
        # it tells soon
        num_rows = 1 if num_seats is None else num_seats - self.kept_seats(replica_id)
        left = num_rows - self._load_of(replica_id).num_rows
        return replace(room, rows=min(room.rows, left))

    def _has_moved(self) -> bool:
        before = self._sorted_by[1]
        return bool((np.abs(self.bounds - before) > _MOVED_BOUND * before).any())

    def _release(self, line: WaitingLine) -> None:
        for replica_id in sorted(self._lines):
            line.release(replica_id)
        self._lines.clear()

    def _sort_bundle(
        self, bundle: Bundle, batches: Mapping[int, RowStates], dealer: "_Dealer"
    ) -> None:
        stages = [self._stages(batches[span.batch_id], span) for span in bundle.spans]
        if bundle.group != ALONE:
            # members of a group stay together, in the stage that suits most of them
            counts = np.bincount(np.concatenate(stages), minlength=self.num_stages)
            dealer.deal_group(bundle, self._present(int(counts.argmax())))
            return
        for span, of_rows in zip(bundle.spans, stages, strict=True):
            borders = np.flatnonzero(np.diff(of_rows)) + 1
            for start, stop in pairwise([0, *borders.tolist(), len(of_rows)]):
                piece = Span(span.batch_id, span.start + start, span.start + stop)
                dealer.deal(piece, self._present(int(of_rows[start])))

    def _stages(self, batch: RowStates, span: Span) -> Ints:
        rows = slice(span.start, span.stop)
        # half of its tokens are made at less, the others at more
        return stage_for(self.bounds, batch.prompt[rows] + batch.output[rows] // 2)

    def _present(self, stage: int) -> int:
        """Return a stage itself where it has replicas or will have some, else the nearest one."""
        there = set(self.stage_of.values())
        if stage in there or self._is_expected():
            return stage
        return min(there, key=lambda other: (abs(other - stage), -other))


class _Dealer:
    """Puts rows into lines of replicas, each time into that of the one that would end first."""

    def __init__(
        self,
        line: WaitingLine,
        stage_of: Mapping[int, int],
        load_of: Callable[[int], ReplicaLoad],
        speed_of: Callable[[int], float],
    ) -> None:
        self.used: set[int] = set()
        self._line, self._load_of, self._speed_of = line, load_of, speed_of
        self._heaps: dict[int, list[tuple[float, int]]] = {}
        for replica_id, stage in stage_of.items():
            self._heaps.setdefault(stage, []).append((self._seconds(replica_id), replica_id))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def deal(self, piece: Span, stage: int) -> None:
        """Deal neighbouring rows of no group to the replicas of a stage."""
        num_parts = _NUM_PARTS * len(self._heaps.get(stage, ())) or 1
        size = max(1, -(-(piece.stop - piece.start) // num_parts))
        for start in range(piece.start, piece.stop, size):
            part = Span(piece.batch_id, start, min(piece.stop, start + size))
            own = self._next(stage)
            bundle = own[len(own) - 1] if own else None
            if bundle is None or bundle.group != ALONE:
                bundle = Bundle(ALONE, arrival=self._line.batches[part.batch_id].arrival)
                own.insert(bundle)
            # rows that were handed out before have waited
            has_waited = bool(self._line.batches[part.batch_id].attempts[part.start])
            own.extend(bundle, part, at_head=has_waited)
            self._note(stage)

    def deal_group(self, bundle: Bundle, stage: int) -> None:
        own = self._next(stage)
        if bundle.group in own.groups():
            for span in bundle.spans:
                own.add(span)
        else:
            own.insert(bundle)
        self._note(stage)

    def _next(self, stage: int) -> BundleLine:
        heap = self._heaps.get(stage)
        # ids of replicas begin at 1
        replica_id = heap[0][1] if heap else -1 - stage
        self.used.add(replica_id)
        return self._line.own(replica_id)

    def _note(self, stage: int) -> None:
        if heap := self._heaps.get(stage):
            replica_id = heap[0][1]
            heapq.heapreplace(heap, (self._seconds(replica_id), replica_id))

    def _seconds(self, replica_id: int) -> float:
        cost = self._load_of(replica_id).cost + self._line.own(replica_id).cost
        return cost / self._speed_of(replica_id)


def lengths_of(batches: Mapping[int, RowStates]) -> RowLengths | None:
    """Return prompts and expected outputs of rows that are not done; None where there are none.

    Of many rows an even part is looked at.
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
