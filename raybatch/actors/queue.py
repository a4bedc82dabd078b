"""The one global queue of a pool: which replica gets which rows; no Ray, no clock.

Rows are the unit of work. A row is waiting, held by one replica, or done:

    add -> waiting -> dispatch -> held -> finish -> done
              ^                    |
              +-- lose, release, --+
                    give_back

`lose` strikes every row that its replica held. Rows with two strikes, or with one that they got
alone, are suspects: they are handed out as a set that a replica runs alone, in halves, until the
row that ends its replica is found. A control row runs alone as well, before all suspects.

The rows of a dropped batch count as held until their replica has confirmed that it runs them no
more: a replica that looks empty is empty, and a row that dies alone was alone.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from raybatch.actors.records import Loss, PoisonRow, Room, Span
from raybatch.actors.replica_load import ReplicaLoad
from raybatch.actors.row_states import RowStates, spans_of
from raybatch.actors.waiting_line import WaitingLine

_SUSPECT_STRIKES = 2

_Alone = tuple[Span, ...]


class RowQueue:
    """Rows of all batches and clients, handed out in order of arrival.

    Replicas are named by an id that no other start of a replica shares, so that a late word from
    a dead one is ignored.

    Args:
        max_row_crashes: deaths after which a row that ran alone is given up.
    """

    def __init__(self, max_row_crashes: int) -> None:
        self._max_row_crashes = max_row_crashes
        self._batches: dict[int, RowStates] = {}
        self._replicas: dict[int, ReplicaLoad] = {}
        self._line = WaitingLine(self._batches)
        self._suspects: deque[_Alone] = deque()
        self._control: Span | None = None

    def add(
        self, batch_id: int, prompt_tokens: npt.ArrayLike, max_new_tokens: npt.ArrayLike
    ) -> None:
        """Queue a row batch behind all others.

        Args:
            batch_id: unique among the batches in the queue.
            prompt_tokens: of each row.
            max_new_tokens: of each row, all samples together.
        """
        batch = self._batches[batch_id] = RowStates.make(prompt_tokens, max_new_tokens)
        if batch.num_left:
            self._line.append(Span(batch_id, 0, batch.num_left))

    def add_control(
        self, batch_id: int, prompt_tokens: npt.ArrayLike, max_new_tokens: npt.ArrayLike, row: int
    ) -> None:
        """Queue one row of a batch of its own as the control, to run alone and next.

        Args:
            batch_id: unique among the batches in the queue.
            prompt_tokens: of each row of the request table.
            max_new_tokens: of each row of the request table.
            row: that runs; the others are done.

        Raises:
            RuntimeError: another control waits or runs.
        """
        if self.has_control():
            raise RuntimeError(f"batch {batch_id} is a second control")
        batch = self._batches[batch_id] = RowStates.make(prompt_tokens, max_new_tokens)
        batch.close(np.delete(np.arange(batch.num_left), row))
        self._control = Span(batch_id, row, row + 1)

    def pick_control(self, place: float) -> bool:
        """Make a row that waits unsuspected the control, unless there is one.

        Args:
            place: of the row between 0, the head of the queue, and 1, the last row.

        Returns:
            Whether a control waits or runs.
        """
        if self._line and not self.has_control():
            self._control = self._line.take_at(place)
        return self.has_control()

    def has_control(self) -> bool:
        """Return whether a control row waits or runs."""
        return self._control is not None or any(r.has_control for r in self._replicas.values())

    def dispatch(self, hungry: Mapping[int, Room], num_expected: int = 0) -> dict[int, list[Span]]:
        """Hand waiting rows to replicas that ask, the least loaded first.

        Levels the cost (prompt plus longest output) that the replicas hold, so that a short queue
        is shared evenly, and leaves a share for replicas that are about to be ready.

        Args:
            hungry: replicas that ask, and how much they have room for.
            num_expected: replicas that will ask soon.

        Returns:
            Spans per replica, in the order of submission; a replica that gets nothing is absent.
        """
        grants: dict[int, list[Span]] = {}
        open_ids = []
        for replica_id in sorted(hungry, key=lambda r: (self._load(r).cost, r)):
            replica = self._load(replica_id)
            if replica.num_rows == 0:
                replica.has_control = self._control is not None
                alone = self._next_alone()
                replica.is_testing = bool(alone)
                if alone:
                    grants[replica_id] = self._hand_out(replica_id, alone)
            if not replica.is_testing:
                open_ids.append(replica_id)
        level = self._line.cost + sum(self._load(r).cost for r in open_ids)
        num_sharing = len(open_ids) + num_expected
        for replica_id in open_ids:
            quota = level // num_sharing - self._load(replica_id).cost
            if not self._line or (quota <= 0 and num_expected):
                break
            spans = self._line.cut(hungry[replica_id], quota)
            grants[replica_id] = self._hand_out(replica_id, spans)
        return grants

    def finish(self, replica_id: int, batch_id: int, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Note that a replica is done with rows; return which of them it really held."""
        batch = self._batches.get(batch_id)
        replica = self._replicas.get(replica_id)
        index = np.asarray(rows, np.intp)
        if batch is None or replica is None:
            return np.zeros(len(index), np.bool_)
        is_held = batch.is_held(replica_id, index)
        done = index[is_held]
        batch.close(done)
        replica.remove(len(done), batch.cost(done))
        return is_held

    def lose(self, replica_id: int) -> Loss:
        """Take all rows from a replica that died.

        Complexity: O(rows in the queue).
        """
        replica = self._replicas.pop(replica_id, ReplicaLoad())
        was_alone = replica.num_rows == 1
        innocent: list[Span] = []
        suspects: list[Span] = []
        poison: list[PoisonRow] = []
        num_struck = 0
        for batch_id, batch in self._batches.items():
            rows = batch.held_by(replica_id)
            num_struck += len(rows)
            batch.strikes[rows] += 1
            batch.reopen(rows)
            is_suspect = self._is_suspect(batch, rows) | was_alone
            innocent += spans_of(batch_id, rows[~is_suspect])
            for row in rows[is_suspect].tolist():
                strikes = int(batch.strikes[row])
                if was_alone and strikes >= self._max_row_crashes:
                    batch.close(np.array([row], np.intp))
                    poison.append(PoisonRow(batch_id, row, strikes))
                else:
                    suspects.append(Span(batch_id, row, row + 1))
        self._line.put_back(innocent)
        self._suspects.extendleft(reversed(_halves(suspects)))
        return Loss(
            num_rows=replica.num_rows,
            num_struck=num_struck,
            poison=tuple(poison),
            was_control=replica.has_control and num_struck > 0,
        )

    def give_back(self, replica_id: int, spans: Iterable[Span]) -> None:
        """Take rows that a living replica has not started, without a strike."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        has_control = replica.has_control
        returned: list[Span] = []
        for span in spans:
            batch = self._batches.get(span.batch_id)
            if batch is None:
                continue
            rows = np.arange(span.start, span.stop)
            rows = rows[batch.is_held(replica_id, rows)]
            batch.reopen(rows)
            batch.attempts[rows] -= 1
            replica.remove(len(rows), batch.cost(rows))
            returned += spans_of(span.batch_id, rows)
        if not replica.is_testing:
            self._line.put_back(returned)
        elif returned and has_control:
            (self._control,) = returned
        elif returned:
            self._suspects.appendleft(tuple(returned))

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
        self._replicas.pop(replica_id, None)

    def drop(self, batch_id: int) -> list[int]:
        """Forget a row batch, whatever the state of its rows.

        Returns:
            Replicas that run rows of it; these count as held until `note_aborted`.
        """
        batch = self._batches.get(batch_id)
        if batch is None:
            return []
        holders = batch.holders()
        for replica_id in holders:
            rows = batch.held_by(replica_id)
            self._load(replica_id).abort(batch_id, len(rows), batch.cost(rows))
        self._line.remove_batch(batch_id)
        kept = (tuple(s for s in spans if s.batch_id != batch_id) for spans in self._suspects)
        self._suspects = deque(spans for spans in kept if spans)
        if self._control is not None and self._control.batch_id == batch_id:
            self._control = None
        del self._batches[batch_id]
        return holders

    def note_aborted(self, replica_id: int, batch_id: int) -> None:
        """Note that a replica runs no row of a dropped batch any more."""
        if replica_id in self._replicas:
            self._replicas[replica_id].confirm(batch_id)

    def is_done(self, batch_id: int) -> bool:
        """Return whether every row of the batch is finished or given up."""
        return self._batches[batch_id].num_left == 0

    def rows_left(self, batch_id: int) -> npt.NDArray[np.intp]:
        """Return the rows of the batch that are not done; none when it is not in the queue."""
        batch = self._batches.get(batch_id)
        return np.empty(0, np.intp) if batch is None else batch.left()

    def attempts(self, batch_id: int) -> npt.NDArray[np.int16]:
        """Return how often each row of the batch was handed out, int16 [rows]."""
        return self._batches[batch_id].attempts.copy()

    def num_held(self, replica_id: int) -> int:
        """Return the number of rows that a replica runs."""
        replica = self._replicas.get(replica_id)
        return replica.num_rows if replica is not None else 0

    def is_testing(self, replica_id: int) -> bool:
        """Return whether a replica runs suspects alone."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_testing

    def num_waiting(self) -> int:
        """Return the number of rows that no replica holds, suspects included."""
        spans: list[Span] = [*self._line, *(s for group in self._suspects for s in group)]
        return sum(s.stop - s.start for s in spans) + (self._control is not None)

    def has_waiting(self) -> bool:
        """Return whether any row waits for a replica."""
        return bool(self._line or self._suspects or self._control)

    def _load(self, replica_id: int) -> ReplicaLoad:
        return self._replicas.setdefault(replica_id, ReplicaLoad())

    def _is_suspect(self, batch: RowStates, rows: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        limit = min(_SUSPECT_STRIKES, self._max_row_crashes)
        return np.asarray(batch.strikes[rows] >= limit)

    def _next_alone(self) -> _Alone:
        """Take what a replica without rows is to run alone; nothing when all else may run."""
        if self._control is not None:
            control, self._control = self._control, None
            return (control,)
        return self._suspects.popleft() if self._suspects else ()

    def _hand_out(self, replica_id: int, spans: Iterable[Span]) -> list[Span]:
        replica = self._load(replica_id)
        handed = list(spans)
        for span in handed:
            batch = self._batches[span.batch_id]
            batch.hold(replica_id, span.start, span.stop)
            replica.add(span.stop - span.start, batch.cost_between(span.start, span.stop))
        return handed


def _halves(suspects: list[Span]) -> list[_Alone]:
    middle = (len(suspects) + 1) // 2
    return [half for half in (tuple(suspects[:middle]), tuple(suspects[middle:])) if half]
