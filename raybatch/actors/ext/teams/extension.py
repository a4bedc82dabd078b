"""Forms and ends teams of replicas, as `plan_teams` decides; no Ray.

```
leader:     steps alone | makes slices, hands KV over, commits | steps of the team | KV comes back
followers:  idle        | make slices, take their heads of KV  | compute for it    | idle
rows:       held by the leader from beginning to end
```

A failure before the commit leaves the leader as it was. A follower that dies or hangs later ends
the team, and rows go on by their tokens; the death of a leader is like any other. Rows that wait
end a team, as its followers get none (mechanisms B6, B13, B14).
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from raybatch.actors.coordinator.parts import PoolExtension, PoolParts
from raybatch.actors.ext.teams.policy import TeamBook, TeamPace, TeamPlan, TeamSnapshot, plan_teams
from raybatch.actors.replicas.site import Errors
from raybatch.errors import TeamError, error_text
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch.records.team import FormingCost, Served, TeamCall

# what a replica is asked to do about a team, a method of `TeamEngine`
TeamStep = Literal["team_calls", "lead", "call_off", "follow", "reunite"]

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class TeamCounters:
    """Teams since the start of the pool."""

    num_formed: int = 0
    num_failed: int = 0
    num_steps: int = 0
    """That they computed."""


class EndTeam(NamedTuple):
    """The team of a leader is to end."""

    leader: int
    why: str


@dataclass(slots=True, eq=False)
class _Team:
    """A team from the first call to the last."""

    plan: TeamPlan
    epoch: int
    # teams that its leader had lost before
    num_lost: int
    # of its replicas by id, as logs know them
    names: Mapping[int, str]
    # a follower could not go on
    is_broken: bool = False
    # why it is to end, "" while it is wanted
    ends: str = ""
    # once it has formed
    cost: FormingCost | None = None
    num_steps: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_formed(self) -> bool:
        return self.cost is not None


class Teams(PoolExtension):
    """The teams of one pool; each is a coroutine that the coordinator runs beside others."""

    actions = (TeamPlan, EndTeam)

    def __init__(self, parts: PoolParts) -> None:
        self.counters, self.book = TeamCounters(), TeamBook()
        self._parts, self._members, self._queue = parts, parts.members, parts.queue
        self._failed: Errors = (*parts.site.failed, TeamError)
        self._teams: dict[int, _Team] = {}
        self._known: set[int] = set()
        self._epoch = 0

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> TeamSnapshot | None:
        """Return the replicas with what teams are decided by."""
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

    def plan(self, snapshot: TeamSnapshot | None, plan: PoolPlan) -> Sequence[TeamPlan | EndTeam]:
        """Return what two boundaries in a row want."""
        if snapshot is None:
            return ()
        wanted, ends = plan_teams(snapshot, plan)
        actions = list[TeamPlan | EndTeam]()
        for leader in snapshot.replicas:
            leader_id, team = leader.replica_id, self._teams.get(leader.replica_id)
            if team is None or team.cost is None:
                continue
            if self._members[leader_id].stats.num_lost_teams > team.num_lost:
                # a follower that hangs has not told
                team.is_broken = True
                actions.append(EndTeam(leader_id, "its leader has lost a rank, and goes on alone"))
                continue
            if leader.team_ratio is not None:
                self._note_pace(team, TeamPace(leader.team_ratio, team.cost.seconds))
            if why := self.book.to_end(leader_id, ends, snapshot):
                actions.append(EndTeam(leader_id, why))
            elif not leader.num_held:
                actions.append(EndTeam(leader_id, "its rows have ended"))
        if (team_plan := self.book.to_begin(wanted, snapshot)) is not None:
            actions.append(team_plan)
        return actions

    def apply(self, action: TeamPlan | EndTeam) -> None:
        """Begin to form a team or to end one."""
        if isinstance(action, TeamPlan):
            self._begin(action)
        else:
            self._end(self._teams[action.leader], action.why)

    def note_change(self) -> None:
        """End teams where rows wait, as their replicas take none, and those that a replica leaves.

        They end as soon as their leaders can.
        """
        for team in self._teams.values():
            if self._queue.has_waiting():
                self._end(team, "rows wait")
            for replica_id in (team.plan.leader, *team.plan.followers):
                member = self._members.get(replica_id)
                if member is not None and member.is_leaving:
                    self._end(team, f"{team.names[replica_id]} leaves")

    def counts(self) -> dict[str, int]:
        return {"teams": self.counters.num_formed, "team_steps": self.counters.num_steps}

    def _begin(self, plan: TeamPlan) -> None:
        some = [self._members.get(r) for r in (plan.leader, *plan.followers)]
        if any(member is None or not member.takes_rows for member in some):
            return
        self._epoch += 1
        leader = self._members[plan.leader]
        num_lost = leader.stats.num_lost_teams
        names = {r: str(self._members[r]) for r in (plan.leader, *plan.followers)}
        team = self._teams[plan.leader] = _Team(plan, self._epoch, num_lost, names)
        leader.is_leading = True
        self.book.begin(plan)
        for replica_id in plan.followers:
            self._members[replica_id].is_following = True
        self._parts.spawn(self._carry_out(team))

    def _end(self, team: _Team, why: str) -> None:
        if team.ends:
            return
        team.ends = why
        self._parts.spawn(self._reunite(team) if team.is_formed else self._call_off(team, why))

    async def _carry_out(self, team: _Team) -> None:
        """Form a team, and wait until all are free again; raises nothing of a replica."""
        plan, leader_id, epoch = team.plan, team.plan.leader, team.epoch
        serving = dict[asyncio.Task[None], int]()
        _logger.info(
            "team %d: steps of %s are now shared by %s: %s",
            epoch,
            team.names[leader_id],
            ", ".join(team.names[r] for r in plan.followers),
            plan.reason,
        )
        try:
            address = self._address(leader_id)
            calls: list[TeamCall] = await self._call(
                leader_id, "team_calls", epoch, plan.kind.size, address, self._parts.timeout_s
            )
            if team.ends:
                raise TeamError(team.ends)
            for replica_id, call in zip(plan.followers, calls[1:], strict=True):
                serving[self._parts.spawn(self._follow(team, replica_id, call))] = replica_id
            cost: FormingCost = await self._lead(team, calls[0], serving)
        except self._failed as error:
            _logger.info("team %d could not form: %s", epoch, error_text(error))
            if not team.ends:
                self.counters.num_failed += 1
                self._give_up(team)
            # followers may wait for it still
            await self._call_off(team, error_text(error))
        else:
            await self._compute(team, cost, serving)
        await self._free(team, serving)
        if team.is_formed:
            self.counters.num_steps += team.num_steps
            if team.is_broken and plan.kind not in self.book.paces:
                self._give_up(team)
            why = team.ends or "its rows or one of its engines have ended"
            _logger.info("team %d ends after %d steps: %s", epoch, team.num_steps, why)

    async def _lead(
        self, team: _Team, call: TeamCall, serving: Mapping[asyncio.Task[None], int]
    ) -> FormingCost:
        """Let a leader form its team; where a follower has ended, it waits for nobody longer."""
        leading = asyncio.ensure_future(self._call(team.plan.leader, "lead", call))
        await asyncio.wait({leading, *serving}, return_when=asyncio.FIRST_COMPLETED)
        if not leading.done():
            ended = next(serving[task] for task in serving if task.done())
            await self._call_off(team, f"{team.names[ended]} follows no more")
        cost: FormingCost = await leading
        return cost

    async def _call_off(self, team: _Team, why: str) -> None:
        """Let the ranks of a team give up that wait for each other while it forms."""
        with suppress(*self._failed):
            await self._call(team.plan.leader, "call_off", team.epoch, why)

    async def _compute(
        self, team: _Team, cost: FormingCost, serving: Mapping[asyncio.Task[None], int]
    ) -> None:
        """Wait for the end of a team that has formed: of its rows, or of one of its ranks."""
        leader = self._members.get(team.plan.leader)
        self.counters.num_formed += 1
        team.cost = cost
        if leader is not None:
            self.book.restart_pace(leader.replica_id, leader.stats)
        if team.ends:
            await self._reunite(team)
        over = asyncio.create_task(team.over.wait())
        await asyncio.wait({over, *serving}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()

    async def _free(self, team: _Team, serving: Mapping[asyncio.Task[None], int]) -> None:
        """Wait until followers are free, and end those that hang."""
        if serving:
            _, busy = await asyncio.wait(serving, timeout=2 * self._parts.timeout_s)
            for task in busy:
                why = "the engine hung: it follows a team that is over"
                self._parts.replicas.kill(serving[task], why)
            if busy:
                await asyncio.wait(busy)
        else:
            for replica_id in team.plan.followers:
                self._release(replica_id)
        leader_id = team.plan.leader
        del self._teams[leader_id]
        leader = self._members.get(leader_id)
        self.book.end(leader_id, None if leader is None else leader.stats)
        if leader is not None:
            leader.is_leading = False
        self._parts.on_change()

    async def _follow(self, team: _Team, replica_id: int, call: TeamCall) -> None:
        try:
            served: Served = await self._call(replica_id, "follow", call)
            team.num_steps = max(team.num_steps, served.num_steps)
        except self._failed as error:
            team.is_broken = True
            _logger.info("%s follows no more: %s", team.names[replica_id], error_text(error))
        self._release(replica_id)

    async def _reunite(self, team: _Team) -> None:
        with suppress(*self._failed):
            await self._call(team.plan.leader, "reunite")
        team.over.set()

    def _release(self, replica_id: int) -> None:
        if (member := self._members.get(replica_id)) is not None:
            member.is_following = False

    def _address(self, replica_id: int) -> str:
        member = self._members.get(replica_id)
        return "" if member is None or member.place is None else member.place.address

    async def _call(self, replica_id: int, step: TeamStep, *args: object) -> Any:  # noqa: ANN401
        member = self._members.get(replica_id)
        if member is None:
            raise TeamError("a replica of the team has ended")
        return await member.actor.extend("teams", step, *args)

    def _give_up(self, team: _Team) -> None:
        """Let no such team form for some time, where its engines are all there and it broke."""
        ids = (team.plan.leader, *team.plan.followers)
        if all(replica_id in self._members for replica_id in ids):
            self._note_pace(team, TeamPace(ratio=1.0, switch_s=0.0))

    def _note_pace(self, team: _Team, pace: TeamPace) -> None:
        self.book.note_pace(team.plan.kind, pace, time.monotonic())
