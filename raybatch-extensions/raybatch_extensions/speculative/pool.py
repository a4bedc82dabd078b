"""Launches the speculative copies that `choose_copies` decides; Ray-free."""

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from raybatch.actors.coordinator.parts import MakeExtension, PoolExtension, PoolParts
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, PoolSpec, RowRange
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch_extensions.speculative.copies import OwnedRows, SpeculativeCopies
from raybatch_extensions.speculative.policy import (
    HeldRows,
    Owner,
    Spare,
    SpeculativeCopy,
    choose_copies,
)

# without a step for this many usual steps and seconds, a replica may have hung
_SILENT_STEPS, _SILENT_S = 4.0, 3.0

# replicas with rows, and those without
Ends = tuple[list[Owner], list[Spare]]

_logger = logging.getLogger("raybatch.extensions.speculative.pool")


class LaunchCopies(NamedTuple):
    """Launch copies of rows at an idle replica."""

    target: int
    rows: tuple[SpeculativeCopy, ...]


class SpeculativeExecution(PoolExtension):
    """Launches speculative copies of the last rows of one pool."""

    actions = (LaunchCopies,)

    def __init__(self, parts: PoolParts) -> None:
        self._parts, self._view = parts, parts.view
        self._registry, self._queue = parts.registry, parts.queue
        self.copies = parts.queue.attach(SpeculativeCopies)
        # seconds without a step, of replicas that may hang
        self._silent_s: dict[int, float] = {}

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> Ends:
        """Return (replicas with rows, idle replicas); both are empty while rows wait.

        Also excludes replicas that may hang from moves.
        """
        still_s = self._parts.stuck.still_s()
        self._silent_s = {r: s for r, s in still_s.items() if s > self._patience_s(r)}
        self._view.silent = self._silent_s.keys()
        if self._queue.num_waiting():
            return [], []
        spares = [spare for r in self._parts.demand() if (spare := self._spare(r)) is not None]
        return self._owners() if spares else [], spares

    def plan(self, snapshot: Ends, plan: PoolPlan) -> Sequence[LaunchCopies]:
        """Return the copies that pay off now."""
        owners, spares = snapshot
        # a move is better than a copy, unless the owner of a row hangs
        owners = [each for each in owners if plan.is_settled or each.silent_s]
        chosen: dict[int, tuple[SpeculativeCopy, ...]] = {}
        for each in choose_copies(owners, spares):
            chosen[each.target] = (*chosen.get(each.target, ()), each)
        return [LaunchCopies(*copies) for copies in chosen.items()]

    def apply(self, action: LaunchCopies) -> None:
        """Launch copies at an idle replica, if it is still idle."""
        # another action of the same plan may have given it rows
        if action.target not in self._parts.demand() or self._spare(action.target) is None:
            return
        launched = [each for each in action.rows if self.copies.begin(action.target, each.row_id)]
        if launched:
            self._parts.hand_out(action.target, [_row_range(each.row_id) for each in launched])
        for each in launched:
            _log(each)

    def note_change(self) -> None:
        """Abort runs of rows that another replica finished first."""
        for replica_id, row_id in self.copies.take_losers():
            if (member := self._parts.members.get(replica_id)) is not None:
                self._parts.spawn(self._abort(member, row_id))

    def counts(self) -> dict[str, int]:
        counters = self.copies.counters
        return {"duplicates": counters.num_launched, "won_duplicates": counters.num_won}

    async def _abort(self, member: Member, row_id: int) -> None:
        # `ReplicaSet` handles a broken engine
        with suppress(*self._parts.runtime.failed):
            await member.actor.abort_row(row_id)
            self.copies.note_aborted(member.replica_id, row_id)
            self._parts.on_change()

    def _patience_s(self, replica_id: int) -> float:
        seconds = self._view.throughput.seconds(replica_id)
        num_rows = self._queue.load(replica_id).num_rows
        step_s = 0.0 if seconds is None else seconds.step_s + seconds.row_s * num_rows
        return max(_SILENT_S, _SILENT_STEPS * step_s)

    def _spare(self, replica_id: int) -> Spare | None:
        """Return an idle replica and its capacity; None if it is busy or new."""
        capacity, seconds = (
            self._view.capacity(replica_id),
            self._view.throughput.seconds(replica_id),
        )
        if capacity is None or seconds is None:
            return None
        if self._queue.load(replica_id).num_rows or self._view.num_moves(replica_id):
            return None
        return Spare(replica_id, seconds, capacity.max_num_seqs, capacity.kv_tokens)

    def _owners(self) -> list[Owner]:
        held: dict[int, list[HeldRows]] = {}
        for of_batch in self.copies.held():
            if of_batch.batch_id in self._registry.lengths:
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
            if (seconds := self._view.throughput.seconds(replica_id)) is not None
        ]

    def _rows_of(self, held: OwnedRows) -> HeldRows:
        batch_id, rows = held.batch_id, held.rows
        generated, left = self._registry.lengths.tokens_so_far(batch_id, rows)
        num_checkpointed = self._registry.num_checkpointed(batch_id, rows.tolist())
        ids = rows.astype(np.int64) | batch_id << ROW_BITS
        may_copy = [self.copies.may_begin(i) and not self._view.is_moving(i) for i in ids.tolist()]
        return HeldRows(
            ids=ids,
            prompt=held.prompts,
            generated=generated,
            kept=np.minimum(num_checkpointed, generated),
            left=np.maximum(1.0, left),
            may_copy=np.array(may_copy),
        )


def _row_range(row_id: int) -> RowRange:
    row = row_id & ROW_MASK
    return RowRange(row_id >> ROW_BITS, row, row + 1)


def _log(launched: SpeculativeCopy) -> None:
    _logger.info(
        "running a copy of row %d of batch %d on an idle engine: it should finish in %.1f s, on "
        "its own engine in %.1f s",
        launched.row_id & ROW_MASK,
        launched.row_id >> ROW_BITS,
        launched.copy_s,
        launched.row_s,
    )


def make_speculative_execution(spec: PoolSpec, plan: Placement) -> MakeExtension:
    """Return what makes the extension; an entry point."""
    return SpeculativeExecution
