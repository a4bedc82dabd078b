"""Runs one backend in a dedicated thread, so that the engine never waits for I/O; no Ray."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from raybatch.actors.queue.pulling import Lead, OpenRows, PullPace, choose_rows, credit_for
from raybatch.actors.wire.records import Credit, EnginePart
from raybatch.backends.base import Backend, BackendExtension
from raybatch.errors import RankError
from raybatch.records.types import Capacity, Completion, ReplicaStats, Request, SequenceState

_T = TypeVar("_T")

# poll interval of an idle engine for rounds of others
_POLL_S = 1e-3
# after a step of this length, the next one is inspected while it runs
_LONG_STEP_S = 0.5

# methods that run while the engine is busy
_AT_ONCE = ("call_off",)
# error of an engine without an extension
_WITHOUT = {
    "tp_groups": "this engine supports no TP groups",
    "sharing": "this engine shares no weights",
}
# before the engine has started
NO_CAPACITY = Capacity(kv_tokens=0, max_model_len=0, max_num_seqs=0, block_size=1)


@dataclass(frozen=True, slots=True)
class RowStates:
    """A row that has left an engine: states of its unfinished samples, and its finished samples."""

    states: tuple[SequenceState, ...]
    finished: tuple[Completion, ...] = ()

    @property
    def request(self) -> Request:
        return self.states[0].request


def _part_of(backend: Backend | None, part: EnginePart) -> BackendExtension:
    found = None if backend is None else backend.extensions.get(part)
    if found is None:
        raise RankError(_WITHOUT[part])
    return found


class EngineEndedError(RuntimeError):
    """The engine thread has ended, so a call is not run."""


class EngineThread:
    """Runs one backend in a thread; the event loop calls `submit` and `collect`.

    Where a row is that this replica holds, by the coordinator's `RowQueue`:

        event loop                   engine thread
        submit, go_on -> _incoming   -> backend.submit, restore: waits or runs in the engine
                                        backend.poll: its finished samples are in _samples
        collect       <- _finished   <- all of its samples, or an error
        give_back     <----------------- backend.drain: it has not started, and waits elsewhere
        depart        <----------------- backend.depart and its _samples: RowStates for `go_on`
        abort         <----------------- taken out wherever it is

    Args:
        build: creates the backend, called in the thread.
        wake: called in the thread when rows have finished, the engine needs rows, or it failed.
        lead_tokens: least number of prompt tokens to queue in the engine beyond running rows.
    """

    def __init__(
        self, build: Callable[[], Backend], wake: Callable[[], None], *, lead_tokens: int
    ) -> None:
        self._build = build
        self._wake = wake
        self._min_lead_tokens = lead_tokens
        self._lead = Lead(1, lead_tokens)
        self._pace = PullPace()
        self._changed = threading.Condition()
        self._incoming: list[Request] = []
        self._checkpointed: dict[int, Sequence[SequenceState]] = {}
        self._calls: deque[tuple[Callable[[Backend], None], Future[Any]]] = deque()
        self._finished: list[Completion] = []
        self._samples: dict[int, list[Completion]] = {}
        self._rows = OpenRows()
        self._backend: Backend | None = None
        # as last read by the thread
        self._stats = ReplicaStats()
        self.capacity = NO_CAPACITY
        # start of the running step, None between steps; and the reported seconds in steps
        self._step_began_s: float | None = None
        self._reported_s = 0.0
        # seconds of the previous step; the first one has no limit
        self._step_s = math.inf
        # requests passed to the engine since `_stats`
        self._num_in_hand = 0
        self._is_asking = False
        self._is_closing = self._is_over = False
        # error that ended the engine, None while it works
        self.failure: BaseException | None = None
        self._started: Future[Capacity] = Future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def stats(self) -> ReplicaStats:
        """Counters of the engine; `step_s` has the seconds so far of the running step."""
        with self._changed:
            engine_s = self._stats.engine_s
            began_s = self._step_began_s
            seconds = 0.0 if began_s is None else time.perf_counter() - began_s
            # the sum never falls, though the engine's own clock starts a little later
            self._reported_s = max(self._reported_s, engine_s + seconds)
            return replace(self._stats, step_s=self._reported_s - engine_s)

    def start(self) -> Future[Capacity]:
        """Build the backend in the thread; the future has its capacity or its exception."""
        self._thread.start()
        return self._started

    def submit(
        self,
        requests: Sequence[Request],
        checkpointed: Mapping[int, Sequence[SequenceState]] | None = None,
    ) -> None:
        """Queue requests in order, those of one pull.

        `checkpointed` has the states of all samples of rows that another engine began, by request
        id.
        """
        with self._changed:
            self._incoming.extend(requests)
            self._checkpointed |= checkpointed or {}
            self._rows.add(requests)
            self._pace.note_pull(self._lead, self._rows.done, now_s=time.monotonic())
            self._is_asking = False
            self._changed.notify()

    def collect(self) -> list[Completion]:
        """Return the completions of rows that finished since the last call; all samples of each."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def give_back(self, max_rows: int | None, max_cost: int | None = None) -> Future[list[int]]:
        """Remove unstarted requests; the future has their ids.

        `max_rows` and `max_cost` limit them as in `choose_rows`; with None for `max_rows` all are
        removed.
        """
        return self.call(lambda backend: self._take_back(backend, max_rows, max_cost))

    def depart(self, request_id: int, from_block: int | None) -> Future[RowStates | None]:
        """Remove a row; the future has the states of its samples, or None if it has finished.

        The states include its KV from block `from_block` on; None for no KV.
        """
        return self.call(lambda backend: self._depart(backend, request_id, from_block))

    def extend(self, part: EnginePart, step: str, *args: Any) -> Future[Any]:  # noqa: ANN401
        """Call method `step` of the backend's extension `part`, for an extension of the pool.

        A TP worker runs nothing else until its group ends. Methods in `_AT_ONCE` run immediately
        in the calling thread, even while the engine thread is busy.
        """
        if step not in _AT_ONCE:
            return self.call(lambda backend: getattr(_part_of(backend, part), step)(*args))
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(_part_of(self._backend, part), step)(*args))
        except RankError as error:
            future.set_exception(error)
        return future

    def go_on(self, row: RowStates) -> None:
        """Resume a row that has left an engine, this one or another."""
        request_id = row.request.request_id
        with self._changed:
            self._incoming.append(row.request)
            self._checkpointed[request_id] = row.states
            self._rows.add([row.request])
            if row.finished:
                self._samples[request_id] = list(row.finished)
            self._changed.notify()

    def abort(self, first_id: int, last_id: int) -> Future[int]:
        """Drop the unfinished requests with ids from `first_id` to `last_id`, inclusive.

        The future has their number. Once it is done, `collect` returns none of them.
        """
        return self.call(lambda backend: self._drop(backend, first_id, last_id))

    def credit(self) -> Credit | None:
        """Return the credit with which to pull rows, or None while enough rows are queued."""
        with self._changed:
            num_waiting = len(self._incoming) + self._num_in_hand + self.stats.num_waiting
            cached_fraction = self.stats.cached_fraction
            return credit_for(
                self._lead, self._rows, num_waiting=num_waiting, cached_fraction=cached_fraction
            )

    def is_idle(self) -> bool:
        with self._changed:
            return not self._rows

    def close(self) -> None:
        self.close_soon()
        self._thread.join()

    def close_soon(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    async def ask(self, work: Callable[[Backend], _T]) -> _T:
        """Run `work` in the thread as `call` does, and await its result."""
        return await asyncio.wrap_future(self.call(work))

    def call(self, work: Callable[[Backend], _T]) -> Future[_T]:
        """Run `work` in the thread between two steps, after earlier requests were submitted.

        The future has its result. It raises `EngineEndedError` if the thread ends before, and a
        RankError of `work`; any other exception of `work` ends the engine.
        """
        future: Future[_T] = Future()

        def call(backend: Backend) -> None:
            # the caller may have been cancelled
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(backend))
            except RankError as error:
                future.set_exception(error)

        with self._changed:
            self._calls.append((call, future))
            is_over = self._is_over
            self._changed.notify()
        if is_over:
            self._refuse_calls()
        return future

    def _main(self) -> None:
        try:
            self._serve()
        finally:
            with self._changed:
                self._is_over = True
            self._refuse_calls()

    def _serve(self) -> None:
        # who waits for the start may be cancelled, and the future with it
        if not self._started.set_running_or_notify_cancel():
            return
        # whatever ends the engine ends the replica: the exception goes to the event loop
        try:
            backend = self._build()
            capacity = backend.capacity()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._set_lead(capacity)
        self.capacity, self._backend = capacity, backend
        backend.watch(lambda: self._note_schedule(backend))
        self._started.set_result(capacity)
        try:
            while self._step(backend):
                pass
            backend.close()
        except BaseException as error:
            self.failure = error
            self._wake()

    def _set_lead(self, capacity: Capacity) -> None:
        """Set the target of queued work by the current step size."""
        self._lead = Lead.of(
            capacity, min_tokens=self._min_lead_tokens, num_leads=self._pace.num_leads
        )

    def _refuse_calls(self) -> None:
        """Fail the open calls, which the thread will not run."""
        with self._changed:
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            # the call at which the engine failed is running
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(EngineEndedError("the engine has exited"))

    def _step(self, backend: Backend) -> bool:
        with self._changed:
            while not (
                self._incoming or self._calls or self._is_closing or backend.num_unfinished()
            ):
                if any(extension.is_exchanging for extension in backend.extensions.values()):
                    self._changed.wait(_POLL_S)
                    break
                self._changed.wait()
            requests, self._incoming = self._incoming, []
            checkpointed, self._checkpointed = self._checkpointed, {}
            num_calls, self._num_in_hand = len(self._calls), len(requests)
        if self._is_closing:
            return False
        if checkpointed:
            backend.restore([state for states in checkpointed.values() for state in states])
        if requests:
            backend.submit([r for r in requests if r.request_id not in checkpointed])
        for _ in range(num_calls):
            # removed only after success: an error leaves it for `_refuse_calls`
            self._calls[0][0](backend)
            self._calls.popleft()
        if not backend.num_unfinished():
            for extension in backend.extensions.values():
                extension.serve()
        completions = self._poll(backend) if backend.num_unfinished() else []
        # the execution mode may have changed
        stats, capacity = backend.stats(), backend.capacity()
        with self._changed:
            self._set_lead(capacity)
            self.capacity = capacity
            num_before = len(self._finished)
            for completion in completions:
                self._gather(completion)
            self._stats, self._step_began_s = stats, None
            self._num_in_hand = 0
            wants_rows = self.credit() is not None and not self._is_asking
            self._is_asking |= wants_rows
            has_events = wants_rows or num_calls > 0 or len(self._finished) > num_before
        if has_events:
            self._wake()
        return True

    def _poll(self, backend: Backend) -> list[Completion]:
        began_s = time.perf_counter()
        with self._changed:
            self._step_began_s = began_s
        completions = backend.poll()
        self._step_s = time.perf_counter() - began_s
        return completions

    def _note_schedule(self, backend: Backend) -> None:
        """Read the counters during a step that may be long."""
        if self._step_s < _LONG_STEP_S:
            return
        stats = backend.stats()
        with self._changed:
            # its seconds count when it ends
            self._stats = replace(stats, engine_s=self._stats.engine_s)
            self._num_in_hand = 0

    def _take_back(self, backend: Backend, max_rows: int | None, max_cost: int | None) -> list[int]:
        unstarted = chosen = backend.drain()
        with self._changed:
            if max_rows is not None:
                groups = self._rows.groups
                chosen = choose_rows(unstarted, groups, max_rows=max_rows, max_cost=max_cost)
            # in their order
            ids = {request.request_id: None for request in chosen}
            for request_id in ids:
                self._rows.give_back(request_id)
        backend.submit([r for r in unstarted if r.request_id not in ids])
        return list(ids)

    def _depart(
        self, backend: Backend, request_id: int, from_block: int | None
    ) -> RowStates | None:
        states = backend.depart(request_id, from_block)
        if not states:
            return None
        with self._changed:
            finished = self._samples.pop(request_id, [])
            self._rows.close(request_id)
        return RowStates(tuple(states), tuple(finished))

    def _drop(self, backend: Backend, first_id: int, last_id: int) -> int:
        with self._changed:
            dropped = self._rows.between(first_id, last_id)
            for request_id in dropped:
                self._rows.close(request_id)
                self._samples.pop(request_id, None)
            ended = {c.request_id for c in self._finished if first_id <= c.request_id <= last_id}
            self._finished = [c for c in self._finished if c.request_id not in ended]
        backend.abort(dropped)
        return len(dropped) + len(ended)

    def _gather(self, completion: Completion) -> None:
        """Finish a row once all its samples are done, or at the first error."""
        request_id = completion.request_id
        num_samples = self._rows.num_samples(request_id)
        if not num_samples:
            return
        samples = self._samples.setdefault(request_id, [])
        samples.append(completion)
        if completion.error or len(samples) == num_samples:
            self._finished += [completion] if completion.error else samples
            del self._samples[request_id]
            self._rows.close(request_id)
