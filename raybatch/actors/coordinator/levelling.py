"""Lets replicas that have little take rows of others: as `plan_pool` decides; no Ray."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from raybatch.actors.coordinator.mailbox import Mailbox
from raybatch.actors.coordinator.moves import Moves
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.site import Site
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Span
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, Steal

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class Levelling:
    """Rows that are given back, and rows that move, of one pool.

    Args:
        members: replicas by id, that come and go.
        spawn: runs a coroutine beside others.
        on_change: called when rows have changed their place.
    """

    def __init__(
        self,
        queue: RowQueue,
        mailbox: Mailbox,
        members: Mapping[int, Member],
        site: Site,
        *,
        spawn: Spawn,
        on_change: Callable[[], None],
    ) -> None:
        self.view = PoolView(queue, mailbox.lengths)
        self._moves = Moves(queue, mailbox, self.view, members, site.failed)
        self.counters = self._moves.counters
        self._queue, self._members, self._died = queue, members, site.died
        self._spawn, self._on_change = spawn, on_change
        self._stealing: asyncio.Task[None] | None = None

    def look(self, pulling: Mapping[int, object], *, with_rows: bool) -> None:
        """Begin what is worth it now; rows that run move only `with_rows`.

        Args:
            pulling: the replicas that ask for rows, by id.
        """
        if self._queue.has_waiting() or self._stealing is not None:
            return
        snapshot = self.view.snapshot(self._members.values(), pulling, with_rows=with_rows)
        plan = plan_pool(snapshot)
        if plan.steal is not None:
            self.view.note_stale(plan.steal.replica_id)
            victim = self._members[plan.steal.replica_id]
            self._stealing = self._spawn(self._take_back(victim, plan.steal))
        self._begin_moves(plan, snapshot)

    def _begin_moves(self, plan: PoolPlan, snapshot: PoolSnapshot) -> None:
        rows = {replica.replica_id: replica.rows for replica in snapshot.replicas}
        for move in plan.moves:
            of_source = rows[move.source]
            assert of_source is not None, "a row that was seen moves"
            batch_id, row = move.row_id >> ROW_BITS, move.row_id & ROW_MASK
            if not self._moves.may_begin(move):
                continue
            if self._queue.begin_move(move.source, batch_id, row):
                self.view.begin_move(move, of_source)
                self._spawn(self._moves.carry_out(move, self._on_change))

    async def _take_back(self, victim: Member, steal: Steal) -> None:
        rows: list[tuple[int, int]] = []
        # its death is noticed, and its rows are queued again, where it is awaited
        with suppress(*self._died):
            rows = await victim.actor.give_back.remote(steal.max_rows, steal.max_cost)
        self._stealing = None
        self._queue.give_back(steal.replica_id, [Span(b, row, row + 1) for b, row in rows])
        self._on_change()
