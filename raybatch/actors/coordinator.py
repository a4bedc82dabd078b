"""The actor between feeders and replicas, with one global queue for all of them."""

import asyncio
import itertools
import logging
import time
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from raybatch.actors.counters import ClientCounters
from raybatch.actors.crew import Crew, CrewPlan
from raybatch.actors.inbox import Inbox, OpenBatch
from raybatch.actors.queue import RowQueue
from raybatch.actors.records import (
    Answer,
    Assignment,
    PoisonRow,
    PoolSpec,
    PoolState,
    Room,
    Span,
    Submission,
)
from raybatch.actors.wire import encode_completions, row_numbers
from raybatch.types import Completion, PoolStats, ReplicaStats

_MAX_WAIT_S = 20.0
_TICK_S = 0.5
# so many rows given up with none finished in between: the engine is broken, not the rows
_MAX_POISON_IN_A_ROW = 10

_logger = logging.getLogger(__name__)


class Coordinator:
    """Owns the replicas of one pool and everything that waits for them.

    All methods run on one event loop; what they decide is in `RowQueue` and `StartLedger`.

    Args:
        spec: of the pool.
        plan: size and resources of the crew.
    """

    def __init__(self, spec: PoolSpec, plan: CrewPlan) -> None:
        self._spec = spec
        self._plan = plan
        self._queue = RowQueue(spec.pool.max_row_crashes)
        self._inbox = Inbox()
        self._clients: dict[str, ClientCounters] = defaultdict(ClientCounters)
        self._pulls: dict[int, tuple[Room, asyncio.Future[list[Assignment] | None]]] = {}
        self._crew = Crew(spec, plan, on_lost=self._lose, on_exhausted=self._fail)
        self._crew_lock = asyncio.Lock()
        self._is_stopping = False
        self._ticking: asyncio.Task[None] | None = None
        self._stealing: set[asyncio.Task[None]] = set()
        self._not_worth_asking: set[int] = set()
        self._failure: tuple[int, str] | None = None
        self._poison_in_a_row = 0
        self._idle_since = time.monotonic()

    async def generate(self, submission: Submission) -> Answer:
        """Queue a row batch and wait a while for its results."""
        if self._failure is None:
            await self._start_crew()
        now = time.monotonic()
        batch = self._inbox.add(submission, now)
        self._queue.add(batch.batch_id, submission.prompt_tokens, submission.max_new_tokens)
        self._clients[submission.client].received(
            submission.prompt_tokens, submission.max_new_tokens, now
        )
        self._settle(batch)
        self._dispatch()
        return await self._answer(batch)

    async def collect(self, token: str) -> Answer:
        """Wait a while longer for a row batch."""
        batch = self._inbox.find(token)
        return Answer(status="unknown") if batch is None else await self._answer(batch)

    async def cancel(self, token: str) -> None:
        """Forget a row batch; what runs of it ends unheard."""
        self._drop(self._inbox.find(token))

    async def note_lost(self, batch_id: int) -> None:
        """Forget a row batch whose request table is gone, so that its feeder submits it again."""
        self._drop(self._inbox.get(batch_id))

    async def pull(self, replica_id: int, room: Room) -> list[Assignment] | None:
        """Wait for rows; None tells the replica to end."""
        if replica_id not in self._crew.members or self._is_stopping:
            return None
        future: asyncio.Future[list[Assignment] | None]
        future = asyncio.get_running_loop().create_future()
        self._pulls[replica_id] = (room, future)
        self._dispatch()
        return await future

    async def report(
        self, replica_id: int, results: list[tuple[int, pa.RecordBatch]], stats: ReplicaStats
    ) -> None:
        """Take finished rows and the counters of a replica."""
        member = self._crew.members.get(replica_id)
        if member is None:
            return
        member.stats = stats
        self._not_worth_asking.discard(replica_id)
        for batch_id, batch_results in results:
            num_rows = self._take_results(replica_id, batch_id, batch_results)
            member.num_finished_rows += num_rows
            if num_rows:
                self._poison_in_a_row = 0
                self._crew.ledger.worked(member.rank)
        self._dispatch()

    async def note_cause(self, replica_id: int, cause: str) -> None:
        """Remember why a replica is about to end itself."""
        if replica_id in self._crew.members:
            self._crew.members[replica_id].cause = cause

    async def stats(self, client: str) -> PoolStats:
        """Return the counters of a client and the state of the pool."""
        ledger = self._crew.ledger
        counters = self._clients.get(client) or ClientCounters()
        return counters.stats(
            num_replicas=self._plan.num_replicas,
            num_ready=ledger.num_ready(),
            num_restarts=ledger.num_restarts,
            busy_s=self._crew.busy_s(),
            replicas=[m.stats for m in self._crew.members.values() if m.is_ready],
        )

    async def state(self) -> PoolState:
        """Return what the pool holds at this moment."""
        members = [m for m in self._crew.members.values() if m.pid is not None and m.is_ready]
        return PoolState(
            num_batches=len(self._inbox),
            num_waiting_rows=self._queue.num_waiting(),
            num_held_rows=sum(self._queue.num_held(m.replica_id) for m in members),
            num_results=sum(len(batch.results) for batch in self._inbox),
            pids=tuple(sorted(m.pid for m in members if m.pid is not None)),
            finished_by_pid={m.pid: m.num_finished_rows for m in members if m.pid is not None},
        )

    async def shutdown(self) -> None:
        """End every replica; who still waits gets an error."""
        self._fail(0, "the pool was shut down")
        if self._ticking is not None:
            self._ticking.cancel()
        await self._stop_crew()

    async def _start_crew(self) -> None:
        async with self._crew_lock:
            self._crew.start(ray.get_runtime_context().current_actor)
            if self._ticking is None:
                self._ticking = asyncio.create_task(self._tick())

    async def _stop_crew(self) -> None:
        async with self._crew_lock:
            self._is_stopping = True
            for _, future in self._pulls.values():
                future.set_result(None)
            self._pulls.clear()
            await self._crew.stop()
            self._is_stopping = False

    async def _answer(self, batch: OpenBatch) -> Answer:
        batch_id = batch.batch_id
        batch.last_asked = time.monotonic()
        try:
            wait_s = min(_MAX_WAIT_S, self._spec.pool.feeder_timeout_s / 3)
            await asyncio.wait_for(batch.done.wait(), wait_s)
        except TimeoutError:
            return Answer(status="pending")
        if self._inbox.get(batch_id) is None:
            return Answer(status="unknown")
        self._inbox.close(batch)
        self._idle_since = time.monotonic()
        if self._failure is not None:
            rank, cause = self._failure
            answer = Answer(status="failed", rank=rank, cause=cause)
        else:
            attempts = self._queue.attempts(batch_id)
            answer = Answer(status="done", results=tuple(batch.results), attempts=attempts)
        self._queue.drop(batch_id)
        return answer

    def _drop(self, batch: OpenBatch | None) -> None:
        if batch is not None:
            self._inbox.close(batch)
            self._queue.drop(batch.batch_id)
            batch.done.set()
            self._dispatch()

    def _take_results(self, replica_id: int, batch_id: int, results: pa.RecordBatch) -> int:
        batch = self._inbox.get(batch_id)
        if batch is None:
            return 0
        rows = row_numbers(results)
        is_held = self._queue.finish(replica_id, batch_id, rows)
        if not is_held.all():
            rows = rows[is_held]
            results = results.filter(pa.array(np.isin(results.column("row").to_numpy(), rows)))
        if len(rows):
            self._keep(batch, rows, results)
        return len(rows)

    def _keep(self, batch: OpenBatch, rows: npt.NDArray[np.int32], results: pa.RecordBatch) -> None:
        submission = batch.submission
        batch.results.append(results)
        counters = self._clients[submission.client]
        counters.results(results)
        counters.done(
            len(rows),
            int(submission.prompt_tokens[rows].sum()),
            int(submission.max_new_tokens[rows].sum()),
            time.monotonic(),
        )
        self._settle(batch)

    def _settle(self, batch: OpenBatch) -> None:
        if self._failure is not None or self._queue.is_done(batch.batch_id):
            batch.done.set()

    def _dispatch(self) -> None:
        hungry = {replica_id: room for replica_id, (room, _) in self._pulls.items()}
        if not hungry:
            return
        num_expected = self._crew.ledger.num_expected(time.monotonic())
        for replica_id, spans in self._queue.dispatch(hungry, num_expected).items():
            _, future = self._pulls.pop(replica_id)
            future.set_result(self._assignments(spans))
        if not self._queue.has_waiting():
            self._steal()

    def _assignments(self, spans: list[Span]) -> list[Assignment]:
        assignments = []
        for batch_id, group in itertools.groupby(spans, key=lambda span: span.batch_id):
            batch = self._inbox.get(batch_id)
            if batch is not None:
                refs = batch.submission.refs
                assignments.append(Assignment(batch_id=batch_id, refs=refs, spans=tuple(group)))
        return assignments

    def _steal(self) -> None:
        """Ask the replica with the most unstarted rows for half of them when another has none."""
        if self._stealing or all(self._queue.num_held(r) for r in self._pulls):
            return
        members = [
            m
            for m in self._crew.members.values()
            if m.stats.num_waiting > 1
            and m.replica_id not in self._not_worth_asking
            and not self._queue.is_testing(m.replica_id)
        ]
        if members:
            victim = max(members, key=lambda m: m.stats.num_waiting)
            self._not_worth_asking.add(victim.replica_id)
            task = asyncio.create_task(
                self._take_back(victim.replica_id, victim.actor, victim.stats.num_waiting // 2)
            )
            self._stealing.add(task)
            task.add_done_callback(self._stealing.discard)

    async def _take_back(self, replica_id: int, actor: ActorHandle, max_rows: int) -> None:
        try:
            rows = await actor.give_back.remote(max_rows)
        except RayError:
            # its death is noticed, and its rows are queued again, where it is awaited
            return
        self._queue.give_back(replica_id, [Span(b, row, row + 1) for b, row in rows])
        self._dispatch()

    def _lose(self, replica_id: int) -> bool:
        _, future = self._pulls.pop(replica_id, (None, None))
        if future is not None:
            future.set_result(None)
        self._not_worth_asking.discard(replica_id)
        had_rows = self._queue.num_held(replica_id) > 0
        for poison in self._queue.lose(replica_id):
            self._give_up_row(poison)
        self._dispatch()
        return had_rows

    def _give_up_row(self, poison: PoisonRow) -> None:
        batch = self._inbox.get(poison.batch_id)
        if batch is None:
            return
        error = f"ReplicaCrash: the engine died {poison.num_crashes} times with this row"
        completion = Completion(request_id=poison.row, finish_reason="error", error=error)
        rows = np.array([poison.row], np.int32)
        self._keep(batch, rows, encode_completions(rows, [completion]))
        self._poison_in_a_row += 1
        if self._poison_in_a_row >= _MAX_POISON_IN_A_ROW:
            self._fail(0, f"{error}, like {self._poison_in_a_row - 1} rows before it")

    def _fail(self, rank: int, cause: str) -> None:
        self._failure = self._failure or (rank, cause)
        for batch in self._inbox:
            batch.done.set()

    async def _tick(self) -> None:
        pool = self._spec.pool
        while True:
            await asyncio.sleep(_TICK_S)
            now = time.monotonic()
            for batch in self._inbox.abandoned(now, pool.feeder_timeout_s):
                _logger.warning("row batch %d is dropped: its feeder is silent", batch.batch_id)
                self._drop(batch)
            self._dispatch()
            if len(self._inbox):
                self._idle_since = now
            elif pool.idle_release_s is not None and now - self._idle_since > pool.idle_release_s:
                await self._stop_crew()
