"""One replica: pulls rows, feeds the engine thread, reports finished rows; no Ray."""

import asyncio
import contextlib
import logging
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from raybatch.actors.coordinator.counters import ReplicaMetrics
from raybatch.actors.queue.pulling import HEARTBEAT_S, LEAD_STEPS, MIN_NEW_TOKENS, REPORT_EVERY_S
from raybatch.actors.replica.engine_thread import EngineThread, RowStates
from raybatch.actors.replicas.runtime import ReplicaRuntime, obey_log_level
from raybatch.actors.wire.columns import (
    RequestReader,
    encode_checkpointed,
    encode_completions,
    sequence_states,
)
from raybatch.actors.wire.records import (
    ROW_BITS,
    ROW_MASK,
    Activity,
    Assignment,
    EnginePart,
    FailedStart,
    LeftRow,
    MoveStep,
    Piece,
    Place,
    PoolApi,
    PoolSpec,
    Progress,
    ReplicaApi,
    ResultBatches,
)
from raybatch.backends.base import Backend
from raybatch.backends.registry import create_backend, type_of
from raybatch.errors import (
    EndpointError,
    RankError,
    RaybatchError,
    error_text,
    is_permanent,
    one_line,
)
from raybatch.records.share import ShareLink, ShareRank
from raybatch.records.types import Completion, Request, SequenceState
from raybatch.redaction import redacted
from raybatch.telemetry import flush

# first interval of progress reports, and its growth: frequent while little is known
_PROGRESS_EVERY_S, _PROGRESS_GROWTH = 0.1, 1.1
# longest interval while rows are queued in the engine, and in the tail, when rows may move
_PROGRESS_AT_LEAST_EVERY_S, _PROGRESS_OF_TAIL_EVERY_S = 5.0, 0.5
# bytes of one copy, during which the engine is blocked
_PIECE_BYTES = 4 << 20

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _OpenBatch:
    reader: RequestReader
    num_rows: int = 0


