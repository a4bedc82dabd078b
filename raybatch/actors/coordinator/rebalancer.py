"""Rebalancing and autoscaling of the replicas of one pool; Ray-free.

```
snapshot   reports of replicas, waiting rows, draining hosts; and the snapshots of extensions
plan       the decisions of `raybatch.policy.pool`, and of extensions, as actions
apply      starts each action; what it waits for is a coroutine
```

A replica that will exit soon is drained:

```
notice -> no more rows -> unstarted rows are given back -> running rows move -> it exits
                          (to the queue)                   (with their KV)      (no crash)
```

Rows that cannot move finish there. A draining replica that dies adds no crash to its rows.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from raybatch.actors.coordinator.parts import MakeExtension, PoolParts
from raybatch.actors.replicas.placement import WaitForRay
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.replicas.runtime import Errors
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, LeftRow, MoveStep, Piece, RowRange
from raybatch.errors import error_text
from raybatch.policy.pool.autoscaling import (
    USUAL_START_S,
    AutoscaleOptions,
    AutoscalePlan,
    AutoscaleSnapshot,
    RemainingWork,
    plan_autoscaling,
)
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, ReplicaSnapshot, RowMove, Steal
from raybatch.policy.pool.spread import drain_moves
from raybatch.policy.pool.throughput import StepSeconds
from raybatch.records.pool_stats import POOL_COUNTS

# largest share of the coordinator's time that planning moves may use
_PLAN_SHARE = 0.05
# between two polls of a draining replica
_TURN_S = 0.1
# between two polls for draining hosts
_ASK_EVERY_S = 5.0
# input counts as ended after a pause of this share of the time that it lasted
_FED_PAUSE = 0.25
# copy attempts in a row that may fail to catch up with decoding
_MAX_VAIN_COPIES = 4
_STEP_TIMEOUT_S = 60.0

_logger = logging.getLogger(__name__)


class MoveRows(NamedTuple):
    """Move running rows to other replicas; `pool` is the snapshot by which they were chosen."""

    moves: tuple[RowMove, ...]
    pool: PoolSnapshot
    saved_s: float = 0.0


class Drain(NamedTuple):
    """Move the rows of a replica that will exit to others; `is_replaced` starts another at once."""

    replica_id: int
    why: str
    is_replaced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The input of one plan.

    Args:
        pool: replicas with their running rows; None if running rows do not count this time.
        pool_s: CPU seconds that it took to make `pool`.
        is_settled: the last plan with running rows had no moves to make.
        draining: reason for each replica on a draining host, by id.
        autoscaler: input of `plan_autoscaling`; None if the number of replicas is fixed, or there
            are no rows.
        more: snapshot of each extension, in the order of extensions.
    """

    pool: PoolSnapshot | None = None
    pool_s: float = 0.0
    is_settled: bool = False
    draining: Mapping[int, str] = field(default_factory=dict)
    autoscaler: tuple[AutoscaleSnapshot, AutoscaleOptions] | None = None
    more: tuple[Any, ...] = ()


