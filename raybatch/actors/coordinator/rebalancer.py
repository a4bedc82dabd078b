"""What the replicas of one pool do for each other, and how many there are; no Ray.

```
snapshot   reports of replicas, rows that wait, hosts that leave; and what extensions add
plan       the decisions of `raybatch.policy.pool`, and of extensions, as actions
apply      each action begins: what it waits for is a coroutine beside others
```

A replica that will end soon is emptied:

```
notice -> no more rows -> unstarted rows are given back -> running rows move -> it ends
                          (to the queue)                   (with their KV)      (no death)
```

What cannot move ends there. A replica that dies before it is empty costs its rows no strike.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from raybatch.actors.coordinator.moves import Moves
from raybatch.actors.coordinator.parts import MakeExtension, PoolParts
from raybatch.actors.replicas.placement import WaitForRay
from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.records import ROW_BITS, ROW_MASK, Span
from raybatch.policy.pool.crew import (
    USUAL_START_S,
    CrewOptions,
    CrewPlan,
    CrewSnapshot,
    CrewWork,
    plan_crew,
)
from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.rates import StepSeconds
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, ReplicaSnapshot, RowMove, Steal
from raybatch.policy.pool.spread import leave_moves
from raybatch.records.pool_stats import POOL_COUNTS

# of the time of the coordinator, at most, that goes into plans of moves
_PLAN_SHARE = 0.05
# between two looks at what is left in a replica that leaves
_TURN_S = 0.1
# between two questions which hosts are taken away
_ASK_EVERY_S = 5.0
# rows that have come for some time come no more after this share of it without any
_FED_PAUSE = 0.25

_logger = logging.getLogger(__name__)


class Kill(NamedTuple):
    """A replica hangs, and is to be replaced; its end is noticed where it is awaited."""

    replica_id: int
    why: str


class MoveRows(NamedTuple):
    """Running rows are to go to other replicas, by a snapshot that has them."""

    moves: tuple[RowMove, ...]
    pool: PoolSnapshot
    saved_s: float = 0.0


class Empty(NamedTuple):
    """A replica will end, and others are to have its rows; `is_replaced` starts another at once."""

    replica_id: int
    why: str
    is_replaced: bool = False


class Wait(NamedTuple):
    """So many replicas wait for what Ray is to reserve, for so long at most."""

    num_replicas: int
    waits_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """What one plan reads.

    Args:
        pool: None where nobody is to look at rows that run now; then `is_settled` is of the last
            look at them. It took `pool_s` to make.
        hung: replicas that hang, and why.
        leaving: replicas whose hosts are taken away, and why.
        wait: None where no replica waits for what Ray is to reserve, or there are no rows.
        crew: None where the number of replicas is fixed, or there are no rows.
        more: what each extension adds, in their order.
    """

    pool: PoolSnapshot | None = None
    pool_s: float = 0.0
    is_settled: bool = False
    hung: Mapping[int, str] = field(default_factory=dict)
    leaving: Mapping[int, str] = field(default_factory=dict)
    wait: Wait | None = None
    crew: tuple[CrewSnapshot, CrewOptions] | None = None
    more: tuple[Any, ...] = ()


class Rebalancer:
    """Plans what replicas of one pool do for each other, and begins it.

    Args:
        extensions: mechanisms that the options of this job ask for, in the order of their plans.
    """

    def __init__(self, parts: PoolParts, extensions: Sequence[MakeExtension] = ()) -> None:
        self.view = parts.view
        self.moves, self.crew = Moves(parts), Crew(parts)
        self.extensions = tuple(make(parts) for make in extensions)
        self._parts, self._queue, self._members = parts, parts.queue, parts.members
        self._replicas, self._site = parts.replicas, parts.site
        self._waits = WaitForRay(parts.pool, parts.plan)
        self._stealing: asyncio.Task[None] | None = None
        self._not_before = 0.0
        # the last look at rows that run found nothing to do
        self._is_settled = False
        self._hosts_leaving: Collection[str] = ()
        self._asked_s = time.monotonic()
        self._is_asking = False
        self._begin: dict[type, Callable[[Any], None]] = {
            Kill: self._kill,
            Steal: self._begin_steal,
            MoveRows: self._begin_moves,
            Empty: self._begin_emptying,
            Wait: self._tell_wait,
            CrewPlan: self.crew.apply,
        }
        for extension in self.extensions:
            self._begin |= dict.fromkeys(extension.actions, extension.apply)

    def step(self, elapsed_s: float) -> None:
        """Plan, and begin what is worth it; called now and then, so many seconds after before."""
        for action in self.plan(self.snapshot(elapsed_s)):
            self.apply(action)

    def snapshot(self, elapsed_s: float) -> Snapshot:
        """Return the pool as it is, so many seconds after the last one."""
        now = time.monotonic()
        pool, pool_s = None, 0.0
        ready = [m.replica_id for m in self._members.values() if m.is_ready]
        with_rows = [r for r in ready if self._queue.load(r).num_rows]
        found = Snapshot(hung=self._parts.stuck.tick(elapsed_s, with_rows))
        if not self._is_busy() and now >= self._not_before:
            pool = self.view.snapshot(self._staying(), self._parts.pulls, with_rows=True)
            pool_s = time.monotonic() - now
        if len(self._parts.mailbox):
            wait = Wait(*self._replicas.waiting(now))
            self._ask_for_hosts(now)
            found = replace(
                found,
                leaving=self._leaving(),
                wait=wait if wait.num_replicas else None,
                crew=self.crew.snapshot(now),
            )
        else:
            self.crew.note_rest()
        more = tuple(each.snapshot(pool, now) for each in self.extensions)
        return replace(found, pool=pool, pool_s=pool_s, is_settled=self._is_settled, more=more)

    def plan(self, snapshot: Snapshot) -> list[object]:
        """Return what is to be done, in this order."""
        actions: list[object] = [Kill(*each) for each in snapshot.hung.items()]
        plan = PoolPlan(is_settled=snapshot.is_settled)
        if snapshot.pool is not None:
            began = time.monotonic()
            plan = plan_pool(snapshot.pool)
            # a plan for many replicas takes a while, in which no other call is served
            now = time.monotonic()
            self._not_before = now + (snapshot.pool_s + now - began) / _PLAN_SHARE
            self._is_settled = plan.is_settled
            actions += [] if plan.steal is None else [plan.steal]
            if plan.moves:
                actions.append(MoveRows(plan.moves, snapshot.pool, plan.saved_s))
        for extension, own in zip(self.extensions, snapshot.more, strict=True):
            more = extension.plan(own, plan)
            plan = replace(plan, is_settled=plan.is_settled and not more)
            actions += more
        actions += [] if snapshot.wait is None else [snapshot.wait]
        actions += [Empty(r, why, is_replaced=True) for r, why in snapshot.leaving.items()]
        if snapshot.crew is not None:
            actions.append(plan_crew(*snapshot.crew))
        return actions

    def apply(self, action: object) -> None:
        """Begin an action of a plan."""
        self._begin[type(action)](action)

    def note_change(self) -> None:
        """Do what cannot wait for a plan, after rows or replicas have changed."""
        for extension in self.extensions:
            extension.note_change()

    def level(self) -> None:
        """Let an idle replica have rows that wait in another; quick enough for every report."""
        if self._is_busy() or not self.view.may_steal(self._parts.pulls):
            return
        pool = self.view.snapshot(self._staying(), self._parts.pulls, with_rows=False)
        if (steal := plan_pool(pool).steal) is not None:
            self.apply(steal)

    def counts(self) -> dict[str, int]:
        """Return what there was so far, as `PoolCounts` names it."""
        moves = self.moves.counters
        counts = dict.fromkeys(POOL_COUNTS, 0)
        counts |= {"moved": moves.num_moved, "moved_kv_bytes": moves.num_bytes}
        for extension in self.extensions:
            counts |= extension.counts()
        return counts

    def _is_busy(self) -> bool:
        """Return whether rows wait, or come back to wait; what was seen of running ones is over."""
        is_busy = self._queue.has_waiting() or self._stealing is not None
        self._is_settled &= not is_busy
        return is_busy

    def _staying(self) -> list[Member]:
        return [m for m in self._members.values() if m.stays and not m.is_following]

    def _kill(self, action: Kill) -> None:
        self._replicas.kill(action.replica_id, action.why)

    def _begin_steal(self, steal: Steal) -> None:
        self.view.note_stale(steal.replica_id)
        victim = self._members[steal.replica_id]
        self._stealing = self._parts.spawn(self._take_back(victim, steal))

    async def _take_back(self, victim: Member, steal: Steal) -> None:
        rows: list[tuple[int, int]] = []
        # its death is noticed, and its rows are queued again, where it is awaited
        with suppress(*self._site.died):
            rows = await victim.actor.give_back(steal.max_rows, steal.max_cost)
        self._stealing = None
        self._queue.give_back(steal.replica_id, [Span(b, row, row + 1) for b, row in rows])
        self._parts.on_change()

    def _begin_moves(self, action: MoveRows) -> None:
        """Begin the moves that replicas have hands free for."""
        has_begun = False
        for move in action.moves:
            rows = action.pool.replica(move.source).rows
            assert rows is not None, "a row that was seen moves"
            if not self.view.may_begin(move):
                continue
            if self._queue.begin_move(move.source, move.row_id >> ROW_BITS, move.row_id & ROW_MASK):
                self.view.begin_move(move, rows)
                self._parts.spawn(self.moves.carry_out(move))
                has_begun = True
        if has_begun and action.saved_s:
            _logger.info("rows that run move: the pool ends %.1f s sooner by that", action.saved_s)

    def _tell_wait(self, wait: Wait) -> None:
        if self._waits.is_due(wait.waits_s, time.monotonic()):
            self._parts.spawn(self._site.make_room(self._waits.requested))
        if message := self._waits.message(*wait):
            self._parts.spawn(self._tell(message))

    async def _tell(self, message: str) -> None:
        hint = ""
        try:
            hint = await self._site.shortage(self._parts.plan, self._parts.pool)
        except Exception as error:  # of what Ray promises nobody; no run ends for want of a hint
            _logger.debug("the cluster does not say why engines wait", exc_info=error)
        _logger.warning("%s", f"{message}; {hint}" if hint else message)

    def _ask_for_hosts(self, now: float) -> None:
        """Ask now and then for hosts that are taken away."""
        if not self._is_asking and now - self._asked_s > _ASK_EVERY_S:
            self._asked_s = now
            self._is_asking = True
            self._parts.spawn(self._ask())

    async def _ask(self) -> None:
        try:
            self._hosts_leaving = await self._site.leaving_hosts()
        except Exception as error:  # of what Ray promises nobody; such a host ends without notice
            _logger.debug("the cluster does not say which hosts leave", exc_info=error)
        self._is_asking = False

    def _leaving(self) -> dict[int, str]:
        return {
            member.replica_id: f"{member.place.host} is taken away"
            for member in self._members.values()
            if member.stays and member.place and member.place.host_id in self._hosts_leaving
        }

    def _begin_emptying(self, action: Empty) -> None:
        member = self._members.get(action.replica_id)
        if member is None or member.is_leaving:
            return
        if action.is_replaced:
            # Ray gives another host to the next one, which need not wait for the end of this
            self._replicas.ledger.release(member.rank)
            self._replicas.ledger.grow(1)
        member.is_leaving = True
        self.note_change()
        _logger.warning("%s will end: %s; its rows go to others", member, action.why)
        if member.is_ready:
            self._parts.spawn(self._empty(member))
        else:
            member.started.end()
        for mate in list(self._members.values()):
            if member.group is not None and mate.group is member.group:
                self.apply(Empty(mate.replica_id, f"{member} of its group does"))

    async def _empty(self, member: Member) -> None:
        replica_id = member.replica_id
        try:
            while replica_id in self._members:
                rows = await member.actor.empty()
                self._queue.give_back(replica_id, [Span(b, row, row + 1) for b, row in rows])
                able = [m for m in self._members.values() if m.takes_rows or m is member]
                pool = self.view.snapshot(able, (), with_rows=True)
                self.apply(MoveRows(leave_moves(pool, replica_id), pool))
                if not self._queue.load(replica_id).num_rows:
                    self._parts.let_go(replica_id)
                await asyncio.sleep(_TURN_S)
        except self._site.failed as error:
            # its end is noticed, and its rows are queued again, where it is awaited
            _logger.debug("%s has ended before it was empty", member, exc_info=error)


class Crew:
    """Follows the number of replicas of a pool, where that may change."""

    def __init__(self, parts: PoolParts) -> None:
        self._num_first, self._num_most = parts.plan.num_first, parts.plan.num_replicas
        self._parts, self._replicas = parts, parts.replicas
        self._queue, self._view = parts.queue, parts.view
        self._idle_since: dict[int, float] = {}
        self._fed_since: float | None = None
        self._fed_until = 0.0

    def note_rows(self, now: float) -> None:
        """Note that rows have come."""
        if self._fed_since is None:
            self._fed_since = now
        self._fed_until = now

    def note_rest(self) -> None:
        """Note that no rows are there."""
        self._fed_since = None

    def apply(self, plan: CrewPlan) -> None:
        """Want more replicas or fewer; those to stop get no rows from here on."""
        ledger = self._replicas.ledger
        if plan.num_starts:
            ledger.grow(plan.num_starts)
            _logger.info("%d more engines start: %s", plan.num_starts, plan.reason)
        for replica_id in plan.stops:
            member = self._replicas.members[replica_id]
            # another action of the same plan may have found work for it
            has_work = self._queue.load(replica_id).num_rows or self._view.num_moves(replica_id)
            if has_work or member.is_leaving or member.is_following:
                continue
            member.is_leaving = True
            ledger.release(member.rank)
            if self._idle_since.pop(replica_id, None) is None:
                member.started.end()
            _logger.info("%s stops: %s", member, plan.reason)
            self._parts.let_go(replica_id)

    def snapshot(self, now: float) -> tuple[CrewSnapshot, CrewOptions] | None:
        """Return what `plan_crew` takes, None where the number of replicas is fixed."""
        members, ledger = self._replicas.members, self._replicas.ledger
        num_most = self._num_most - ledger.num_retired()
        if self._num_first is None or num_most < 1:
            return None
        options = CrewOptions(min_replicas=min(self._num_first, num_most), max_replicas=num_most)
        held = {r: self._queue.load(r).num_rows for r, m in members.items() if m.is_ready}
        idle = [
            r
            for r, num_rows in held.items()
            if not num_rows
            and members[r].takes_rows
            and not self._view.num_moves(r)
            and r in self._parts.pulls
        ]
        self._idle_since = {r: self._idle_since.get(r, now) for r in idle}
        num_replicas = len(ledger.to_start())
        staying = [m for m in members.values() if m.stays]
        in_sight = self._view.snapshot(staying, (), with_rows=True).replicas
        known = [r for r in in_sight if r.rows is not None and r.seconds is not None]
        unplaced = [r for r, m in members.items() if m.pid is None and not m.is_leaving]
        has_learnt = any(m.num_finished_rows for m in members.values())
        crew = CrewSnapshot(
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
        return crew, options

    def _fed_s(self, now: float) -> float:
        if self._fed_since is None:
            return 0.0
        fed_s = self._fed_until - self._fed_since
        return fed_s if now - self._fed_until <= _FED_PAUSE * fed_s else 0.0

    def _work(self, known: list[ReplicaSnapshot]) -> CrewWork:
        waiting = self._queue.tokens_left(is_held=False)
        held = self._queue.tokens_left(is_held=True)
        left = np.concatenate([r.rows.left for r in known if r.rows is not None])
        # rows that run have their prompts; of some nothing is heard yet, and they count as waiting
        unstarted = max(0, held.num_rows - len(left)) / max(1, held.num_rows)
        # those that wait for a row like them in no line never run
        in_line = self._queue.num_waiting() / max(1, waiting.num_rows)
        return CrewWork(
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
        assert replica.rows is not None, "a replica that tells its rows"
        num_rows, ends = len(replica.rows), replica.rows.tokens + replica.rows.left
        num_tokens = replica.free_kv_tokens + replica.rows.tokens.sum()
        in_memory = num_tokens / ends.mean() if num_rows else np.inf
        # prompts that are shared take less
        slots.append(max(1.0, num_rows, min(num_rows + replica.free_seqs, in_memory)))
    return float(np.mean(slots))
