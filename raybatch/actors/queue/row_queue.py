"""The one global queue of a pool: which replica gets which rows; no Ray, no clock.

Rows are the unit of work. A row is waiting, held by one replica, or done:

    add -> waiting -> dispatch -> held -> finish -> done
              ^                    | ^
              +-- lose, release, --+ +-- begin_move, then commit_move (another
                    give_back            replica holds it) or end_move

A row that is held back is in no line until it is opened, or closed because another one like it ran.

Rows of one prefix group wait together and go to the replica that has the prefix (`grant.py`).

`lose` strikes every row that its replica held. Rows with two strikes, or with one that they got
alone, are suspects: they are handed out as a set that a replica runs alone, in halves, until the
row that ends its replica is found. A control row runs alone as well, before all suspects.

The rows of a dropped batch count as held until their replica has confirmed that it runs them no
more: a replica that looks empty is empty, and a row that dies alone was alone.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.grant import share_out
from raybatch.actors.queue.regroup import Regrouping
from raybatch.actors.queue.row_states import (
    HELD,
    MOVING,
    NoCopies,
    ReplicaLoad,
    Rows,
    RowStates,
    Share,
    Tokens,
    one_by_one,
    spans_of,
)
from raybatch.actors.queue.waiting_line import Isolation, NoRanges, PrefixAffinity, WaitingLine
from raybatch.actors.wire.records import ROW_BITS, Loss, Room, RowCrashes, RowGroups, Span
from raybatch.prefix.block_keys import BlockKeys
from raybatch.records.arrays import Ints

_SUSPECT_STRIKES = 2
# of a replica that has got nothing; read only
_NO_LOAD = ReplicaLoad()
_NO_ROWS = np.empty(0, np.intp)

_Copies = TypeVar("_Copies", bound=NoCopies)


class RowQueue:
    """Rows of all batches and clients, handed out in order of arrival or of their groups.

    It says who holds a row, and nobody else does; see `Coordinator` for who has what of it.

    Replicas are named by an id that no other start of a replica shares, so that a late word from
    a dead one is ignored. A row that ran alone is given up after `max_row_crashes` deaths.

    Example:
        >>> queue = RowQueue(max_row_crashes=3)
        >>> queue.add(7, prompt_tokens=[10, 10, 10], new_tokens=[4, 4, 4])
        >>> queue.dispatch({1: Room(tokens=20, rows=8)})
        {1: [Span(batch_id=7, start=0, stop=2)]}
        >>> queue.finish(1, 7, [0]).tolist(), queue.load(1).num_rows, queue.num_waiting()
        ([True], 1, 1)
        >>> queue.lose(1).crashes  # the other row waits again, and its death counts
        {7: [RowCrashes(row=1, num_crashes=1, is_given_up=False)]}
        >>> queue.num_waiting()
        2
    """

    def __init__(self, max_row_crashes: int) -> None:
        self._max_row_crashes = max_row_crashes
        self._batches: dict[int, RowStates] = {}
        self._replicas: dict[int, ReplicaLoad] = {}
        self._affinity = PrefixAffinity()
        self.copies = NoCopies()
        self._line = WaitingLine(self._batches, self._affinity)
        self._regrouping = Regrouping(self._batches, self._line, self._affinity)
        self._isolation = Isolation()
        # while a control waits or runs, nothing else is handed out
        self.is_cautious = False

    def attach(
        self,
        make: Callable[[dict[int, RowStates], dict[int, ReplicaLoad], PrefixAffinity], _Copies],
    ) -> _Copies:
        """Let rows have copies, kept by what is made of the states, the loads and the affinity."""
        self.copies = copies = make(self._batches, self._replicas, self._affinity)
        return copies

    def reserve(self, ranges: NoRanges) -> None:
        """Let some rows wait for some replicas alone."""
        self._line.ranges = ranges

    def add(
        self,
        batch_id: int,
        prompt_tokens: npt.ArrayLike,
        new_tokens: npt.ArrayLike,
        *,
        groups: RowGroups | None = None,
        keys: BlockKeys | None = None,
        strikes: npt.NDArray[np.int16] | None = None,
        held_back: npt.NDArray[np.intp] = _NO_ROWS,
    ) -> None:
        """Queue a row batch behind all others; its suspects, if any, run before them.

        Args:
            keys: of rows without a plan, which are grouped while they wait.
            strikes: int16 [rows], deaths with each row that are known from elsewhere.
            held_back: rows that wait for `open` or `close` instead of a replica.
        """
        arrival = self._regrouping.num_groupings
        batch = self._batches[batch_id] = RowStates(
            prompt_tokens, new_tokens, groups=groups, keys=keys, arrival=arrival, strikes=strikes
        )
        rows = np.delete(np.arange(batch.num_left), held_back)
        is_suspect = self._is_suspect(batch, rows)
        self._regrouping.add(batch_id, rows[~is_suspect])
        self._isolation.add_suspects(one_by_one(batch_id, rows[is_suspect]))

    def open(self, batch_id: int, row: int) -> None:
        """Queue a row that was held back, before all others: it has waited."""
        self._line.put_back([Span(batch_id, row, row + 1)])

    def close(self, batch_id: int, row: int) -> None:
        """Note that a row that was held back is done; it counts as one attempt of another."""
        batch = self._batches[batch_id]
        batch.attempts[row] += 1
        batch.close(np.array([row]))

    def add_control(
        self, batch_id: int, prompt_tokens: npt.ArrayLike, new_tokens: npt.ArrayLike, row: int
    ) -> None:
        """Queue one row of a batch of its own as the control, to run alone and next."""
        if self.has_control():
            raise RuntimeError(f"batch {batch_id} is a second control")
        batch = self._batches[batch_id] = RowStates(prompt_tokens, new_tokens)
        batch.close(np.delete(np.arange(batch.num_left), row))
        self._isolation.control = Span(batch_id, row, row + 1)

    def pick_control(self, place: float) -> bool:
        """Make a row that waits unsuspected the control, unless there is one.

        `place` is that of the row between 0, the head of the queue, and 1, the last row.
        """
        if self._line and not self.has_control():
            self._isolation.control = self._line.take_at(place)
        return self.has_control()

    def has_control(self) -> bool:
        runs = any(load.has_control for load in self._replicas.values())
        return runs or self._isolation.control is not None

    def dispatch(
        self,
        hungry: Mapping[int, Room],
        num_expected: int = 0,
        speed_of: Callable[[int], float] = lambda _: 1.0,
    ) -> dict[int, list[Span]]:
        """Hand waiting rows to replicas that pull, first to the one that would end first.

        Levels the time that replicas need for the cost that they hold (prefixes once, the rest of
        the prompts, expected outputs), so that a short queue is shared by speed, and leaves a share
        for replicas that are about to be ready. A replica that gets nothing is absent from the
        result.

        Args:
            speed_of: a replica, beside one of usual speed.
        """
        grants: dict[int, list[Span]] = {}
        open_ids, order = [], list(hungry)
        if self._line or self._isolation:
            order.sort(key=lambda r: (self._load(r).cost / speed_of(r), r))
        only_control = self.is_cautious and self.has_control()
        for replica_id in order:
            replica = self._load(replica_id)
            if replica.num_rows == 0:
                replica.has_control = self._isolation.control is not None
                is_due = replica.has_control or not only_control
                alone = self._isolation.take() if is_due else ()
                replica.is_testing = bool(alone)
                if alone:
                    grants[replica_id] = self._hand_out(replica_id, alone)
            if not replica.is_testing:
                open_ids.append(replica_id)
        if open_ids and self._line and not only_control:
            self._regrouping.refresh()
            rooms = {replica_id: hungry[replica_id] for replica_id in open_ids}
            rooms = dict(self._line.ranges.sort(self._line, rooms))
            speeds = {replica_id: speed_of(replica_id) for replica_id in self._replicas}
            shared = share_out(
                self._line, rooms, self._load, num_expected, lambda r: speeds.get(r, 1.0)
            )
            for replica_id, spans in shared:
                grants[replica_id] = self._hand_out(replica_id, spans)
        return grants

    def finish(self, replica_id: int, batch_id: int, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Note that a replica is done with rows; return which of them it really held."""
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
        """Take all rows from a replica that died. Complexity: O(rows in the queue)."""
        replica = self._forget(replica_id)
        was_alone = replica.num_rows == 1
        innocent: list[Span] = []
        suspects: list[Span] = []
        crashes: dict[int, list[RowCrashes]] = {}
        for batch_id, batch in self._batches.items():
            rows = batch.held_by(replica_id)
            batch.strikes[rows] += 1
            batch.reopen(rows)
            # one whose copy goes on elsewhere waits for what becomes of that
            is_out = ~self.copies.inherit(batch_id, rows)
            is_suspect = (self._is_suspect(batch, rows) | was_alone) & is_out
            is_poison = (batch.strikes[rows] >= self._max_row_crashes) & was_alone & is_out
            batch.close(rows[is_poison])
            innocent += spans_of(batch_id, rows[~is_suspect & is_out])
            suspects += one_by_one(batch_id, rows[is_suspect & ~is_poison])
            struck = zip(rows, batch.strikes[rows], is_poison, strict=True)
            if len(rows):
                crashes[batch_id] = [RowCrashes(int(r), int(n), bool(bad)) for r, n, bad in struck]
        self._line.put_back(innocent)
        self._isolation.add_suspects(suspects)
        return Loss(
            num_rows=replica.num_rows,
            crashes=crashes,
            was_control=replica.has_control and bool(crashes),
        )

    def give_back(self, replica_id: int, spans: Iterable[Span]) -> None:
        """Take rows that a living replica has not started, without a strike."""
        if (replica := self._replicas.get(replica_id)) is None:
            return
        has_control = replica.has_control
        returned: list[Span] = []
        left: list[int] = []
        for span in spans:
            if (batch := self._batches.get(span.batch_id)) is None:
                continue
            rows = np.arange(span.start, span.stop)
            left += self.copies.give_back(replica_id, span.batch_id, rows)
            rows = rows[batch.is_held(replica_id, rows)]
            batch.reopen(rows)
            batch.attempts[rows] -= 1
            left += replica.remove(batch.share(rows))
            rows = rows[~self.copies.inherit(span.batch_id, rows)]
            for piece in spans_of(span.batch_id, rows):
                runs = batch.runs(piece.start, piece.stop)
                returned += [Span(span.batch_id, start, stop) for start, stop in runs]
        self._affinity.leave(replica_id, left)
        self._line.free(replica_id, left)
        if not replica.is_testing:
            self._line.put_back(returned)
        elif returned:
            self._isolation.put_back(returned, is_control=has_control)

    def begin_move(self, replica_id: int, batch_id: int, row: int) -> bool:
        """Note that a row is to leave its replica; False where it cannot.

        It is not there any more, moves already, has a copy, or runs alone as suspect or control.
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
        """Note that a row stays where it is, if it is still on its way."""
        batch = self._batches.get(batch_id)
        if batch is not None and batch.is_moving(replica_id, row):
            batch.state[row] = HELD

    def commit_move(
        self, replica_id: int, target_id: int, batch_id: int, row: int, *, with_kv: bool
    ) -> bool:
        """Give a row on its way to the other replica; False where that is not possible any more.

        The first one may have died, or the row may have ended, or nobody waits for it, or the other
        replica runs suspects by now, which have to be alone.
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
        """Take all rows from a replica that was stopped, as if it had not got them.

        Complexity: O(rows in the queue).
        """
        held = [
            span
            for batch_id, batch in self._batches.items()
            for span in spans_of(batch_id, batch.held_by(replica_id))
        ]
        self.give_back(replica_id, held)
        self._forget(replica_id)

    def drop(self, batch_id: int) -> list[int]:
        """Forget a row batch, whatever the state of its rows.

        Returns the replicas that run rows of it; these count as held until `note_aborted`.
        """
        if (batch := self._batches.get(batch_id)) is None:
            return []
        copies = self.copies.drop(batch_id)
        holders = sorted({*batch.holders(), *copies})
        for replica_id in holders:
            rows = np.append(batch.held_by(replica_id), copies.get(replica_id, _NO_ROWS))
            self._replicas[replica_id].aborting[batch_id] = batch.share(rows)
        self._line.remove_batch(batch_id)
        self._isolation.drop(batch_id)
        del self._batches[batch_id]
        return holders

    def note_aborted(self, replica_id: int, batch_id: int) -> None:
        """Note that a replica runs no row of a dropped batch any more."""
        if (replica := self._replicas.get(replica_id)) is not None:
            share = replica.aborting.pop(batch_id, Share(0, 0))
            self._affinity.end(replica_id, replica.remove(share))

    def reweigh(self, new_tokens: Iterable[tuple[int, Callable[[Rows], Ints]]]) -> None:
        """Expect other outputs of the waiting rows of some batches, each with what tells them.

        What replicas hold costs them what it did. Complexity: O(rows of these batches + spans in
        the line).
        """
        num_changed = 0
        for batch_id, expected in new_tokens:
            if (batch := self._batches.get(batch_id)) is not None:
                num_changed += batch.reweigh(expected)
        if num_changed:
            self._line.reweigh()

    def is_held(
        self, replica_id: int | Ints, batch_id: int, rows: npt.NDArray[np.integer[Any]]
    ) -> npt.NDArray[np.bool_]:
        """Return which rows a replica holds, or that of each; none of a batch that is not here."""
        if (batch := self._batches.get(batch_id)) is None:
            return np.zeros(len(rows), np.bool_)
        return batch.is_held(replica_id, rows.astype(np.intp))

    def is_done(self, batch_id: int) -> bool:
        return self._batches[batch_id].num_left == 0

    def rows_left(self, batch_id: int) -> npt.NDArray[np.intp]:
        """Return the rows of the batch that are not done; none when it is not in the queue."""
        batch = self._batches.get(batch_id)
        return _NO_ROWS if batch is None else batch.left()

    def attempts(self, batch_id: int) -> npt.NDArray[np.int16]:
        """Return how often each row of the batch was handed out, int16 [rows]."""
        return self._batches[batch_id].attempts.copy()

    def groups_of(self, batch_id: int, spans: Iterable[Span]) -> RowGroups | None:
        """Return the groups of some rows of a batch, None where all are alone."""
        batch = self._batches[batch_id]
        rows = np.concatenate([np.arange(s.start, s.stop) for s in spans])
        if (batch.group[rows] < 0).all():
            return None
        return RowGroups(group_ids=batch.group[rows], prefix_lens=batch.prefix[rows].astype("i4"))

    def load(self, replica_id: int) -> ReplicaLoad:
        """Return the sums over what a replica runs; read only."""
        return self._replicas.get(replica_id, _NO_LOAD)

    def num_waiting(self) -> int:
        """Return the number of rows that no replica holds, suspects included."""
        return self._line.num_rows() + sum(s.stop - s.start for s in self._isolation)

    def tokens_left(self, *, is_held: bool) -> Tokens:
        """Return what the rows of replicas take from their beginning, or all others; O(rows)."""
        sums = [batch.tokens_left(is_held=is_held) for batch in self._batches.values()]
        return Tokens(*np.sum([(0, 0, 0), *sums], axis=0).tolist())

    def has_waiting(self) -> bool:
        """Return whether any row waits that is not reserved for the replica with its prefix."""
        is_waiting = bool(self._line.fresh) or bool(self._isolation)
        return is_waiting or self._line.ranges.has_waiting(self._line)

    def cuts(self) -> tuple[int, int]:
        """Return how often a group was live at two replicas, and the tokens of their prefixes."""
        return self._affinity.num_cuts, self._affinity.cut_tokens

    def _load(self, replica_id: int) -> ReplicaLoad:
        return self._replicas.setdefault(replica_id, ReplicaLoad())

    def _is_suspect(self, batch: RowStates, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        limit = min(_SUSPECT_STRIKES, self._max_row_crashes)
        return np.asarray(batch.strikes[rows] >= limit)

    def _hand_out(self, replica_id: int, spans: Iterable[Span]) -> list[Span]:
        replica = self._load(replica_id)
        for span in spans:
            batch = self._batches[span.batch_id]
            batch.hold(replica_id, span.start, span.stop)
            started = replica.add(batch.share_between(span.start, span.stop))
            self._affinity.start(replica_id, started)
        return list(spans)

    def _forget(self, replica_id: int) -> ReplicaLoad:
        """Take a replica out; rows reserved for it may go anywhere."""
        replica = self._replicas.pop(replica_id, ReplicaLoad())
        self.copies.forget(replica_id)
        self._affinity.forget(replica_id, list(replica.groups))
        self._line.release(replica_id)
        return replica
