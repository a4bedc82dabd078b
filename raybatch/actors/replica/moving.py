"""Rows on their way from one replica to another, as each of both sees them; no Ray."""

import asyncio
from collections.abc import Callable
from typing import Literal

from raybatch.actors.replica.engine_thread import EngineThread, RowStates
from raybatch.actors.replicas.site import ReplicaSite
from raybatch.actors.wire.begun import encode_begun
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, LeftRow, Piece

# of one copy, for which the engine takes no step
_PIECE_BYTES = 4 << 20


class MovingRows:
    """What one replica does about moves, which the coordinator drives; see `Moves` there.

    A row that has left is kept until it runs elsewhere (`release`), or goes on here (`stay`); one
    that has come does not start before the coordinator says that it is this replica's (`begin`).

    Args:
        close_row: called with the batch of a row that was read here and has left.
    """

    def __init__(
        self, engine: EngineThread, site: ReplicaSite, close_row: Callable[[int], None]
    ) -> None:
        self._engine, self._site, self._close_row = engine, site, close_row
        # rows that run here and were read elsewhere, and those that are on their way
        self._guests: set[int] = set()
        self._coming: set[int] = set()
        # between the question to the engine and its answer
        self._leaving: dict[int, Literal["leaves", "stays"]] = {}
        self._left: dict[int, RowStates] = {}
        self._come: dict[int, RowStates] = {}

    @property
    def has_left(self) -> bool:
        """Return whether rows have left that are kept, as they may go on here."""
        return bool(self._left)

    async def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Keep KV memory for a row that is to come; False where it has to come without KV."""
        return await self._engine.ask(lambda backend: backend.reserve(request_id, num_blocks))

    async def peek(self, request_id: int, from_block: int) -> Piece | None:
        """Copy whole blocks of a row that goes on; None where it has ended or cannot be copied."""
        capacity = self._engine.capacity
        block_bytes = max(1, capacity.kv_token_bytes * capacity.block_size)
        max_blocks = max(1, _PIECE_BYTES // block_bytes)
        state = await self._engine.ask(
            lambda backend: backend.peek(request_id, from_block, max_blocks)
        )
        if state is None:
            return None
        num_whole = (len(state.request.prompt_token_ids) + len(state.token_ids) - 1) // (
            capacity.block_size
        )
        num_blocks = 0 if state.kv is None else len(state.kv.blocks)
        return Piece(
            refs=[self._site.share(state)] if num_blocks else [],
            next_block=from_block + num_blocks,
            num_missing=num_whole - from_block - num_blocks,
            num_bytes=0 if state.kv is None else state.kv.blocks.nbytes,
        )

    async def receive(self, refs: list[object]) -> bool:
        """Take what `peek` copied; False where it is of no use."""
        state = await self._site.shared(refs[0])
        return await self._engine.ask(lambda backend: backend.receive(state))

    async def depart(self, request_id: int, from_block: int | None) -> LeftRow | None:
        """Stop a row, with its KV from a block on; None where it has ended."""
        self._leaving[request_id] = "leaves"
        row = await asyncio.wrap_future(self._engine.depart(request_id, from_block))
        wish = self._leaving.pop(request_id, None)
        if row is None or wish is None:
            await self.release(request_id)
            return None
        if wish == "stays":
            self._engine.go_on(row)
            return None
        self._left[request_id] = row
        begun = encode_begun([request_id & ROW_MASK] * len(row.states), row.states)
        return LeftRow(refs=[self._site.share(row)], begun=begun)

    async def stay(self, request_id: int) -> None:
        """Let a row go on here that has stopped, where it is wanted still."""
        if request_id in self._leaving:
            self._leaving[request_id] = "stays"
        elif (row := self._left.pop(request_id, None)) is not None:
            self._engine.go_on(row)

    async def release(self, request_id: int) -> None:
        """Free what a row has here, whether it has left, or was to come and does not."""
        if self._left.pop(request_id, None) is not None and not self.forget_guest(request_id):
            self._close_row(request_id >> ROW_BITS)
        self._come.pop(request_id, None)
        self._coming.discard(request_id)
        await self._engine.ask(lambda backend: backend.forget(request_id))

    async def arrive(self, request_id: int, refs: list[object]) -> None:
        """Take a row that has stopped elsewhere; it waits for `begin`."""
        self._coming.add(request_id)
        row = await self._site.shared(refs[0])
        # who waited may have given up meanwhile
        if request_id in self._coming:
            self._come[request_id] = row

    async def begin(self, request_id: int) -> None:
        self._coming.discard(request_id)
        if (row := self._come.pop(request_id, None)) is not None:
            self._guests.add(request_id)
            self._engine.go_on(row)

    def forget_guest(self, request_id: int) -> bool:
        """Note the end of a row here; return whether it was read elsewhere."""
        is_guest = request_id in self._guests
        self._guests.discard(request_id)
        return is_guest

    async def drop(self, batch_id: int) -> None:
        """Forget the rows of a row batch that nobody waits for."""
        of_batch = {i for i in (*self._left, *self._come) if i >> ROW_BITS == batch_id}
        self._guests = {i for i in self._guests if i >> ROW_BITS != batch_id}
        self._leaving = {i: w for i, w in self._leaving.items() if i >> ROW_BITS != batch_id}
        for request_id in sorted(of_batch):
            await self.release(request_id)
