"""The global queue of a pool: decides which replica gets which rows; no Ray, no clock.

Rows are the unit of work. A row is waiting, held by one replica, or done:

    add -> waiting -> dispatch -> held -> finish -> done
              ^                    | ^
              +-- lose, release, --+ +-- begin_move, then commit_move (another
                    give_back            replica holds it) or end_move

A row that is held back is in no queue until it is opened, or closed by an in-flight duplicate.

Rows of one prefix group wait together and go to the replica that has the prefix (`grant.py`).

`lose` counts a crash for every row that its replica held. Rows with two crashes, or with one that
they got alone, are suspects: a set of them is handed out to run alone, in halves, until the row
that crashes replicas is found. A canary row runs alone as well, before all suspects.

Rows of a dropped batch count as held until their replica confirms that it has stopped them. So a
replica without rows is really idle, and a row that crashed alone was alone.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.grant import share_out
from raybatch.actors.queue.row_states import (
    HELD,
    MOVING,
    NoSpeculativeCopies,
    ReplicaLoad,
    Rows,
    RowStates,
    Share,
    Tokens,
    one_by_one,
    row_ranges_of,
)
from raybatch.actors.queue.waiting_queues import (
    Isolation,
    NoRanges,
    PrefixAffinity,
    Regrouping,
    WaitingQueues,
)
from raybatch.actors.wire.records import ROW_BITS, Credit, Loss, RowCrashes, RowGroups, RowRange
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Ints

_SUSPECT_CRASHES = 2
# load of a replica without rows; read only
_NO_LOAD = ReplicaLoad()
_NO_ROWS = np.empty(0, np.intp)
_SpeculativeCopies = TypeVar("_SpeculativeCopies", bound=NoSpeculativeCopies)


class RowQueue:
    """Queues row batches (`add`) and hands rows to replicas that pull (`dispatch`).

    It alone decides which replica holds a row; see `Coordinator` for the other parts of a row. Rows
    are handed out in order of arrival or of their groups.

    A replica id is unique among all starts, so late calls of a dead replica are ignored. A row that
    ran alone is given up after `max_row_crashes` crashes.

    Example:
        >>> queue = RowQueue(max_row_crashes=3)
        >>> queue.add(7, prompt_tokens=[10, 10, 10], new_tokens=[4, 4, 4])
        >>> queue.dispatch({1: Credit(tokens=20, rows=8)})
        {1: [RowRange(batch_id=7, start=0, stop=2)]}
        >>> queue.finish(1, 7, [0]).tolist(), queue.load(1).num_rows, queue.num_waiting()
        ([True], 1, 1)
        >>> queue.lose(1).crashes  # the other row waits again, with one crash
        {7: [RowCrashes(row=1, num_crashes=1, is_given_up=False)]}
        >>> queue.num_waiting()
        2
    """

    def __init__(self, max_row_crashes: int) -> None:
        self._max_row_crashes = max_row_crashes
        self._batches: dict[int, RowStates] = {}
        self._replicas: dict[int, ReplicaLoad] = {}
        self._affinity = PrefixAffinity()
        self.copies = NoSpeculativeCopies()
        self._waiting = WaitingQueues(self._batches, self._affinity)
        self._regrouping = Regrouping(self._batches, self._waiting, self._affinity)
        self._isolation = Isolation()
        # while a canary waits or runs, no other row is handed out
        self.is_cautious = False

    def attach(
        self,
        make: Callable[
            [dict[int, RowStates], dict[int, ReplicaLoad], PrefixAffinity], _SpeculativeCopies
        ],
    ) -> _SpeculativeCopies:
        """Enable speculative copies, tracked by the object that `make` returns."""
        self.copies = copies = make(self._batches, self._replicas, self._affinity)
        return copies

    def reserve(self, ranges: NoRanges) -> None:
        """Let `ranges` decide which waiting rows may go to which replicas."""
        self._waiting.ranges = ranges

    def add(
        self,
        batch_id: int,
        prompt_tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
        *,
        groups: RowGroups | None = None,
        keys: BlockKeys | None = None,
        crash_counts: npt.NDArray[np.int16] | None = None,
        held_back: npt.NDArray[np.intp] = _NO_ROWS,
    ) -> None:
        """Queue a row batch behind all others; rows that may crash an engine run before, alone.

        Args:
            prompt_tokens: prompt tokens of each row.
            new_tokens: expected output tokens of each row, over all samples.
            groups: prefix groups of rows with a plan.
            keys: block keys of rows without a plan, which are grouped while they wait.
            crash_counts: crashes of each row in earlier runs, int16 [rows].
            held_back: rows that are not handed out until `open` or `close` is called for them.
        """
        arrival = self._regrouping.num_groupings
        batch = self._batches[batch_id] = RowStates(
            prompt_tokens,
            new_tokens,
            groups=groups,
            keys=keys,
            arrival=arrival,
            crash_counts=crash_counts,
        )
        rows = np.delete(np.arange(batch.num_left), held_back)
        is_suspect = self._is_suspect(batch, rows)
        self._regrouping.add(batch_id, rows[~is_suspect])
        self._isolation.add_suspects(one_by_one(batch_id, rows[is_suspect]))

    def open(self, batch_id: int, row: int) -> None:
        """Queue a row that was held back, before all others."""
        self._waiting.put_back([RowRange(batch_id, row, row + 1)])

    def close(self, batch_id: int, row: int) -> None:
        """Note that a row that was held back is done without a run; it counts as one attempt."""
        batch = self._batches[batch_id]
        batch.attempts[row] += 1
        batch.close(np.array([row]))

    def add_canary(
        self, batch_id: int, prompt_tokens: npt.ArrayLike, new_tokens: npt.ArrayLike, row: int
    ) -> None:
        """Queue one row of a separate batch as the canary, to run alone and next."""
        batch = self._batches[batch_id] = RowStates(prompt_tokens, new_tokens)
        batch.close(np.delete(np.arange(batch.num_left), row))
        self._isolation.canary = RowRange(batch_id, row, row + 1)

    def pick_canary(self, place: float) -> bool:
        """Make a waiting row the canary, unless there is one; return whether there is one now.

        `place` is the relative position of the row: 0 for the head of the queue, 1 for its last
        row.
        """
        if self._waiting and not self.has_canary():
            self._isolation.canary = self._waiting.take_at(place)
        return self.has_canary()

    def has_canary(self) -> bool:
        runs = any(load.has_canary for load in self._replicas.values())
        return runs or self._isolation.canary is not None

    def dispatch(
        self,
        demand: Mapping[int, Credit],
        num_expected: int = 0,
        speed_of: Callable[[int], float] = lambda _: 1.0,
    ) -> dict[int, list[RowRange]]:
        """Hand waiting rows to replicas that pull; return the row ranges of each, by replica id.

        Balances the time that replicas need for their cost (prefixes once, the rest of the prompts,
        expected outputs), beginning with the replica that would finish first. So a short queue is
        shared by speed. A replica that gets no rows is not in the result.

        Args:
            demand: credit of each replica that pulls.
            num_expected: number of replicas that are about to be ready, for which shares are left.
            speed_of: returns the speed of a replica, 1 for the usual one.
        """
        grants: dict[int, list[RowRange]] = {}
        open_ids, order = [], list(demand)
        if self._waiting or self._isolation:
            order.sort(key=lambda r: (self._load(r).cost / speed_of(r), r))
        only_canary = self.is_cautious and self.has_canary()
        for replica_id in order:
            replica = self._load(replica_id)
            if replica.num_rows == 0:
                replica.has_canary = self._isolation.canary is not None
                is_due = replica.has_canary or not only_canary
                alone = self._isolation.take() if is_due else ()
                replica.is_testing = bool(alone)
                if alone:
                    grants[replica_id] = self._hand_out(replica_id, alone)
            if not replica.is_testing:
                open_ids.append(replica_id)
        if open_ids and self._waiting and not only_canary:
            self._regrouping.refresh()
            credits = {replica_id: demand[replica_id] for replica_id in open_ids}
            credits = dict(self._waiting.ranges.sort(self._waiting, credits))
            speeds = {replica_id: speed_of(replica_id) for replica_id in self._replicas}
            shared = share_out(
                self._waiting, credits, self._load, num_expected, lambda r: speeds.get(r, 1.0)
            )
            for replica_id, row_ranges in shared:
                grants[replica_id] = self._hand_out(replica_id, row_ranges)
        return grants

    def finish(self, replica_id: int, batch_id: int, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Note that a replica finished rows; return a mask of those that it held, bool [rows]."""
        batch, replica = self._batches.get(batch_id), self._replicas.get(replica_id)
        index = np.asarray(rows, np.intp)
        if batch is None or replica is None:
            return np.zeros(len(index), np.bool_)
        self.copies.settle(replica_id, batch_id, index)
        is_held = batch.is_held(replica_id, index)
        done = index[is_held]
        batch.close(done)
        self._affinity.end(replica_id, replica.remove(batch.share(done)))
        return is_held

    def lose(self, replica_id: int) -> Loss:
        """Requeue the rows of a replica that crashed, and count a crash for each; O(queued rows).

        Rows that crashed too many engines while alone are given up.
        """
        replica = self._forget(replica_id)
        was_alone = replica.num_rows == 1
        innocent: list[RowRange] = []
        suspects: list[RowRange] = []
        crashes: dict[int, list[RowCrashes]] = {}
        for batch_id, batch in self._batches.items():
            rows = batch.held_by(replica_id)
            batch.crash_counts[rows] += 1
            batch.reopen(rows)
            # a row whose speculative copy runs on is held by the replica of the copy
            is_out = ~self.copies.inherit(batch_id, rows)
            is_suspect = (self._is_suspect(batch, rows) | was_alone) & is_out
            is_poison = (batch.crash_counts[rows] >= self._max_row_crashes) & was_alone & is_out
            batch.close(rows[is_poison])
            innocent += row_ranges_of(batch_id, rows[~is_suspect & is_out])
            suspects += one_by_one(batch_id, rows[is_suspect & ~is_poison])
            struck = zip(rows, batch.crash_counts[rows], is_poison, strict=True)
            if len(rows):
                crashes[batch_id] = [RowCrashes(int(r), int(n), bool(bad)) for r, n, bad in struck]
        self._waiting.put_back(innocent)
        self._isolation.add_suspects(suspects)
        return Loss(
            num_rows=replica.num_rows,
            crashes=crashes,
            was_canary=replica.has_canary and bool(crashes),
        )

    def give_back(self, replica_id: int, row_ranges: Iterable[RowRange]) -> None:
        """Requeue rows that a live replica has not started; they count no attempt or crash."""
        if (replica := self._replicas.get(replica_id)) is None:
            return
        has_canary = replica.has_canary
        returned: list[RowRange] = []
        left: list[int] = []
        for row_range in row_ranges:
            if (batch := self._batches.get(row_range.batch_id)) is None:
                continue
            rows = np.arange(row_range.start, row_range.stop)
            left += self.copies.give_back(replica_id, row_range.batch_id, rows)
            rows = rows[batch.is_held(replica_id, rows)]
            batch.reopen(rows)
            batch.attempts[rows] -= 1
            left += replica.remove(batch.share(rows))
            rows = rows[~self.copies.inherit(row_range.batch_id, rows)]
            for piece in row_ranges_of(row_range.batch_id, rows):
                runs = batch.runs(piece.start, piece.stop)
                returned += [RowRange(row_range.batch_id, start, stop) for start, stop in runs]
        self._affinity.leave(replica_id, left)
        self._waiting.free(replica_id, left)
        if not replica.is_testing:
            self._waiting.put_back(returned)
        elif returned:
            self._isolation.put_back(returned, is_canary=has_canary)

    def begin_move(self, replica_id: int, batch_id: int, row: int) -> bool:
        """Note that a row begins to move from its replica; return False if it cannot move.

        It cannot if the replica does not hold it any more, if it moves already, has a speculative
        copy, or runs alone as suspect or canary.
        """
        batch, replica = self._batches.get(batch_id), self._replicas.get(replica_id)
        if batch is None or replica is None or replica.is_testing:
            return False
        is_here = batch.state[row] == HELD and batch.holder[row] == replica_id
        if not is_here or batch_id << ROW_BITS | row in self.copies:
            return False
        batch.state[row] = MOVING
        return True

    def end_move(self, replica_id: int, batch_id: int, row: int) -> None:
        """End the move of a row; without a commit its replica keeps the row."""
        batch = self._batches.get(batch_id)
        if batch is not None and batch.is_moving(replica_id, row):
            batch.state[row] = HELD

    def commit_move(
        self, replica_id: int, target_id: int, batch_id: int, row: int, *, with_kv: bool
    ) -> bool:
        """Make the target the holder of a moving row; return False if that is not possible.

        The source may have died, the row may have finished or been cancelled, or the target may run
        suspects by now, which have to be alone. `with_kv` if the KV of the row has moved too.
        """
        batch = self._batches.get(batch_id)
        if batch is None or not batch.is_moving(replica_id, row):
            return False
        if self.load(target_id).is_testing:
            return False
        share = batch.share(np.array([row]))
        self._affinity.end(replica_id, self._load(replica_id).remove(share))
        batch.state[row], batch.holder[row] = HELD, target_id
        started = self._load(target_id).add(share)
        self._affinity.start(target_id, started, is_computed=not with_kv)
        return True

    def release(self, replica_id: int) -> None:
        """Requeue all rows of a replica that was stopped; they count no attempt or crash.

        Complexity: O(rows in the queue).
        """
        held = [
            row_range
            for batch_id, batch in self._batches.items()
            for row_range in row_ranges_of(batch_id, batch.held_by(replica_id))
        ]
        self.give_back(replica_id, held)
        self._forget(replica_id)

    def drop(self, batch_id: int) -> list[int]:
        """Forget a row batch, whatever its state; return the ids of replicas that run its rows.

        These rows count in the load of a replica until `note_aborted`.
        """
        if (batch := self._batches.get(batch_id)) is None:
            return []
        copies = self.copies.drop(batch_id)
        holders = sorted({*batch.holders(), *copies})
        for replica_id in holders:
            rows = np.append(batch.held_by(replica_id), copies.get(replica_id, _NO_ROWS))
            self._replicas[replica_id].aborting[batch_id] = batch.share(rows)
        if batch.num_left:
            self._waiting.remove_batch(batch_id)
            self._isolation.drop(batch_id)
        del self._batches[batch_id]
        return holders

    def note_aborted(self, replica_id: int, batch_id: int) -> None:
        """Note that a replica has stopped all rows of a dropped batch."""
        if (replica := self._replicas.get(replica_id)) is not None:
            share = replica.aborting.pop(batch_id, Share(0, 0))
            self._affinity.end(replica_id, replica.remove(share))

    def reweigh(self, new_tokens: Iterable[tuple[int, Callable[[Rows], Ints]]]) -> None:
        """Update the expected output tokens of waiting rows.

        The cost of held rows stays. Complexity: O(rows of these batches + waiting row ranges).

        Args:
            new_tokens: (batch id, function) pairs; the function returns the expected output tokens
                of some rows of the batch.
        """
        num_changed = 0
        for batch_id, expected in new_tokens:
            if (batch := self._batches.get(batch_id)) is not None:
                num_changed += batch.reweigh(expected)
        if num_changed:
            self._waiting.reweigh()

    def is_held(
        self, replica_id: int | Ints, batch_id: int, rows: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.bool_]:
        """Return which rows are held by a replica, bool [rows]; all False for an unknown batch.

        `replica_id` is one id, or one for each row.
        """
        if (batch := self._batches.get(batch_id)) is None:
            return np.zeros(len(rows), np.bool_)
        return batch.is_held(replica_id, rows.astype(np.intp))

    def is_done(self, batch_id: int) -> bool:
        return self._batches[batch_id].num_left == 0

    def rows_left(self, batch_id: int) -> npt.NDArray[np.intp]:
        """Return the unfinished rows of a batch, ascending; none if it is not in the queue."""
        batch = self._batches.get(batch_id)
        return _NO_ROWS if batch is None else batch.left()

    def attempts(self, batch_id: int) -> npt.NDArray[np.int16]:
        """Return how often each row of the batch was handed out, int16 [rows]."""
        return self._batches[batch_id].attempts.copy()

    def groups_of(self, batch_id: int, row_ranges: Iterable[RowRange]) -> RowGroups | None:
        """Return the groups of some rows of a batch, None if no row has a group."""
        batch = self._batches[batch_id]
        rows = np.concatenate([np.arange(s.start, s.stop) for s in row_ranges])
        if (batch.group[rows] < 0).all():
            return None
        return RowGroups(group_ids=batch.group[rows], prefix_lens=batch.prefix[rows].astype("i4"))

    def load(self, replica_id: int) -> ReplicaLoad:
        """Return the sums over the rows that a replica holds; read only."""
        return self._replicas.get(replica_id, _NO_LOAD)

    def num_waiting(self) -> int:
        """Return the number of rows that no replica holds, suspects included."""
        return self._waiting.num_rows() + sum(s.stop - s.start for s in self._isolation)

    def tokens_left(self, *, is_held: bool) -> Tokens:
        """Return the total tokens of rows that replicas hold, or else of waiting rows; O(rows)."""
        sums = [batch.tokens_left(is_held=is_held) for batch in self._batches.values()]
        return Tokens(*np.sum([(0, 0, 0), *sums], axis=0).tolist())

    def has_waiting(self) -> bool:
        """Return whether any row waits that may go to any replica.

        Rows that wait for the replica that has their prefix do not count.
        """
        is_waiting = bool(self._waiting.shared) or bool(self._isolation)
        return is_waiting or self._waiting.ranges.has_waiting(self._waiting)

    def cuts(self) -> tuple[int, int]:
        """Return (how often a group ran at a second replica, prefix tokens computed again)."""
        return self._affinity.num_cuts, self._affinity.cut_tokens

    def _load(self, replica_id: int) -> ReplicaLoad:
        return self._replicas.setdefault(replica_id, ReplicaLoad())

    def _is_suspect(self, batch: RowStates, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        limit = min(_SUSPECT_CRASHES, self._max_row_crashes)
        return np.asarray(batch.crash_counts[rows] >= limit)

    def _hand_out(self, replica_id: int, row_ranges: Iterable[RowRange]) -> list[RowRange]:
        replica = self._load(replica_id)
        for row_range in row_ranges:
            batch = self._batches[row_range.batch_id]
            batch.hold(replica_id, row_range.start, row_range.stop)
            started = replica.add(batch.share_between(row_range.start, row_range.stop))
            self._affinity.start(replica_id, started)
        return list(row_ranges)

    def _forget(self, replica_id: int) -> ReplicaLoad:
        """Remove a replica; rows reserved for it may go anywhere."""
        replica = self._replicas.pop(replica_id, ReplicaLoad())
        self.copies.forget(replica_id)
        self._affinity.forget(replica_id, list(replica.groups))
        self._waiting.release(replica_id)
        return replica
