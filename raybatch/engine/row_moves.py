"""Live migration of rows with their KV between engines, while both keep running other rows.

The source copies whole blocks while the row decodes (`peek`); the target writes them into reserved
blocks (`receive`). Then the row stops at the source (`depart`), and the rest of its KV moves with
its tokens: at most two blocks for a row of any length. Source: live migration of Llumnix
(arXiv:2406.03243) and CascadeInfer, section 4.4.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.swap import COPY_ERRORS
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import SwappedKV
from raybatch.engine.sequences.table import DECODE, EMPTY
from raybatch.errors import RankError, error_text
from raybatch.records.sequence_kv import KVKey, SequenceKV, block_checksums
from raybatch.records.types import RowProgress, SequenceState, TokenIds


def tokens_with_kv(state: SequenceState) -> TokenIds:
    """Return the tokens of a sequence that can have KV: all but the last, the next step's input."""
    return np.concatenate((state.request.prompt_token_ids, state.token_ids))[:-1]


def state_with_kv(
    state: SequenceState, place: SwappedKV | None, owner: ModelRunner
) -> SequenceState:
    """Return a sequence's state with copies of the exact KV that is stored at `place`.

    KV that was rounded, or computed from rounded KV, is left out and must be recomputed.
    """
    key = owner.kv_key if place is not None else None
    if place is None or key is None:
        return state
    tokens = tokens_with_kv(state)[: place.num_tokens]
    first, size = place.first_block, key.block_size
    if place.num_exact is not None:
        tokens = tokens[: place.num_exact * size]
    count = -(-len(tokens) // size) - first
    if count <= 0:
        return state
    if place.rows is not None:
        blocks = place.rows[:count]
    else:
        read = owner.read_blocks if place.is_on_device else owner.tiers.read_host_blocks
        try:
            blocks = read(place.host_blocks[:count].astype(np.int64))
        except RankError as error:
            _logger.warning("moving a row without its KV, which is lost: %s", error_text(error))
            return state
    checksums = block_checksums(blocks, tokens, first_block=first, block_size=size)
    kv = SequenceKV(
        key=key, first_block=first, num_tokens=len(tokens), blocks=blocks, checksums=checksums
    )
    return replace(state, kv=kv)


def accept_kv(state: SequenceState, key: KVKey | None) -> SwappedKV | None:
    """Return the part of a migrated sequence's KV that an engine with this key can use, or None.

    The rest is recomputed; the log gives the reason.
    """
    kv, row_id = state.kv, state.request.row_id
    if kv is None:
        return None
    if kv.key != key:
        _logger.info(
            "recomputing the KV of row %s: it is of another model, dtype or block size (%s, here "
            "%s)",
            row_id,
            tuple(kv.key),
            None if key is None else tuple(key),
        )
        return None
    count = kv.num_sound(tokens_with_kv(state))
    if count < len(kv.blocks) or not count:
        _logger.warning(
            "the KV of row %s is damaged, recomputing it from token %d",
            row_id,
            (kv.first_block + count) * kv.key.block_size,
        )
    if not count:
        return None
    return SwappedKV(
        first_block=kv.first_block,
        host_blocks=np.empty(0, np.int32),
        num_tokens=min(kv.num_tokens, (kv.first_block + count) * kv.key.block_size),
        rows=kv.blocks[:count],
    )


_logger = logging.getLogger(__name__)


class RowMoves:
    """Migrates rows in and out of an engine; used by the engine thread.

    Args:
        export: `Engine.export`.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, export: Callable[..., list[SequenceState]]
    ) -> None:
        self._scheduler, self._runner, self._export = scheduler, runner, export
        self._table = scheduler.table

    def progress(self) -> RowProgress:
        return self._table.progress()

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        """Return the state of a running row, which keeps running, with copies of its KV blocks.

        The copies are of at most `max_blocks` full blocks, from `from_block` on; `kv` of the state
        is None if there are none. Returns None if the row does not run, has other samples here, or
        its KV cannot be copied.
        """
        table, slot = self._table, self._slot_of(request_id)
        if slot is None or self._runner.kv_key is None:
            return None
        record = table.record(slot)
        state = replace(record.state(), token_ids=table.generated(slot))
        num_whole = self._num_whole(slot)
        stop = min(num_whole, from_block + max_blocks)
        if stop <= from_block:
            return state
        place = SwappedKV(
            first_block=from_block,
            host_blocks=table.blocks(slot)[from_block:stop].copy(),
            num_tokens=stop * table.block_size,
            is_on_device=True,
        )
        try:
            return state_with_kv(state, place, self._runner)
        except COPY_ERRORS as error:
            _logger.warning(
                "could not copy the KV of row %s for another engine: %s",
                record.request.row_id,
                error,
            )
            return None

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Reserve blocks for an incoming row; False if rows of this engine need them."""
        table, scheduler = self._table, self._scheduler
        num_spare = scheduler.blocks.num_available - table.num_needed_blocks(table.block_size)
        is_free = table.has_free_slot and not scheduler.num_waiting
        if not is_free or num_blocks > num_spare:
            return False
        return scheduler.arrivals.reserve(request_id, num_blocks)

    def receive(self, state: SequenceState) -> bool:
        """Write the KV blocks in `state` to the cache; False, with a log message, if impossible."""
        kv, request = state.kv, state.request
        if kv is None:
            return False
        if kv.key != self._runner.kv_key:
            _logger.info(
                "refusing the KV of row %s from another engine, whose model, dtype or block size "
                "differs",
                request.row_id,
            )
            return False
        if kv.num_sound(tokens_with_kv(state)) < len(kv.blocks):
            _logger.warning(
                "refusing the KV of row %s from another engine: it was damaged in transfer",
                request.row_id,
            )
            return False
        try:
            return self._scheduler.arrivals.write(request.request_id, kv.blocks, kv.first_block)
        except (*COPY_ERRORS, RankError) as error:
            _logger.warning(
                "could not write the KV of row %s received from another engine: %s",
                request.row_id,
                error,
            )
            return False

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        """Remove a row and return the states of its sequences; none if it has ended.

        The states hold the KV from block `from_block` on; None: no KV. The full KV blocks of the
        row stay here until `restore` or `forget`, so that the row can resume here.
        """
        slot = self._slot_of(request_id)
        if slot is not None and self._runner.kv_key is not None:
            kept = self._table.blocks(slot)[: self._num_whole(slot)].copy()
            self._scheduler.arrivals.keep(request_id, kept)
        if from_block is None:
            return self._export([request_id])
        return self._export([request_id], with_kv=True, from_block=from_block)

    @property
    def is_idle(self) -> bool:
        """Return whether no KV is held for migrating rows."""
        return not self._scheduler.arrivals.tables()

    def forget(self, request_id: int) -> None:
        """Free the KV blocks held here for a row that has left, or will not arrive."""
        self._scheduler.arrivals.drop(request_id)

    def num_leaving_blocks(self) -> int:
        """Return the number of blocks that `Engine.leave` would copy."""
        table = self._table
        running = [table.record(s) for s in np.flatnonzero(table.phase != EMPTY).tolist()]
        records = (*running, *self._scheduler.waiting())
        ids = {record.request.request_id for record in records}
        places = self._scheduler.kv_places(ids, once=True).values()
        return sum(place.num_blocks for place in places if place is not None)

    def _slot_of(self, request_id: int) -> int | None:
        """Return the slot of a row with one sequence here, which decodes; else None."""
        table, slots = self._table, list[int]()
        for slot in np.flatnonzero(table.phase != EMPTY).tolist():
            if table.record(slot).request.request_id == request_id:
                slots.append(slot)
        is_waiting = any(r.request.request_id == request_id for r in self._scheduler.waiting())
        if len(slots) != 1 or is_waiting or table.phase[slots[0]] != DECODE:
            return None
        return slots[0]

    def _num_whole(self, slot: int) -> int:
        """Return the number of leading blocks that are full and exact."""
        table = self._table
        # the GPU may be one token ahead of the host
        num_tokens = min(table.num_computed[slot], table.num_tokens[slot] - 1)
        return min(int(num_tokens) // table.block_size, int(table.num_exact[slot]))
