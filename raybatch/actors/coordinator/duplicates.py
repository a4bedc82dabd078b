"""Lets idle replicas compute the last rows as well: as `choose_duplicates` decides; no Ray."""

import logging

import numpy as np

from raybatch.actors.coordinator.levelling import Levelling
from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.queue.copies import OwnedRows
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Span
from raybatch.policy.pool.duplicates import Duplicate, HeldRows, Owner, Spare, choose_duplicates

# of the usual step of a replica, and in all, from which on without one it may have hung
_SILENT_STEPS, _SILENT_S = 4.0, 3.0

_logger = logging.getLogger(__name__)


class Duplicates:
    """Second copies of running rows of one pool, where `pool.duplicate_last_rows` is on."""

    def __init__(self, parts: PoolParts, levelling: Levelling) -> None:
        self._is_on = parts.pool.duplicate_last_rows
        self._parts, self._levelling, self._view = parts, levelling, parts.view
        self._mailbox, self._queue = parts.mailbox, parts.queue
        self._copies = parts.queue.copies
        # of replicas that may hang, seconds without a step
        self._silent_s: dict[int, float] = {}

    def look(self, now: float) -> None:
        """Begin the copies that are worth it now, and keep moves off replicas that may hang."""
        if not self._is_on:
            return
        still_s = self._parts.stuck.still_s()
        self._silent_s = {r: s for r, s in still_s.items() if s > self._patience_s(r)}
        self._view.silent = self._silent_s.keys()
        if self._queue.num_waiting():
            return
        spares = [spare for r in self._parts.hungry() if (spare := self._spare(r)) is not None]
        if not spares:
            return
        begun: dict[int, list[Duplicate]] = {}
        for each in choose_duplicates(self._owners(), spares):
            if self._copies.begin(each.target, each.row_id):
                begun.setdefault(each.target, []).append(each)
        for replica_id, copies in begun.items():
            self._parts.hand_out(replica_id, [_span(each.row_id) for each in copies])
            for each in copies:
                _log(each)

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
        # a move is better than a copy, unless the owner of a row hangs
        is_settled = self._levelling.is_settled
        held: dict[int, list[HeldRows]] = {}
        for of_batch in self._copies.held():
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
            and (is_settled or replica_id in self._silent_s)
        ]

    def _rows_of(self, held: OwnedRows) -> HeldRows:
        batch_id, rows = held.batch_id, held.rows
        generated, left = self._mailbox.lengths.so_far(batch_id, rows)
        num_begun = self._mailbox.num_begun(batch_id, rows.tolist())
        ids = rows.astype(np.int64) | batch_id << ROW_BITS
        may_copy = [self._copies.may_begin(i) and not self._view.is_moving(i) for i in ids.tolist()]
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
