"""Rows that a second replica computes as well: each has one owner, and its copy is marked here.

    begin --> copy --- owner finishes, or copy does ---> the other run ends --> confirmed
                 |---- owner dies, or gives the row back ---> the copy is the row
                 `---- its own replica dies, or gives it back ---> nothing is left of it

Whoever finishes first is the owner from then on, and what the other sends later is of a row that is
done. The run that ends counts to the load of its replica until that has confirmed that it runs it
no more. A row has one copy in its life, so that a row that kills engines ends in their deaths.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from raybatch.actors.queue.row_states import HELD, NoCopies, ReplicaLoad, Rows, RowStates, Share
from raybatch.actors.queue.waiting_line import PrefixAffinity
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK
from raybatch.records.arrays import Bools, Ints


@dataclass(slots=True)
class CopyCounters:
    """Copies since the start of the pool."""

    num_duplicates: int = 0
    num_won_duplicates: int = 0
    """That finished before their owners."""


class OwnedRows(NamedTuple):
    """Rows of one row batch, their owners and the lengths of their prompts, [S] each."""

    batch_id: int
    rows: Rows
    owners: Ints
    prompts: Ints


class Copies(NoCopies):
    """Copies of rows of one queue; a row is named by its id, as in a request.

    Args:
        batches: of the queue; read, and changed where a copy becomes the row.
        loads: of all replicas, changed in place.
    """

    def __init__(
        self,
        batches: Mapping[int, RowStates],
        loads: dict[int, ReplicaLoad],
        affinity: PrefixAffinity,
    ) -> None:
        self.counters = CopyCounters()
        self._batches, self._loads, self._affinity = batches, loads, affinity
        # of each row with a copy, the replica that has it
        self._at: dict[int, int] = {}
        self._had: set[int] = set()
        # replica and row, until it is confirmed
        self._ending: dict[tuple[int, int], Share] = {}
        self._losers: list[tuple[int, int]] = []

    def __contains__(self, row_id: int) -> bool:
        return row_id in self._at

    def row_ids(self) -> list[int]:
        return list(self._at)

    def are_at(self, replica_ids: Ints, row_ids: Ints) -> Bools:
        found = np.zeros(len(row_ids), np.bool_)
        if self._at:
            (places,) = np.nonzero(np.isin(row_ids, list(self._at)))
            at = [self._at[row_id] for row_id in row_ids[places].tolist()]
            found[places] = replica_ids[places] == at
        return found

    def may_begin(self, row_id: int) -> bool:
        """Return whether a row is held, on no way elsewhere, by itself, and had no copy yet."""
        batch, row = self._batches.get(row_id >> ROW_BITS), row_id & ROW_MASK
        if batch is None or batch.state[row] != HELD or row_id in self._had:
            return False
        return not self._loads[int(batch.holder[row])].is_testing

    def begin(self, replica_id: int, row_id: int) -> bool:
        """Note that a replica gets a copy of a row of another one; False where it may not."""
        if not self.may_begin(row_id):
            return False
        batch, row = self._place(row_id)
        load = self._loads.setdefault(replica_id, ReplicaLoad())
        if load.is_testing or batch.holder[row] == replica_id:
            return False
        self._at[row_id] = replica_id
        self._had.add(row_id)
        self.counters.num_duplicates += 1
        self._affinity.start(replica_id, load.add(batch.share(np.array([row]))))
        return True

    def held(self) -> Iterator[OwnedRows]:
        """Yield the rows of each row batch that replicas own; O(rows in the queue)."""
        for batch_id, batch in self._batches.items():
            rows = np.flatnonzero(batch.state == HELD)
            if len(rows):
                yield OwnedRows(batch_id, rows, batch.holder[rows], batch.prompt[rows])

    def settle(self, replica_id: int, batch_id: int, rows: Rows) -> None:
        if not self._at:
            return
        for row_id in (batch_id << ROW_BITS | row for row in rows.tolist()):
            if (at := self._at.get(row_id)) is None:
                continue
            batch, row = self._place(row_id)
            owner = int(batch.holder[row])
            if replica_id in (owner, at):
                self.counters.num_won_duplicates += replica_id == at
                batch.holder[row] = replica_id
                del self._at[row_id]
                self._end(owner if replica_id == at else at, row_id)

    def inherit(self, batch_id: int, rows: Rows) -> Bools:
        is_taken = np.zeros(len(rows), np.bool_)
        for place, row in enumerate(rows.tolist() if self._at else ()):
            at = self._at.pop(batch_id << ROW_BITS | row, None)
            if at is not None:
                self._batches[batch_id].hold(at, row, row + 1)
                is_taken[place] = True
        return is_taken

    def give_back(self, replica_id: int, batch_id: int, rows: Rows) -> list[int]:
        left: list[int] = []
        for row_id in (batch_id << ROW_BITS | row for row in rows.tolist()):
            if self._at.get(row_id) == replica_id:
                del self._at[row_id]
                left += self._loads[replica_id].remove(self._share(row_id))
        return left

    def forget(self, replica_id: int) -> None:
        self._at = {row_id: at for row_id, at in self._at.items() if at != replica_id}
        self._ending = {key: share for key, share in self._ending.items() if key[0] != replica_id}

    def drop(self, batch_id: int) -> dict[int, list[int]]:
        rows: dict[int, list[int]] = {}
        for row_id in [i for i in self._at if i >> ROW_BITS == batch_id]:
            rows.setdefault(self._at.pop(row_id), []).append(row_id & ROW_MASK)
        self._had = {row_id for row_id in self._had if row_id >> ROW_BITS != batch_id}
        return rows

    def take_losers(self) -> list[tuple[int, int]]:
        """Return replicas and rows that they are to abort, since the last call."""
        losers, self._losers = self._losers, []
        return losers

    def note_aborted(self, replica_id: int, row_id: int) -> None:
        """Note that a replica does not run a row any more that another has finished."""
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
