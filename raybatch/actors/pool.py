"""The handle of a pool of engines, for stages, and what it submits of a request table.

Equal specs share a pool: one of a Ray job (`raybatch.actors.executors.ray_pools`), or one of this
process (`raybatch.actors.executors.local_pools`). It stays warm between executions, and is made
when a handle is first used, or pickled on its way to a worker.
"""

import asyncio
import hashlib
import os
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.replicas.runtime import T
from raybatch.actors.wire.columns import (
    RESULT_SCHEMA,
    combine_results,
    is_planned,
    prompt_lengths,
    to_numpy,
    whole_array,
)
from raybatch.actors.wire.records import (
    Answer,
    PoolApi,
    PoolSpec,
    PoolState,
    RowCrashes,
    RowGroups,
    Submission,
)
from raybatch.backends.choice import BackendChoice
from raybatch.config import EngineConfig
from raybatch.errors import ReplicaError
from raybatch.prefix.block_keys import BlockKeys, hash_blocks, start_offsets
from raybatch.records.payload import adapter_in
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import Sampling

if TYPE_CHECKING:
    from raybatch.actors.executors.local_pools import LocalPools
    from raybatch.actors.executors.ray_pools import RayPools

_made: "dict[bool, LocalPools | RayPools]" = {}


class RowWatch(Protocol):
    """What a caller of `PoolHandle.generate` knows of earlier runs, and wants to be notified of."""

    @property
    def crashes(self) -> npt.NDArray[np.int16]:
        """Return how often each row crashed an engine in earlier runs, int16 [rows]."""

    @property
    def checkpointed(self) -> pa.RecordBatch | None:
        """Return the checkpointed tokens of rows that earlier runs did not finish, or None."""

    async def note_crashes(self, crashes: Sequence[RowCrashes]) -> None:
        """Called with new crash counts of rows."""

    def note_checkpointed(self, checkpointed: pa.RecordBatch) -> None:
        """Called with new tokens of unfinished rows, see `CheckpointedTokens`."""