class Replica(ReplicaApi):
    """One engine, usually in a separate process: the coordinator calls `start`, then `run`.

    Ray starts its workers with nice 15 (`RAY_worker_niceness`), which the engine inherits. The
    `replica_id` is unique among all starts of the pool.
    """

    def __init__(self, spec: PoolSpec, replica_id: int, runtime: ReplicaRuntime) -> None:
        runtime.settle(spec)
        self._runtime = runtime
        self._spec = spec
        self._replica_id = replica_id
        self._metrics = ReplicaMetrics(replica_id, runtime.metrics)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_events = asyncio.Event()
        self._outbox = asyncio.Event()
        self._is_urgent = asyncio.Event()
        self._open: dict[int, _OpenBatch] = {}
        # batches dropped since the last pull, whose answer may still carry their rows
        self._dropped: set[int] = set()
        # dropped rows, which are never assigned again
        self._dropped_rows: set[int] = set()
        self._num_engines_on_host = 1
        self._link: ShareLink | None = None
        lead_tokens = LEAD_STEPS * spec.engine.token_budget
        self._engine = EngineThread(self._build, self._wake, lead_tokens=lead_tokens)
        self._moving = MovingRows(self._engine, runtime, self._close_row)
        self._is_fetching = False
        self._progress: Progress | None = None

    async def start(
        self,
        num_engines_on_host: int,
        share_rank: ShareRank | None = None,
        coordinator: PoolApi | None = None,
    ) -> FailedStart | None:
        """Build the engine; return why that failed, None if the engine is ready.

        Args:
            num_engines_on_host: number of engines that share the memory of the host.
            share_rank: place in a weight-sharing group; None if weights are not shared.
            coordinator: how to reach the other replicas of the group.
        """
        self._loop = asyncio.get_running_loop()
        self._num_engines_on_host = num_engines_on_host
        if share_rank is not None and coordinator is not None:
            self._link = self._link_of(share_rank, coordinator, self._loop)
        started = self._engine.start()
        # pyarrow imports pandas at its first array, which would delay a row that moves
        await asyncio.to_thread(encode_checkpointed, [], [])
        try:
            capacity = await asyncio.wrap_future(started)
        except Exception as error:
            _logger.debug("could not build the engine", exc_info=error)
            is_own = isinstance(error, RaybatchError)
            trace = "" if is_own else _trace(error)
            cause = one_line(error_text(error))
            return FailedStart(cause=cause, is_final=is_permanent(error), trace=trace)
        _logger.info("replica %d is ready: %s", self._replica_id, capacity)
        return None

    async def place(self) -> Place:
        return self._runtime.place()

    async def run(self, coordinator: PoolApi) -> None:
        engine = self._engine
        reports = [
            asyncio.create_task(self._report(engine, coordinator)),
            asyncio.create_task(self._follow(engine)),
        ]
        if self._spec.pool.keep_tokens_every_s is not None:
            keeping = self._report_checkpointed(
                engine, coordinator, self._spec.pool.keep_tokens_every_s
            )
            reports.append(asyncio.create_task(keeping))
        try:
            while True:
                self._has_events.clear()
                while (credit := engine.credit()) is None:
                    await self._has_events.wait()
                    self._has_events.clear()
                # batches that were dropped before a pull are not in its answer
                self._dropped.clear()
                self._dropped_rows.clear()
                work = await coordinator.pull(self._replica_id, credit)
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
        """Stop the engine after its current step, without waiting for it."""
        self._engine.close_soon()

    async def give_back(
        self, max_rows: int | None = None, max_cost: int | None = None
    ) -> list[tuple[int, int]]:
        """Remove unstarted rows; return their (batch id, row) pairs.

        Arguments as of `choose_rows`; without `max_rows` all are removed.
        """
        ids = await asyncio.wrap_future(self._engine.give_back(max_rows, max_cost))
        rows = [(request_id >> ROW_BITS, request_id & ROW_MASK) for request_id in ids]
        for batch_id, _ in rows:
            self._close_row(batch_id)
        return rows

    async def drain(self) -> list[tuple[int, int]]:
        """Remove all unstarted rows; return their (batch id, row) pairs.

        The next report has the progress of the running rows, so that they can be moved.
        """
        rows = await self.give_back()
        progress = await self._engine.ask(lambda backend: backend.progress())
        self._progress = Progress(rows=progress, capacity=self._engine.capacity)
        self._outbox.set()
        self._is_urgent.set()
        return rows

    async def abort(self, batch_id: int) -> None:
        """Drop the rows of a row batch, even those on the way here; return once none runs."""
        self._dropped.add(batch_id)
        self._open.pop(batch_id, None)
        await self._moving.drop(batch_id)
        first_id = batch_id << ROW_BITS
        await asyncio.wrap_future(self._engine.abort(first_id, first_id + ROW_MASK))

    async def abort_row(self, request_id: int) -> None:
        """Drop a row that another replica has finished; return once it has stopped."""
        self._dropped_rows.add(request_id)
        is_here = await asyncio.wrap_future(self._engine.abort(request_id, request_id))
        if is_here and not self._moving.forget_guest(request_id):
            self._close_row(request_id >> ROW_BITS)

    async def move(self, step: MoveStep, *args: Any) -> Any:  # noqa: ANN401 - of each step
        """Call a method of `MovingRows`."""
        return await getattr(self._moving, step)(*args)

    async def extend(self, part: EnginePart, step: str, *args: Any) -> Any:  # noqa: ANN401
        """Call a method of an extension; see `EngineThread.extend`."""
        return await asyncio.wrap_future(self._engine.extend(part, step, *args))

    def _link_of(
        self, share_rank: ShareRank, coordinator: PoolApi, loop: asyncio.AbstractEventLoop
    ) -> ShareLink:
        """Return the link from a loading engine to the others of its group."""

        async def ask(text: str) -> list[str] | None:
            return await coordinator.exchange(self._replica_id, text)

        def exchange(text: str) -> list[str]:
            texts = asyncio.run_coroutine_threadsafe(ask(text), loop).result()
            if texts is None:
                raise RankError("another replica of the weight-sharing group has exited")
            return texts

        return ShareLink(share_rank, exchange)

    def _build(self) -> Backend:
        obey_log_level()  # before the first log line
        spec, engine = self._spec, self._spec.engine
        device = None if self._link is None else self._runtime.device()
        if device is not None and engine.device in ("auto", "cuda"):
            engine = replace(engine, device=device)
        return create_backend(
            spec.model,
            spec.backend,
            engine,
            num_engines_on_host=self._num_engines_on_host,
            num_replicas=spec.pool.replicas,
            share=self._link,
        )

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._set_events)

    def _set_events(self) -> None:
        self._has_events.set()
        if self._engine.is_idle() or self._engine.failure is not None:
            self._is_urgent.set()
        self._outbox.set()

    async def _admit(
        self, engine: EngineThread, coordinator: PoolApi, work: list[Assignment]
    ) -> None:
        """Fetch the tables of all assignments, then submit rows in the order of the pull."""
        batches = await asyncio.gather(*(self._open_batch(coordinator, each) for each in work))
        requests: list[tuple[int, list[Request]]] = []
        checkpointed: dict[int, list[SequenceState]] = {}
        for assignment, batch in zip(work, batches, strict=True):
            if batch is not None and assignment.batch_id not in self._dropped:
                self._open[assignment.batch_id] = batch
                row_ranges = _read(batch, assignment)
                requests += row_ranges
                if assignment.checkpointed is not None:
                    by_row = {r.request_id & ROW_MASK: r for _, of in row_ranges for r in of}
                    checkpointed |= sequence_states(by_row, assignment.checkpointed)
        requests.sort(key=lambda in_range: in_range[0])
        wanted = [request for _, in_range in requests for request in in_range]
        for request_id in self._dropped_rows.intersection(r.request_id for r in wanted):
            checkpointed.pop(request_id, None)
            self._close_row(request_id >> ROW_BITS)
        engine.submit([r for r in wanted if r.request_id not in self._dropped_rows], checkpointed)

    async def _open_batch(self, coordinator: PoolApi, work: Assignment) -> _OpenBatch | None:
        if work.batch_id in self._open:
            return self._open[work.batch_id]
        requests = await self._runtime.fetch(work.refs[0])
        if requests is None:
            await coordinator.note_lost(work.batch_id)
            return None
        return _OpenBatch(RequestReader(*requests))

    async def _report(self, engine: EngineThread, coordinator: PoolApi) -> None:
        """Report finished rows promptly, but as rarely as the coordinator asks."""
        every_s = REPORT_EVERY_S
        while True:
            try:
                await asyncio.wait_for(self._outbox.wait(), HEARTBEAT_S)
            except TimeoutError:
                if engine.is_idle() and not self._is_fetching and not self._moving.has_left:
                    continue
            self._outbox.clear()
            self._is_urgent.clear()
            # read first, so that results of a failed engine are sent
            failure = engine.failure
            try:
                every_s = await self._send(engine, coordinator)
            except Exception as error:
                await self._give_up(coordinator, error)
            if failure is not None:
                await self._give_up(coordinator, failure)
            if not engine.is_idle():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_urgent.wait(), every_s)

    async def _report_checkpointed(
        self, engine: EngineThread, coordinator: PoolApi, every_s: float
    ) -> None:
        """Checkpoint tokens of long generations, so that a crash loses only the latest."""
        while True:
            await asyncio.sleep(every_s)
            if engine.is_idle():
                continue
            of_batch: dict[int, list[SequenceState]] = defaultdict(list)
            for state in await engine.ask(lambda backend: backend.checkpoint(MIN_NEW_TOKENS)):
                of_batch[state.request.request_id >> ROW_BITS].append(state)
            progress = [
                (
                    batch_id,
                    encode_checkpointed([s.request.request_id & ROW_MASK for s in states], states),
                )
                for batch_id, states in of_batch.items()
            ]
            if progress:
                await coordinator.note_checkpointed(progress)

    async def _send(self, engine: EngineThread, coordinator: PoolApi) -> float:
        """Report; return the shortest interval until the next report, in seconds."""
        by_batch: dict[int, list[Completion]] = defaultdict(list)
        for completion in engine.collect():
            by_batch[completion.request_id >> ROW_BITS].append(completion)
        results = []
        for batch_id, samples in by_batch.items():
            rows = [completion.request_id & ROW_MASK for completion in samples]
            results.append(encode_completions(rows, samples))
            for row in set(rows):
                request_id = batch_id << ROW_BITS | row
                if not self._moving.forget_guest(request_id):
                    self._close_row(batch_id)
        stats = engine.stats
        self._metrics.update(stats)
        progress, self._progress = self._progress, None
        return await coordinator.report(
            self._replica_id,
            list(by_batch),
            ResultBatches(results),
            stats,
            self._activity(),
            progress,
        )

    async def _follow(self, engine: EngineThread) -> None:
        """Read the progress of rows regularly, for the next report.

        Finished rows alone are biased to short ones; and in the tail of a batch, rows may move.
        """
        every_s, reported_idle = _PROGRESS_EVERY_S, False
        while True:
            await asyncio.sleep(every_s)
            if engine.is_idle():
                every_s = _PROGRESS_EVERY_S
                if reported_idle:
                    continue
            reported_idle = engine.is_idle()
            rows = await engine.ask(lambda backend: backend.progress())
            self._progress = Progress(rows=rows, capacity=engine.capacity)
            if reported_idle:
                # its free capacity is worth a report
                self._outbox.set()
            is_tail = engine.stats.num_waiting <= 1
            most_s = _PROGRESS_OF_TAIL_EVERY_S if is_tail else _PROGRESS_AT_LEAST_EVERY_S
            every_s = min(_PROGRESS_GROWTH * every_s, most_s)

    def _activity(self) -> Activity:
        if self._engine.is_idle():
            return "fetching" if self._is_fetching else "nothing"
        # the backend of an endpoint has its own timeouts
        return "endpoint" if type_of(self._spec.backend).is_endpoint else "steps"

    def _close_row(self, batch_id: int) -> None:
        if (batch := self._open.get(batch_id)) is None:
            return  # dropped while its row was leaving
        batch.num_rows -= 1
        if not batch.num_rows:
            del self._open[batch_id]

    async def _give_up(self, coordinator: PoolApi, failure: BaseException) -> None:
        """Exit: a broken engine must look like a crash, so that it is replaced.

        An endpoint that refuses every request would refuse another replica as well.
        """
        ends_run = isinstance(failure, EndpointError)
        trace = "" if ends_run else _trace(failure)
        await coordinator.note_cause(self._replica_id, error_text(failure), ends_run, trace)
        await self._runtime.die()


