"""Migrates running rows from one replica to another; Ray-free.

```
source:   runs ---------------------------------> stops | kept            | freed
target:          blocks come, while source decodes      | rest comes      | runs
the row:  held by source, state MOVING                           commit -> held by target
```

A failure before the commit leaves the row with the source, which resumes from the KV that it kept;
after it, the row belongs to the target. The commit is one synchronous change of the queue, so a row
always has exactly one holder (mechanisms B7, B14, C13).
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.replicas.runtime import Errors
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, LeftRow, MoveStep, Piece
from raybatch.errors import error_text
from raybatch.policy.pool.snapshot import RowMove

# copy attempts in a row that may fail to catch up with decoding
_MAX_VAIN_COPIES = 4
_STEP_TIMEOUT_S = 60.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MoveCounters:
    """Counts of rows that moved between replicas since the start of the pool."""

    num_moved: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    """Of KV."""


class _NotMovedError(Exception):
    """Why a row stays at its replica."""


class Moves:
    """Moves running rows of one pool from one replica to another: call `carry_out` for each."""

    def __init__(self, parts: PoolParts) -> None:
        self.counters = MoveCounters()
        self._queue, self._registry, self._view = parts.queue, parts.registry, parts.view
        self._members, self._on_change = parts.members, parts.on_change
        self._failed: Errors = (*parts.runtime.failed, _NotMovedError, TimeoutError)

    async def carry_out(self, move: RowMove) -> None:
        """Move one row; if a step fails, the row stays at its replica, and nothing is raised."""
        batch_id, row = move.row_id >> ROW_BITS, move.row_id & ROW_MASK
        has_moved = False
        try:
            has_moved = await self._move(move, batch_id, row)
        except self._failed as error:
            self.counters.num_failed += 1
            _logger.info(
                "row %d of batch %d was not moved and stays at its replica: %s",
                row,
                batch_id,
                error_text(error),
            )
            # both keep what they had; a dead one needs nothing
            await self._try(move.source, "stay", move.row_id)
            await self._try(move.target, "release", move.row_id)
        self._queue.end_move(move.source, batch_id, row)
        self._view.end_move(move, has_moved=has_moved)
        self._on_change()

    async def _move(self, move: RowMove, batch_id: int, row: int) -> bool:
        began = time.perf_counter()
        names = [str(self._members.get(r, "one that ended")) for r in (move.source, move.target)]
        next_block, num_bytes = await self._copy_ahead(move) if move.with_kv else (None, 0)
        stopping_s = time.perf_counter()
        left: LeftRow | None = await self._call(move.source, "depart", move.row_id, next_block)
        if left is None:
            raise _NotMovedError("the row finished")
        await self._call(move.target, "arrive", move.row_id, left.refs)
        if move.target not in self._members:
            raise _NotMovedError("the target replica exited")
        is_held = self._queue.commit_move(
            move.source, move.target, batch_id, row, with_kv=move.with_kv
        )
        if not is_held:
            raise _NotMovedError("the source replica has exited, or the row was cancelled")
        self._registry.note_checkpointed(batch_id, left.checkpointed)
        self.counters.num_moved += 1
        self.counters.num_bytes += num_bytes
        await self._try(move.target, "begin", move.row_id)
        _logger.info(
            "moved row %d of batch %d from %s to %s with %d generated tokens, %s, in %.3f s "
            "(%.3f s of downtime)",
            row,
            batch_id,
            *names,
            len(left.checkpointed.column("token_ids")[0]),
            f"{num_bytes / 1e6:.1f} MB of KV" if move.with_kv else "KV to recompute",
            time.perf_counter() - began,
            time.perf_counter() - stopping_s,
        )
        await self._try(move.source, "release", move.row_id)
        return True

    async def _copy_ahead(self, move: RowMove) -> tuple[int, int]:
        """Copy whole blocks while the source decodes; return blocks at the target, and bytes."""
        next_block = num_bytes = num_vain = 0
        is_reserved, least = False, None
        while num_vain < _MAX_VAIN_COPIES:
            began = time.perf_counter()
            piece: Piece | None = await self._call(move.source, "peek", move.row_id, next_block)
            if piece is None:
                raise _NotMovedError("the row finished or was preempted")
            if not is_reserved:
                num_blocks = piece.next_block + piece.num_missing + 1
                is_reserved = await self._call(move.target, "reserve", move.row_id, num_blocks)
                if not is_reserved:
                    raise _NotMovedError("the target replica has no free KV memory for the row")
            if not piece.refs:
                break
            if not await self._call(move.target, "receive", piece.refs):
                raise _NotMovedError("the target replica did not accept the KV of the row")
            self._view.note_copy(piece.num_bytes, time.perf_counter() - began)
            next_block, num_bytes = piece.next_block, num_bytes + piece.num_bytes
            if piece.num_missing <= 1:
                break
            num_vain = 0 if least is None or piece.num_missing < least else num_vain + 1
            least = piece.num_missing
        else:
            raise _NotMovedError("the row decodes faster than its KV is copied")
        return next_block, num_bytes

    async def _call(self, replica_id: int, step: MoveStep, *args: object) -> Any:  # noqa: ANN401
        member = self._members.get(replica_id)
        if member is None:
            raise _NotMovedError("a replica exited")
        # `StuckWatch` finds hung replicas; until then the row stays at its source
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            return await member.actor.move(step, *args)

    async def _try(self, replica_id: int, step: MoveStep, *args: object) -> None:
        """Call a replica, ignoring its death."""
        with suppress(*self._failed):
            await self._call(replica_id, step, *args)