class PoolHandle:
    """A handle of a pool of engines: call `generate` with a request table; cheap to pickle.

    Nothing starts before the first use. In the process that created the handle, the first use
    connects to the pool of this Ray job or creates it, and initialises Ray if needed. A handle
    pickled to a worker carries the address of the pool. A local one works in its process only.

    Example:
        >>> handle = PoolHandle(spec)                                    # doctest: +SKIP
        >>> results = await handle.generate(table, (Sampling(),))        # doctest: +SKIP

    Args:
        spec: model, backend and limits; an unset backend is decided at the first use.
        is_local: engines are subprocesses, and Ray is not used.
    """

    def __init__(self, spec: PoolSpec, *, is_local: bool = False) -> None:
        self.spec = spec
        self.is_local = is_local
        self._carried: PoolApi | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_local:
            raise TypeError(
                "the handle of a pool without Ray cannot be pickled: it works only in the process "
                "that created it"
            )
        import ray  # a pickled handle goes to a Ray worker

        coordinator = self.connect() if ray.is_initialized() else None
        return _restore, (self.spec, coordinator)

    def settled(
        self, *, began_with: str | None = None, connect: bool = True
    ) -> "tuple[PoolHandle, BackendChoice | None]":
        """Return a handle with a decided backend, and the choice; None if the user named a backend.

        Args:
            began_with: backend kind of earlier rows of the same output.
            connect: connect to a cluster if needed; if False and without a connection, the options
                and this host decide.

        Raises:
            ConfigError: no host could report whether it has vLLM.
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
        dedup_keys: bytes = b"",
        watch: RowWatch | None = None,
    ) -> pa.Table:
        """Run all rows of a request table and return the result table.

        Cancelling this coroutine takes the rows out of the pool.

        Args:
            samplings: sampling options, to which the column `sampling` of the table refers.
            client: name under which the rows are counted in `stats`.
            name: name of these rows, unique within the client. If this process dies, another one
                that submits the same rows and name gets those that have finished. Results stay in
                the pool until `forget`, for at most `feeder_timeout_s`.
            copies: number of identical rows that are counted with each row, see `Submission`.
            dedup_keys: rows with equal keys get the results of one of them, see `Submission`.
            watch: provides the state of earlier runs, and is notified of progress.

        Raises:
            ReplicaError: no replica could be started, or the pool was shut down.
        """
        coordinator = self._connect()
        requests = table, tuple(samplings)
        submission = make_submission(
            *requests, client, self.spec.engine, name=name, copies=copies, dedup_keys=dedup_keys
        )
        call: Awaitable[Answer] | None = None
        try:
            while True:
                if call is None:
                    submission = replace(submission, token=uuid.uuid4().hex)
                    if watch is not None:
                        submission = replace(
                            submission, crashes=watch.crashes, checkpointed=watch.checkpointed
                        )
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
        """Return whether the pool has rows that a client submitted under this name."""
        try:
            return await self._connect().has_named(client, name)
        except self._pools.gone:
            # the later call of `generate` raises
            return False

    def forget(self, names: Sequence[str], *, client: str) -> None:
        """Let the pool drop the rows of these names, and their results; does not wait for it."""
        with suppress(*self._pools.failed):
            self._connect().forget(client, list(names))

    async def partial_results(
        self, seen: Mapping[str, int], *, client: str, watches: Sequence[RowWatch | None]
    ) -> list[tuple[pa.Table, int]]:
        """Return (results, num_seen) of pending calls of `generate`, so that they can be stored.

        Results are those of rows that finished since an earlier call returned `num_seen`.

        Args:
            seen: `num_seen` by the name of a call; 0 at first, then the returned number.
            watches: the watch of each call.
        """
        try:
            answers = await self._connect().partial_results(client, seen)
        except self._pools.gone:
            # the pending call of `generate` raises
            answers = [Answer(status="unknown")] * len(seen)
        found = []
        for watch, num_seen, answer in zip(watches, seen.values(), answers, strict=True):
            await _notify(watch, answer)
            is_known = answer.attempts is not None
            results = _results(answer) if is_known else RESULT_SCHEMA.empty_table()
            found.append((results, num_seen + len(answer.results)))
        return found

    def connect(self) -> PoolApi:
        """Connect to the pool before a run; recreates a pool that failed in an earlier run."""
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

    def start(self) -> None:
        """Connect, and start the replicas before the first rows arrive; does not wait for them."""
        self.connect().start()

    async def note_outside(
        self, num_rows: int, errors: Mapping[str, int], *, client: str = "default"
    ) -> None:
        """Add rows that finished without the pool, and errors by class, to the counts in `stats`.

        For the progress display only: a repeated call counts again, and nothing is raised if the
        counts are lost.
        """
        if num_rows or errors:
            with suppress(*self._pools.failed):
                await self._connect().note_outside(client, num_rows, dict(errors))

    def note_unit(self, unit: int, state: str, *, client: str = "default") -> None:
        """Report the state of a commit unit: "started", "written", or "left" if not written.

        For the progress display only: does not wait, and raises nothing.
        """
        with suppress(*self._pools.failed):
            coordinator, place = self._connect(), (socket.gethostname(), os.getpid())
            coordinator.note_unit(client, unit, state, *place)

    def stop(self, *, client: str = "default") -> None:
        """Let a client start no further commit unit; open ones store finished rows and end."""
        with suppress(*self._pools.failed):
            self._connect().stop(client)

    async def is_stopped(self, *, client: str = "default") -> bool:
        """Return whether no further commit unit of a client may start."""
        # the next call of `generate` raises
        with suppress(*self._pools.failed):
            return await self._connect().is_stopped(client)
        return False

    def stats(self, client: str = "default") -> PoolStats:
        """Return the counts of a client.

        Raises:
            ReplicaError: the coordinator is gone; the next use creates a new one.
        """
        return self._ask(lambda coordinator: coordinator.stats(client))

    def state(self) -> PoolState:
        """Return the current contents of the pool, over all clients; raises as `stats` does."""
        return self._ask(lambda coordinator: coordinator.state())

    def shutdown(self) -> None:
        """Stop the replicas and the coordinator; the next use creates a new pool."""
        self._pools.end(self.spec)

    @property
    def _pools(self) -> "LocalPools | RayPools":
        return _pools(self.is_local)

    def _ask(self, begin: Callable[[PoolApi], Awaitable[T]]) -> T:
        coordinator = self._connect()
        try:
            return self._pools.result(begin(coordinator))
        except self._pools.gone as error:
            raise self._gone(coordinator, error) from error

    def _gone(self, coordinator: PoolApi, error: Exception) -> ReplicaError:
        """Let the next use create a new coordinator, if this process creates them."""
        if self._carried is None:
            self._pools.forget(self.spec, coordinator)
        return ReplicaError(0, f"the coordinator of the pool is gone: {error}")

    def _connect(self) -> PoolApi:
        if self._carried is not None:
            return self._carried
        self.spec, _ = self._pools.settle(self.spec)
        return self._pools.connect(self.spec)


@cache
def _pools(is_local: bool) -> "LocalPools | RayPools":
    # Ray is slow to import, and local pools do not need it
    if is_local:
        from raybatch.actors.executors.local_pools import LocalPools

        _made[is_local] = LocalPools()
    else:
        from raybatch.actors.executors.ray_pools import RayPools

        _made[is_local] = RayPools()
    return _made[is_local]


def release_pools() -> None:
    """Stop every pool of this process."""
    for pools in _made.values():
        pools.end_all()


def end_local_engines() -> None:
    """Stop the engines of pools without Ray; a hung one would outlive this process."""
    if (pools := _made.get(True)) is not None:
        pools.end_all()


def _restore(spec: PoolSpec, coordinator: PoolApi | None) -> PoolHandle:
    handle = PoolHandle(spec)
    handle._carried = coordinator
    return handle


async def _notify(watch: RowWatch | None, answer: Answer) -> None:
    if watch is not None and answer.checkpointed is not None:
        watch.note_checkpointed(answer.checkpointed)
    if watch is not None and answer.crashes:
        await watch.note_crashes(answer.crashes)


def _results(answer: Answer) -> pa.Table:
    assert answer.attempts is not None, "a final answer has attempts"
    return combine_results(answer.results, answer.attempts)


def make_submission(
    table: pa.Table,
    samplings: Sequence[Sampling],
    client: str,
    engine: EngineConfig,
    *,
    name: str = "",
    copies: npt.NDArray[np.int32] | None = None,
    dedup_keys: bytes = b"",
) -> Submission:
    """Return a submission that describes a request table to the coordinator, which never opens it.

    It has the groups of rows with a plan, and block keys of other rows unless prefix caching is
    off. `name`, `copies` and `dedup_keys` are as in `Submission`.
    """
    planned = is_planned(table)
    has_keys = engine.enable_prefix_caching and not planned
    kinds = to_numpy(table["sampling"], np.int32)
    num_samples = np.array([s.n for s in samplings], np.int32)[kinds]
    bounds = np.array([s.max_tokens * s.n for s in samplings], np.int64)[kinds]
    expected = whole_array(table["expected_output_len"])
    lengths = np.clip(to_numpy(expected, np.int64) * num_samples, 0, bounds)
    return Submission(
        token=uuid.uuid4().hex,
        client=client,
        name=name,
        prompt_tokens=prompt_lengths(table),
        max_new_tokens=bounds,
        expected_new_tokens=np.where(to_numpy(expected.is_valid(), np.bool_), lengths, bounds),
        num_samples=None if (num_samples == 1).all() else num_samples,
        copies=copies,
        dedup_keys=dedup_keys,
        groups=_row_groups(table, client) if planned else None,
        block_keys=row_keys(table, engine.block_size_tokens).blocks if has_keys else None,
    )


def _row_groups(table: pa.Table, client: str) -> RowGroups:
    """Return the planned groups of the rows, with ids that are unique among clients."""
    ids = to_numpy(whole_array(table["group_id"]).fill_null(-1), np.int64)
    salt = np.int64(_digest(client) >> 1)
    return RowGroups(
        group_ids=np.where(ids < 0, -1, ids ^ salt),
        prefix_lens=to_numpy(table["prefix_len"], np.int32),
    )


class RowKeys(NamedTuple):
    """Hashes of the rows of a request table, by which shared prefixes are found.

    Args:
        blocks: hashes of prompts up to each block's end; rows of different adapters share none,
            and rows of different payloads are not identical.
        adapters: hash of the adapter of each row, uint64 [rows]; 0 for none.
    """

    blocks: BlockKeys
    adapters: npt.NDArray[np.uint64]


def row_keys(table: pa.Table, block_size: int) -> RowKeys:
    """Return the hashes of all rows of a request table; linear in tokens and in payloads."""
    prompts = whole_array(table["prompt_token_ids"])
    tokens = to_numpy(prompts.flatten(), np.int32)
    keys = hash_blocks(tokens, start_offsets(prompt_lengths(table)), block_size)
    payloads = table["payload"]
    # salts of each payload: for the KV of a prompt, and for its result
    salts = np.zeros((len(payloads), 2), np.uint64)
    if payloads.null_count < len(payloads):
        texts = payloads.to_pylist()
        known = {text: (_digest(adapter_in(text)), _digest(text)) for text in set(texts)}
        salts = np.array([known[text] for text in texts], np.uint64)
    return RowKeys(keys.salted(salts[:, 0], salts[:, 1]), salts[:, 0])


def _digest(text: str | None) -> int:
    if text is None:
        return 0
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
