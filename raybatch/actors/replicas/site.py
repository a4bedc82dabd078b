"""Where the coordinator of a pool and its replicas run, and how they reach each other; no Ray."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Protocol, TypeVar

from raybatch.actors.replicas.placement import Placement
from raybatch.actors.wire.api import PoolApi, ReplicaApi
from raybatch.actors.wire.records import Place, PoolSpec, Requests
from raybatch.backends.choice import BackendChoice
from raybatch.config import PoolConfig, log_level
from raybatch.records.share import ShareSeat
from raybatch.redaction import DiscreetFormatter
from raybatch.telemetry import metrics_of_process

T = TypeVar("T")
Errors = tuple[type[Exception], ...]
# runs a coroutine beside others
Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class ReplicaGroup(Protocol):
    """Replicas of one host that start together, and end together; see `ShareGroup`."""

    number: int
    size: int
    # what is kept of the cluster for all of them, with those who use it
    reserved: Any
    num_users: int
    # why it is over, "" while it is not
    ends: str

    def seat(self, rank: int) -> ShareSeat: ...
    async def exchange(self, rank: int, text: str) -> list[str] | None: ...
    def end(self, why: str) -> None: ...


class ReplicaGroups(Protocol):
    """The groups of one pool; see `ShareGroups`."""

    def join(self, rank: int) -> ReplicaGroup: ...
    def give_up(self, rank: int, cause: str) -> None: ...
    def why_given_up(self, rank: int) -> str | None: ...


class Started(Protocol):
    """A replica that was started, with what is kept for it."""

    @property
    def actor(self) -> ReplicaApi:
        """Return what stands for the replica here."""

    def end(self) -> None:
        """End it, whatever it does, and give back what was kept for it; may be called again."""


class Site(Protocol):
    """Where a coordinator runs.

    Attributes:
        died: what a call raises where the replica, or what it needs, is gone.
        failed: what a call of a replica raises, whatever the reason.
    """

    died: Errors
    failed: Errors

    @property
    def metrics(self) -> Any:  # noqa: ANN401 - a module, or a stand-in for it
        """Return what makes counters, gauges and histograms, as `ray.util.metrics` does."""
        return metrics_of_process()

    def coordinator(self) -> PoolApi:
        """Return what replicas get to call the coordinator; called there."""

    def keep(self, requests: Requests) -> Any:  # noqa: ANN401
        """Return a reference to a request table, which lives as long as the reference."""

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
        """Start a replica, on none of the hosts to avoid; returns before it is there.

        Those of a group run on one host.
        """

    async def make_room(self, wanted: str) -> None:
        """Ask idle pools of this driver to end engines, where one waits for what they hold."""

    async def leaving_hosts(self) -> Collection[str]:
        """Return the ids of hosts that are about to be taken away."""
        return ()

    async def shortage(self, plan: Placement, pool: PoolConfig) -> str:
        """Return why engines that wait may wait for ever, "" where nothing says so."""
        return ""


class ReplicaSite(Protocol):
    """Where a replica runs; unless a site says otherwise, a process of its own on this host."""

    @property
    def metrics(self) -> Any:  # noqa: ANN401
        """Return the same as that of `Site`."""
        return metrics_of_process()

    async def fetch(self, ref: Any) -> Requests | None:  # noqa: ANN401
        """Return a request table; None where it is gone."""

    def place(self) -> Place:
        """Return where the replica runs."""
        return Place(os.getpid())

    def settle(self, spec: PoolSpec) -> None:
        """Prepare the process for an engine, before any of its libraries is loaded."""
        use_threads(spec)

    def device(self) -> str | None:
        """Return the device of a replica that sees those of others too; None leaves it as it is."""
        return None

    def share(self, value: object) -> Any:  # noqa: ANN401
        """Return a reference to something that another replica will read."""
        return value

    async def shared(self, ref: Any) -> Any:  # noqa: ANN401
        """Return what another replica shares; raises where it is gone with that."""
        return ref

    async def die(self) -> None:
        """End the replica at once, as a crash does; does not return."""
        os._exit(1)


class Pools(Protocol):
    """The pools of one process, by their specs.

    Attributes:
        gone: what a call raises where the coordinator is gone.
        failed: what a call of the coordinator raises, whatever the reason.
    """

    gone: Errors
    failed: Errors

    def settle(
        self, spec: PoolSpec, *, began_with: str | None = None, connect: bool = True
    ) -> tuple[PoolSpec, BackendChoice | None]:
        """Return a spec whose backend is decided; see `PoolHandle.settled`."""

    def connect(self, spec: PoolSpec) -> PoolApi:
        """Return the coordinator of a pool, which is made if it is not there."""

    def result(self, call: Awaitable[T]) -> T:
        """Wait for a call of a coordinator from a thread without an event loop."""

    def forget(self, spec: PoolSpec, coordinator: PoolApi) -> None:
        """Let the next use make a new coordinator: this one is gone."""

    def end(self, spec: PoolSpec) -> None:
        """End a pool, if it is there."""

    def end_all(self) -> None:
        """End every pool that this process made."""


def use_threads(spec: PoolSpec) -> None:
    os.environ["OMP_NUM_THREADS"] = str(spec.engine.num_threads)


def obey_log_level() -> None:
    """Log with the level of RAYBATCH_LOG_LEVEL; Ray prints it at the driver."""
    if (level := log_level()) is None:
        return
    logger = logging.getLogger("raybatch")
    logger.setLevel(level)
    # who logs in a way of their own has handlers
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(DiscreetFormatter())
        logger.addHandler(handler)
