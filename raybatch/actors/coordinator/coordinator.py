"""The coordinator of a pool: one global queue between feeders and replicas; Ray-free."""

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from raybatch.actors.coordinator.counters import ClientCounters, PoolMetrics
from raybatch.actors.coordinator.parts import MakeExtension, PendingPulls, PoolParts
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.coordinator.rebalancer import Drain, Rebalancer
from raybatch.actors.coordinator.registry import BatchRegistry, OpenBatch
from raybatch.actors.queue.pulling import report_every_s
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.placement import Placement, has_reserved
from raybatch.actors.replicas.replica_set import Member, ReplicaSet
from raybatch.actors.replicas.runtime import PoolRuntime
from raybatch.actors.replicas.starts import StuckWatch
from raybatch.actors.wire.records import (
    Activity,
    Answer,
    Assignment,
    Credit,
    PoolApi,
    PoolSpec,
    PoolState,
    Progress,
    Requests,
    ResultBatches,
    Submission,
)
from raybatch.errors import error_text
from raybatch.records.pool_stats import PoolStats
from raybatch.records.types import ReplicaStats
from raybatch.telemetry import flush

_MAX_WAIT_S = 20.0
_TICK_S = 0.5
# idle time after which a pool releases resources that others wait for
_GIVE_AFTER_S = 10.0

_logger = logging.getLogger(__name__)


