"""Protocols of the runtimes of coordinator and replicas, with Ray or without."""

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol, TypeVar

from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.records import Place, PoolApi, PoolSpec, ReplicaApi, Requests
from raybatch.config import PoolConfig, log_level
from raybatch.records.share import ShareRank
from raybatch.redaction import DiscreetFormatter
from raybatch.telemetry import metrics_of_process

T = TypeVar("T")
Errors = tuple[type[Exception], ...]
# starts a coroutine as a task
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class ReplicaGroup(Protocol):
    """Replicas of one host that start and stop together; see `WeightSharingGroup`."""

    number: int
    size: int
    # reserved cluster resources, and the number of their users
    reserved: Any
    num_users: int
    # why it ended, "" while it lives
    ends: str

    def share_rank(self, rank: int) -> ShareRank: ...
    async def exchange(self, rank: int, text: str) -> list[str] | None: ...
    def end(self, why: str) -> None: ...


class ReplicaGroups(Protocol):
    """The groups of one pool; see `WeightSharingGroups`."""

    def join(self, rank: int) -> ReplicaGroup: ...
    def give_up(self, rank: int, cause: str) -> None: ...
    def why_given_up(self, rank: int) -> str | None: ...


class Started(Protocol):
    """A started replica with its reserved resources."""

    @property
    def actor(self) -> ReplicaApi:
        """Return the proxy of the replica."""

    def end(self) -> None:
        """Kill the replica and release its resources; may be called again."""


class PoolRuntime(Protocol):
    """The runtime of a coordinator: starts replicas, and stores request tables.

    Attributes:
        died: exceptions that a call raises if the replica has died, or an object is lost.
        failed: all exceptions that a call to a replica may raise.
    """

    died: Errors
    failed: Errors

    @property
    def metrics(self) -> Any:  # noqa: ANN401 - a module, or a stand-in for it
        """Return a factory of counters, gauges and histograms, such as `ray.util.metrics`."""
        return metrics_of_process()

    def coordinator(self) -> PoolApi:
        """Return a proxy of the coordinator for its replicas; called in its own process."""

    def keep(self, requests: Requests) -> Any:  # noqa: ANN401
        """Store a request table; return a reference, which keeps it as long as it lives."""

    def start(
        self,
        spec: PoolSpec,
        plan: Placement,
        rank: int,
        replica_id: int,
        *,
        avoid: Collection[str] = (),
        group: ReplicaGroup | None = None,
    ) -> Started:
        """Start a replica; returns before it is ready.

        Args:
            rank: its index in the pool.
            replica_id: unique among all starts.
            avoid: ids of hosts on which it must not run.
            group: its weight-sharing group, whose replicas run on one host; None for none.
        """

    async def make_room(self, wanted: str) -> None:
        """Ask idle pools of this driver to release resources; `wanted` names them in the log."""

    async def draining_hosts(self) -> Collection[str]:
        """Return the ids of hosts that the cluster is about to remove."""
        return ()

    async def shortage(self, plan: Placement, pool: PoolConfig) -> str:
        """Return why waiting engines may wait forever and what to do, "" if unknown."""
        return ""


class ReplicaRuntime(Protocol):
    """The runtime of a replica; by default a separate process on this host."""

    @property
    def metrics(self) -> Any:  # noqa: ANN401
        """Return a factory of metrics, as `PoolRuntime.metrics` does."""
        return metrics_of_process()

    async def fetch(self, ref: Any) -> Requests | None:  # noqa: ANN401
        """Return a request table; None if it is lost."""

    def place(self) -> Place:
        """Return where the replica runs."""
        return Place(os.getpid())

    def settle(self, spec: PoolSpec) -> None:
        """Prepare the process for an engine, before its libraries are imported."""
        use_threads(spec)

    def device(self) -> str | None:
        """Return the torch device of a replica that sees several; None for the configured one."""
        return None

    def share(self, value: object) -> Any:  # noqa: ANN401
        """Return a reference to an object, by which another replica can get it."""
        return value

    async def shared(self, ref: Any) -> Any:  # noqa: ANN401
        """Return the object of a reference from another replica; raises if it is lost."""
        return ref

    async def die(self) -> None:
        """Exit at once, like a crash; does not return."""
        os._exit(1)


def use_threads(spec: PoolSpec) -> None:
    os.environ["OMP_NUM_THREADS"] = str(spec.engine.num_threads)


def obey_log_level() -> None:
    """Set the log level of this process to RAYBATCH_LOG_LEVEL; Ray prints its log at the driver."""
    if (level := log_level()) is None:
        return
    logger = logging.getLogger("raybatch")
    logger.setLevel(level)
    # an application with its own logging has handlers
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(DiscreetFormatter())
        logger.addHandler(handler)
