"""Decides whether the last rows of a pool finish sooner in a TP group with idle engines.

The step time of a TP group depends on interconnect and shared memory bandwidth, and cannot be
predicted. So the first group of a kind is a trial: it forms if it would pay at an even split of the
work. Its measured steps decide whether it stays, and whether later ones form. Source: BatchGen
(arXiv:2606.21712), PARTITION (section 4.2) and ONLONGTAIL (5.1), with the gain test of its design
document; the trial is new here.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, ReplicaSnapshot, RunningRows
from raybatch.records.types import Capacity, ReplicaStats
from raybatch_extensions.debounce import Debounce

# least gain of a switch, as a share and in seconds, and least remaining steps
_GAIN_FRACTION, _MIN_STEPS, _LEAST_S = 0.10, 128, 0.5
# steps of one measurement of the token time, and measurements to keep
_MEASURED_STEPS, _NUM_MEASUREMENTS = 16, 3
# measurements of a driver before it forms a group, as it takes none meanwhile
_MIN_MEASUREMENTS = 3
# before the first group: memory copy bandwidth, and the time of a rendezvous
_COPY_BYTES_PER_S, _CONNECT_S = 2e9, 0.1
# time after which a kind of group that was measured, or failed to form, is tried again
_RETRY_S = 300.0


class SwitchTimes(NamedTuple):
    """Forecast of a TP group: seconds of a step alone and in it, of the switch, and steps left."""

    alone_s: float
    tp_s: float
    switch_s: float
    steps_left: float

    @property
    def saved_s(self) -> float:
        """Return the seconds that the group is forecast to save."""
        return self.steps_left * (self.alone_s - self.tp_s) - self.switch_s

    @property
    def pays(self) -> bool:
        wanted_s = max(_LEAST_S, _GAIN_FRACTION * self.steps_left * self.alone_s)
        return self.steps_left >= _MIN_STEPS and self.saved_s > wanted_s


class TPGroupKind(NamedTuple):
    size: int
    is_on_one_host: bool


class TPGroupTimes(NamedTuple):
    """Measured times of TP groups of one kind."""

    ratio: float
    """Step time of the group, relative to its driver alone."""
    switch_s: float
    """Seconds to form the group, and to end it."""


class TPGroupPlan(NamedTuple):
    """A TP group to form: a driver replica and idle workers."""

    driver: int
    workers: tuple[int, ...]
    kind: TPGroupKind
    reason: str
    alone_s: float
    """Token time of the driver alone, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TPReplica(ReplicaSnapshot):
    """A replica with the facts by which `plan_tp_groups` decides."""

    token_s: float | None = None
    """Latest measured seconds per token of each of its rows; None if not measured."""
    num_measurements: int = 0
    """Number of measurements of `token_s`."""
    weight_bytes: int = 0
    tp_sizes: tuple[int, ...] = ()
    """Sizes of TP groups that it can drive."""
    tp_size: int = 0
    """Size of its TP group; 0 if it runs alone."""
    tp_ratio: float | None = None
    """Step time in that group, relative to its own before; None until measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TPSnapshot:
    """The replicas of a pool, without TP workers, and the measured times of TP groups."""

    replicas: tuple[TPReplica, ...]
    pulling: frozenset[int] = frozenset()
    has_waiting: bool = False
    measured: Mapping[TPGroupKind, TPGroupTimes]
    """By kind of TP group."""

    def replica(self, replica_id: int) -> TPReplica:
        """Return a replica by id."""
        return next(r for r in self.replicas if r.replica_id == replica_id)


class TimePerToken:
    """Measures the time per token of a replica from its latest steps: `note` its reports."""

    def __init__(self, stats: ReplicaStats) -> None:
        self._base = stats
        self._is_stale = False
        # other load on the host only adds time
        self._latest: deque[float] = deque(maxlen=_NUM_MEASUREMENTS)
        self.num_measured = 0

    @property
    def token_s(self) -> float | None:
        """Return the seconds per token of each row: the least of the last measurements, or None."""
        return min(self._latest, default=None)

    def restart(self, stats: ReplicaStats) -> None:
        """Discard all measurements; new ones begin after the next step."""
        self._base, self._is_stale = stats, True
        self._latest.clear()

    def note(self, stats: ReplicaStats) -> None:
        """Update from the counters of the replica; measures after enough steps of the same rows."""
        before, num_rows = self._base, stats.num_running
        if self._is_stale:
            self._is_stale = stats.num_steps == before.num_steps
            self._base = stats
        elif num_rows != before.num_running or not num_rows:
            self._base = stats
            self._latest.clear()
        elif stats.num_steps - before.num_steps >= _MEASURED_STEPS:
            num_tokens = stats.generated_tokens - before.generated_tokens
            seconds = stats.engine_s - before.engine_s
            self._base, self.num_measured = stats, self.num_measured + 1
            # counters fall when an engine is rebuilt
            if min(seconds, num_tokens) > 0:
                self._latest.append(seconds * num_rows / num_tokens)


class TPGroupHistory:
    """Records measurements and decisions about the TP groups of one pool, real or simulated."""

    def __init__(self) -> None:
        self.measured: dict[TPGroupKind, TPGroupTimes] = {}
        # expiry of each measurement
        self._stale_s: dict[TPGroupKind, float] = {}
        self._forming, self._ending = Debounce(), dict[int, Debounce]()
        self._tokens: dict[int, TimePerToken] = {}
        # by driver, the group size and the token time before
        self._led: dict[int, tuple[int, float]] = {}

    def snapshot(
        self, pool: PoolSnapshot, engines: Mapping[int, tuple[ReplicaStats, Capacity]]
    ) -> TPSnapshot:
        """Return the input of `plan_tp_groups`.

        `engines` has the counters and the capacity of replicas that reported them, by id.
        """
        found = []
        for each in pool.replicas:
            more: dict[str, Any] = {}
            if each.replica_id in engines:
                more = self._facts(each.replica_id, *engines[each.replica_id])
            plain = {field.name: getattr(each, field.name) for field in fields(each)}
            found.append(TPReplica(**plain, **more))
        return TPSnapshot(
            replicas=tuple(found),
            pulling=pool.pulling,
            has_waiting=pool.has_waiting,
            measured=self.measured,
        )

    def _facts(self, replica_id: int, stats: ReplicaStats, capacity: Capacity) -> dict[str, Any]:
        measured = self._tokens.setdefault(replica_id, TimePerToken(stats))
        measured.note(stats)
        size, alone_s = self._led.get(replica_id, (0, 0.0))
        return {
            "token_s": measured.token_s,
            "num_measurements": measured.num_measured,
            "weight_bytes": capacity.weight_bytes,
            "tp_sizes": capacity.tp_sizes,
            "tp_size": size,
            "tp_ratio": measured.token_s / alone_s
            if size and measured.token_s is not None
            else None,
        }

    def begin(self, plan: TPGroupPlan) -> None:
        """Note that a group is being formed."""
        self._led[plan.driver] = plan.kind.size, plan.alone_s

    def restart_timing(self, driver_id: int, stats: ReplicaStats) -> None:
        """Restart the measurements of a driver whose group began or ended."""
        self._tokens.setdefault(driver_id, TimePerToken(stats)).restart(stats)

    def end(self, driver_id: int, stats: ReplicaStats | None) -> None:
        """Note the end of a driver's group; `stats` are its counters, None if it has exited."""
        self._ending.pop(driver_id, None)
        if self._led.pop(driver_id, None) is not None and stats is not None:
            self.restart_timing(driver_id, stats)

    def forget(self, replica_id: int) -> None:
        """Forget a dead replica."""
        self._tokens.pop(replica_id, None)
        self._led.pop(replica_id, None)

    def retry(self, now: float) -> None:
        """Expire old measurements, since the load of hosts changes."""
        for kind in [k for k in self.measured if self._stale_s[k] < now]:
            del self.measured[kind], self._stale_s[kind]

    def to_begin(self, tp_group: TPGroupPlan | None, pool: TPSnapshot) -> TPGroupPlan | None:
        """Return the group to form, if this plan and the one before agree on it; else None."""
        wanted = None if tp_group is None else (tp_group.driver, tp_group.workers)
        place = -1 if tp_group is None else pool.replica(tp_group.driver).num_measurements
        return tp_group if self._forming.update(wanted, place) else None

    def to_end(self, driver_id: int, ends: Mapping[int, str], pool: TPSnapshot) -> str:
        """Return why to end a group, if this plan and the one before agree on it; else ""."""
        why = ends.get(driver_id, "")
        debounce = self._ending.setdefault(driver_id, Debounce())
        agrees = debounce.update(bool(why), pool.replica(driver_id).num_measurements)
        return why if agrees else ""

    def note_times(self, kind: TPGroupKind, measured: TPGroupTimes, now: float) -> None:
        """Record the measured times of TP groups of a kind; they expire after some minutes."""
        self.measured[kind] = measured
        self._stale_s[kind] = now + _RETRY_S


