"""The handle through which stages reach a pool of engines.

Equal specs share a pool: one of a Ray job (`raybatch.actors.executors.ray_pools`), or one of this
process (`raybatch.actors.executors.local_pools`). It stays warm between executions, and is made
when a handle is first used, or pickled on its way to a worker.
"""

import asyncio
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.replicas.site import Pools, T
from raybatch.actors.submitting import make_submission
from raybatch.actors.wire.api import PoolApi
from raybatch.actors.wire.columns import RESULT_SCHEMA, combine_results
from raybatch.actors.wire.records import Answer, PoolSpec, PoolState, RowCrashes
from raybatch.backends.choice import BackendChoice
from raybatch.errors import ReplicaError
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import Sampling

_made: dict[bool, Pools] = {}


class RowWatch(Protocol):
    """Follows the rows of one request table."""

    @property
    def crashes(self) -> npt.NDArray[np.int16]:
        """Return the engines that died with each row in earlier runs, int16 [rows]."""

    @property
    def begun(self) -> pa.RecordBatch | None:
        """Return the tokens that earlier runs have of the rows; None where they have none."""

    async def note_crashes(self, crashes: Sequence[RowCrashes]) -> None:
        """Note engines that died with rows, each with all deaths so far."""

    def note_begun(self, begun: pa.RecordBatch) -> None:
        """Note tokens that unfinished rows have gained."""


