"""Lets replicas that have little take rows or steps of others: as `plan_pool` decides; no Ray."""

import asyncio
import logging
import time
from contextlib import suppress

from raybatch.actors.coordinator.moves import Moves
from raybatch.actors.coordinator.parts import PoolParts
from raybatch.actors.coordinator.teams import Teams
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Span
from raybatch.policy.pool.leaving import leave_moves
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, Steal

# of the time of the coordinator, at most, that goes into plans of moves
_PLAN_SHARE = 0.05

_logger = logging.getLogger(__name__)


class Levelling:
    """Rows that are given back, rows that move, and teams of one pool."""

    def __init__(self, parts: PoolParts) -> None:
        self.view = parts.view
        self._moves, self._teams = Moves(parts), Teams(parts)
        self.counters = self._moves.counters
        self._parts, self._queue, self._members = parts, parts.queue, parts.members
        self._stealing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        # the last look at rows that run found nothing to do
        self.is_settled = False

    def look(self, now: float) -> None:
        """Begin what is worth it now."""
        self.level(with_rows=True)

    def level(self, *, with_rows: bool) -> None:
        """Begin what is worth it now; rows that run move only `with_rows`."""
        pulling = self._parts.pulls
        self.free_teams()
        if self._queue.has_waiting() or self._stealing is not None:
            self.is_settled = False
            return
        if not with_rows and not self.view.may_steal(pulling):
            return
        began = time.monotonic()
        if with_rows and began < self._not_before:
            return
        members = self._members.values()
        staying = [member for member in members if member.stays and not member.is_following]
        snapshot = self.view.snapshot(staying, pulling, with_rows=with_rows)
        plan = plan_pool(snapshot)
        if with_rows:
            # a plan for many replicas takes a while, in which no other call is served
            now = time.monotonic()
            self._not_before = now + (now - began) / _PLAN_SHARE
            has_unstarted = any(replica.num_unstarted for replica in snapshot.replicas)
            self.is_settled = plan == PoolPlan() and not has_unstarted
            self._teams.look(plan, snapshot)
        if plan.steal is not None:
            self.view.note_stale(plan.steal.replica_id)
            victim = self._members[plan.steal.replica_id]
            self._stealing = self._parts.spawn(self._take_back(victim, plan.steal))
        if self._begin_moves(plan, snapshot):
            _logger.info("rows that run move: the pool ends %.1f s sooner by that", plan.saved_s)

    def stats(self) -> dict[str, int]:
        """Return what there was of it so far, as `PoolCounts` names it."""
        moves, teams, copies = self.counters, self._teams.counters, self._queue.copies.counters
        return {
            "moved": moves.num_moved,
            "moved_kv_bytes": moves.num_bytes,
            "teams": teams.num_formed,
            "team_steps": teams.num_steps,
            "duplicates": copies.num_duplicates,
            "won_duplicates": copies.num_won_duplicates,
        }

    def free_teams(self) -> None:
        """End teams where rows wait, as their replicas take none."""
        if self._teams and self._queue.has_waiting():
            self._teams.end_all("rows wait")

    def note_leaving(self) -> None:
        """Note that a replica is to leave, and free those that compute with it."""
        self._teams.end_leaving()

    def move_away(self, replica_id: int) -> None:
        """Begin to move the running rows of a replica that will end soon."""
        members = self._members.values()
        some = [m for m in members if m.takes_rows or m.replica_id == replica_id]
        snapshot = self.view.snapshot(some, (), with_rows=True)
        self._begin_moves(PoolPlan(moves=leave_moves(snapshot, replica_id)), snapshot)

    def _begin_moves(self, plan: PoolPlan, snapshot: PoolSnapshot) -> bool:
        """Begin the moves that replicas have hands free for; return whether there is one."""
        has_begun = False
        rows = {replica.replica_id: replica.rows for replica in snapshot.replicas}
        for move in plan.moves:
            of_source = rows[move.source]
            assert of_source is not None, "a row that was seen moves"
            batch_id, row = move.row_id >> ROW_BITS, move.row_id & ROW_MASK
            if not self.view.may_begin(move):
                continue
            if self._queue.begin_move(move.source, batch_id, row):
                self.view.begin_move(move, of_source)
                self._parts.spawn(self._moves.carry_out(move))
                has_begun = True
        return has_begun

    async def _take_back(self, victim: Member, steal: Steal) -> None:
        rows: list[tuple[int, int]] = []
        # its death is noticed, and its rows are queued again, where it is awaited
        with suppress(*self._parts.site.died):
            rows = await victim.actor.give_back(steal.max_rows, steal.max_cost)
        self._stealing = None
        self._queue.give_back(steal.replica_id, [Span(b, row, row + 1) for b, row in rows])
        self._parts.on_change()
