"""The handle through which stages reach a pool of engines.

A pool belongs to one Ray job: equal specs share it, it stays warm between executions of one driver,
and it dies with the driver. Its coordinator is a named actor that the driver owns; it is made when
a handle is first used, or pickled on its way to a worker.
"""

import asyncio
import hashlib
import json
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raybatch.actors.coordinator import Coordinator
from raybatch.actors.crew_plan import plan_crew
from raybatch.actors.records import Answer, PoolSpec, PoolState, Submission
from raybatch.actors.submitting import make_submission
from raybatch.actors.watching import RowWatch, tell, with_news
from raybatch.actors.wire import RESULT_SCHEMA, combine_results
from raybatch.errors import ReplicaError
from raybatch.types import PoolStats, Sampling

__all__ = ["PoolHandle", "PoolSpec", "release_pools"]

_NAME_PREFIX = "raybatch-pool"
_MAX_CALLS = 10_000

# an actor ends when its owner drops the handle that made it, although it has a name: these keep
# the pools of this process warm
_coordinators: dict[tuple[str, str], ActorHandle] = {}
_making = threading.Lock()


class PoolHandle:
    """A pool of engine replicas, described by its spec; cheap to make and to pickle.

    Nothing starts before the first use. In the process that made the handle, use connects to the
    pool of this Ray job or makes it; Ray is initialised only if it is not. A handle that travelled
    to a worker carries the address of the pool.

    Example:
        >>> handle = PoolHandle(spec)                                    # doctest: +SKIP
        >>> results = handle.generate_sync(table, (Sampling(),))         # doctest: +SKIP

    Args:
        spec: model, backend and limits.
    """

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self._carried: ActorHandle | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        coordinator = self._connect_afresh() if ray.is_initialized() else None
        return _restore, (self.spec, coordinator)

    async def generate(
        self,
        table: pa.Table,
        samplings: Sequence[Sampling],
        *,
        client: str = "default",
        name: str = "",
        watch: RowWatch | None = None,
    ) -> pa.Table:
        """Run all rows of a request table and return the result table.

        Cancelling this coroutine takes the rows out of the pool.

        Args:
            table: see `raybatch.actors.wire.REQUEST_SCHEMA`.
            samplings: what the column `sampling` points into.
            client: name under which rows and tokens are counted.
            name: of these rows among those of the client; whoever asks for them again under this
                name, because the process that asked before died, gets what is finished of them.
                The results stay in the pool until `forget`, for `feeder_timeout_s` at most.
            watch: says what is known of the rows, and hears what becomes of unfinished ones.

        Raises:
            ConfigError: the table lacks columns or points outside `samplings`.
            ReplicaError: no replica could be started, or the pool was shut down.
        """
        coordinator = self._connect()
        requests = table, tuple(samplings)
        submission = make_submission(*requests, client, self.spec.engine, name=name)
        submission = with_news(submission, watch)
        try:
            answer = await coordinator.generate.remote(submission, requests)
            await tell(watch, answer)
            while answer.status != "done":
                if answer.status == "unknown":
                    submission = with_news(submission.again(), watch)
                    answer = await coordinator.generate.remote(submission, requests)
                else:
                    answer = await _ask_again(coordinator, submission, answer)
                await tell(watch, answer)
        except asyncio.CancelledError:
            coordinator.cancel.remote(submission.token)
            raise
        except RayActorError as error:
            raise self._coordinator_died(error) from error
        return _results(answer)

    async def has_named(self, *, client: str, name: str) -> bool:
        """Return whether rows of this name are in the pool, so that they need not run again."""
        try:
            return bool(await self._connect().has_named.remote(client, name))
        except RayActorError:
            # whoever asks for the rows hears of it
            return False

    def forget(self, names: Sequence[str], *, client: str) -> None:
        """Say that the results of rows of these names are safe; nothing waits for it."""
        with suppress(RayError):
            self._connect().forget.remote(client, list(names))

    async def so_far(
        self, *, client: str, name: str, num_seen: int, watch: RowWatch | None = None
    ) -> tuple[pa.Table, int]:
        """Return results of a call of `generate` that waits for others, so that they can be kept.

        Args:
            client: of the call.
            name: of the call.
            num_seen: what the second value was when this was asked before; 0 at first.
            watch: of the call.

        Returns:
            A result table, as `generate` returns one, of rows with all their samples that have
            finished since; and what to say the next time.
        """
        try:
            answer = await self._connect().so_far.remote(client, name, num_seen)
        except RayActorError:
            # whoever waits for the rows hears of it
            answer = Answer(status="unknown")
        await tell(watch, answer)
        if answer.attempts is None:
            return RESULT_SCHEMA.empty_table(), num_seen
        return _results(answer), num_seen + len(answer.results)

    def generate_sync(
        self, table: pa.Table, samplings: Sequence[Sampling], *, client: str = "default"
    ) -> pa.Table:
        """Do the same as `generate` for callers without an event loop."""
        coordinator = self._connect()
        requests = table, tuple(samplings)
        submission = make_submission(*requests, client, self.spec.engine)
        try:
            answer = ray.get(coordinator.generate.remote(submission, requests))
            while answer.status != "done":
                if answer.status == "unknown":
                    submission = submission.again()
                    answer = ray.get(coordinator.generate.remote(submission, requests))
                else:
                    answer = ray.get(_ask_again(coordinator, submission, answer))
        except KeyboardInterrupt:
            coordinator.cancel.remote(submission.token)
            raise
        except RayActorError as error:
            raise self._coordinator_died(error) from error
        return _results(answer)

    def start(self) -> None:
        """Start the replicas ahead of the first rows; returns at once."""
        self._connect_afresh().start.remote()

    async def note_outside(
        self, num_rows: int, errors: Mapping[str, int], *, client: str = "default"
    ) -> None:
        """Count rows that never reach the pool, and errors found outside it, in `stats`.

        They serve the progress display: a call that is done again counts again, and counts that
        are lost raise nothing.
        """
        if num_rows or errors:
            with suppress(RayError):
                await self._connect().note_outside.remote(client, num_rows, dict(errors))

    def note_unit(self, unit: int, state: str, *, client: str = "default") -> None:
        """Say that a unit of commit is "started", "written", or "left" without being written.

        It serves the progress display alone, so nothing waits for it and nothing is raised.
        """
        with suppress(RayError):
            coordinator, place = self._connect(), (socket.gethostname(), os.getpid())
            coordinator.note_unit.remote(client, unit, state, *place)

    def stop(self, *, client: str = "default") -> None:
        """Let no further unit of a client start; open ones keep what is finished and end."""
        with suppress(RayError):
            self._connect().stop.remote(client)

    async def is_stopped(self, *, client: str = "default") -> bool:
        """Return whether no further unit of a client may start."""
        # a pool that is gone is told of where rows are asked for
        with suppress(RayError):
            return bool(await self._connect().is_stopped.remote(client))
        return False

    def stats(self, client: str = "default") -> PoolStats:
        """Return the counters of a client and the state of the pool."""
        stats: PoolStats = ray.get(self._connect().stats.remote(client))
        return stats

    def state(self) -> PoolState:
        """Return what the pool holds at this moment, over all clients."""
        state: PoolState = ray.get(self._connect().state.remote())
        return state

    def shutdown(self) -> None:
        """End the replicas and the coordinator; the next use makes a new pool."""
        if not ray.is_initialized():
            return
        name = _name(self.spec)
        coordinator = self._carried or _find(name)
        _coordinators.pop(_key(name), None)
        if coordinator is not None:
            _end(coordinator)

    def _coordinator_died(self, error: RayActorError) -> ReplicaError:
        # so that the next use makes a new one
        _coordinators.pop(_key(_name(self.spec)), None)
        return ReplicaError(0, f"the coordinator of the pool is gone: {error}")

    def _connect_afresh(self) -> ActorHandle:
        """Connect before an execution: a pool that failed in an earlier one gets another try."""
        coordinator = self._connect()
        if self._carried is not None:
            return coordinator
        try:
            has_failed = ray.get(coordinator.has_failed.remote())
        except RayActorError:
            has_failed = True
        if has_failed:
            self.shutdown()
            coordinator = self._connect()
        return coordinator

    def _connect(self) -> ActorHandle:
        if self._carried is not None:
            return self._carried
        if not ray.is_initialized():
            ray.init()
        name = _name(self.spec)
        with _making:
            coordinator = _find(name)
            if coordinator is None:
                coordinator = _coordinators[_key(name)] = _make(name, self.spec)
        return coordinator


