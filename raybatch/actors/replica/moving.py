"""The part of a replica in row moves, as source or target; no Ray."""

import asyncio
from collections.abc import Callable
from typing import Literal

from raybatch.actors.replica.engine_thread import EngineThread, RowStates
from raybatch.actors.replicas.runtime import ReplicaRuntime
from raybatch.actors.wire.checkpointed import encode_checkpointed
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, LeftRow, Piece

# bytes of one copy, during which the engine is blocked
_PIECE_BYTES = 4 << 20


class MovingRows:
    """Performs the steps of row moves at one replica; the coordinator's `Moves` calls them.

    A row that has left is kept until it runs elsewhere (`release`) or resumes here (`stay`). A row
    that has arrived does not start before the coordinator commits the move (`begin`).

    Args:
        close_row: called with the batch id of a row that has left, if this replica had read it
            from its request table.
    """

    def __init__(
        self, engine: EngineThread, runtime: ReplicaRuntime, close_row: Callable[[int], None]
    ) -> None:
        self._engine, self._runtime, self._close_row = engine, runtime, close_row
        # running rows that were read elsewhere, and rows that are arriving
        self._guests: set[int] = set()
        self._coming: set[int] = set()
        # during the call to the engine
        self._departing: dict[int, Literal["leaves", "stays"]] = {}
        self._left: dict[int, RowStates] = {}
        self._come: dict[int, RowStates] = {}

    @property
    def has_left(self) -> bool:
        """Return whether any row that has left is still kept here, since it may resume."""
        return bool(self._left)

    async def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Reserve `num_blocks` KV blocks for an arriving row; return False if too few are free."""
        return await self._engine.ask(lambda backend: backend.reserve(request_id, num_blocks))

    async def peek(self, request_id: int, from_block: int) -> Piece | None:
        """Copy some whole KV blocks of a running row, from block `from_block` on.

        None if it has finished or cannot be copied.
        """
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
            refs=[self._runtime.share(state)] if num_blocks else [],
            next_block=from_block + num_blocks,
            num_missing=num_whole - from_block - num_blocks,
            num_bytes=0 if state.kv is None else state.kv.blocks.nbytes,
        )

    async def receive(self, refs: list[object]) -> bool:
        """Accept KV blocks that another replica copied by `peek`; return False if not usable."""
        state = await self._runtime.shared(refs[0])
        return await self._engine.ask(lambda backend: backend.receive(state))

    async def depart(self, request_id: int, from_block: int | None) -> LeftRow | None:
        """Stop a running row and return it, None if it has finished.

        It has its KV from block `from_block` on; None for no KV.
        """
        self._departing[request_id] = "leaves"
        row = await asyncio.wrap_future(self._engine.depart(request_id, from_block))
        wish = self._departing.pop(request_id, None)
        if row is None or wish is None:
            await self.release(request_id)
            return None
        if wish == "stays":
            self._engine.go_on(row)
            return None
        self._left[request_id] = row
        checkpointed = encode_checkpointed([request_id & ROW_MASK] * len(row.states), row.states)
        return LeftRow(refs=[self._runtime.share(row)], checkpointed=checkpointed)

    async def stay(self, request_id: int) -> None:
        """Resume a row that was stopped here, unless it was cancelled."""
        if request_id in self._departing:
            self._departing[request_id] = "stays"
        elif (row := self._left.pop(request_id, None)) is not None:
            self._engine.go_on(row)

    async def release(self, request_id: int) -> None:
        """Free the memory of a row that has left, or that does not arrive after all."""
        if self._left.pop(request_id, None) is not None and not self.forget_guest(request_id):
            self._close_row(request_id >> ROW_BITS)
        self._come.pop(request_id, None)
        self._coming.discard(request_id)
        await self._engine.ask(lambda backend: backend.forget(request_id))

    async def arrive(self, request_id: int, refs: list[object]) -> None:
        """Accept a row that another replica has stopped; it starts with `begin`."""
        self._coming.add(request_id)
        row = await self._runtime.shared(refs[0])
        # the move may have been given up meanwhile
        if request_id in self._coming:
            self._come[request_id] = row

    async def begin(self, request_id: int) -> None:
        self._coming.discard(request_id)
        if (row := self._come.pop(request_id, None)) is not None:
            self._guests.add(request_id)
            self._engine.go_on(row)

    def forget_guest(self, request_id: int) -> bool:
        """Note that a row has ended here; return whether it came from another replica."""
        is_guest = request_id in self._guests
        self._guests.discard(request_id)
        return is_guest

    async def drop(self, batch_id: int) -> None:
        """Forget the rows of a cancelled row batch."""
        of_batch = {i for i in (*self._left, *self._come) if i >> ROW_BITS == batch_id}
        self._guests = {i for i in self._guests if i >> ROW_BITS != batch_id}
        self._departing = {i: w for i, w in self._departing.items() if i >> ROW_BITS != batch_id}
        for request_id in sorted(of_batch):
            await self.release(request_id)
