"""Rows on their way from one engine to another, with their KV, while both go on with others.

The source copies whole blocks while it decodes (`peek`), the target writes them into blocks that it
has reserved (`receive`). Then the row stops at the source (`depart`), and what is left travels with
its tokens: a block and a part of one, however long it is. Source: live migration of Llumnix
(arXiv:2406.03243) and CascadeInfer, section 4.4.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.block_copies import COPY_ERRORS
from raybatch.engine.memory.kv_moves import state_with_kv, tokens_with_kv
from raybatch.engine.scheduling.scheduler import Scheduler
from raybatch.engine.sequences.block_manager import SwappedKV
from raybatch.engine.sequences.table import DECODE, EMPTY
from raybatch.errors import TeamError
from raybatch.records.types import RowProgress, SequenceState

_logger = logging.getLogger(__name__)


class RowMoves:
    """What an engine does about rows that come and go; of its thread.

    Args:
        export: that of the engine.
    """

    def __init__(
        self, scheduler: Scheduler, runner: ModelRunner, export: Callable[..., list[SequenceState]]
    ) -> None:
        self._scheduler, self._runner, self._export = scheduler, runner, export
        self._table = scheduler.table

    def progress(self) -> RowProgress:
        return self._table.progress()

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        """Return a running row with copies of whole blocks; it goes on.

        None where it does not run, has other samples here, or is in no state to be copied. `kv` is
        None where there are no such blocks.
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
            _logger.warning("the KV of row %s is not copied: %s", record.request.row_id, error)
            return None

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Keep so many blocks for a row; False where rows of this engine want them."""
        table, scheduler = self._table, self._scheduler
        num_spare = scheduler.blocks.num_available - table.num_needed_blocks(table.block_size)
        is_free = table.has_free_slot and not scheduler.num_waiting
        if not is_free or num_blocks > num_spare:
            return False
        return scheduler.arrivals.reserve(request_id, num_blocks)

    def receive(self, state: SequenceState) -> bool:
        """Write copies of whole blocks; False where they cannot be used, and the log says why."""
        kv, request = state.kv, state.request
        if kv is None:
            return False
        if kv.key != self._runner.kv_key:
            _logger.info("the KV of row %s is of an engine unlike this one", request.row_id)
            return False
        if kv.num_sound(tokens_with_kv(state)) < len(kv.blocks):
            _logger.warning("the KV of row %s was damaged on its way", request.row_id)
            return False
        try:
            return self._scheduler.arrivals.write(request.request_id, kv.blocks, kv.first_block)
        except (*COPY_ERRORS, TeamError) as error:
            _logger.warning("the KV of row %s is not taken: %s", request.row_id, error)
            return False

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        """Take a row out as `export` does, with its KV from a block on; no state if it has ended.

        None takes no KV along.
        Its blocks stay until `restore` or `forget`, so that it can go on here.
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
        """Return whether nothing is kept for rows that come or have left."""
        return not self._scheduler.arrivals.tables()

    def forget(self, request_id: int) -> None:
        """Free what is kept for a row that has left, or will not come."""
        self._scheduler.arrivals.drop(request_id)

    def num_leaving_blocks(self) -> int:
        """Return the blocks of which `Engine.leave` holds copies."""
        table = self._table
        running = [table.record(s) for s in np.flatnonzero(table.phase != EMPTY).tolist()]
        records = (*running, *self._scheduler.waiting())
        ids = {record.request.request_id for record in records}
        places = self._scheduler.kv_places(ids, once=True).values()
        return sum(place.num_blocks for place in places if place is not None)

    def _slot_of(self, request_id: int) -> int | None:
        """Return the slot of a row whose only sequence here is running and has all its KV."""
        table, slots = self._table, list[int]()
        for slot in np.flatnonzero(table.phase != EMPTY).tolist():
            if table.record(slot).request.request_id == request_id:
                slots.append(slot)
        is_waiting = any(r.request.request_id == request_id for r in self._scheduler.waiting())
        if len(slots) != 1 or is_waiting or table.phase[slots[0]] != DECODE:
            return None
        return slots[0]

    def _num_whole(self, slot: int) -> int:
        """Return the leading blocks that are full, and exact."""
        table = self._table
        # a GPU may have computed with a token that is not read yet
        num_tokens = min(table.num_computed[slot], table.num_tokens[slot] - 1)
        return min(int(num_tokens) // table.block_size, int(table.num_exact[slot]))