class Coordinator(PoolApi):
    """Owns the replicas and the queue of a pool: call `generate` with a row batch.

    Where the parts of a row are, from its submission to its answer:

               BatchRegistry         RowQueue          Replica          EngineThread     engine
        waits  request table   a place in line   -                -                -
        held   request table   its holder        rows to read     an open request  sequence and KV
        moves  request table   the old holder    kept, see Moves  no more          KV at both
        done   its results     only that it is   -                -                -

    `RowQueue` alone decides who holds a row, and a row always has exactly one holder. Results of a
    row that the sending replica does not hold are dropped. Methods run on one event loop; decisions
    are in `RowQueue`, `Rebalancer` and `StartLedger`.

    Example:
        >>> from raybatch.actors.executors.local_pools import LocalPools
        >>> from raybatch.actors.pool import make_submission
        >>> from raybatch.actors.wire.columns import request_table
        >>> from raybatch.config import BackendConfig, EngineConfig, PoolConfig
        >>> from raybatch.records.types import Sampling
        >>> backend, pool = BackendConfig(kind="fake"), PoolConfig(replicas=1)
        >>> spec = PoolSpec(model="none", backend=backend, engine=EngineConfig(), pool=pool)
        >>> pools = LocalPools()
        >>> coordinator = pools.connect(spec)  # on a loop of this process
        >>> table, samplings = request_table(["a", "b"], [[1, 2], [3]]), (Sampling(max_tokens=3),)
        >>> submission = make_submission(table, samplings, "client", spec.engine)
        >>> answer = pools.result(coordinator.generate(submission, (table, samplings)))
        >>> answer.status, sum(batch.num_rows for batch in answer.results), answer.attempts.tolist()
        ('done', 2, [1, 1])
        >>> pools.end(spec)
    """

    def __init__(
        self,
        spec: PoolSpec,
        plan: Placement,
        runtime: PoolRuntime,
        extensions: Sequence[MakeExtension] = (),
    ) -> None:
        self._queue = RowQueue(spec.pool.max_row_crashes)
        self._registry = BatchRegistry(self._queue, on_drop=self._begin_abort)
        self._metrics = PoolMetrics(runtime.metrics)
        self._replicas = ReplicaSet(
            spec, plan, runtime, on_lost=self._lose, on_exhausted=self._registry.fail
        )
        self._parts = PoolParts(
            pool=spec.pool,
            plan=plan,
            runtime=runtime,
            registry=self._registry,
            replicas=self._replicas,
            view=PoolView(self._queue, self._registry.lengths),
            stuck=StuckWatch(spec.pool),
            pending_pulls=PendingPulls(),
            spawn=self._spawn,
            on_change=self._dispatch,
        )
        self._rebalancer = Rebalancer(self._parts, extensions)
        self._start_lock = asyncio.Lock()
        self._is_stopping = False
        # the event loop itself keeps no task alive
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticking: asyncio.Task[None] | None = None
        self._idle_since = time.monotonic()
        self._wait_s = min(_MAX_WAIT_S, spec.pool.feeder_timeout_s / 3)

    async def start(self) -> None:
        self._idle_since = time.monotonic()
        await self._start_replicas()

    async def has_failed(self) -> bool:
        return self._registry.failure is not None

    async def generate(self, submission: Submission, requests: Requests) -> Answer:
        """Queue a row batch, or take over the same batch of a dead feeder; wait for its results.

        If they take too long the answer is "pending", and the feeder continues with `collect`.
        """
        await self._start_replicas()
        # objects that a feeder owns die with it, but its rows are still wanted
        batch = self._registry.take_over(submission) or self._registry.add(
            replace(submission, refs=[self._parts.runtime.keep(requests)])
        )
        if batch is None:
            return Answer(status="unknown")
        self._rebalancer.autoscaler.note_rows(time.monotonic())
        self._dispatch()
        return await self._answer(batch)

    async def collect(self, token: str) -> Answer:
        batch = self._registry.find(token)
        return Answer(status="unknown") if batch is None else await self._answer(batch)

    async def partial_results(self, client: str, seen: Mapping[str, int]) -> list[Answer]:
        """Return the answer of each batch name so far, without the results seen before."""
        return [
            self._registry.partial_results(client, name, skip=num_seen)
            for name, num_seen in seen.items()
        ]

    async def has_named(self, client: str, name: str) -> bool:
        return self._registry.has_named(client, name)

    async def forget(self, client: str, names: Sequence[str]) -> None:
        self._registry.forget(client, names)
        self._dispatch()

    async def cancel(self, token: str) -> None:
        """Drop the row batch with this token, even if it has not arrived yet."""
        self._registry.cancel(token)
        self._dispatch()

    async def note_lost(self, batch_id: int) -> None:
        """Forget a row batch whose request table is gone, so that its feeder submits it again."""
        self._registry.lose_table(batch_id)
        self._dispatch()

    async def pull(self, replica_id: int, credit: Credit) -> list[Assignment] | None:
        """Wait for rows for a replica, and return them; None tells it to exit."""
        if replica_id not in self._replicas.members or self._is_stopping:
            return None
        answered = self._parts.pending_pulls.ask(replica_id, credit)
        self._dispatch()
        return await answered

    async def exchange(self, replica_id: int, text: str) -> list[str] | None:
        """Exchange a text with the other replicas of a group; see `WeightSharingGroup.exchange`."""
        member = self._replicas.members.get(replica_id)
        if member is None or member.group is None:
            return None
        return await member.group.exchange(member.rank, text)

    async def report(
        self,
        replica_id: int,
        batch_ids: Sequence[int],
        results: ResultBatches,
        stats: ReplicaStats,
        busy_with: Activity,
        progress: Progress | None = None,
    ) -> float:
        """Take results, one record batch for each row batch, and counters.

        Returns:
            The shortest interval until the next report, in seconds.
        """
        stuck_after_s = self._parts.pool.stuck_after_s
        every_s = report_every_s(len(self._replicas.members), stuck_after_s)
        member = self._replicas.members.get(replica_id)
        # results since a GPU of its group was lost may be wrong
        if member is None or member.lost_peer:
            return every_s
        member.stats = stats
        self._parts.stuck.note_report(replica_id, stats.num_steps, busy_with)
        self._parts.view.note_report(replica_id, stats, progress)
        if progress is not None:
            self._registry.note_running(replica_id, progress.rows)
        for batch_id, batch_results in zip(batch_ids, results, strict=True):
            num_rows = self._registry.take(replica_id, batch_id, batch_results)
            member.num_finished_rows += num_rows
            if num_rows:
                self._replicas.ledger.worked(member.rank)
        self._dispatch()
        return every_s

    async def note_checkpointed(self, progress: list[tuple[int, pa.RecordBatch]]) -> None:
        for batch_id, checkpointed in progress:
            self._registry.note_checkpointed(batch_id, checkpointed)

    async def note_cause(
        self, replica_id: int, cause: str, ends_run: bool = False, trace: str = ""
    ) -> None:
        """Record why a replica is about to exit; with `ends_run` this fails the whole pool.

        `trace` is the traceback of an unexpected error, or "".
        """
        if (member := self._replicas.members.get(replica_id)) is not None:
            member.cause, member.trace = cause, trace
            if ends_run:
                self._registry.fail(member.rank, cause)

    async def drain(self, replica_id: int, why: str) -> None:
        """Move the rows of a replica that will exit soon to others; `why` is for the log."""
        self._rebalancer.apply(Drain(replica_id, why))

    async def note_outside(self, client: str, num_rows: int, errors: dict[str, int]) -> None:
        self._registry.clients[client].outside(num_rows, errors)

    async def stop(self, client: str) -> None:
        self._registry.clients[client].is_stopped = True

    async def is_stopped(self, client: str) -> bool:
        return client in self._registry.clients and self._registry.clients[client].is_stopped

    async def note_unit(self, client: str, unit: int, state: str, host: str, pid: int) -> None:
        counters, now = self._registry.clients[client], time.monotonic()
        seconds = None
        if state == "started":
            counters.unit_opened(unit, host, pid, now)
        else:
            seconds = counters.unit_closed(unit, now, is_written=state == "written")
        self._metrics.unit(state, seconds)

    async def stats(self, client: str) -> PoolStats:
        # a caller at the end of a run may end this process
        self._update_metrics()
        ledger = self._replicas.ledger
        counters = self._registry.clients.get(client) or ClientCounters()
        num_group_cuts, cut_tokens = self._queue.cuts()
        ready = [m for m in self._replicas.members.values() if m.is_ready]
        return counters.stats(
            num_replicas=ledger.num_wanted(),
            most_replicas=ledger.most_wanted,
            num_ready=ledger.num_ready(),
            num_restarting=ledger.num_restarting(),
            num_given_up=ledger.num_retired(),
            **self._rebalancer.counts(),
            num_group_cuts=num_group_cuts,
            cut_tokens=cut_tokens,
            busy_s=self._replicas.busy_s(),
            replicas=tuple(m.stats for m in ready),
            ranks=tuple(m.rank for m in ready),
            now=time.monotonic(),
        )

    async def state(self) -> PoolState:
        members = self._replicas.members.values()
        pids = {m.pid: m for m in members if m.pid is not None and m.is_ready}
        return PoolState(
            num_batches=len(self._registry),
            num_waiting_rows=self._queue.num_waiting(),
            num_held_rows=sum(self._queue.load(m.replica_id).num_rows for m in pids.values()),
            num_results=self._registry.num_results(),
            coordinator_pid=os.getpid(),
            pids=tuple(sorted(pids)),
            finished_by_pid={pid: m.num_finished_rows for pid, m in pids.items()},
        )

    async def shutdown(self) -> None:
        """Stop every replica, and answer waiting feeders with an error."""
        self._registry.fail(0, "the pool was shut down")
        self._update_metrics()
        if self._ticking is not None:
            self._ticking.cancel()
        await self._stop_replicas()
        await asyncio.to_thread(flush, "metrics")

    async def rest(self) -> None:
        """Stop the replicas of a pool without rows; they restart on demand."""
        if not len(self._registry):
            await self._stop_replicas()

    async def make_room(self) -> bool:
        """Stop replicas of an idle pool that reserve resources; return whether any stopped."""
        is_idle = not len(self._registry) and time.monotonic() - self._idle_since > _GIVE_AFTER_S
        holds_some = has_reserved(self._parts.pool, self._parts.plan)
        if not (is_idle and self._replicas.members and holds_some):
            return False
        await self._stop_replicas()
        return True

    async def _answer(self, batch: OpenBatch) -> Answer:
        answer = await self._registry.answer(batch, self._wait_s)
        if not self._registry:
            for message in self._registry.sharing_messages():
                # Ray forwards warnings only
                _logger.warning("%s", message)
        return answer

    async def _start_replicas(self) -> None:
        async with self._start_lock:
            if self._registry.failure is not None:
                return
            self._replicas.start(self._parts.runtime.coordinator)
            if self._ticking is None:
                self._ticking = self._spawn(self._tick())

    async def _stop_replicas(self) -> None:
        async with self._start_lock:
            self._is_stopping = True
            self._parts.pending_pulls.end_all()
            await self._replicas.stop()
            # an idle pool keeps nothing in the object store
            self._registry.forget_good_row()
            self._is_stopping = False

    def _begin_abort(self, replica_id: int, batch_id: int) -> None:
        """Start aborting the rows of a dropped row batch."""
        if (member := self._replicas.members.get(replica_id)) is not None:
            self._spawn(self._abort(member, batch_id))

    async def _abort(self, member: Member, batch_id: int) -> None:
        # `ReplicaSet` handles the death of the replica
        with suppress(*self._parts.runtime.died):
            await member.actor.abort(batch_id)
            self._queue.note_aborted(member.replica_id, batch_id)
            self._dispatch()

    def _dispatch(self) -> None:
        if demand := self._parts.demand():
            num_expected = self._replicas.ledger.num_expected(time.monotonic())
            speed_of = self._parts.view.throughput.speed
            for replica_id, row_ranges in self._queue.dispatch(
                demand, num_expected, speed_of
            ).items():
                self._parts.hand_out(replica_id, row_ranges)
        self._rebalancer.note_change()
        if demand:
            self._rebalancer.rebalance()

    def _lose(self, member: Member, cause: str | None) -> bool:
        """Requeue the rows of a replica that exited; return whether it held any."""
        self._parts.pending_pulls.answer(member.replica_id, None)
        self._parts.view.forget(member.replica_id)
        self._parts.stuck.forget(member.replica_id)
        if cause is None:
            self._queue.release(member.replica_id)
            return False
        loss = self._queue.lose(member.replica_id)
        verdict = self._registry.note_loss(loss, member.cause)
        if verdict:
            self._registry.fail(member.rank, f"{verdict}; last crash: {cause}")
        self._dispatch()
        return loss.num_rows > 0 or member.is_tp_worker

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._registry.fail(0, f"the coordinator failed: {error_text(error)}")

    def _update_metrics(self) -> None:
        self._metrics.update(self._registry.clients, self._rebalancer.counts())

    async def _tick(self) -> None:
        pool, is_busy = self._parts.pool, False
        last = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            for batch in self._registry.abandoned(pool.feeder_timeout_s):
                # answered results stay for a successor feeder, which may never come
                if not batch.done.is_set():
                    _logger.warning(
                        "dropping row batch %d: its feeder has not polled for its results in time",
                        batch.batch_id,
                    )
                self._registry.drop(batch)
            self._dispatch()
            # a busy event loop delays reports and this tick alike
            elapsed_s = min(2 * _TICK_S, time.monotonic() - last)
            last = time.monotonic()
            self._rebalancer.step(elapsed_s)
            self._update_metrics()
            was_busy, is_busy = is_busy, len(self._registry) > 0
            if was_busy and not is_busy:
                # the driver may end now, and this process with it
                self._spawn(asyncio.to_thread(flush, "metrics"))
            if is_busy:
                self._idle_since = time.monotonic()
                # replaces drained replicas, and adds those that the autoscaler wants
                await self._start_replicas()
                continue
            idle_s = time.monotonic() - self._idle_since
            if pool.idle_release_s is not None and idle_s > pool.idle_release_s:
                await self._stop_replicas()
