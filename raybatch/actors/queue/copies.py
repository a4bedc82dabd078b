"""Speculative copies: rows that a second replica runs as well. Each row has one owner.

    begin --> copy --- owner or copy finishes ---------------> the other run is aborted, confirmed
                 |---- owner dies, or gives the row back ----> the copy becomes the row
                 `---- its replica dies, or gives it back ---> the copy is gone

The first to finish becomes the owner; later results of the other are dropped. An aborted run counts
as load until its replica confirms. A row gets one copy in its life, so that a row that crashes
engines does not spread. Without the extension that begins copies there are none.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from raybatch.actors.queue.row_states import HELD, ReplicaLoad, Rows, RowStates, Share
from raybatch.actors.queue.waiting_queues import PrefixAffinity
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK
from raybatch.records.arrays import Bools, Ints


class OwnedRows(NamedTuple):
    """Rows of one row batch, the id of the replica that owns each, and its prompt tokens, [S]."""

    batch_id: int
    rows: Rows
    owners: Ints
    prompts: Ints


class SpeculativeCopies:
    """Tracks speculative copies of rows of one queue: `begin` one, `settle` finished rows.

    A `row_id` is the request id of a row, which contains its batch.

    Args:
        batches: row states of the queue, modified if the copy finishes first.
        loads: load of each replica by id, modified in place.
        affinity: replicas of prefix groups, modified in place.
    """

    def __init__(
        self,
        batches: Mapping[int, RowStates],
        loads: dict[int, ReplicaLoad],
        affinity: PrefixAffinity,
    ) -> None:
        # copies since the start of the pool, and those that finished before their owners
        self.num_launched = self.num_won = 0
        self._batches, self._loads, self._affinity = batches, loads, affinity
        # by row with a copy, the replica of the copy
        self._at: dict[int, int] = {}
        self._had: set[int] = set()
        # by replica and row, until the abort is confirmed
        self._ending: dict[tuple[int, int], Share] = {}
        self._losers: list[tuple[int, int]] = []

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._at

    def row_ids(self) -> list[int]:
        """Return the request ids of rows with a copy."""
        return list(self._at)

    def are_at(self, replica_ids: Ints, row_ids: Ints) -> Bools:
        """Return whether replica `replica_ids[i]` has a copy of row `row_ids[i]`, [S]."""
        found = np.zeros(len(row_ids), np.bool_)
        if self._at:
            (places,) = np.nonzero(np.isin(row_ids, list(self._at)))
            at = [self._at[row_id] for row_id in row_ids[places].tolist()]
            found[places] = replica_ids[places] == at
        return found

    def may_begin(self, row_id: int) -> bool:
        """Return whether a row may get a copy.

        It must be held by a replica, not move or be tested alone, and have had no copy.
        """
        batch, row = self._batches.get(row_id >> ROW_BITS), row_id & ROW_MASK
        if batch is None or batch.state[row] != HELD or row_id in self._had:
            return False
        return not self._loads[int(batch.holder[row])].is_testing

    def begin(self, replica_id: int, row_id: int) -> bool:
        """Note that a replica gets a copy of another replica's row; return False if it may not."""
        if not self.may_begin(row_id):
            return False
        batch, row = self._place(row_id)
        load = self._loads.setdefault(replica_id, ReplicaLoad())
        if load.is_testing or batch.holder[row] == replica_id:
            return False
        self._at[row_id] = replica_id
        self._had.add(row_id)
        self.num_launched += 1
        self._affinity.start(replica_id, load.add(batch.share(np.array([row]))))
        return True

    def held(self) -> Iterator[OwnedRows]:
        """Yield the rows of each row batch that replicas own; O(rows in the queue)."""
        for batch_id, batch in self._batches.items():
            rows = np.flatnonzero(batch.state == HELD)
            if len(rows):
                yield OwnedRows(batch_id, rows, batch.holder[rows], batch.prompt[rows])

    def settle(self, replica_id: int, batch_id: int, rows: Rows) -> None:
        """Make a replica that finished rows their holder; their other runs are to be aborted."""
        if not self._at:
            return
        for row_id in (batch_id << ROW_BITS | row for row in rows.tolist()):
            if (at := self._at.get(row_id)) is None:
                continue
            batch, row = self._place(row_id)
            owner = int(batch.holder[row])
            if replica_id in (owner, at):
                self.num_won += replica_id == at
                batch.holder[row] = replica_id
                del self._at[row_id]
                self._end(owner if replica_id == at else at, row_id)

    def inherit(self, batch_id: int, rows: Rows) -> Bools:
        """Let the replicas with copies of lost rows hold these rows; return a mask of them."""
        is_taken = np.zeros(len(rows), np.bool_)
        for place, row in enumerate(rows.tolist() if self._at else ()):
            at = self._at.pop(batch_id << ROW_BITS | row, None)
            if at is not None:
                self._batches[batch_id].hold(at, row, row + 1)
                is_taken[place] = True
        return is_taken

    def give_back(self, replica_id: int, batch_id: int, rows: Rows) -> list[int]:
        """Forget unstarted copies of a replica; return the groups of which it has no rows left."""
        left: list[int] = []
        for row_id in (batch_id << ROW_BITS | row for row in (rows.tolist() if self._at else ())):
            if self._at.get(row_id) == replica_id:
                del self._at[row_id]
                left += self._loads[replica_id].remove(self._share(row_id))
        return left

    def forget(self, replica_id: int) -> None:
        """Forget the copies at a replica that has exited."""
        self._at = {row_id: at for row_id, at in self._at.items() if at != replica_id}
        self._ending = {key: share for key, share in self._ending.items() if key[0] != replica_id}

    def drop(self, batch_id: int) -> dict[int, list[int]]:
        """Forget the copies of a row batch; return the rows by the replica of their copy."""
        rows: dict[int, list[int]] = {}
        for row_id in [i for i in self._at if i >> ROW_BITS == batch_id]:
            rows.setdefault(self._at.pop(row_id), []).append(row_id & ROW_MASK)
        self._had = {row_id for row_id in self._had if row_id >> ROW_BITS != batch_id}
        return rows

    def take_losers(self) -> list[tuple[int, int]]:
        """Return new (replica id, row id) pairs of runs to abort, as another replica was faster."""
        losers, self._losers = self._losers, []
        return losers

    def note_aborted(self, replica_id: int, row_id: int) -> None:
        """Note that a replica has aborted a row that another has finished."""
        share = self._ending.pop((replica_id, row_id), None)
        if share is not None:
            self._affinity.end(replica_id, self._loads[replica_id].remove(share))

    def _end(self, replica_id: int, row_id: int) -> None:
        self._ending[replica_id, row_id] = self._share(row_id)
        self._losers.append((replica_id, row_id))

    def _share(self, row_id: int) -> Share:
        batch, row = self._place(row_id)
        return batch.share(np.array([row]))

    def _place(self, row_id: int) -> tuple[RowStates, int]:
        return self._batches[row_id >> ROW_BITS], row_id & ROW_MASK