class Rebalancer:
    """Plans and applies steals, moves, drains and starts of a pool: call `step` regularly.

    Args:
        extensions: functions that make the optional mechanisms of this job, in order of planning.
    """

    def __init__(self, parts: PoolParts, extensions: Sequence[MakeExtension] = ()) -> None:
        self.view = parts.view
        self.moves, self.autoscaler = Moves(parts), Autoscaler(parts)
        self.extensions = tuple(make(parts) for make in extensions)
        self._parts, self._queue, self._members = parts, parts.queue, parts.members
        self._replicas, self._runtime = parts.replicas, parts.runtime
        self._waits = WaitForRay(parts.pool, parts.plan)
        self._stealing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        # the last plan over running rows had nothing to do
        self._is_settled = False
        self._draining_hosts: Collection[str] = ()
        self._polled_s = time.monotonic()
        self._is_asking = False
        self._begin: dict[type, Callable[[Any], None]] = {
            Steal: self._begin_steal,
            MoveRows: self._begin_moves,
            Drain: self._begin_drain,
            AutoscalePlan: self.autoscaler.apply,
        }
        for extension in self.extensions:
            self._begin |= dict.fromkeys(extension.actions, extension.apply)

    def step(self, elapsed_s: float) -> None:
        """Kill hung replicas, plan and start actions; `elapsed_s` is the time since the last call.

        `ReplicaSet` handles the death of a replica, and replaces it.
        """
        ready = [m.replica_id for m in self._members.values() if m.is_ready]
        with_rows = [r for r in ready if self._queue.load(r).num_rows]
        for replica_id, why in self._parts.stuck.tick(elapsed_s, with_rows).items():
            self._replicas.kill(replica_id, why)
        for action in self.plan(self.snapshot()):
            self.apply(action)
        if len(self._parts.registry):
            self._warn_of_wait(*self._replicas.waiting(time.monotonic()))

    def snapshot(self) -> Snapshot:
        """Return the state of the pool to plan the next actions from."""
        now = time.monotonic()
        snapshot, pool, pool_s = Snapshot(), None, 0.0
        if not self._is_busy() and now >= self._not_before:
            began = time.thread_time()
            pool = self.view.snapshot(self._staying(), self._parts.pending_pulls, with_rows=True)
            pool_s = time.thread_time() - began
        if len(self._parts.registry):
            self._poll_hosts(now)
            autoscaler = self.autoscaler.snapshot(now)
            snapshot = Snapshot(draining=self._draining(), autoscaler=autoscaler)
        else:
            self.autoscaler.note_rest()
        more = tuple(each.snapshot(pool, now) for each in self.extensions)
        return replace(snapshot, pool=pool, pool_s=pool_s, is_settled=self._is_settled, more=more)

    def plan(self, snapshot: Snapshot) -> list[object]:
        """Return the actions to start, in the order in which to `apply` them."""
        actions: list[object] = []
        plan = PoolPlan(is_settled=snapshot.is_settled)
        if snapshot.pool is not None:
            began = time.thread_time()
            plan = plan_pool(snapshot.pool)
            # planning blocks the event loop; time without a CPU says nothing about the next plan
            planned_s = snapshot.pool_s + time.thread_time() - began
            self._not_before = time.monotonic() + planned_s / _PLAN_SHARE
            self._is_settled = plan.is_settled
            actions += [] if plan.steal is None else [plan.steal]
            if plan.moves:
                actions.append(MoveRows(plan.moves, snapshot.pool, plan.saved_s))
        for extension, own in zip(self.extensions, snapshot.more, strict=True):
            more = extension.plan(own, plan)
            plan = replace(plan, is_settled=plan.is_settled and not more)
            actions += more
        actions += [Drain(r, why, is_replaced=True) for r, why in snapshot.draining.items()]
        if snapshot.autoscaler is not None:
            actions.append(plan_autoscaling(*snapshot.autoscaler))
        return actions

    def apply(self, action: object) -> None:
        """Start an action of a plan."""
        self._begin[type(action)](action)

    def note_change(self) -> None:
        """Let extensions react at once to changed rows or replicas."""
        for extension in self.extensions:
            extension.note_change()

    def rebalance(self) -> None:
        """Steal unstarted rows for an idle replica, if there is one; cheap, for every report."""
        if self._is_busy() or not self.view.may_steal(self._parts.pending_pulls):
            return
        pool = self.view.snapshot(self._staying(), self._parts.pending_pulls, with_rows=False)
        if (steal := plan_pool(pool).steal) is not None:
            self.apply(steal)

    def counts(self) -> dict[str, int]:
        """Return counts since the start of the pool, as `PoolCounts` names them."""
        ledger, moves = self._replicas.ledger, self.moves
        counts = dict.fromkeys(POOL_COUNTS, 0)
        counts |= {"restarts": ledger.num_restarts, "hung": ledger.num_hung}
        counts |= {"moved": moves.num_moved, "moved_kv_bytes": moves.num_bytes}
        for extension in self.extensions:
            counts |= extension.counts()
        return counts

    def _is_busy(self) -> bool:
        """Return whether rows wait or are being stolen; then running rows are not settled."""
        is_busy = self._queue.has_waiting() or self._stealing is not None
        self._is_settled &= not is_busy
        return is_busy

    def _staying(self) -> list[Member]:
        return [m for m in self._members.values() if m.stays and not m.is_tp_worker]

    def _begin_steal(self, steal: Steal) -> None:
        self.view.note_stale(steal.replica_id)
        victim = self._members[steal.replica_id]
        self._stealing = self._parts.spawn(self._take_back(victim, steal))

    async def _take_back(self, victim: Member, steal: Steal) -> None:
        rows: list[tuple[int, int]] = []
        # `ReplicaSet` handles its death, and requeues its rows
        with suppress(*self._runtime.died):
            rows = await victim.actor.give_back(steal.max_rows, steal.max_cost)
        self._stealing = None
        self._queue.give_back(steal.replica_id, [RowRange(b, row, row + 1) for b, row in rows])
        self._parts.on_change()

    def _begin_moves(self, action: MoveRows) -> None:
        """Start the moves that replicas have capacity for."""
        has_begun = False
        for move in action.moves:
            rows = action.pool.replica(move.source).rows
            assert rows is not None, "a plan moves rows of its snapshot"
            if not self.view.may_begin(move):
                continue
            if self._queue.begin_move(move.source, move.row_id >> ROW_BITS, move.row_id & ROW_MASK):
                self.view.begin_move(move, rows)
                self._parts.spawn(self.moves.carry_out(move))
                has_begun = True
        if has_begun and action.saved_s:
            _logger.info(
                "moving running rows to other replicas, to finish about %.1f s sooner",
                action.saved_s,
            )

    def _warn_of_wait(self, num_waiting: int, waits_s: float) -> None:
        """Note that replicas wait for resources of Ray, the longest for `waits_s` seconds."""
        if self._waits.is_due(waits_s, time.monotonic()):
            self._parts.spawn(self._runtime.make_room(self._waits.requested))
        if message := self._waits.message(num_waiting, waits_s):
            self._parts.spawn(self._warn(message))

    async def _warn(self, message: str) -> None:
        hint = ""
        try:
            hint = await self._runtime.shortage(self._parts.plan, self._parts.pool)
        except Exception as error:  # private API of Ray; a missing hint must not fail a run
            _logger.debug("cannot query Ray why engines wait for resources", exc_info=error)
        _logger.warning("%s", f"{message}; {hint}" if hint else message)

    def _poll_hosts(self, now: float) -> None:
        """Query draining hosts every few seconds."""
        if not self._is_asking and now - self._polled_s > _ASK_EVERY_S:
            self._polled_s = now
            self._is_asking = True
            self._parts.spawn(self._ask())

    async def _ask(self) -> None:
        try:
            self._draining_hosts = await self._runtime.draining_hosts()
        except Exception as error:  # private API of Ray; then hosts go without notice
            _logger.debug("cannot query draining hosts", exc_info=error)
        self._is_asking = False

    def _draining(self) -> dict[int, str]:
        return {
            member.replica_id: f"{member.place.host} is draining"
            for member in self._members.values()
            if member.stays and member.place and member.place.host_id in self._draining_hosts
        }

    def _begin_drain(self, action: Drain) -> None:
        member = self._members.get(action.replica_id)
        if member is None or member.is_draining:
            return
        if action.is_replaced:
            # the replacement gets another host, so it can start at once
            self._replicas.ledger.release(member.rank)
            self._replicas.ledger.grow(1)
        member.is_draining = True
        self.note_change()
        _logger.warning("draining %s: %s; its rows go to other replicas", member, action.why)
        if member.is_ready:
            self._parts.spawn(self._drain(member))
        else:
            member.started.end()
        for peer in list(self._members.values()):
            if member.group is not None and peer.group is member.group:
                self.apply(Drain(peer.replica_id, f"{member} of its group is draining"))

    async def _drain(self, member: Member) -> None:
        replica_id = member.replica_id
        try:
            while replica_id in self._members:
                rows = await member.actor.drain()
                self._queue.give_back(replica_id, [RowRange(b, row, row + 1) for b, row in rows])
                able = [m for m in self._members.values() if m.takes_rows or m is member]
                pool = self.view.snapshot(able, (), with_rows=True)
                self.apply(MoveRows(drain_moves(pool, replica_id), pool))
                if not self._queue.load(replica_id).num_rows:
                    self._parts.pending_pulls.answer(replica_id, None)
                await asyncio.sleep(_TURN_S)
        except self._runtime.failed as error:
            # `ReplicaSet` handles its death, and requeues its rows
            _logger.debug("%s exited before it was drained", member, exc_info=error)