class PoolHandle:
    """A pool of engine replicas, described by its spec; cheap to make and to pickle.

    Nothing starts before the first use. In the process that made the handle, use connects to the
    pool of this Ray job or makes it; Ray is initialised only if it is not. A handle that travelled
    to a worker carries the address of the pool. A local one is of use in its own process alone.

    Example:
        >>> handle = PoolHandle(spec)                                    # doctest: +SKIP
        >>> results = await handle.generate(table, (Sampling(),))        # doctest: +SKIP

    Args:
        spec: model, backend and limits; a backend that nobody named is decided at the first use.
        is_local: the engines are processes of this one, and Ray is not used.
    """

    def __init__(self, spec: PoolSpec, *, is_local: bool = False) -> None:
        self.spec = spec
        self.is_local = is_local
        self._carried: PoolApi | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_local:
            raise TypeError("a pool without Ray is of use in the process that made its handle")
        import ray  # who pickles a handle sends it to a worker

        coordinator = self._connect_afresh() if ray.is_initialized() else None
        return _restore, (self.spec, coordinator)

    def settled(
        self, *, began_with: str | None = None, connect: bool = True
    ) -> "tuple[PoolHandle, BackendChoice | None]":
        """Return a handle whose backend is decided, and why; None where the user named it.

        Args:
            began_with: kind of the backend that answered the first rows of the same output.
            connect: to a cluster where there is no connection; else options alone decide then.

        Raises:
            ConfigError: no host could report what it has.
        """
        spec, choice = self._pools.settle(self.spec, began_with=began_with, connect=connect)
        return PoolHandle(spec, is_local=self.is_local), choice

    async def generate(
        self,
        table: pa.Table,
        samplings: Sequence[Sampling],
        *,
        client: str = "default",
        name: str = "",
        copies: npt.NDArray[np.int32] | None = None,
        twin_keys: bytes = b"",
        watch: RowWatch | None = None,
    ) -> pa.Table:
        """Run all rows of a request table and return the result table.

        Cancelling this coroutine takes the rows out of the pool.

        Args:
            name: of these rows among those of the client. A process that submits them again,
                because the first one died, gets the finished ones. The results stay in the pool
                until `forget`, for `feeder_timeout_s` at most.
            copies: see `Submission`; they count with their rows in `stats`.
            twin_keys: see `Submission`; a row like one of another call takes its results.
            watch: knows earlier runs of the rows, and is notified of their progress.

        Raises:
            ConfigError: the table lacks columns or points outside `samplings`.
            ReplicaError: no replica could be started, or the pool was shut down.
        """
        coordinator = self._connect()
        requests = table, tuple(samplings)
        submission = make_submission(
            *requests, client, self.spec.engine, name=name, copies=copies, twin_keys=twin_keys
        )
        call: Awaitable[Answer] | None = None
        try:
            while True:
                if call is None:
                    submission = replace(submission, token=uuid.uuid4().hex)
                    if watch is not None:
                        submission = replace(submission, crashes=watch.crashes, begun=watch.begun)
                    call = coordinator.generate(submission, requests)
                answer = await call
                await _notify(watch, answer)
                if answer.status == "done":
                    return _results(answer)
                if answer.status == "failed":
                    raise ReplicaError(answer.rank, answer.cause)
                is_pending = answer.status == "pending"
                call = coordinator.collect(submission.token) if is_pending else None
        except asyncio.CancelledError:
            coordinator.cancel(submission.token)
            raise
        except self._pools.gone as error:
            raise self._gone(coordinator, error) from error

    async def has_named(self, *, client: str, name: str) -> bool:
        """Return whether rows of this name are in the pool, so that they need not run again."""
        try:
            return await self._connect().has_named(client, name)
        except self._pools.gone:
            # the call for the rows will raise
            return False

    def forget(self, names: Sequence[str], *, client: str) -> None:
        """Say that the results of rows of these names are safe; nothing waits for it."""
        with suppress(*self._pools.failed):
            self._connect().forget(client, list(names))

    async def so_far(
        self, *, client: str, name: str, num_seen: int, watch: RowWatch | None = None
    ) -> tuple[pa.Table, int]:
        """Return results of a call of `generate` that waits for others, so that they can be kept.

        They are of rows with all their samples that have finished since the call that returned
        `num_seen` (0 at first), which is returned with them.
        """
        try:
            answer = await self._connect().so_far(client, name, num_seen)
        except self._pools.gone:
            # the call for the rows will raise
            answer = Answer(status="unknown")
        await _notify(watch, answer)
        if answer.attempts is None:
            return RESULT_SCHEMA.empty_table(), num_seen
        return _results(answer), num_seen + len(answer.results)

    def connect(self) -> None:
        """Connect before an execution: a pool that failed in an earlier one gets another try."""
        self._connect_afresh()

    def start(self) -> None:
        """Connect, and start the replicas ahead of the first rows; returns at once."""
        self._connect_afresh().start()

    async def note_outside(
        self, num_rows: int, errors: Mapping[str, int], *, client: str = "default"
    ) -> None:
        """Count rows that never reach the pool, and errors found outside it, in `stats`.

        They serve the progress display: a call that is done again counts again, and counts that
        are lost raise nothing.
        """
        if num_rows or errors:
            with suppress(*self._pools.failed):
                await self._connect().note_outside(client, num_rows, dict(errors))

    def note_unit(self, unit: int, state: str, *, client: str = "default") -> None:
        """Say that a unit of commit is "started", "written", or "left" without being written.

        It serves the progress display alone, so nothing waits for it and nothing is raised.
        """
        with suppress(*self._pools.failed):
            coordinator, place = self._connect(), (socket.gethostname(), os.getpid())
            coordinator.note_unit(client, unit, state, *place)

    def stop(self, *, client: str = "default") -> None:
        """Let no further unit of a client start; open ones keep what is finished and end."""
        with suppress(*self._pools.failed):
            self._connect().stop(client)

    async def is_stopped(self, *, client: str = "default") -> bool:
        """Return whether no further unit of a client may start."""
        # the next call for rows will raise
        with suppress(*self._pools.failed):
            return await self._connect().is_stopped(client)
        return False

    def stats(self, client: str = "default") -> PoolStats:
        """Return the counts of a client.

        Raises:
            ReplicaError: the coordinator is gone; the next use makes a new one.
        """
        return self._ask(lambda coordinator: coordinator.stats(client))

    def state(self) -> PoolState:
        """Return what the pool holds at this moment, over all clients; raises as `stats` does."""
        return self._ask(lambda coordinator: coordinator.state())

    def shutdown(self) -> None:
        """End the replicas and the coordinator; the next use makes a new pool."""
        self._pools.end(self.spec)

    @property
    def _pools(self) -> Pools:
        return _pools(self.is_local)

    def _connect_afresh(self) -> PoolApi:
        coordinator = self._connect()
        if self._carried is not None:
            return coordinator
        try:
            has_failed = self._pools.result(coordinator.has_failed())
        except self._pools.gone:
            has_failed = True
        if has_failed:
            self.shutdown()
            coordinator = self._connect()
        return coordinator

    def _ask(self, begin: Callable[[PoolApi], Awaitable[T]]) -> T:
        coordinator = self._connect()
        try:
            return self._pools.result(begin(coordinator))
        except self._pools.gone as error:
            raise self._gone(coordinator, error) from error

    def _gone(self, coordinator: PoolApi, error: Exception) -> ReplicaError:
        """Let the next use make a new coordinator, if this process is the one that makes them."""
        if self._carried is None:
            self._pools.forget(self.spec, coordinator)
        return ReplicaError(0, f"the coordinator of the pool is gone: {error}")

    def _connect(self) -> PoolApi:
        if self._carried is not None:
            return self._carried
        self.spec, _ = self._pools.settle(self.spec)
        return self._pools.connect(self.spec)


@cache
def _pools(is_local: bool) -> Pools:
    # Ray is slow to load, and local pools do without
    pools: Pools
    if is_local:
        from raybatch.actors.executors.local_pools import LocalPools

        pools = LocalPools()
    else:
        from raybatch.actors.executors.ray_pools import RayPools

        pools = RayPools()
    _made[is_local] = pools
    return pools


def release_pools() -> None:
    """End every pool that this process made."""
    for pools in _made.values():
        pools.end_all()


def end_local_engines() -> None:
    """End the engines of pools without Ray: one that hangs would outlive this process."""
    if (pools := _made.get(True)) is not None:
        pools.end_all()


def _restore(spec: PoolSpec, coordinator: PoolApi | None) -> PoolHandle:
    handle = PoolHandle(spec)
    handle._carried = coordinator
    return handle


async def _notify(watch: RowWatch | None, answer: Answer) -> None:
    if watch is not None and answer.begun is not None:
        watch.note_begun(answer.begun)
    if watch is not None and answer.crashes:
        await watch.note_crashes(answer.crashes)


def _results(answer: Answer) -> pa.Table:
    if answer.attempts is None:
        raise AssertionError("an answer that is done carries the attempts")
    return combine_results(answer.results, answer.attempts)
