"""Forms and ends the TP groups that `plan_tp_groups` decides; Ray-free.

```
driver:   steps alone | slices weights, sends KV, commits   | steps of the group | KV comes back
workers:  idle        | slice weights, receive KV of heads  | compute shards     | idle
rows:     held by the driver throughout
```

A failure before the commit leaves the driver unchanged. A worker that dies or hangs later dissolves
the group; its rows continue by recomputing their KV. The death of a driver is like any other.
Waiting rows dissolve a group, since its workers take none (mechanisms B6, B13, B14).
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from raybatch.actors.coordinator.parts import MakeExtension, PoolExtension, PoolParts
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.runtime import Errors
from raybatch.actors.wire.records import PoolSpec
from raybatch.errors import RankError, error_text
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch_extensions.ranks.records import FormingCost, RankInit, Served
from raybatch_extensions.tp_groups.policy import (
    TPGroupHistory,
    TPGroupPlan,
    TPGroupTimes,
    TPSnapshot,
    plan_tp_groups,
)

# a method of `TPExtension`
TPGroupStep = Literal["rank_inits", "lead", "call_off", "follow", "reunite"]

_logger = logging.getLogger("raybatch.extensions.tp_groups.pool")


@dataclass(slots=True)
class TPGroupCounters:
    """Counts of TP groups since the start of the pool."""

    num_formed: int = 0
    num_failed: int = 0
    num_steps: int = 0
    """Steps that groups computed."""


class EndTPGroup(NamedTuple):
    """End the TP group of a driver."""

    driver: int
    why: str


@dataclass(slots=True, eq=False)
class _TPGroup:
    """A TP group from the first call to the last."""

    plan: TPGroupPlan
    generation: int
    # groups that its driver had lost before
    num_lost: int
    # names of its replicas in logs, by id
    names: Mapping[int, str]
    # a worker failed
    is_broken: bool = False
    # why it should end, "" while it is wanted
    ends: str = ""
    # set once it has formed
    cost: FormingCost | None = None
    num_steps: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_formed(self) -> bool:
        return self.cost is not None


class TPGroups(PoolExtension):
    """Forms and ends the TP groups of one pool, each as a coroutine."""

    actions = (TPGroupPlan, EndTPGroup)

    def __init__(self, parts: PoolParts) -> None:
        self.counters, self.book = TPGroupCounters(), TPGroupHistory()
        self._parts, self._members, self._queue = parts, parts.members, parts.queue
        self._failed: Errors = (*parts.runtime.failed, RankError)
        self._tp_groups: dict[int, _TPGroup] = {}
        self._known: set[int] = set()
        self._generation = 0

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> TPSnapshot | None:
        """Return the input of `plan`; None if running rows do not count this time."""
        for gone in self._known - self._members.keys():
            self.book.forget(gone)
        self._known = set(self._members)
        if pool is None:
            return None
        self.book.retry(now)
        engines = {
            replica.replica_id: (self._members[replica.replica_id].stats, capacity)
            for replica in pool.replicas
            if (capacity := self._parts.view.capacity(replica.replica_id)) is not None
        }
        return self.book.snapshot(pool, engines)

    def plan(
        self, snapshot: TPSnapshot | None, plan: PoolPlan
    ) -> Sequence[TPGroupPlan | EndTPGroup]:
        """Return the groups to form or to end, if two plans in a row agree on it."""
        if snapshot is None:
            return ()
        wanted, ends = plan_tp_groups(snapshot, plan)
        actions = list[TPGroupPlan | EndTPGroup]()
        for driver in snapshot.replicas:
            driver_id, tp_group = driver.replica_id, self._tp_groups.get(driver.replica_id)
            if tp_group is None or tp_group.cost is None:
                continue
            if self._members[driver_id].stats.num_lost_tp_groups > tp_group.num_lost:
                # a hung worker does not report
                tp_group.is_broken = True
                actions.append(EndTPGroup(driver_id, "its driver lost a rank and continues alone"))
                continue
            if driver.tp_ratio is not None:
                self._note_times(tp_group, TPGroupTimes(driver.tp_ratio, tp_group.cost.seconds))
            if why := self.book.to_end(driver_id, ends, snapshot):
                actions.append(EndTPGroup(driver_id, why))
            elif not driver.num_held:
                actions.append(EndTPGroup(driver_id, "its rows have finished"))
        if (tp_plan := self.book.to_begin(wanted, snapshot)) is not None:
            actions.append(tp_plan)
        return actions

    def apply(self, action: TPGroupPlan | EndTPGroup) -> None:
        """Start to form a group or to end one."""
        if isinstance(action, TPGroupPlan):
            self._begin(action)
        else:
            self._end(self._tp_groups[action.driver], action.why)

    def note_change(self) -> None:
        """End all groups if rows wait, as their replicas take none, or a group that is drained."""
        for tp_group in self._tp_groups.values():
            if self._queue.has_waiting():
                self._end(tp_group, "rows wait")
            for replica_id in (tp_group.plan.driver, *tp_group.plan.workers):
                member = self._members.get(replica_id)
                if member is not None and member.is_draining:
                    self._end(tp_group, f"{tp_group.names[replica_id]} is draining")

    def counts(self) -> dict[str, int]:
        return {"teams": self.counters.num_formed, "team_steps": self.counters.num_steps}

    def _begin(self, plan: TPGroupPlan) -> None:
        some = [self._members.get(r) for r in (plan.driver, *plan.workers)]
        if any(member is None or not member.takes_rows for member in some):
            return
        self._generation += 1
        driver = self._members[plan.driver]
        num_lost = driver.stats.num_lost_tp_groups
        names = {r: str(self._members[r]) for r in (plan.driver, *plan.workers)}
        tp_group = self._tp_groups[plan.driver] = _TPGroup(plan, self._generation, num_lost, names)
        driver.is_tp_driver = True
        self.book.begin(plan)
        for replica_id in plan.workers:
            self._members[replica_id].is_tp_worker = True
        self._parts.spawn(self._carry_out(tp_group))

    def _end(self, tp_group: _TPGroup, why: str) -> None:
        if tp_group.ends:
            return
        tp_group.ends = why
        self._parts.spawn(
            self._reunite(tp_group) if tp_group.is_formed else self._call_off(tp_group, why)
        )

    async def _carry_out(self, tp_group: _TPGroup) -> None:
        """Form a group, and wait until all ranks are free; raises no error of a replica."""
        plan, driver_id, generation = tp_group.plan, tp_group.plan.driver, tp_group.generation
        serving = dict[asyncio.Task[None], int]()
        _logger.info(
            "forming TP group %d: %s shares its steps with %s: %s",
            generation,
            tp_group.names[driver_id],
            ", ".join(tp_group.names[r] for r in plan.workers),
            plan.reason,
        )
        try:
            address = self._address(driver_id)
            calls: list[RankInit] = await self._call(
                driver_id, "rank_inits", generation, plan.kind.size, address, self._parts.timeout_s
            )
            if tp_group.ends:
                raise RankError(tp_group.ends)
            for replica_id, call in zip(plan.workers, calls[1:], strict=True):
                serving[self._parts.spawn(self._follow(tp_group, replica_id, call))] = replica_id
            cost: FormingCost = await self._lead(tp_group, calls[0], serving)
        except self._failed as error:
            _logger.info("could not form TP group %d: %s", generation, error_text(error))
            if not tp_group.ends:
                self.counters.num_failed += 1
                self._give_up(tp_group)
            # workers may still wait for it
            await self._call_off(tp_group, error_text(error))
        else:
            await self._compute(tp_group, cost, serving)
        await self._free(tp_group, serving)
        if tp_group.is_formed:
            self.counters.num_steps += tp_group.num_steps
            if tp_group.is_broken and plan.kind not in self.book.measured:
                self._give_up(tp_group)
            why = tp_group.ends or "its rows finished or an engine exited"
            _logger.info(
                "TP group %d ended after %d steps: %s", generation, tp_group.num_steps, why
            )

    async def _lead(
        self, tp_group: _TPGroup, call: RankInit, serving: Mapping[asyncio.Task[None], int]
    ) -> FormingCost:
        """Let a driver form its group; abort the rendezvous if a worker ends."""
        leading = asyncio.ensure_future(self._call(tp_group.plan.driver, "lead", call))
        await asyncio.wait({leading, *serving}, return_when=asyncio.FIRST_COMPLETED)
        if not leading.done():
            ended = next(serving[task] for task in serving if task.done())
            await self._call_off(tp_group, f"{tp_group.names[ended]} left the group")
        cost: FormingCost = await leading
        return cost

    async def _call_off(self, tp_group: _TPGroup, why: str) -> None:
        """Abort the rendezvous of a group that forms."""
        with suppress(*self._failed):
            await self._call(tp_group.plan.driver, "call_off", tp_group.generation, why)

    async def _compute(
        self, tp_group: _TPGroup, cost: FormingCost, serving: Mapping[asyncio.Task[None], int]
    ) -> None:
        """Wait until the rows of a formed group finish, or a rank ends."""
        driver = self._members.get(tp_group.plan.driver)
        self.counters.num_formed += 1
        tp_group.cost = cost
        if driver is not None:
            self.book.restart_timing(driver.replica_id, driver.stats)
        if tp_group.ends:
            await self._reunite(tp_group)
        over = asyncio.create_task(tp_group.over.wait())
        await asyncio.wait({over, *serving}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()

    async def _free(self, tp_group: _TPGroup, serving: Mapping[asyncio.Task[None], int]) -> None:
        """Wait until workers are free, and kill hung ones."""
        if serving:
            _, busy = await asyncio.wait(serving, timeout=2 * self._parts.timeout_s)
            for task in busy:
                why = "the engine hung: it still runs in an ended TP group"
                self._parts.replicas.kill(serving[task], why)
            if busy:
                await asyncio.wait(busy)
        else:
            for replica_id in tp_group.plan.workers:
                self._release(replica_id)
        driver_id = tp_group.plan.driver
        del self._tp_groups[driver_id]
        driver = self._members.get(driver_id)
        self.book.end(driver_id, None if driver is None else driver.stats)
        if driver is not None:
            driver.is_tp_driver = False
        self._parts.on_change()

    async def _follow(self, tp_group: _TPGroup, replica_id: int, call: RankInit) -> None:
        try:
            served: Served = await self._call(replica_id, "follow", call)
            tp_group.num_steps = max(tp_group.num_steps, served.num_steps)
        except self._failed as error:
            tp_group.is_broken = True
            _logger.info("%s left the TP group: %s", tp_group.names[replica_id], error_text(error))
        self._release(replica_id)

    async def _reunite(self, tp_group: _TPGroup) -> None:
        with suppress(*self._failed):
            await self._call(tp_group.plan.driver, "reunite")
        tp_group.over.set()

    def _release(self, replica_id: int) -> None:
        if (member := self._members.get(replica_id)) is not None:
            member.is_tp_worker = False

    def _address(self, replica_id: int) -> str:
        member = self._members.get(replica_id)
        return "" if member is None or member.place is None else member.place.address

    async def _call(self, replica_id: int, step: TPGroupStep, *args: object) -> Any:  # noqa: ANN401
        member = self._members.get(replica_id)
        if member is None:
            raise RankError("a replica of the TP group has exited")
        return await member.actor.extend("tp_groups", step, *args)

    def _give_up(self, tp_group: _TPGroup) -> None:
        """Form no such group for some time, if it failed while all its engines live."""
        ids = (tp_group.plan.driver, *tp_group.plan.workers)
        if all(replica_id in self._members for replica_id in ids):
            self._note_times(tp_group, TPGroupTimes(ratio=1.0, switch_s=0.0))

    def _note_times(self, tp_group: _TPGroup, measured: TPGroupTimes) -> None:
        self.book.note_times(tp_group.plan.kind, measured, time.monotonic())


def make_tp_groups(spec: PoolSpec, plan: Placement) -> MakeExtension:
    """Return what makes the `TPGroups` of a pool; an entry point."""
    return TPGroups
