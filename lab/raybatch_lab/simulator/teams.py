"""Simulated teams: idle replicas that take part in the steps of another one, by set prices.

The decision is that of a real pool, with the steps that it measures; see
`raybatch.actors.coordinator.teams`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.policy.pool.partition import TeamBook
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, TeamPace, TeamPlan
from raybatch.simulator.clock import VirtualClock
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
        self._book = TeamBook(view.team_paces)
        # by their leaders
        self._teams: dict[int, _Team] = {}
        self.followers: set[int] = set()

    def takes_rows(self, replica_id: int) -> bool:
        """Return whether a replica is in no team."""
        return replica_id not in self.followers and replica_id not in self._teams

    def look(self, plan: PoolPlan, snapshot: PoolSnapshot) -> None:
        """Begin and end what two boundaries in a row want."""
        now = self._clock.now
        self._book.look(now)
        for leader in snapshot.replicas:
            team = self._teams.get(leader.replica_id)
            if team is None:
                continue
            if leader.team_ratio is not None:
                pace = TeamPace(leader.team_ratio, self._engine.team_switch_s)
                self._book.note_pace(team.plan.kind, pace, now)
            if self._book.to_end(leader.replica_id, plan, snapshot) or not leader.num_held:
                self._end(team)
        if (team_plan := self._book.to_begin(plan, snapshot)) is not None:
            self._begin(team_plan, snapshot)

    def end_all(self) -> None:
        """End all teams, as rows wait for their replicas."""
        for team in list(self._teams.values()):
            self._end(team)

    def lose(self, replica_id: int) -> None:
        """End the team of a replica that died, whose leader computes its rows again."""
        for team in list(self._teams.values()):
            if replica_id in team.plan.followers:
                self._end(team, has_kv=False)
            elif replica_id == team.plan.leader:
                self._end(team)

    def _begin(self, plan: TeamPlan, snapshot: PoolSnapshot) -> None:
        alone_s = snapshot.replica(plan.leader).token_s
        assert alone_s is not None, "a leader was measured"
        leader = self._members[plan.leader]
        leader.change_pace(self._engine.team_ratios[plan.kind.size], self._engine.team_switch_s)
        self._teams[plan.leader] = _Team(plan, self._clock.now)
        self.followers.update(plan.followers)
        self._view.begin_team(leader, plan.kind.size, alone_s)
        self._view.restart_pace(leader)
        self.num_formed += 1

    def _end(self, team: _Team, *, has_kv: bool = True) -> None:
        del self._teams[team.plan.leader]
        self._book.ended(team.plan.leader)
        self.followers.difference_update(team.plan.followers)
        for replica_id in team.plan.followers:
            self.busy.setdefault(replica_id, []).append((team.began_s, self._clock.now))
        if (leader := self._members.get(team.plan.leader)) is not None:
            leader.change_pace(1.0, self._engine.team_switch_s)
            if not has_kv:
                leader.recompute()
            self._view.end_team(leader)
        self._on_change()
