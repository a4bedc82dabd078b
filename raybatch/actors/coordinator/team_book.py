"""Which teams were wanted, and what they took, so that one begins or ends; no clock."""

from raybatch.policy.pool.partition import Agreement
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, TeamKind, TeamPace, TeamPlan

# after which a kind of team that was measured, or did not come about, is tried again
_RETRY_S = 300.0


class TeamBook:
    """Follows the plans of one pool; for the teams of real replicas, and of simulated ones.

    Args:
        paces: of kinds of teams, which is kept here.
    """

    def __init__(self, paces: dict[TeamKind, TeamPace]) -> None:
        self._paces = paces
        # when they are not believed any more
        self._stale_s: dict[TeamKind, float] = {}
        self._forming, self._ending = Agreement(), dict[int, Agreement]()

    def look(self, now: float) -> None:
        """Let kinds of teams be tried again after some time, as hosts are not always as busy."""
        for kind in [k for k in self._paces if self._stale_s[k] < now]:
            del self._paces[kind], self._stale_s[kind]

    def to_begin(self, plan: PoolPlan, snapshot: PoolSnapshot) -> TeamPlan | None:
        """Return the team that two boundaries in a row wanted."""
        team = plan.team
        wanted = None if team is None else (team.leader, team.followers)
        place = -1 if team is None else snapshot.replica(team.leader).num_steps
        return team if self._forming.look(wanted, place) else None

    def to_end(self, leader_id: int, plan: PoolPlan, snapshot: PoolSnapshot) -> str:
        """Return why two boundaries in a row want a team to end, "" where they do not."""
        why = plan.ends.get(leader_id, "")
        agreement = self._ending.setdefault(leader_id, Agreement())
        agrees = agreement.look(why and leader_id, snapshot.replica(leader_id).num_steps)
        return why if agrees else ""

    def ended(self, leader_id: int) -> None:
        self._ending.pop(leader_id, None)

    def note_pace(self, kind: TeamKind, pace: TeamPace, now: float) -> None:
        """Take what a team was measured to take."""
        self._paces[kind] = pace
        self._stale_s[kind] = now + _RETRY_S