def _trace(error: BaseException) -> str:
    return redacted("".join(traceback.format_exception(error)))


def _read(batch: _OpenBatch, work: Assignment) -> list[tuple[int, list[Request]]]:
    """Return the requests of each range with its place in the pull, and count them as open."""
    places = range(len(work.row_ranges)) if work.places is None else work.places
    first_id = work.batch_id << ROW_BITS
    requests, start = [], 0
    for place, row_range in zip(places, work.row_ranges, strict=True):
        num_rows = row_range.stop - row_range.start
        groups = work.groups and work.groups.between(start, start + num_rows)
        likely = None if work.likely is None else work.likely.between(start, start + num_rows)
        in_range = batch.reader.read(row_range.start, row_range.stop, first_id, groups, likely)
        requests.append((place, in_range))
        batch.num_rows += num_rows
        start += num_rows
    return requests


class MovingRows:
    """Performs the steps of row moves at one replica; the coordinator's `Moves` calls them.

    A row that has left is kept until it runs elsewhere (`release`) or resumes here (`stay`). A row
    that has arrived does not start before the coordinator commits the move (`begin`).

    Args:
        close_row: called with the batch id of a row that has left, if this replica had read it
            from its request table.
    """

    def __init__(
        self, engine: EngineThread, runtime: ReplicaRuntime, close_row: Callable[[int], None]
    ) -> None:
        self._engine, self._runtime, self._close_row = engine, runtime, close_row
        # running rows that were read elsewhere, and rows that are arriving
        self._guests: set[int] = set()
        self._coming: set[int] = set()
        # during the call to the engine
        self._departing: dict[int, Literal["leaves", "stays"]] = {}
        self._left: dict[int, RowStates] = {}
        self._come: dict[int, RowStates] = {}

    @property
    def has_left(self) -> bool:
        """Return whether any row that has left is still kept here, since it may resume."""
        return bool(self._left)

    async def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Reserve `num_blocks` KV blocks for an arriving row; return False if too few are free."""
        return await self._engine.ask(lambda backend: backend.reserve(request_id, num_blocks))

    async def peek(self, request_id: int, from_block: int) -> Piece | None:
        """Copy some whole KV blocks of a running row, from block `from_block` on.

        None if it has finished or cannot be copied.
        """
        capacity = self._engine.capacity
        block_bytes = max(1, capacity.kv_token_bytes * capacity.block_size)
        max_blocks = max(1, _PIECE_BYTES // block_bytes)
        state = await self._engine.ask(
            lambda backend: backend.peek(request_id, from_block, max_blocks)
        )
        if state is None:
            return None
        num_whole = (len(state.request.prompt_token_ids) + len(state.token_ids) - 1) // (
            capacity.block_size
        )
        num_blocks = 0 if state.kv is None else len(state.kv.blocks)
        return Piece(
            refs=[self._runtime.share(state)] if num_blocks else [],
            next_block=from_block + num_blocks,
            num_missing=num_whole - from_block - num_blocks,
            num_bytes=0 if state.kv is None else state.kv.blocks.nbytes,
        )

    async def receive(self, refs: list[object]) -> bool:
        """Accept KV blocks that another replica copied by `peek`; return False if not usable."""
        state = await self._runtime.shared(refs[0])
        return await self._engine.ask(lambda backend: backend.receive(state))

    async def depart(self, request_id: int, from_block: int | None) -> LeftRow | None:
        """Stop a running row and return it, None if it has finished.

        It has its KV from block `from_block` on; None for no KV.
        """
        self._departing[request_id] = "leaves"
        row = await asyncio.wrap_future(self._engine.depart(request_id, from_block))
        wish = self._departing.pop(request_id, None)
        if row is None or wish is None:
            await self.release(request_id)
            return None
        if wish == "stays":
            self._engine.go_on(row)
            return None
        self._left[request_id] = row
        checkpointed = encode_checkpointed([request_id & ROW_MASK] * len(row.states), row.states)
        return LeftRow(refs=[self._runtime.share(row)], checkpointed=checkpointed)

    async def stay(self, request_id: int) -> None:
        """Resume a row that was stopped here, unless it was cancelled."""
        if request_id in self._departing:
            self._departing[request_id] = "stays"
        elif (row := self._left.pop(request_id, None)) is not None:
            self._engine.go_on(row)

    async def release(self, request_id: int) -> None:
        """Free the memory of a row that has left, or that does not arrive after all."""
        if self._left.pop(request_id, None) is not None and not self.forget_guest(request_id):
            self._close_row(request_id >> ROW_BITS)
        self._come.pop(request_id, None)
        self._coming.discard(request_id)
        await self._engine.ask(lambda backend: backend.forget(request_id))

    async def arrive(self, request_id: int, refs: list[object]) -> None:
        """Accept a row that another replica has stopped; it starts with `begin`."""
        self._coming.add(request_id)
        row = await self._runtime.shared(refs[0])
        # the move may have been given up meanwhile
        if request_id in self._coming:
            self._come[request_id] = row

    async def begin(self, request_id: int) -> None:
        self._coming.discard(request_id)
        if (row := self._come.pop(request_id, None)) is not None:
            self._guests.add(request_id)
            self._engine.go_on(row)

    def forget_guest(self, request_id: int) -> bool:
        """Note that a row has ended here; return whether it came from another replica."""
        is_guest = request_id in self._guests
        self._guests.discard(request_id)
        return is_guest

    async def drop(self, batch_id: int) -> None:
        """Forget the rows of a cancelled row batch."""
        of_batch = {i for i in (*self._left, *self._come) if i >> ROW_BITS == batch_id}
        self._guests = {i for i in self._guests if i >> ROW_BITS != batch_id}
        self._departing = {i: w for i, w in self._departing.items() if i >> ROW_BITS != batch_id}
        for request_id in sorted(of_batch):
            await self.release(request_id)
