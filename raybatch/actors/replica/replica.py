"""One replica: pulls rows, feeds the engine thread, sends finished rows; no Ray."""

import asyncio
import contextlib
import logging
import traceback
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from raybatch.actors.coordinator.counters import ReplicaMetrics
from raybatch.actors.queue.pulling import HEARTBEAT_S, LEAD_STEPS, MIN_NEW_TOKENS, REPORT_EVERY_S
from raybatch.actors.replica.engine_thread import EngineThread
from raybatch.actors.replica.moving import MovingRows
from raybatch.actors.replicas.site import ReplicaSite, obey_log_level
from raybatch.actors.wire.api import PoolApi, ReplicaApi
from raybatch.actors.wire.begun import encode_begun, sequence_states
from raybatch.actors.wire.columns import RequestReader, encode_completions
from raybatch.actors.wire.records import (
    ROW_BITS,
    ROW_MASK,
    Assignment,
    EnginePart,
    FailedStart,
    MoveStep,
    Place,
    PoolSpec,
    Progress,
    Pulse,
)
from raybatch.backends.base import Backend
from raybatch.backends.registry import create_backend, type_of
from raybatch.errors import (
    EndpointError,
    RaybatchError,
    TeamError,
    error_text,
    is_permanent,
    one_line,
)
from raybatch.records.share import ShareLink, ShareSeat
from raybatch.records.types import Completion, Request, SequenceState
from raybatch.redaction import redacted
from raybatch.telemetry import flush

# of the first reports of how far rows are, and of later ones: many at first, when little is known
_PROGRESS_EVERY_S, _PROGRESS_GROWTH = 0.1, 1.1
# while rows wait in the engine, and where none does and rows may move
_PROGRESS_AT_LEAST_EVERY_S, _PROGRESS_OF_TAIL_EVERY_S = 5.0, 0.5

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenBatch:
    reader: RequestReader
    num_rows: int = 0


