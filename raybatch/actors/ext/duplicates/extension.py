"""Lets idle replicas compute the last rows too, as `choose_duplicates` decides; no Ray."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from raybatch.actors.coordinator.parts import PoolExtension, PoolParts
from raybatch.actors.ext.duplicates.copies import Copies, OwnedRows
from raybatch.actors.ext.duplicates.policy import (
    Duplicate,
    HeldRows,
    Owner,
    Spare,
    choose_duplicates,
)
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Span
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot

# of the usual step of a replica, and in all, from which on without one it may have hung
_SILENT_STEPS, _SILENT_S = 4.0, 3.0

# replicas with rows, and those without
Ends = tuple[list[Owner], list[Spare]]

_logger = logging.getLogger(__name__)


class CopyRows(NamedTuple):
    """An idle replica is to compute rows of others as well."""

    target: int
    rows: tuple[Duplicate, ...]


class Duplicates(PoolExtension):
    """Second copies of running rows of one pool."""

    actions = (CopyRows,)

    def __init__(self, parts: PoolParts) -> None:
        self._parts, self._view = parts, parts.view
        self._mailbox, self._queue = parts.mailbox, parts.queue
        self.copies = parts.queue.attach(Copies)
        # of replicas that may hang, seconds without a step
        self._silent_s: dict[int, float] = {}

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> Ends:
        """Return who has rows and who has none; keep moves off replicas that may hang."""
        still_s = self._parts.stuck.still_s()
        self._silent_s = {r: s for r, s in still_s.items() if s > self._patience_s(r)}
        self._view.silent = self._silent_s.keys()
        if self._queue.num_waiting():
            return [], []
        spares = [spare for r in self._parts.hungry() if (spare := self._spare(r)) is not None]
        return self._owners() if spares else [], spares

    def plan(self, snapshot: Ends, plan: PoolPlan) -> Sequence[CopyRows]:
        """Return the copies that are worth it now."""
        owners, spares = snapshot
        # a move is better than a copy, unless the owner of a row hangs
        owners = [each for each in owners if plan.is_settled or each.silent_s]
        chosen: dict[int, tuple[Duplicate, ...]] = {}
        for each in choose_duplicates(owners, spares):
            chosen[each.target] = (*chosen.get(each.target, ()), each)
        return [CopyRows(*copies) for copies in chosen.items()]

    def apply(self, action: CopyRows) -> None:
        """Hand copies out, where the replica is still idle."""
        # another action of the same plan may have found work for it
        if action.target not in self._parts.hungry() or self._spare(action.target) is None:
            return
        begun = [each for each in action.rows if self.copies.begin(action.target, each.row_id)]
        if begun:
            self._parts.hand_out(action.target, [_span(each.row_id) for each in begun])
        for each in begun:
            _log(each)

    def note_change(self) -> None:
        """Abort the runs of rows that another replica has finished first."""
        for replica_id, row_id in self.copies.take_losers():
            if (member := self._parts.members.get(replica_id)) is not None:
                self._parts.spawn(self._abort(member, row_id))

    def counts(self) -> dict[str, int]:
        counters = self.copies.counters
        return {
            "duplicates": counters.num_duplicates,
            "won_duplicates": counters.num_won_duplicates,
        }

    async def _abort(self, member: Member, row_id: int) -> None:
        # the engine may have broken, which is noticed where its end is awaited
        with suppress(*self._parts.site.failed):
            await member.actor.abort_row(row_id)
            self.copies.note_aborted(member.replica_id, row_id)
            self._parts.on_change()

    def _patience_s(self, replica_id: int) -> float:
        seconds = self._view.rates.seconds(replica_id)
        num_rows = self._queue.load(replica_id).num_rows
        step_s = 0.0 if seconds is None else seconds.step_s + seconds.row_s * num_rows
        return max(_SILENT_S, _SILENT_STEPS * step_s)

    def _spare(self, replica_id: int) -> Spare | None:
        """Return an idle replica with what it has room for; None for one that is not, or new."""
        capacity, seconds = self._view.capacity(replica_id), self._view.rates.seconds(replica_id)
        if capacity is None or seconds is None:
            return None
        if self._queue.load(replica_id).num_rows or self._view.num_moves(replica_id):
            return None
        return Spare(replica_id, seconds, capacity.max_num_seqs, capacity.kv_tokens)

    def _owners(self) -> list[Owner]:
        held: dict[int, list[HeldRows]] = {}
        for of_batch in self.copies.held():
            if of_batch.batch_id in self._mailbox.lengths:
                rows, owners = self._rows_of(of_batch), of_batch.owners
                for replica_id in np.unique(owners).tolist():
                    held.setdefault(replica_id, []).append(rows.take(owners == replica_id))
        return [
            Owner(
                replica_id=replica_id,
                seconds=seconds,
                silent_s=self._silent_s.get(replica_id, 0.0),
                rows=HeldRows.joined(of_batches),
            )
            for replica_id, of_batches in held.items()
            if (seconds := self._view.rates.seconds(replica_id)) is not None
        ]

    def _rows_of(self, held: OwnedRows) -> HeldRows:
        batch_id, rows = held.batch_id, held.rows
        generated, left = self._mailbox.lengths.so_far(batch_id, rows)
        num_begun = self._mailbox.num_begun(batch_id, rows.tolist())
        ids = rows.astype(np.int64) | batch_id << ROW_BITS
        may_copy = [self.copies.may_begin(i) and not self._view.is_moving(i) for i in ids.tolist()]
        return HeldRows(
            ids=ids,
            prompt=held.prompts,
            generated=generated,
            kept=np.minimum(num_begun, generated),
            left=np.maximum(1.0, left),
            may_copy=np.array(may_copy),
        )


def _span(row_id: int) -> Span:
    row = row_id & ROW_MASK
    return Span(row_id >> ROW_BITS, row, row + 1)


def _log(begun: Duplicate) -> None:
    _logger.info(
        "row %d of batch %d runs on a second engine as well, for %.1f s: its own would take %.1f s",
        begun.row_id & ROW_MASK,
        begun.row_id >> ROW_BITS,
        begun.copy_s,
        begun.row_s,
    )
