"""The replicas of one pool: starts them, watches them, starts them again; no Ray."""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raybatch.actors.replicas.placement import Placement, requested_of_ray
from raybatch.actors.replicas.site import Handle, Site, Started
from raybatch.actors.wire.records import FailedStart, PoolSpec
from raybatch.config import PoolConfig
from raybatch.errors import error_text, last_line
from raybatch.records.types import ReplicaStats

_FIRST_DELAY_S = 0.2
_DELAY_FACTOR = 5.0
_MAX_DELAY_S = 30.0
_STOP_GRACE_S = 5.0
# a replica that waits for so long makes other pools release engines, and again after that
_ASK_AFTER_S = 5.0
_WARN_AFTER_S = 30.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Rank:
    num_failures: int = 0
    start_began: float | None = None
    is_ready: bool = False
    has_been_ready: bool = False
    is_retired: bool = False


@dataclass(slots=True)
class StartLedger:
    """Counts starts and deaths of the ranks of one pool.

    A death that cost rows is theirs to answer for (see `RowQueue.lose`); one without rows counts
    like a failed start, and after `max_start_failures` in a row the rank is given up.
    """

    num_replicas: int
    max_start_failures: int
    num_restarts: int = 0
    num_hung: int = 0
    longest_start_s: float = 0.0
    ranks: list[_Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks = [_Rank() for _ in range(self.num_replicas)]

    def begin(self, rank: int, now: float) -> None:
        self.ranks[rank].start_began = now

    def ready(self, rank: int, now: float) -> None:
        state = self.ranks[rank]
        if state.start_began is not None:
            self.longest_start_s = max(self.longest_start_s, now - state.start_began)
        state.start_began = None
        state.is_ready = state.has_been_ready = True

    def worked(self, rank: int) -> None:
        """Note that `rank` finished rows, so that its failures count from zero again."""
        self.ranks[rank].num_failures = 0

    def stopped(self, rank: int) -> None:
        self.ranks[rank].start_began = None
        self.ranks[rank].is_ready = False

    def died(self, rank: int, *, lost_rows: bool, is_final: bool = False) -> float | None:
        """Note a death or a failed start; `is_final` where another start would fail as well.

        Returns seconds to wait before the next start, or None: the rank is given up.
        """
        self.stopped(rank)
        state = self.ranks[rank]
        if lost_rows:
            self.num_restarts += 1
            return 0.0
        state.num_failures += 1
        if is_final or state.num_failures >= self.max_start_failures:
            state.is_retired = True
            return None
        self.num_restarts += 1
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * _DELAY_FACTOR ** (state.num_failures - 1))

    def num_ready(self) -> int:
        return sum(state.is_ready for state in self.ranks)

    def num_restarting(self) -> int:
        """Return the number of ranks that answered once and do not answer now."""
        return sum(s.has_been_ready and not (s.is_ready or s.is_retired) for s in self.ranks)

    def num_retired(self) -> int:
        return sum(state.is_retired for state in self.ranks)

    def is_exhausted(self) -> bool:
        return self.num_retired() == self.num_replicas

    def num_expected(self, now: float) -> int:
        """Return the starts that are likely to end soon, judged by the longest one seen."""
        patience_s = 2 * self.longest_start_s
        return sum(
            state.start_began is not None and now - state.start_began <= patience_s
            for state in self.ranks
        )


@dataclass(slots=True)
class StartEvents:
    """Messages about the starts of one pool, for the log.

    The run ends with the cause of the last rank that is given up. So the others are logged only
    where some rank works, which shows when one is ready. A trace is logged once.
    """

    _traces: set[str] = field(default_factory=set)
    _kept: list[str] = field(default_factory=list)

    def again(self, rank: int, cause: str, trace: str = "") -> str:
        return f"replica {rank} is started again: {cause}{self.new_trace(trace)}"

    def given_up(self, rank: int, cause: str, trace: str = "") -> None:
        """Keep the message about a rank that is given up while others are not."""
        self._kept.append(f"replica {rank} is given up: {cause}{self.new_trace(trace)}")

    def new_trace(self, trace: str) -> str:
        """Return a trace on lines of its own if it is new, else ""."""
        if not trace or trace in self._traces:
            return ""
        self._traces.add(trace)
        return f"\n{trace}"

    def take(self) -> list[str]:
        kept, self._kept = self._kept, []
        return kept


@dataclass(slots=True)
class Member:
    """One started replica; `cause` is what it reported before it died."""

    replica_id: int
    rank: int
    started: Started
    pid: int | None = None
    is_ready: bool = False
    num_finished_rows: int = 0
    stats: ReplicaStats = field(default_factory=ReplicaStats)
    cause: str = ""
    is_killed: bool = False
    made_s: float = field(default_factory=time.monotonic)

    @property
    def actor(self) -> Handle:
        return self.started.actor


