"""The one global queue of a pool: which replica gets which rows; no Ray, no clock.

Rows are the unit of work. A row is waiting, held by one replica, or done:

    add -> waiting -> dispatch -> held -> finish -> done
              ^                    |
              +--- lose, give_back-+

`lose` strikes every row that its replica held. Rows with two strikes are suspects: they are handed
out as a set that a replica runs alone, in halves, until the row that ends its replica is found.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import numpy.typing as npt

from raybatch.actors.records import PoisonRow, Room, Span

_WAITING, _HELD, _DONE = 0, 1, 2
_SUSPECT_STRIKES = 2

_Int64s = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Batch:
    """Per-row state of one row batch; `prompt_ends[i]` sums the prompt tokens before row i."""

    prompt_ends: _Int64s
    cost_ends: _Int64s
    state: npt.NDArray[np.uint8]
    holder: npt.NDArray[np.int64]
    attempts: npt.NDArray[np.int16]
    strikes: npt.NDArray[np.int16]
    num_left: int

    def cost(self, rows: npt.NDArray[np.intp]) -> int:
        return int((self.cost_ends[rows + 1] - self.cost_ends[rows]).sum())


@dataclass(slots=True)
class _Replica:
    num_rows: int = 0
    cost: int = 0
    is_testing: bool = False


@dataclass(slots=True)
class RowQueue:
    """Rows of all batches and clients, handed out in order of arrival.

    Replicas are named by an id that no other start of a replica shares, so that a late word from
    a dead one is ignored.

    Args:
        max_row_crashes: deaths after which a row that ran alone is given up.
    """

    max_row_crashes: int
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _replicas: dict[int, _Replica] = field(default_factory=dict)
    _waiting: deque[Span] = field(default_factory=deque)
    _waiting_cost: int = 0
    _suspects: deque[tuple[Span, ...]] = field(default_factory=deque)

    def add(
        self, batch_id: int, prompt_tokens: npt.ArrayLike, max_new_tokens: npt.ArrayLike
    ) -> None:
        """Queue a row batch behind all others.

        Args:
            batch_id: unique among the batches in the queue.
            prompt_tokens: of each row.
            max_new_tokens: of each row, all samples together.
        """
        prompt = np.asarray(prompt_tokens, np.int64)
        num_rows = len(prompt)
        batch = _Batch(
            prompt_ends=_ends(prompt),
            cost_ends=_ends(prompt + np.asarray(max_new_tokens, np.int64)),
            state=np.full(num_rows, _WAITING, np.uint8),
            holder=np.zeros(num_rows, np.int64),
            attempts=np.zeros(num_rows, np.int16),
            strikes=np.zeros(num_rows, np.int16),
            num_left=num_rows,
        )
        self._batches[batch_id] = batch
        if num_rows:
            self._waiting.append(Span(batch_id, 0, num_rows))
            self._waiting_cost += int(batch.cost_ends[-1])

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
                replica.is_testing = bool(self._suspects)
                if replica.is_testing:
                    grants[replica_id] = self._hand_out(replica_id, self._suspects.popleft())
            if not replica.is_testing:
                open_ids.append(replica_id)
        level = self._waiting_cost + sum(self._load(r).cost for r in open_ids)
        num_sharing = len(open_ids) + num_expected
        for replica_id in open_ids:
            quota = level // num_sharing - self._load(replica_id).cost
            if not self._waiting or (quota <= 0 and num_expected):
                break
            spans = self._cut(hungry[replica_id], quota)
            self._waiting_cost -= sum(self._span_cost(s) for s in spans)
            grants[replica_id] = self._hand_out(replica_id, spans)
        return grants

    def finish(self, replica_id: int, batch_id: int, rows: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """Note that a replica is done with rows; return which of them it really held."""
        batch = self._batches.get(batch_id)
        index = np.asarray(rows, np.intp)
        if batch is None:
            return np.zeros(len(index), np.bool_)
        is_held = (batch.state[index] == _HELD) & (batch.holder[index] == replica_id)
        done = index[is_held]
        batch.state[done] = _DONE
        batch.num_left -= len(done)
        self._unload(replica_id, batch, done)
        return cast(npt.NDArray[np.bool_], is_held)

    def lose(self, replica_id: int) -> list[PoisonRow]:
        """Take all rows from a replica that died; return those that are given up.

        Complexity: O(rows in the queue).
        """
        was_alone = self._load(replica_id).num_rows == 1
        innocent: list[Span] = []
        suspects: list[Span] = []
        poison: list[PoisonRow] = []
        for batch_id, batch in self._batches.items():
            rows = self._held_rows(replica_id, batch)
            batch.strikes[rows] += 1
            batch.state[rows] = _WAITING
            is_suspect = batch.strikes[rows] >= min(_SUSPECT_STRIKES, self.max_row_crashes)
            innocent += _spans(batch_id, rows[~is_suspect])
            for row in rows[is_suspect].tolist():
                strikes = int(batch.strikes[row])
                if was_alone and strikes >= self.max_row_crashes:
                    batch.state[row] = _DONE
                    batch.num_left -= 1
                    poison.append(PoisonRow(batch_id, row, strikes))
                else:
                    suspects.append(Span(batch_id, row, row + 1))
        self._replicas.pop(replica_id, None)
        self._put_back(innocent)
        self._suspects.extendleft(reversed(_halves(suspects)))
        return poison

    def give_back(self, replica_id: int, spans: Iterable[Span]) -> None:
        """Take rows that a living replica has not started, without a strike."""
        returned: list[Span] = []
        for span in spans:
            batch = self._batches.get(span.batch_id)
            if batch is None:
                continue
            rows = np.arange(span.start, span.stop)
            rows = rows[(batch.state[rows] == _HELD) & (batch.holder[rows] == replica_id)]
            batch.state[rows] = _WAITING
            batch.attempts[rows] -= 1
            self._unload(replica_id, batch, rows)
            returned += _spans(span.batch_id, rows)
        self._put_back(returned)

    def drop(self, batch_id: int) -> None:
        """Forget a row batch, whatever the state of its rows."""
        batch = self._batches.pop(batch_id, None)
        if batch is None:
            return
        for replica_id in np.unique(batch.holder[batch.state == _HELD]).tolist():
            self._unload(replica_id, batch, self._held_rows(replica_id, batch))
        dropped = [s for s in self._waiting if s.batch_id == batch_id]
        self._waiting_cost -= sum(_cost_between(batch, s) for s in dropped)
        self._waiting = deque(s for s in self._waiting if s.batch_id != batch_id)
        kept = (tuple(s for s in spans if s.batch_id != batch_id) for spans in self._suspects)
        self._suspects = deque(spans for spans in kept if spans)

    def is_done(self, batch_id: int) -> bool:
        """Return whether every row of the batch is finished or given up."""
        return self._batches[batch_id].num_left == 0

    def attempts(self, batch_id: int) -> npt.NDArray[np.int16]:
        """Return how often each row of the batch was handed out, int16 [rows]."""
        return self._batches[batch_id].attempts.copy()

    def num_held(self, replica_id: int) -> int:
        """Return the number of rows that a replica holds."""
        replica = self._replicas.get(replica_id)
        return replica.num_rows if replica is not None else 0

    def is_testing(self, replica_id: int) -> bool:
        """Return whether a replica runs suspects alone."""
        replica = self._replicas.get(replica_id)
        return replica is not None and replica.is_testing

    def num_waiting(self) -> int:
        """Return the number of rows that no replica holds, suspects included."""
        spans = [*self._waiting, *(s for group in self._suspects for s in group)]
        return sum(s.stop - s.start for s in spans)

    def has_waiting(self) -> bool:
        """Return whether any row waits for a replica."""
        return bool(self._waiting or self._suspects)

    def _load(self, replica_id: int) -> _Replica:
        return self._replicas.setdefault(replica_id, _Replica())

    def _unload(self, replica_id: int, batch: _Batch, rows: npt.NDArray[np.intp]) -> None:
        replica = self._load(replica_id)
        replica.num_rows -= len(rows)
        replica.cost -= batch.cost(rows)

    def _held_rows(self, replica_id: int, batch: _Batch) -> npt.NDArray[np.intp]:
        return np.flatnonzero((batch.state == _HELD) & (batch.holder == replica_id))

    def _span_cost(self, span: Span) -> int:
        return _cost_between(self._batches[span.batch_id], span)

    def _put_back(self, spans: list[Span]) -> None:
        self._waiting.extendleft(reversed(spans))
        self._waiting_cost += sum(self._span_cost(s) for s in spans)

    def _cut(self, room: Room, quota: int) -> list[Span]:
        """Take spans from the head: at least one row, else within room and quota."""
        spans: list[Span] = []
        tokens, rows = room.tokens, room.rows
        while self._waiting and (not spans or min(tokens, rows, quota) > 0):
            head = self._waiting.popleft()
            batch = self._batches[head.batch_id]
            stop = min(
                head.stop,
                head.start + rows,
                _reach(batch.prompt_ends, head.start, tokens),
                _reach(batch.cost_ends, head.start, quota),
            )
            if stop <= head.start:
                if spans:
                    self._waiting.appendleft(head)
                    break
                stop = head.start + 1
            taken = Span(head.batch_id, head.start, stop)
            spans.append(taken)
            if stop < head.stop:
                self._waiting.appendleft(Span(head.batch_id, stop, head.stop))
                break
            rows -= stop - head.start
            tokens -= int(batch.prompt_ends[stop] - batch.prompt_ends[head.start])
            quota -= _cost_between(batch, taken)
        return spans

    def _hand_out(self, replica_id: int, spans: Iterable[Span]) -> list[Span]:
        replica = self._load(replica_id)
        handed = list(spans)
        for span in handed:
            batch = self._batches[span.batch_id]
            rows = slice(span.start, span.stop)
            batch.state[rows] = _HELD
            batch.holder[rows] = replica_id
            batch.attempts[rows] += 1
            replica.num_rows += span.stop - span.start
            replica.cost += _cost_between(batch, span)
        return handed


def _ends(values: _Int64s) -> _Int64s:
    ends = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=ends[1:])
    return ends


def _reach(ends: _Int64s, start: int, budget: int) -> int:
    """Return the largest stop whose sum from `start` stays within the budget."""
    return int(np.searchsorted(ends, ends[start] + budget, side="right")) - 1


def _cost_between(batch: _Batch, span: Span) -> int:
    return int(batch.cost_ends[span.stop] - batch.cost_ends[span.start])


def _spans(batch_id: int, rows: npt.NDArray[np.intp]) -> list[Span]:
    """Return ascending rows as spans of neighbours."""
    if not len(rows):
        return []
    pieces = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return [Span(batch_id, int(piece[0]), int(piece[-1]) + 1) for piece in pieces]


def _halves(suspects: list[Span]) -> list[tuple[Span, ...]]:
    middle = (len(suspects) + 1) // 2
    return [half for half in (tuple(suspects[:middle]), tuple(suspects[middle:])) if half]