def plan_tp_groups(pool: TPSnapshot, plan: PoolPlan) -> tuple[TPGroupPlan | None, dict[int, str]]:
    """Return the TP group to form or None, and {driver id: reason} of the groups to end.

    A group is formed only while the plan of the pool moves no rows.
    """
    ends = tp_groups_to_end(pool)
    if ends or plan.steal is not None or plan.moves:
        return None, ends
    return choose_tp_group(pool), ends


def why_not_eligible(pool: TPSnapshot) -> str:
    """Return why no TP group can form now, "" if one can."""
    if pool.has_waiting or any(replica.num_unstarted for replica in pool.replicas):
        return "rows wait"
    num_rows = 0
    for replica in pool.replicas:
        if not replica.num_held:
            continue
        # prefilling, moving, or not reported yet
        if replica.rows is None or replica.num_held > len(replica.rows) or replica.num_moves:
            return "rows start or move"
        num_rows += len(replica.rows)
    num_workers = sum(r.tp_size - 1 for r in pool.replicas if r.tp_size)
    num_engines = len(pool.replicas) + num_workers
    if not 0 < num_rows < num_engines:
        return f"{num_rows} rows run on {num_engines} engines"
    return ""


def choose_tp_group(pool: TPSnapshot) -> TPGroupPlan | None:
    """Return the TP group that saves most time, None if none saves enough.

    The engine that would finish last becomes the driver. Before that, `spread_rows` has spread the
    rows over the engines.
    """
    if why_not_eligible(pool):
        return None
    able = [r for r in pool.replicas if r.num_held and not r.tp_size]
    able = [r for r in able if r.num_measurements >= _MIN_MEASUREMENTS]
    drivers = [_Driver(r, r.rows, r.token_s) for r in able if r.rows is not None and r.token_s]
    driver = max(drivers, key=lambda each: (each.left_s, -each.replica.replica_id), default=None)
    if driver is None:
        return None
    ranked = [(times, plan) for times, plan in _tp_groups(pool, driver) if times.pays]
    if not ranked:
        return None
    return max(ranked, key=lambda each: (each[0].saved_s, -each[1].kind.size))[1]


