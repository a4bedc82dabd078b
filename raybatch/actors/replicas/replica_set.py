"""Starts, watches and restarts the replicas of one pool; Ray-free."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from raybatch.actors.replicas.placement import Placement, requested_of_ray
from raybatch.actors.replicas.runtime import PoolRuntime, ReplicaGroup, ReplicaGroups, Started
from raybatch.actors.replicas.starts import StartEvents, StartLedger
from raybatch.actors.wire.records import FailedStart, Place, PoolApi, PoolSpec, ReplicaApi
from raybatch.errors import error_text, last_line
from raybatch.records.types import ReplicaStats

_STOP_GRACE_S = 5.0

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Member:
    """One started replica; `cause` and `trace` are what it reported before it died, or ""."""

    replica_id: int
    rank: int
    started: Started
    place: Place | None = None
    is_ready: bool = False
    num_finished_rows: int = 0
    stats: ReplicaStats = field(default_factory=ReplicaStats)
    cause: str = ""
    trace: str = ""
    is_killed: bool = False
    # it gets no more rows, and its exit is no crash
    is_draining: bool = False
    # members of a TP group get no rows
    is_tp_driver: bool = False
    is_tp_worker: bool = False
    # its group, and the member whose exit stopped this one, "" for none
    group: ReplicaGroup | None = None
    lost_peer: str = ""
    made_s: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        """Return its name in logs and reports, by rank."""
        return f"replica {self.rank}"

    @property
    def pid(self) -> int | None:
        """Return its process id, None while it waits for resources of Ray."""
        return None if self.place is None else self.place.pid

    @property
    def host_id(self) -> str:
        return "" if self.place is None else self.place.host_id

    @property
    def stays(self) -> bool:
        return self.is_ready and not self.is_draining

    @property
    def takes_rows(self) -> bool:
        return self.stays and not (self.is_tp_driver or self.is_tp_worker)

    @property
    def actor(self) -> ReplicaApi:
        return self.started.actor


class ReplicaSet:
    """Starts the replicas of a pool, one per rank, and restarts those that die: call `start`.

    Args:
        on_lost: called with a replica that exited, and why it crashed or None if it was stopped;
            returns whether it held rows.
        on_exhausted: called with (rank, cause) once all ranks are given up.
    """

    def __init__(
        self,
        spec: PoolSpec,
        plan: Placement,
        runtime: PoolRuntime,
        *,
        on_lost: Callable[[Member, str | None], bool],
        on_exhausted: Callable[[int, str], None],
    ) -> None:
        self.members: dict[int, Member] = {}
        num_first = plan.num_replicas if plan.num_first is None else plan.num_first
        self.ledger = StartLedger(
            num_first, spec.pool.max_start_failures, group_size=spec.pool.share_group or 1
        )
        self.past_busy_s = 0.0
        self._spec = spec
        self._plan = plan
        self._runtime = runtime
        self._events = StartEvents()
        # ids of hosts where engines started, and of hosts where a rank was given up
        self._good_hosts: set[str] = set()
        self._failed_hosts: set[str] = set()
        # None if replicas start and stop independently
        self.groups: ReplicaGroups | None = None
        self._on_lost = on_lost
        self._on_exhausted = on_exhausted
        self._ids = itertools.count(1)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_stopping = False

    def start(self, coordinator: Callable[[], PoolApi]) -> None:
        """Start a replica for every rank that should have one and has none."""
        for rank in self.ledger.to_start():
            if rank not in self._tasks:
                self._tasks[rank] = asyncio.create_task(self._guard(rank, coordinator()))

    async def stop(self) -> None:
        """Wait some seconds for replicas to exit, and kill those that do not."""
        self._is_stopping = True
        tasks = list(self._tasks.values())
        if tasks:
            _, running = await asyncio.wait(tasks, timeout=_STOP_GRACE_S)
            for task in running:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()
        self.ledger.shrink()
        self._is_stopping = False

    def kill(self, replica_id: int, why: str) -> None:
        """Kill a hung replica; it restarts like a crashed one."""
        member = self.members.get(replica_id)
        if member is not None and not member.is_killed:
            member.is_killed = True
            self.ledger.num_hung += 1
            member.cause = why
            member.started.end()

    def waiting(self, now: float) -> tuple[int, float]:
        """Return (number of replicas that wait for resources of Ray, longest wait in seconds)."""
        waits_s = [now - member.made_s for member in self.members.values() if member.pid is None]
        return len(waits_s), max(waits_s, default=0.0)

    def busy_s(self) -> float:
        """Return the seconds in steps, summed over all engines of this pool, even dead ones."""
        return self.past_busy_s + sum(m.stats.busy_s for m in self.members.values())

    async def _guard(self, rank: int, coordinator: PoolApi) -> None:
        try:
            await self._keep(rank, coordinator)
        except Exception as error:
            self._on_exhausted(rank, f"the coordinator failed: {error_text(error)}")
            raise
        finally:
            # a drained replica may be replaced
            self._tasks.pop(rank, None)

    async def _keep(self, rank: int, coordinator: PoolApi) -> None:
        while not self._is_stopping:
            why = None if self.groups is None else self.groups.why_given_up(rank)
            if why is not None:
                self.ledger.retire(rank)
                self._give_up(rank, why, "", "")
                return
            member = self._make(rank)
            failed: FailedStart | None = None
            cause: str | None = None
            try:
                failed = await self._start(member, coordinator)
                cause = failed.cause if failed else await self._run(member, coordinator)
                cause = None if member.is_draining else cause
            finally:
                self.past_busy_s += member.stats.busy_s
                del self.members[member.replica_id]
                self.ledger.stopped(rank)
                member.started.end()
                self._end_peers(member)
                # rows of a replica stopped with its group are not to blame
                has_lost_rows = self._on_lost(member, None if member.lost_peer else cause)
            if cause is None:
                return
            if member.lost_peer:
                # even if it was still starting
                failed, has_lost_rows, cause = None, True, member.cause
            is_final, trace = (failed.is_final, failed.trace) if failed else (False, member.trace)
            delay_s = self.ledger.died(rank, lost_rows=has_lost_rows, is_final=is_final)
            where = member.place.host if member.place else ""
            if delay_s is None:
                if self.groups is not None:
                    why = f"{cause} (of {member}, with which it shares weights)"
                    self.groups.give_up(rank, why)
                if member.place is not None:
                    self._failed_hosts.add(member.host_id)
                self._give_up(rank, cause, trace, where)
                return
            _logger.warning("%s", self._events.again(rank, cause, trace, where))
            await asyncio.sleep(delay_s)

    def _end_peers(self, member: Member) -> None:
        """Stop the rest of a group after one member exited; groups restart as a unit."""
        group = member.group
        if group is None or group.ends:
            return
        group.end(f"{member} exited")
        for peer in self.members.values():
            # in a stopping pool all exit anyway
            if peer.group is group and not self._is_stopping:
                peer.lost_peer = str(member)
                peer.cause = f"{member} of its group exited"
                peer.started.end()

    def _give_up(self, rank: int, cause: str, trace: str, where: str) -> None:
        if self.ledger.is_exhausted():
            # feeders get the cause without the traceback
            if message := self._events.new_trace(trace):
                _logger.error("no engine could start:%s", message)
            self._on_exhausted(rank, cause)
            return
        self._events.given_up(rank, cause, trace, where)
        if self.ledger.num_ready():
            self._log_given_up()

    def _log_given_up(self) -> None:
        for line in self._events.take():
            _logger.error("%s", line)

    def _make(self, rank: int) -> Member:
        replica_id = next(self._ids)
        self.ledger.begin(rank, time.monotonic())
        # once engines run on some host, none is started on one with, say, too small a GPU
        avoid = self._failed_hosts - self._good_hosts if self._good_hosts else set()
        group = None if self.groups is None else self.groups.join(rank)
        started = self._runtime.start(
            self._spec, self._plan, rank, replica_id, avoid=avoid, group=group
        )
        member = Member(replica_id=replica_id, rank=rank, started=started, group=group)
        self.members[replica_id] = member
        return member

    async def _start(self, member: Member, coordinator: PoolApi) -> FailedStart | None:
        """Start a replica; return why it is not ready, None if it is."""
        timeout_s = self._spec.pool.start_timeout_s
        try:
            await self._await_place(member, timeout_s)
            # the wait for a host is no part of the start time
            self.ledger.begin(member.rank, time.monotonic())
            async with asyncio.timeout(timeout_s):
                share_rank = None if member.group is None else member.group.share_rank(member.rank)
                failed = await member.actor.start(
                    self._plan.num_engines_on_host, share_rank, coordinator
                )
        except TimeoutError:
            cause = f"the engine did not start within pool.start_timeout_s={timeout_s} s"
            if any(self._plan.total().values()):
                requested = requested_of_ray(self._plan, self._spec.pool)
                needs = "one replica needs"
                if member.group is not None:
                    needs = f"{member.group.size} replicas on one host each need"
                cause += f" ({needs} {requested})"
            return FailedStart(cause=cause)
        except self._runtime.failed as error:
            return FailedStart(cause=last_line(error))
        if failed is None:
            member.is_ready = True
            self._good_hosts.add(member.host_id)
            self.ledger.ready(member.rank, time.monotonic())
            self._log_given_up()
        return failed

    async def _await_place(self, member: Member, timeout_s: float | None) -> None:
        """Wait until Ray has placed a replica; without a limit while others are ready."""
        placing = asyncio.ensure_future(member.actor.place())
        try:
            while member.place is None:
                try:
                    async with asyncio.timeout(timeout_s):
                        member.place = await asyncio.shield(placing)
                except TimeoutError:
                    if not self.ledger.num_ready():
                        raise
        finally:
            placing.cancel()

    async def _run(self, member: Member, coordinator: PoolApi) -> str | None:
        """Return why the replica crashed, None if it was stopped."""
        try:
            await member.actor.run(coordinator)
        except self._runtime.failed as error:
            return member.cause or last_line(error)
        return None
