"""Whether the last rows of a pool end sooner when idle engines take part in every step of them.

What a step of a team takes hangs on how quickly its ranks reach each other, and on what they share
of a host's memory: nobody knows that ahead. So the first team of a kind forms where it would pay if
its ranks shared all work evenly, its measured steps say whether it stays, and later ones form by
those. Source: BatchGen (arXiv:2606.21712), PARTITION (section 4.2) and ONLONGTAIL (5.1), with the
gain test of its design document; the trial is this library's.
"""

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from raybatch.policy.pool.snapshot import (
    PoolPlan,
    PoolSnapshot,
    ReplicaSnapshot,
    RunningRows,
    TeamKind,
    TeamPace,
    TeamPlan,
)

# what a switch has to gain, and steps and seconds over which it has to
_GAIN_FRACTION, _MIN_STEPS, _LEAST_S = 0.10, 128, 0.5
_NUM_BOUNDARIES = 2
# of the pace of a leader alone: it is not measured again while the team works
_MIN_PACES = 3
# until a team was formed: copies within memory, and how long ranks take to find each other
_COPY_BYTES_PER_S, _CONNECT_S = 2e9, 0.1
# after which a kind of team that was measured, or could not form, is tried again
_RETRY_S = 300.0


class SwitchTimes(NamedTuple):
    """Seconds of a step alone and in a team, those of the switch, and the steps that are left."""

    alone_s: float
    team_s: float
    switch_s: float
    steps_left: float

    @property
    def saved_s(self) -> float:
        """Return by how much sooner the rows end."""
        return self.steps_left * (self.alone_s - self.team_s) - self.switch_s

    @property
    def pays(self) -> bool:
        wanted_s = max(_LEAST_S, _GAIN_FRACTION * self.steps_left * self.alone_s)
        return self.steps_left >= _MIN_STEPS and self.saved_s > wanted_s


class Agreement:
    """Counts the boundaries in a row that want the same, each once."""

    def __init__(self) -> None:
        self._wanted: Hashable = None
        self._place, self._num_yes = -1, 0

    def look(self, wanted: Hashable, place: int) -> bool:
        """Return whether enough boundaries want this by now; what is false wants nothing.

        Args:
            place: of the boundary, such as the number of a measurement; one that was looked at
                before does not count again.
        """
        if not wanted or wanted != self._wanted:
            self._num_yes = 0
        if wanted and (place > self._place or not self._num_yes):
            self._num_yes += 1
        self._wanted, self._place = wanted, place
        return self._num_yes >= _NUM_BOUNDARIES


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
        place = -1 if team is None else snapshot.replica(team.leader).num_paces
        return team if self._forming.look(wanted, place) else None

    def to_end(self, leader_id: int, plan: PoolPlan, snapshot: PoolSnapshot) -> str:
        """Return why two boundaries in a row want a team to end, "" where they do not."""
        why = plan.ends.get(leader_id, "")
        agreement = self._ending.setdefault(leader_id, Agreement())
        agrees = agreement.look(bool(why), snapshot.replica(leader_id).num_paces)
        return why if agrees else ""

    def ended(self, leader_id: int) -> None:
        self._ending.pop(leader_id, None)

    def note_pace(self, kind: TeamKind, pace: TeamPace, now: float) -> None:
        """Take what a team was measured to take."""
        self._paces[kind] = pace
        self._stale_s[kind] = now + _RETRY_S


def why_not_eligible(pool: PoolSnapshot) -> str:
    """Return why no row of this pool can be partitioned now, "" where some can."""
    if pool.has_waiting or any(replica.num_unstarted for replica in pool.replicas):
        return "rows wait"
    num_rows = 0
    for replica in pool.replicas:
        if not replica.num_held:
            continue
        # in their prompt, on their way, or not told of yet
        if replica.rows is None or replica.num_held > len(replica.rows) or replica.num_moves:
            return "rows begin or move"
        num_rows += len(replica.rows)
    num_followers = sum(r.team_size - 1 for r in pool.replicas if r.team_size)
    num_engines = len(pool.replicas) + num_followers
    if not 0 < num_rows < num_engines:
        return f"{num_rows} rows run on {num_engines} engines"
    return ""