def tp_groups_to_end(pool: TPSnapshot) -> dict[int, str]:
    """Return {driver id: reason} of the groups that should end, as their steps got slower."""
    found = {}
    for replica in pool.replicas:
        if replica.tp_size and (replica.tp_ratio or 0.0) > 1:
            ratio = f"{replica.tp_ratio:.2f}"
            found[replica.replica_id] = (
                f"its steps take {ratio} times as long as its driver's alone"
            )
    return found


class _Driver(NamedTuple):
    """A replica with known rows and token time."""

    replica: TPReplica
    rows: RunningRows
    token_s: float

    @property
    def steps_left(self) -> float:
        return float(self.rows.left.max(initial=0.0))

    @property
    def left_s(self) -> float:
        return self.steps_left * self.token_s


def _tp_groups(pool: TPSnapshot, leading: _Driver) -> Iterator[tuple[SwitchTimes, TPGroupPlan]]:
    """Yield the TP groups that this engine could drive, one of each size."""
    driver = leading.replica
    idle = [
        r
        for r in pool.replicas
        if r.replica_id in pool.pulling
        and not (r.num_held or r.num_moves)
        and r.is_like(driver)
        and r.weight_bytes == driver.weight_bytes
    ]
    # ranks of one host share memory, and the slowest rank decides
    idle.sort(key=lambda r: (r.host != driver.host, -r.speed, r.replica_id))
    for size in driver.tp_sizes:
        workers = idle[: size - 1]
        if len(workers) < size - 1:
            continue
        kind = TPGroupKind(size, all(r.host == driver.host for r in workers))
        known = pool.measured.get(kind)
        measured = known or _best_case(leading, workers)
        alone_s = leading.token_s
        times = SwitchTimes(
            alone_s, measured.ratio * alone_s, measured.switch_s, leading.steps_left
        )
        ends = f"{size} engines finish {times.saved_s:.1f} s sooner"
        reason = f"{ends}, by earlier measurements" if known else f"a trial: {ends} at best"
        ids = tuple(r.replica_id for r in workers)
        yield times, TPGroupPlan(driver.replica_id, ids, kind, reason, alone_s)


def _best_case(leading: _Driver, workers: list[TPReplica]) -> TPGroupTimes:
    """Return the times of a group whose ranks share the work evenly, without overhead.

    KV is copied to the ranks and back, and read once for its checksums.
    """
    driver = leading.replica
    size = len(workers) + 1
    slowest = min(r.speed for r in (driver, *workers))
    kv_bytes = float(leading.rows.tokens.sum()) * driver.kv_token_bytes
    num_bytes = driver.weight_bytes / size + 3 * kv_bytes
    switch_s = _CONNECT_S + num_bytes / _COPY_BYTES_PER_S
    return TPGroupTimes(ratio=driver.speed / slowest / size, switch_s=switch_s)