def release_pools() -> None:
    """End every pool that this process made."""
    for key in list(_coordinators):
        coordinator = _coordinators.pop(key)
        # the pools of a Ray session that has been shut down are gone already
        if ray.is_initialized() and key == _key(key[1]):
            _end(coordinator)


def _restore(spec: PoolSpec, coordinator: ActorHandle) -> PoolHandle:
    handle = PoolHandle(spec)
    handle._carried = coordinator
    return handle


def _ask_again(coordinator: ActorHandle, submission: Submission, answer: Answer) -> ray.ObjectRef:
    if answer.status == "failed":
        raise ReplicaError(answer.rank, answer.cause)
    return coordinator.collect.remote(submission.token)


def _results(answer: Answer) -> pa.Table:
    if answer.attempts is None:
        raise AssertionError("an answer that is done carries the attempts")
    return combine_results(answer.results, answer.attempts)


def _name(spec: PoolSpec) -> str:
    # the job is part of the name: two drivers in one namespace must not share an actor
    text = json.dumps(asdict(spec), sort_keys=True, default=repr)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{_NAME_PREFIX}-{ray.get_runtime_context().get_job_id()}-{digest}"


def _key(name: str) -> tuple[str, str]:
    """Return where the pool lives and its name; job ids repeat from one local Ray to the next."""
    return ray.get_runtime_context().gcs_address, name


def _find(name: str) -> ActorHandle | None:
    try:
        return ray.get_actor(name)
    except ValueError:
        return None


def _make(name: str, spec: PoolSpec) -> ActorHandle:
    node_id = ray.get_runtime_context().get_node_id()
    return (
        ray.remote(Coordinator)
        .options(
            name=name,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=0,
            max_concurrency=_MAX_CALLS,
            # it should live as long as the driver, so not on a host that may be taken away
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True),
        )
        .remote(spec, plan_crew(spec))
    )


def _end(coordinator: ActorHandle) -> None:
    try:
        ray.get(coordinator.shutdown.remote())
    except RayActorError:
        return
    ray.kill(coordinator, no_restart=True)
