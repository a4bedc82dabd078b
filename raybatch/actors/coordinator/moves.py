"""Carries out moves of running rows from one replica to another; no Ray.

```
source:   runs ---------------------------------> stops | kept            | freed
target:          blocks come, while source decodes      | rest comes      | runs
the row:  held by source, state MOVING                           commit -> held by target
```

Whatever dies or fails before the commit leaves the row with the source, which goes on with what it
kept; afterwards it is the target's, whose death is like any other. The commit is one synchronous
change of the queue, so a row has one holder at every moment (mechanisms B7, B14, C13).
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.replicas.site import Errors
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, LeftRow, MoveStep, Piece
from raybatch.errors import error_text
from raybatch.policy.pool.snapshot import RowMove

# copies that do not catch up with what is decoded meanwhile end after so many
_MAX_VAIN_COPIES = 4
_STEP_TIMEOUT_S = 60.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class MoveCounters:
    """Moves since the start of the pool."""

    num_moved: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    """Of KV."""


class _NotMovedError(Exception):
    """Why a row stays where it is."""


class Moves:
    """The moves of one pool; each is a coroutine that the coordinator runs beside others."""

    def __init__(self, parts: PoolParts) -> None:
        self.counters = MoveCounters()
        self._queue, self._mailbox, self._view = parts.queue, parts.mailbox, parts.view
        self._members, self._on_change = parts.members, parts.on_change
        self._failed: Errors = (*parts.site.failed, _NotMovedError, TimeoutError)

    async def carry_out(self, move: RowMove) -> None:
        """Move one row, or leave it as it was; raises nothing of a replica."""
        batch_id, row = move.row_id >> ROW_BITS, move.row_id & ROW_MASK
        has_moved = False
        try:
            has_moved = await self._move(move, batch_id, row)
        except self._failed as error:
            self.counters.num_failed += 1
            _logger.info("row %d of batch %d does not move: %s", row, batch_id, error_text(error))
            # each has what it had; one that died needs nothing
            await self._try(move.source, "stay", move.row_id)
            await self._try(move.target, "release", move.row_id)
        self._queue.end_move(move.source, batch_id, row)
        self._view.end_move(move, has_moved=has_moved)
        self._on_change()

    async def _move(self, move: RowMove, batch_id: int, row: int) -> bool:
        began = time.perf_counter()
        names = [str(self._members.get(r, "one that ended")) for r in (move.source, move.target)]
        next_block, num_bytes = await self._copy_ahead(move) if move.with_kv else (None, 0)
        asked = time.perf_counter()
        left: LeftRow | None = await self._call(move.source, "depart", move.row_id, next_block)
        if left is None:
            raise _NotMovedError("it has ended")
        await self._call(move.target, "arrive", move.row_id, left.refs)
        if move.target not in self._members:
            raise _NotMovedError("the other replica has ended")
        is_held = self._queue.commit_move(
            move.source, move.target, batch_id, row, with_kv=move.with_kv
        )
        if not is_held:
            raise _NotMovedError("its replica has ended, or nobody waits for it")
        self._mailbox.note_begun(batch_id, left.begun)
        self.counters.num_moved += 1
        self.counters.num_bytes += num_bytes
        await self._try(move.target, "begin", move.row_id)
        _logger.info(
            "row %d of batch %d moved from %s to %s with %d tokens of its own, %s, in "
            "%.3f s, of which %.3f s to stop it and hand it over",
            row,
            batch_id,
            *names,
            len(left.begun.column("token_ids")[0]),
            f"{num_bytes / 1e6:.1f} MB of KV" if move.with_kv else "KV computed again",
            time.perf_counter() - began,
            time.perf_counter() - asked,
        )
        await self._try(move.source, "release", move.row_id)
        return True

    async def _copy_ahead(self, move: RowMove) -> tuple[int, int]:
        """Copy whole blocks while the source decodes; return how many the target has, and bytes."""
        next_block = num_bytes = num_vain = 0
        is_reserved, least = False, None
        while num_vain < _MAX_VAIN_COPIES:
            began = time.perf_counter()
            piece: Piece | None = await self._call(move.source, "peek", move.row_id, next_block)
            if piece is None:
                raise _NotMovedError("it has ended, or was preempted")
            if not is_reserved:
                num_blocks = piece.next_block + piece.num_missing + 1
                is_reserved = await self._call(move.target, "reserve", move.row_id, num_blocks)
                if not is_reserved:
                    raise _NotMovedError("the other replica has no KV memory for it")
            if not piece.refs:
                break
            if not await self._call(move.target, "receive", piece.refs):
                raise _NotMovedError("the other replica could not take its KV")
            self._view.note_copy(piece.num_bytes, time.perf_counter() - began)
            next_block, num_bytes = piece.next_block, num_bytes + piece.num_bytes
            if piece.num_missing <= 1:
                break
            num_vain = 0 if least is None or piece.num_missing < least else num_vain + 1
            least = piece.num_missing
        else:
            raise _NotMovedError("it decodes faster than its KV is copied")
        return next_block, num_bytes

    async def _call(self, replica_id: int, step: MoveStep, *args: object) -> Any:  # noqa: ANN401
        member = self._members.get(replica_id)
        if member is None:
            raise _NotMovedError("a replica has ended")
        # one that hangs is found elsewhere; until then its row goes on where it was
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            return await member.actor.move(step, *args)

    async def _try(self, replica_id: int, step: MoveStep, *args: object) -> None:
        """Tell a replica something that does not matter once it is dead."""
        with suppress(*self._failed):
            await self._call(replica_id, step, *args)