def choose_team(pool: PoolSnapshot) -> TeamPlan | None:
    """Return the team by which the row that ends last ends soonest, None where none pays.

    Several rows at as many engines are spread one by one before (`spread_rows`); those that cannot
    be spread further are led by the engine that would end last.
    """
    if why_not_eligible(pool):
        return None
    able = [r for r in pool.replicas if r.num_held and not r.team_size]
    able = [r for r in able if r.num_paces >= _MIN_PACES]
    leaders = [_Leader(r, r.rows, r.token_s) for r in able if r.rows is not None and r.token_s]
    leader = max(leaders, key=lambda each: (each.left_s, -each.replica.replica_id), default=None)
    if leader is None:
        return None
    ranked = [(times, plan) for times, plan in _teams(pool, leader) if times.pays]
    if not ranked:
        return None
    return max(ranked, key=lambda each: (each[0].saved_s, -each[1].kind.size))[1]


def teams_to_end(pool: PoolSnapshot) -> dict[int, str]:
    """Return the leaders whose teams are to end, and why; where rows wait, all do at once."""
    found = {}
    for replica in pool.replicas:
        if replica.team_size and (replica.team_ratio or 0.0) > 1:
            ratio = f"{replica.team_ratio:.2f}"
            found[replica.replica_id] = f"its steps take {ratio} times those of its leader alone"
    return found


class _Leader(NamedTuple):
    """A replica whose rows and pace are known."""

    replica: ReplicaSnapshot
    rows: RunningRows
    token_s: float

    @property
    def steps_left(self) -> float:
        return float(self.rows.left.max(initial=0.0))

    @property
    def left_s(self) -> float:
        return self.steps_left * self.token_s


def _teams(pool: PoolSnapshot, leading: _Leader) -> Iterator[tuple[SwitchTimes, TeamPlan]]:
    """Yield the teams that this engine could lead, one of each size."""
    leader = leading.replica
    idle = [
        r
        for r in pool.replicas
        if r.replica_id in pool.pulling
        and not (r.num_held or r.num_moves)
        and r.is_like(leader)
        and r.weight_bytes == leader.weight_bytes
    ]
    # ranks of one host share memory; and the slowest of all decides
    idle.sort(key=lambda r: (r.host != leader.host, -r.speed, r.replica_id))
    for size in leader.team_sizes:
        followers = idle[: size - 1]
        if len(followers) < size - 1:
            continue
        kind = TeamKind(size, all(r.host == leader.host for r in followers))
        known = pool.team_paces.get(kind)
        pace = known or _hoped_pace(leading, followers)
        alone_s = leading.token_s
        times = SwitchTimes(alone_s, pace.ratio * alone_s, pace.switch_s, leading.steps_left)
        ends = f"{size} engines end {times.saved_s:.1f} s sooner"
        reason = f"{ends}, as measured before" if known else f"a trial, as {ends} at best"
        ids = tuple(r.replica_id for r in followers)
        yield times, TeamPlan(leader.replica_id, ids, kind, reason)


def _hoped_pace(leading: _Leader, followers: list[ReplicaSnapshot]) -> TeamPace:
    """Return what a team takes at best: its ranks share the work evenly, and nothing else is to do.

    KV is copied there and back, and read once more for its checksums.
    """
    leader = leading.replica
    size = len(followers) + 1
    slowest = min(r.speed for r in (leader, *followers))
    kv_bytes = float(leading.rows.tokens.sum()) * leader.kv_token_bytes
    num_bytes = leader.weight_bytes / size + 3 * kv_bytes
    switch_s = _CONNECT_S + num_bytes / _COPY_BYTES_PER_S
    return TeamPace(ratio=leader.speed / slowest / size, switch_s=switch_s)