class Autoscaler:
    """Starts and stops replicas of an autoscaled pool: `apply` the plan for a `snapshot`."""

    def __init__(self, parts: PoolParts) -> None:
        self._num_first, self._num_most = parts.plan.num_first, parts.plan.num_replicas
        self._parts, self._replicas = parts, parts.replicas
        self._queue, self._view = parts.queue, parts.view
        self._idle_since: dict[int, float] = {}
        self._fed_since: float | None = None
        self._fed_until = 0.0

    def note_rows(self, now: float) -> None:
        """Note that rows arrived."""
        if self._fed_since is None:
            self._fed_since = now
        self._fed_until = now

    def note_rest(self) -> None:
        """Note that the pool has no rows."""
        self._fed_since = None

    def apply(self, plan: AutoscalePlan) -> None:
        """Start or stop replicas; stopped ones get no more rows."""
        ledger = self._replicas.ledger
        if plan.num_starts:
            ledger.grow(plan.num_starts)
            _logger.info("starting %d more engines: %s", plan.num_starts, plan.reason)
        for replica_id in plan.stops:
            member = self._replicas.members[replica_id]
            # another action of the same plan may have found work for it
            has_work = self._queue.load(replica_id).num_rows or self._view.num_moves(replica_id)
            if has_work or member.is_draining or member.is_tp_worker:
                continue
            member.is_draining = True
            ledger.release(member.rank)
            if self._idle_since.pop(replica_id, None) is None:
                member.started.end()
            _logger.info("stopping %s: %s", member, plan.reason)
            self._parts.pending_pulls.answer(replica_id, None)

    def snapshot(self, now: float) -> tuple[AutoscaleSnapshot, AutoscaleOptions] | None:
        """Return the arguments of `plan_autoscaling`; None if the number of replicas is fixed."""
        members, ledger = self._replicas.members, self._replicas.ledger
        num_most = self._num_most - ledger.num_retired()
        if self._num_first is None or num_most < 1:
            return None
        options = AutoscaleOptions(
            min_replicas=min(self._num_first, num_most), max_replicas=num_most
        )
        held = {r: self._queue.load(r).num_rows for r, m in members.items() if m.is_ready}
        idle = [
            r
            for r, num_rows in held.items()
            if not num_rows
            and members[r].takes_rows
            and not self._view.num_moves(r)
            and r in self._parts.pending_pulls
        ]
        self._idle_since = {r: self._idle_since.get(r, now) for r in idle}
        num_replicas = len(ledger.to_start())
        staying = [m for m in members.values() if m.stays]
        in_sight = self._view.snapshot(staying, (), with_rows=True).replicas
        known = [r for r in in_sight if r.rows is not None and r.seconds is not None]
        unplaced = [r for r, m in members.items() if m.pid is None and not m.is_draining]
        has_learnt = any(m.num_finished_rows for m in members.values())
        autoscaler = AutoscaleSnapshot(
            num_replicas=num_replicas,
            num_starting=num_replicas - ledger.num_working(),
            unplaced=tuple(unplaced),
            idle_s={r: now - since for r, since in self._idle_since.items()},
            has_waiting=self._queue.has_waiting(),
            is_at_work=any(held.values()),
            work=self._work(known) if known and has_learnt else None,
            fed_s=self._fed_s(now),
            seconds=_mean_seconds(known) if known else None,
            num_slots=_mean_slots(known) if known else 1.0,
            start_s=ledger.longest_start_s or USUAL_START_S,
        )
        return autoscaler, options

    def _fed_s(self, now: float) -> float:
        if self._fed_since is None:
            return 0.0
        fed_s = self._fed_until - self._fed_since
        return fed_s if now - self._fed_until <= _FED_PAUSE * fed_s else 0.0

    def _work(self, known: list[ReplicaSnapshot]) -> RemainingWork:
        waiting = self._queue.tokens_left(is_held=False)
        held = self._queue.tokens_left(is_held=True)
        left = np.concatenate([r.rows.left for r in known if r.rows is not None])
        # running rows have computed their prompts; rows not reported yet count as waiting
        unstarted = max(0, held.num_rows - len(left)) / max(1, held.num_rows)
        # in-flight duplicates are in no queue, and never run
        in_line = self._queue.num_waiting() / max(1, waiting.num_rows)
        return RemainingWork(
            num_rows=in_line * waiting.num_rows + unstarted * held.num_rows + len(left),
            prompt_tokens=in_line * waiting.prompt + unstarted * held.prompt,
            output_tokens=in_line * waiting.output + unstarted * held.output + float(left.sum()),
            longest=float(left.max(initial=0.0)),
        )


