"""Whether the last rows of a pool end sooner when idle engines take part in every step of them.

What a step of a team takes hangs on how quickly its ranks reach each other, and on what they share
of a host's memory: nobody knows that ahead. So the first team of a kind forms where it would pay if
its ranks shared all work evenly, its measured steps say whether it stays, and later ones form by
those. Source: BatchGen (arXiv:2606.21712), PARTITION (section 4.2) and ONLONGTAIL (5.1), with the
gain test of its design document; the trial is this library's.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from raybatch.policy.pool.plan import Agreement
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, ReplicaSnapshot, RunningRows
from raybatch.records.types import Capacity, ReplicaStats

# what a switch has to gain, and steps and seconds over which it has to
_GAIN_FRACTION, _MIN_STEPS, _LEAST_S = 0.10, 128, 0.5
# steps over which the pace of a replica's present rows is measured
_PACE_STEPS, _NUM_PACES = 16, 3
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


class TeamKind(NamedTuple):
    size: int
    is_on_one_host: bool


class TeamPace(NamedTuple):
    """What teams of one kind were measured to take."""

    ratio: float
    """Seconds of a step of the team, beside those of its leader alone."""
    switch_s: float
    """Of forming the team, and of ending it."""


class TeamPlan(NamedTuple):
    """Idle replicas that are to take part in every step of another one."""

    leader: int
    followers: tuple[int, ...]
    kind: TeamKind
    reason: str
    alone_s: float
    """Seconds that the leader has taken for a token so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamReplica(ReplicaSnapshot):
    """A replica of a pool with what teams are decided by."""

    token_s: float | None = None
    """Seconds of the next token of each of its rows, as lately measured; None where it was not."""
    num_paces: int = 0
    """Measurements of that so far."""
    weight_bytes: int = 0
    team_sizes: tuple[int, ...] = ()
    """How many engines may compute its steps together, itself included."""
    team_size: int = 0
    """Of the team that it leads; 0 where it computes alone."""
    team_ratio: float | None = None
    """Seconds of that team's steps, beside those of its own before; None until measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TeamSnapshot:
    """The replicas of a pool that follow none, and what teams were measured to take."""

    replicas: tuple[TeamReplica, ...]
    pulling: frozenset[int] = frozenset()
    has_waiting: bool = False
    paces: Mapping[TeamKind, TeamPace]
    """Of kinds of teams that there were."""

    def replica(self, replica_id: int) -> TeamReplica:
        """Return a replica that is in it."""
        return next(r for r in self.replicas if r.replica_id == replica_id)


class TokenPace:
    """Seconds of the next token of each row of a replica, by its latest steps alone."""

    def __init__(self, stats: ReplicaStats) -> None:
        self._base = stats
        self._is_stale = False
        # what else runs on its host only adds
        self._latest: deque[float] = deque(maxlen=_NUM_PACES)
        self.num_measured = 0

    @property
    def token_s(self) -> float | None:
        """Return the least of the latest measurements, None where there is none."""
        return min(self._latest, default=None)

    def restart(self, stats: ReplicaStats) -> None:
        """Begin anew with the first report after this one, as what comes is of other steps."""
        self._base, self._is_stale = stats, True
        self._latest.clear()

    def note(self, stats: ReplicaStats) -> None:
        """Take its counters, where it has taken some steps since it was asked last."""
        before, num_rows = self._base, stats.num_running
        if self._is_stale:
            self._is_stale = stats.num_steps == before.num_steps
            self._base = stats
        elif num_rows != before.num_running or not num_rows:
            self._base = stats
            self._latest.clear()
        elif stats.num_steps - before.num_steps >= _PACE_STEPS:
            num_tokens = stats.generated_tokens - before.generated_tokens
            seconds = stats.engine_s - before.engine_s
            self._base, self.num_measured = stats, self.num_measured + 1
            # counters of an engine that was built anew may fall
            if min(seconds, num_tokens) > 0:
                self._latest.append(seconds * num_rows / num_tokens)


class TeamBook:
    """What one pool remembers of its teams; for those of real replicas, and of simulated ones."""

    def __init__(self) -> None:
        self.paces: dict[TeamKind, TeamPace] = {}
        # when they are not believed any more
        self._stale_s: dict[TeamKind, float] = {}
        self._forming, self._ending = Agreement(), dict[int, Agreement]()
        self._tokens: dict[int, TokenPace] = {}
        # of those that lead, the size of the team and the seconds of a token before
        self._led: dict[int, tuple[int, float]] = {}

    def snapshot(
        self, pool: PoolSnapshot, engines: Mapping[int, tuple[ReplicaStats, Capacity]]
    ) -> TeamSnapshot:
        """Return a pool as `plan_teams` takes it; `engines` are those that have told of rows."""
        found = []
        for each in pool.replicas:
            more: dict[str, Any] = {}
            if each.replica_id in engines:
                more = self._facts(each.replica_id, *engines[each.replica_id])
            plain = {field.name: getattr(each, field.name) for field in fields(each)}
            found.append(TeamReplica(**plain, **more))
        return TeamSnapshot(
            replicas=tuple(found),
            pulling=pool.pulling,
            has_waiting=pool.has_waiting,
            paces=self.paces,
        )

    def _facts(self, replica_id: int, stats: ReplicaStats, capacity: Capacity) -> dict[str, Any]:
        pace = self._tokens.setdefault(replica_id, TokenPace(stats))
        pace.note(stats)
        size, alone_s = self._led.get(replica_id, (0, 0.0))
        return {
            "token_s": pace.token_s,
            "num_paces": pace.num_measured,
            "weight_bytes": capacity.weight_bytes,
            "team_sizes": capacity.team_sizes,
            "team_size": size,
            "team_ratio": pace.token_s / alone_s if size and pace.token_s is not None else None,
        }

    def begin(self, plan: TeamPlan) -> None:
        """Note that a replica leads a team, or that this forms: its rows stay where they are."""
        self._led[plan.leader] = plan.kind.size, plan.alone_s

    def restart_pace(self, leader_id: int, stats: ReplicaStats) -> None:
        """Note that its steps are others from now on: those of a team, or its own again."""
        self._tokens.setdefault(leader_id, TokenPace(stats)).restart(stats)

    def end(self, leader_id: int, stats: ReplicaStats | None) -> None:
        """Note the end of a team, whose leader may be gone."""
        self._ending.pop(leader_id, None)
        if self._led.pop(leader_id, None) is not None and stats is not None:
            self.restart_pace(leader_id, stats)

    def forget(self, replica_id: int) -> None:
        """Forget a replica that is gone."""
        self._tokens.pop(replica_id, None)
        self._led.pop(replica_id, None)

    def retry(self, now: float) -> None:
        """Let kinds of teams be tried again after some time, as hosts are not always as busy."""
        for kind in [k for k in self.paces if self._stale_s[k] < now]:
            del self.paces[kind], self._stale_s[kind]

    def to_begin(self, team: TeamPlan | None, pool: TeamSnapshot) -> TeamPlan | None:
        """Return the team that two boundaries in a row wanted."""
        wanted = None if team is None else (team.leader, team.followers)
        place = -1 if team is None else pool.replica(team.leader).num_paces
        return team if self._forming.look(wanted, place) else None

    def to_end(self, leader_id: int, ends: Mapping[int, str], pool: TeamSnapshot) -> str:
        """Return why two boundaries in a row want a team to end, "" where they do not."""
        why = ends.get(leader_id, "")
        agreement = self._ending.setdefault(leader_id, Agreement())
        agrees = agreement.look(bool(why), pool.replica(leader_id).num_paces)
        return why if agrees else ""

    def note_pace(self, kind: TeamKind, pace: TeamPace, now: float) -> None:
        """Take what a team was measured to take."""
        self.paces[kind] = pace
        self._stale_s[kind] = now + _RETRY_S


def plan_teams(pool: TeamSnapshot, plan: PoolPlan) -> tuple[TeamPlan | None, dict[int, str]]:
    """Return the team to form, and why others are to end, by their leaders.

    Engines take part in the steps of others only where no row is to go elsewhere by the plan of
    the pool.
    """
    ends = teams_to_end(pool)
    if ends or plan.steal is not None or plan.moves:
        return None, ends
    return choose_team(pool), ends


def why_not_eligible(pool: TeamSnapshot) -> str:
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


def choose_team(pool: TeamSnapshot) -> TeamPlan | None:
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


def teams_to_end(pool: TeamSnapshot) -> dict[int, str]:
    """Return the leaders whose teams are to end, and why; where rows wait, all do at once."""
    found = {}
    for replica in pool.replicas:
        if replica.team_size and (replica.team_ratio or 0.0) > 1:
            ratio = f"{replica.team_ratio:.2f}"
            found[replica.replica_id] = f"its steps take {ratio} times those of its leader alone"
    return found


class _Leader(NamedTuple):
    """A replica whose rows and pace are known."""

    replica: TeamReplica
    rows: RunningRows
    token_s: float

    @property
    def steps_left(self) -> float:
        return float(self.rows.left.max(initial=0.0))

    @property
    def left_s(self) -> float:
        return self.steps_left * self.token_s


def _teams(pool: TeamSnapshot, leading: _Leader) -> Iterator[tuple[SwitchTimes, TeamPlan]]:
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
        known = pool.paces.get(kind)
        pace = known or _hoped_pace(leading, followers)
        alone_s = leading.token_s
        times = SwitchTimes(alone_s, pace.ratio * alone_s, pace.switch_s, leading.steps_left)
        ends = f"{size} engines end {times.saved_s:.1f} s sooner"
        reason = f"{ends}, as measured before" if known else f"a trial, as {ends} at best"
        ids = tuple(r.replica_id for r in followers)
        yield times, TeamPlan(leader.replica_id, ids, kind, reason, alone_s)


def _hoped_pace(leading: _Leader, followers: list[TeamReplica]) -> TeamPace:
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