class ReplicaSet:
    """Keeps one task per rank that makes a replica, waits for its end and replaces it.

    Args:
        on_lost: called with a replica that ended and why it died, None when it was stopped;
            returns whether its death cost rows.
        on_exhausted: called with rank and cause when no rank is left.
    """

    def __init__(
        self,
        spec: PoolSpec,
        plan: Placement,
        site: Site,
        *,
        on_lost: Callable[[Member, str | None], bool],
        on_exhausted: Callable[[int, str], None],
    ) -> None:
        self.members: dict[int, Member] = {}
        self.ledger = StartLedger(plan.num_replicas, spec.pool.max_start_failures)
        self.past_busy_s = 0.0
        self._spec = spec
        self._plan = plan
        self._site = site
        self._events = StartEvents()
        self._on_lost = on_lost
        self._on_exhausted = on_exhausted
        self._ids = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_stopping = False

    def start(self, coordinator: Handle) -> None:
        """Start every rank that has no replica and is not given up."""
        for rank in range(self._plan.num_replicas):
            if rank not in self._tasks and not self.ledger.ranks[rank].is_retired:
                self._tasks[rank] = asyncio.create_task(self._guard(rank, coordinator))

    async def stop(self) -> None:
        """Wait for replicas that end by themselves, then end the others."""
        self._is_stopping = True
        tasks = list(self._tasks.values())
        if tasks:
            _, running = await asyncio.wait(tasks, timeout=_STOP_GRACE_S)
            for task in running:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self._is_stopping = False

    def kill(self, replica_id: int, why: str) -> None:
        """End a replica that hangs, whatever it does; it is replaced like one that died."""
        member = self.members[replica_id]
        if not member.is_killed:
            member.is_killed = True
            self.ledger.num_hung += 1
            member.cause = why
            member.started.end()

    def waits_s(self, now: float) -> float:
        """Return for how long a replica has been waiting for what Ray is to reserve; 0 for none."""
        return max((now - m.made_s for m in self.members.values() if m.pid is None), default=0.0)

    def busy_s(self) -> float:
        """Return the seconds that engines of this pool spent in steps, dead ones included."""
        return self.past_busy_s + sum(m.stats.engine_s for m in self.members.values())

    async def _guard(self, rank: int, coordinator: Handle) -> None:
        try:
            await self._keep(rank, coordinator)
        except Exception as error:
            self._on_exhausted(rank, f"the coordinator failed: {error_text(error)}")
            raise

    async def _keep(self, rank: int, coordinator: Handle) -> None:
        while not self._is_stopping:
            member = self._make(rank)
            failed: FailedStart | None = None
            cause: str | None = None
            try:
                failed = await self._start(member)
                cause = failed.cause if failed else await self._run(member, coordinator)
            finally:
                self.past_busy_s += member.stats.engine_s
                del self.members[member.replica_id]
                self.ledger.stopped(rank)
                member.started.end()
                has_lost_rows = self._on_lost(member, cause)
            if cause is None:
                return
            is_final, trace = (failed.is_final, failed.trace) if failed else (False, "")
            delay_s = self.ledger.died(rank, lost_rows=has_lost_rows, is_final=is_final)
            if delay_s is None:
                self._give_up(rank, cause, trace)
                return
            _logger.warning("%s", self._events.again(rank, cause, trace))
            await asyncio.sleep(delay_s)

    def _give_up(self, rank: int, cause: str, trace: str) -> None:
        if self.ledger.is_exhausted():
            # whoever waits for rows gets the cause, and no trace
            if message := self._events.new_trace(trace):
                _logger.error("no engine can be started:%s", message)
            self._on_exhausted(rank, cause)
            return
        self._events.given_up(rank, cause, trace)
        if self.ledger.num_ready():
            self._log_given_up()

    def _log_given_up(self) -> None:
        for line in self._events.take():
            _logger.error("%s", line)

    def _make(self, rank: int) -> Member:
        replica_id = next(self._ids)
        self.ledger.begin(rank, time.monotonic())
        started = self._site.start(self._spec, self._plan, rank, replica_id)
        member = Member(replica_id=replica_id, rank=rank, started=started)
        self.members[replica_id] = member
        return member

    async def _start(self, member: Member) -> FailedStart | None:
        """Return why the replica is not ready, None when it is."""
        timeout_s = self._spec.pool.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                member.pid = await member.actor.pid.remote()
                failed: FailedStart | None = await member.actor.start.remote(
                    self._plan.num_engines_on_host
                )
        except TimeoutError:
            cause = f"the start took longer than start_timeout_s={timeout_s}"
            if any(self._plan.total().values()):
                requested = requested_of_ray(self._plan, self._spec.pool)
                cause += f" (one replica asks for {requested})"
            return FailedStart(cause=cause)
        except self._site.failed as error:
            return FailedStart(cause=last_line(error))
        if failed is None:
            member.is_ready = True
            self.ledger.ready(member.rank, time.monotonic())
            self._log_given_up()
        return failed

    async def _run(self, member: Member, coordinator: Handle) -> str | None:
        """Return why the replica died, None when it was stopped."""
        try:
            await member.actor.run.remote(coordinator)
        except self._site.failed as error:
            return member.cause or last_line(error)
        return None


class IdlePoolReclaimer:
    """Says when idle pools of the driver should end engines: this pool waits for what they hold."""

    def __init__(self, pool: PoolConfig, plan: Placement) -> None:
        self.requested = requested_of_ray(plan, pool)
        self._last_request_s = -math.inf
        self._has_warned = False

    def is_due(self, waits_s: float, now_s: float) -> bool:
        """Return whether to reclaim; warn once that a replica has waited long for Ray."""
        if waits_s > _WARN_AFTER_S and not self._has_warned:
            self._has_warned = True
            text = "an engine has been waiting for %.0f s for %s of the cluster"
            _logger.warning(text, waits_s, self.requested)
        if waits_s <= _ASK_AFTER_S or now_s - self._last_request_s <= _ASK_AFTER_S:
            return False
        self._last_request_s = now_s
        return True


def has_reserved(pool: PoolConfig, plan: Placement) -> bool:
    """Return whether an engine holds anything that another one could wait for."""
    return bool(plan.bundles or pool.resources or any(plan.total().values()))