class Replica(ReplicaApi):
    """One engine, as a rule in a process of its own: the coordinator calls `start`, then `run`.

    Ray starts its workers with nice 15 (`RAY_worker_niceness`); the engine inherits it.
    The `replica_id` is unique among all starts of the pool.
    """

    def __init__(self, spec: PoolSpec, replica_id: int, site: ReplicaSite) -> None:
        site.settle(spec)
        self._site = site
        self._spec = spec
        self._replica_id = replica_id
        self._metrics = ReplicaMetrics(replica_id, site.metrics)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_events = asyncio.Event()
        self._outbox = asyncio.Event()
        self._ran_dry = asyncio.Event()
        self._open: dict[int, _OpenBatch] = {}
        # batches that were dropped since the last pull, whose answer may still carry their rows
        self._dropped: set[int] = set()
        # and rows, which never come again
        self._dropped_rows: set[int] = set()
        self._num_engines_on_host = 1
        self._link: ShareLink | None = None
        lead_tokens = LEAD_STEPS * spec.engine.token_budget
        self._engine = EngineThread(self._make_engine, self._wake, lead_tokens=lead_tokens)
        self._moving = MovingRows(self._engine, site, self._close_row)
        self._is_fetching = False
        self._progress: Progress | None = None

    async def start(
        self,
        num_engines_on_host: int,
        seat: ShareSeat | None = None,
        coordinator: PoolApi | None = None,
    ) -> FailedStart | None:
        """Build the engine; return why it could not be built, if so.

        With a seat it shares weights with others, whom it reaches by the coordinator.
        """
        self._loop = asyncio.get_running_loop()
        self._num_engines_on_host = num_engines_on_host
        if seat is not None and coordinator is not None:
            self._link = self._link_of(seat, coordinator, self._loop)
        started = self._engine.start()
        # pyarrow looks for pandas at its first array: a row that moves would stand still meanwhile
        await asyncio.to_thread(encode_begun, [], [])
        try:
            capacity = await asyncio.wrap_future(started)
        except Exception as error:
            _logger.debug("the engine could not be built", exc_info=error)
            is_own = isinstance(error, RaybatchError)
            trace = "" if is_own else _trace(error)
            cause = one_line(error_text(error))
            return FailedStart(cause=cause, is_final=is_permanent(error), trace=trace)
        _logger.info("replica %d is ready: %s", self._replica_id, capacity)
        return None

    async def place(self) -> Place:
        return self._site.place()

    async def run(self, coordinator: PoolApi) -> None:
        engine = self._engine
        reports = [
            asyncio.create_task(self._report(engine, coordinator)),
            asyncio.create_task(self._follow(engine)),
        ]
        if self._spec.pool.keep_tokens_every_s is not None:
            keeping = self._report_begun(engine, coordinator, self._spec.pool.keep_tokens_every_s)
            reports.append(asyncio.create_task(keeping))
        try:
            while True:
                self._has_events.clear()
                while (room := engine.room()) is None:
                    await self._has_events.wait()
                    self._has_events.clear()
                # batches that were dropped before a pull are not in its answer
                self._dropped.clear()
                self._dropped_rows.clear()
                work = await coordinator.pull(self._replica_id, room)
                if work is None:
                    break
                self._is_fetching = True
                await self._admit(engine, coordinator, work)
                self._is_fetching = False
        finally:
            for task in reports:
                task.cancel()
        await asyncio.to_thread(engine.close)
        self._metrics.update(engine.stats)
        await asyncio.to_thread(flush, "metrics")

    def close_soon(self) -> None:
        """Let the engine end after its present step, without waiting for it."""
        self._engine.close_soon()

    async def give_back(
        self, max_rows: int | None = None, max_cost: int | None = None
    ) -> list[tuple[int, int]]:
        """Return unstarted rows as (batch id, row), see `choose_rows`; without a limit, all."""
        ids = await asyncio.wrap_future(self._engine.give_back(max_rows, max_cost))
        rows = [(request_id >> ROW_BITS, request_id & ROW_MASK) for request_id in ids]
        for batch_id, _ in rows:
            self._close_row(batch_id)
        return rows

    async def empty(self) -> list[tuple[int, int]]:
        """Return all unstarted rows, and let the next report tell how far the others are."""
        rows = await self.give_back()
        progress = await asyncio.wrap_future(self._engine.progress())
        self._progress = Progress(rows=progress, capacity=self._engine.capacity)
        self._outbox.set()
        return rows

    async def abort(self, batch_id: int) -> None:
        """Drop the rows of a row batch, also those on their way; return when none runs."""
        self._dropped.add(batch_id)
        self._open.pop(batch_id, None)
        await self._moving.drop(batch_id)
        first_id = batch_id << ROW_BITS
        await asyncio.wrap_future(self._engine.abort(first_id, first_id + ROW_MASK))

    async def abort_row(self, request_id: int) -> None:
        """Drop a row that another replica has finished; return when it does not run."""
        self._dropped_rows.add(request_id)
        is_here = await asyncio.wrap_future(self._engine.abort(request_id, request_id))
        if is_here and not self._moving.forget_guest(request_id):
            self._close_row(request_id >> ROW_BITS)

    async def move(self, step: MoveStep, *args: Any) -> Any:  # noqa: ANN401 - of each step
        """Take one step of a move, a method of `MovingRows`."""
        return await getattr(self._moving, step)(*args)

    async def extend(self, part: EnginePart, step: str, *args: Any) -> Any:  # noqa: ANN401
        """Take one step for an extension of the pool, see `EngineThread.extend`."""
        return await asyncio.wrap_future(self._engine.extend(part, step, *args))

    def _link_of(
        self, seat: ShareSeat, coordinator: PoolApi, loop: asyncio.AbstractEventLoop
    ) -> ShareLink:
        """Return how the thread of an engine that loads reaches the others of its group."""

        async def ask(text: str) -> list[str] | None:
            return await coordinator.exchange(self._replica_id, text)

        def exchange(text: str) -> list[str]:
            texts = asyncio.run_coroutine_threadsafe(ask(text), loop).result()
            if texts is None:
                raise TeamError("another replica of the group has ended")
            return texts

        return ShareLink(seat, exchange)

    def _make_engine(self) -> Backend:
        return self._build(self._num_engines_on_host, self._link)

    def _build(self, num_engines: int, link: ShareLink | None) -> Backend:
        obey_log_level()  # before anything is chosen
        spec, engine = self._spec, self._spec.engine
        device = None if link is None else self._site.device()
        if device is not None and engine.device in ("auto", "cuda"):
            engine = replace(engine, device=device)
        return create_backend(
            spec.model,
            spec.backend,
            engine,
            num_engines_on_host=num_engines,
            num_replicas=spec.pool.replicas,
            share=link,
        )

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set_events)

    def _set_events(self) -> None:
        self._has_events.set()
        if self._engine.is_idle():
            self._ran_dry.set()
        self._outbox.set()

    async def _admit(
        self, engine: EngineThread, coordinator: PoolApi, work: list[Assignment]
    ) -> None:
        """Fetch the tables of all assignments, then submit their rows in the order of the pull."""
        batches = await asyncio.gather(*(self._open_batch(coordinator, each) for each in work))
        requests: list[tuple[int, list[Request]]] = []
        begun: dict[int, list[SequenceState]] = {}
        for assignment, batch in zip(work, batches, strict=True):
            if batch is not None and assignment.batch_id not in self._dropped:
                self._open[assignment.batch_id] = batch
                spans = _read(batch, assignment)
                requests += spans
                if assignment.begun is not None:
                    by_row = {r.request_id & ROW_MASK: r for _, of_span in spans for r in of_span}
                    begun |= sequence_states(by_row, assignment.begun)
        requests.sort(key=lambda of_span: of_span[0])
        wanted = [request for _, of_span in requests for request in of_span]
        for request_id in self._dropped_rows.intersection(r.request_id for r in wanted):
            begun.pop(request_id, None)
            self._close_row(request_id >> ROW_BITS)
        engine.submit([r for r in wanted if r.request_id not in self._dropped_rows], begun)

    async def _open_batch(self, coordinator: PoolApi, work: Assignment) -> _OpenBatch | None:
        if work.batch_id in self._open:
            return self._open[work.batch_id]
        requests = await self._site.fetch(work.refs[0])
        if requests is None:
            await coordinator.note_lost(work.batch_id)
            return None
        return _OpenBatch(RequestReader(*requests))

    async def _report(self, engine: EngineThread, coordinator: PoolApi) -> None:
        """Send finished rows at once, but not more often than needed."""
        while True:
            try:
                await asyncio.wait_for(self._outbox.wait(), HEARTBEAT_S)
            except TimeoutError:
                if engine.is_idle() and not self._is_fetching and not self._moving.has_left:
                    continue
            self._outbox.clear()
            self._ran_dry.clear()
            # read first: what an engine finished before it broke is sent
            failure = engine.failure
            try:
                await self._send(engine, coordinator)
            except Exception as error:
                await self._give_up(coordinator, error)
            if failure is not None:
                await self._give_up(coordinator, failure)
            if not engine.is_idle():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._ran_dry.wait(), REPORT_EVERY_S)

    async def _report_begun(
        self, engine: EngineThread, coordinator: PoolApi, every_s: float
    ) -> None:
        """Report tokens of long generations, so that only the last ones die with this process."""
        while True:
            await asyncio.sleep(every_s)
            if engine.is_idle():
                continue
            of_batch: dict[int, list[SequenceState]] = defaultdict(list)
            for state in await engine.ask(lambda backend: backend.begun(MIN_NEW_TOKENS)):
                of_batch[state.request.request_id >> ROW_BITS].append(state)
            progress = [
                (batch_id, encode_begun([s.request.request_id & ROW_MASK for s in states], states))
                for batch_id, states in of_batch.items()
            ]
            if progress:
                await coordinator.note_begun(progress)

    async def _send(self, engine: EngineThread, coordinator: PoolApi) -> None:
        by_batch: dict[int, list[Completion]] = defaultdict(list)
        for completion in engine.collect():
            by_batch[completion.request_id >> ROW_BITS].append(completion)
        results = []
        for batch_id, samples in by_batch.items():
            rows = [completion.request_id & ROW_MASK for completion in samples]
            results.append((batch_id, encode_completions(rows, samples)))
            for row in set(rows):
                request_id = batch_id << ROW_BITS | row
                if not self._moving.forget_guest(request_id):
                    self._close_row(batch_id)
        stats = engine.stats
        self._metrics.update(stats)
        pulse = self._pulse(engine, stats.num_steps)
        progress, self._progress = self._progress, None
        await coordinator.report(self._replica_id, results, stats, pulse, progress)

    async def _follow(self, engine: EngineThread) -> None:
        """Learn now and then how far rows are, for the next report.

        Those that end first are the short ones; and in the tail of a batch, rows may move.
        """
        every_s, told_idle = _PROGRESS_EVERY_S, False
        while True:
            await asyncio.sleep(every_s)
            if engine.is_idle():
                every_s = _PROGRESS_EVERY_S
                if told_idle:
                    continue
            told_idle = engine.is_idle()
            rows = await asyncio.wrap_future(engine.progress())
            self._progress = Progress(rows=rows, capacity=engine.capacity)
            if told_idle:
                # that it has room is worth a report
                self._outbox.set()
            is_tail = engine.stats.num_waiting <= 1
            most_s = _PROGRESS_OF_TAIL_EVERY_S if is_tail else _PROGRESS_AT_LEAST_EVERY_S
            every_s = min(_PROGRESS_GROWTH * every_s, most_s)

    def _pulse(self, engine: EngineThread, num_steps: int) -> Pulse:
        if engine.is_idle():
            return Pulse(num_steps, "fetching" if self._is_fetching else "nothing")
        # an endpoint takes its time, and its backend has time limits of its own
        is_endpoint = type_of(self._spec.backend).is_endpoint
        return Pulse(num_steps, "endpoint" if is_endpoint else "steps")

    def _close_row(self, batch_id: int) -> None:
        if (batch := self._open.get(batch_id)) is None:
            return  # dropped while its row was on the way out
        batch.num_rows -= 1
        if not batch.num_rows:
            del self._open[batch_id]

    async def _give_up(self, coordinator: PoolApi, failure: BaseException) -> None:
        """End: a broken engine must look like a death, so that it is replaced.

        An endpoint that refuses every request would refuse those of another replica as well.
        """
        ends_run = isinstance(failure, EndpointError)
        trace = "" if ends_run else _trace(failure)
        await coordinator.note_cause(self._replica_id, error_text(failure), ends_run, trace)
        await self._site.die()


def _trace(error: BaseException) -> str:
    return redacted("".join(traceback.format_exception(error)))


def _read(batch: _OpenBatch, work: Assignment) -> list[tuple[int, list[Request]]]:
    """Return the requests of each span with its place in the pull, and count them as open."""
    places = range(len(work.spans)) if work.places is None else work.places
    first_id = work.batch_id << ROW_BITS
    requests, start = [], 0
    for place, span in zip(places, work.spans, strict=True):
        num_rows = span.stop - span.start
        groups = work.groups and work.groups.between(start, start + num_rows)
        likely = None if work.likely is None else work.likely.between(start, start + num_rows)
        of_span = batch.reader.read(span.start, span.stop, first_id, groups, likely)
        requests.append((place, of_span))
        batch.num_rows += num_rows
        start += num_rows
    return requests
