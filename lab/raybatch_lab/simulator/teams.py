"""Simulated teams: idle replicas that take part in the steps of another one, by set prices.

The decision is that of a real pool, with the steps that it measures; see
`raybatch.actors.ext.teams`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.ext.teams.policy import TeamBook, TeamPace, TeamPlan, plan_teams
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch_lab.simulator.clock import VirtualClock
from raybatch_lab.simulator.engine import EngineSpec
from raybatch_lab.simulator.replica import SimulatedReplica


@dataclass(slots=True, eq=False)
class _Team:
    plan: TeamPlan
    began_s: float


class SimulatedTeams:
    """The teams of one simulated pool.

    Args:
        members: replicas by id, that come and go.
        on_change: called when replicas are free again.
    """

    def __init__(
        self,
        engine: EngineSpec,
        members: Mapping[int, SimulatedReplica],
        view: PoolView,
        clock: VirtualClock,
        on_change: Callable[[], None],
    ) -> None:
        self.num_formed = 0
        # from, to: seconds in which a replica followed another one
        self.busy: dict[int, list[tuple[float, float]]] = {}
        self._engine, self._members, self._view = engine, members, view
        self._clock, self._on_change = clock, on_change
        self._book = TeamBook()
        # by their leaders
        self._teams: dict[int, _Team] = {}
        self.followers: set[int] = set()

    def takes_rows(self, replica_id: int) -> bool:
        """Return whether a replica is in no team."""
        return replica_id not in self.followers and replica_id not in self._teams

    def look(self, plan: PoolPlan, pool: PoolSnapshot) -> None:
        """Begin and end what two boundaries in a row want."""
        now = self._clock.now
        self._book.retry(now)
        engines = {
            replica.replica_id: (self._members[replica.replica_id].stats, capacity)
            for replica in pool.replicas
            if (capacity := self._view.capacity(replica.replica_id)) is not None
        }
        snapshot = self._book.snapshot(pool, engines)
        wanted, ends = plan_teams(snapshot, plan)
        for leader in snapshot.replicas:
            team = self._teams.get(leader.replica_id)
            if team is None:
                continue
            if leader.team_ratio is not None:
                pace = TeamPace(leader.team_ratio, self._engine.team_switch_s)
                self._book.note_pace(team.plan.kind, pace, now)
            if self._book.to_end(leader.replica_id, ends, snapshot) or not leader.num_held:
                self._end(team)
        if (team_plan := self._book.to_begin(wanted, snapshot)) is not None:
            self._begin(team_plan)

    def end_all(self) -> None:
        """End all teams, as rows wait for their replicas."""
        for team in list(self._teams.values()):
            self._end(team)

    def lose(self, replica_id: int) -> None:
        """End the team of a replica that died, whose leader computes its rows again."""
        self._book.forget(replica_id)
        for team in list(self._teams.values()):
            if replica_id in team.plan.followers:
                self._end(team, has_kv=False)
            elif replica_id == team.plan.leader:
                self._end(team)

    def _begin(self, plan: TeamPlan) -> None:
        leader = self._members[plan.leader]
        leader.change_pace(self._engine.team_ratios[plan.kind.size], self._engine.team_switch_s)
        self._teams[plan.leader] = _Team(plan, self._clock.now)
        self.followers.update(plan.followers)
        leader.is_leading = True
        self._book.begin(plan)
        self._book.restart_pace(plan.leader, leader.stats)
        self.num_formed += 1

    def _end(self, team: _Team, *, has_kv: bool = True) -> None:
        del self._teams[team.plan.leader]
        self.followers.difference_update(team.plan.followers)
        for replica_id in team.plan.followers:
            self.busy.setdefault(replica_id, []).append((team.began_s, self._clock.now))
        leader = self._members.get(team.plan.leader)
        self._book.end(team.plan.leader, None if leader is None else leader.stats)
        if leader is not None:
            leader.is_leading = False
            leader.change_pace(1.0, self._engine.team_switch_s)
            if not has_kv:
                leader.recompute()
        self._on_change()