def _mean_seconds(known: list[ReplicaSnapshot]) -> StepSeconds:
    seconds = [r.seconds for r in known if r.seconds is not None]
    return StepSeconds(*np.mean(np.array(seconds), axis=0).tolist())


def _mean_slots(known: list[ReplicaSnapshot]) -> float:
    """Return how many rows a replica runs at once, by its sequences and its memory for KV."""
    slots = []
    for replica in known:
        assert replica.rows is not None, "the replica reported its rows"
        num_rows, ends = len(replica.rows), replica.rows.tokens + replica.rows.left
        num_tokens = replica.free_kv_tokens + replica.rows.tokens.sum()
        in_memory = num_tokens / ends.mean() if num_rows else np.inf
        # shared prompts use less
        slots.append(max(1.0, num_rows, min(num_rows + replica.free_seqs, in_memory)))
    return float(np.mean(slots))


class _NotMovedError(Exception):
    """Why a row stays at its replica."""


class Moves:
    """Moves running rows of one pool from one replica to another: call `carry_out` for each.

        source:   runs ---------------------------------> stops | kept            | freed
        target:          blocks come, while source decodes      | rest comes      | runs
        the row:  held by source, state MOVING                           commit -> held by target

    A failure before the commit leaves the row with the source, which resumes from the KV that it
    kept; after it, the row belongs to the target. The commit is one synchronous change of the
    queue, so a row always has exactly one holder (mechanisms B7, B14, C13).
    """

    def __init__(self, parts: PoolParts) -> None:
        # moves, and bytes of KV, since the start of the pool
        self.num_moved = self.num_failed = self.num_bytes = 0
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
            self.num_failed += 1
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
        self.num_moved += 1
        self.num_bytes += num_bytes
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
