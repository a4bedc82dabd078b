"""Runs one backend in a thread of its own, so that the engine waits for no network; no Ray."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from raybatch.actors.queue.pulling import Lead, OpenRows, choose_rows, room_for
from raybatch.actors.wire.records import EnginePart, Room
from raybatch.backends.base import Backend, SharingEngine, TeamEngine
from raybatch.errors import TeamError
from raybatch.records.types import (
    Capacity,
    Completion,
    ReplicaStats,
    Request,
    RowProgress,
    SequenceState,
)

_T = TypeVar("_T")

# between two looks of an idle engine at whether others wait for a round of it
_LOOK_S = 1e-3
# a step behind one that took so long is looked into
_LONG_STEP_S = 0.5

# steps that are taken beside what the engine does
_AT_ONCE = ("call_off",)
# why an engine is without a part
_WITHOUT = {"teams": "this engine can be in no team", "sharing": "this engine shares no weights"}
# of an engine that has not started
NO_CAPACITY = Capacity(kv_tokens=0, max_model_len=0, max_num_seqs=0, block_size=1)


@dataclass(frozen=True, slots=True)
class RowStates:
    """A row between two engines: its unfinished samples, and those that have finished."""

    states: tuple[SequenceState, ...]
    finished: tuple[Completion, ...] = ()

    @property
    def request(self) -> Request:
        return self.states[0].request


def _part_of(backend: Backend | None, part: EnginePart) -> TeamEngine | SharingEngine:
    found = None if backend is None else getattr(backend, part)
    if found is None:
        raise TeamError(_WITHOUT[part])
    engine: TeamEngine | SharingEngine = found
    return engine


def _serve(sharing: SharingEngine) -> None:
    """Run a round without rows where others wait for it."""
    if sharing.is_in_rounds and sharing.is_awaited():
        sharing.serve()


class EngineEndedError(RuntimeError):
    """The thread of the engine has ended before it came to a call."""


class EngineThread:
    """Owner of one backend; every method may be called from the event loop.

    Where a row is while the coordinator's `RowQueue` says that this replica holds it:

        event loop                   engine thread
        submit, go_on -> _incoming   -> backend.submit, restore: waits or runs in the engine
                                        backend.poll: its finished samples are in _samples
        collect       <- _finished   <- all of its samples, or an error
        give_back     <----------------- backend.drain: it has not started, and waits elsewhere
        depart        <----------------- backend.depart and its _samples: RowStates for `go_on`
        abort         <----------------- taken out wherever it is

    Args:
        build: makes the backend, called in the thread.
        wake: called in the thread when rows finished, room became free, or the engine broke.
        lead_tokens: prompt tokens that should wait in the engine beyond what runs, at the least.
    """

    def __init__(
        self, build: Callable[[], Backend], wake: Callable[[], None], *, lead_tokens: int
    ) -> None:
        self._build = build
        self._wake = wake
        self._min_lead_tokens = lead_tokens
        self._lead = Lead(1, lead_tokens)
        self._changed = threading.Condition()
        self._incoming: list[Request] = []
        self._begun: dict[int, Sequence[SequenceState]] = {}
        self._calls: deque[tuple[Callable[[Backend], None], Future[Any]]] = deque()
        self._finished: list[Completion] = []
        self._samples: dict[int, list[Completion]] = {}
        self._rows = OpenRows()
        self._backend: Backend | None = None
        # as the thread has read them last
        self._stats = ReplicaStats()
        self.capacity = NO_CAPACITY
        # of the step that runs, None between steps; and the seconds in steps that were told
        self._step_began_s: float | None = None
        self._told_s = 0.0
        # of the step before; the first one may take as long as any
        self._step_s = math.inf
        # requests that the engine took since then
        self._num_in_hand = 0
        self._is_asking = False
        self._is_closing = self._is_over = False
        # what ended the engine, None while it works
        self.failure: BaseException | None = None
        self._started: Future[Capacity] = Future()
        self._thread = threading.Thread(target=self._main, name="engine", daemon=True)

    @property
    def stats(self) -> ReplicaStats:
        """What the engine has counted, with the seconds so far of the step that runs."""
        with self._changed:
            engine_s = self._stats.engine_s
            began_s = self._step_began_s
            seconds = 0.0 if began_s is None else time.perf_counter() - began_s
            # the sum never falls, though the engine's own clock starts a little later
            self._told_s = max(self._told_s, engine_s + seconds)
            return replace(self._stats, step_s=self._told_s - engine_s)

    def start(self) -> Future[Capacity]:
        """Build the backend in the thread; the future carries its capacity or its exception."""
        self._thread.start()
        return self._started

    def submit(
        self,
        requests: Sequence[Request],
        begun: Mapping[int, Sequence[SequenceState]] | None = None,
    ) -> None:
        """Queue requests in this order; `begun` has all samples of those begun elsewhere, by id."""
        with self._changed:
            self._incoming.extend(requests)
            self._begun |= begun or {}
            self._rows.add(requests)
            self._is_asking = False
            self._changed.notify()

    def collect(self) -> list[Completion]:
        """Return the completions of rows that finished, all samples of a row together."""
        with self._changed:
            finished, self._finished = self._finished, []
            return finished

    def give_back(self, max_rows: int | None, max_cost: int | None = None) -> Future[list[int]]:
        """Take unstarted requests out, as `choose_rows` decides, or all; the future has ids."""
        return self.call(lambda backend: self._take_back(backend, max_rows, max_cost))

    def progress(self) -> Future[RowProgress]:
        return self.call(lambda backend: backend.progress())

    def depart(self, request_id: int, from_block: int | None) -> Future[RowStates | None]:
        """Take a row out with what its samples have so far; None where it has ended."""
        return self.call(lambda backend: self._depart(backend, request_id, from_block))

    def extend(self, part: EnginePart, step: str, *args: Any) -> Future[Any]:  # noqa: ANN401
        """Take one step for an extension of the pool: a method of a part of the backend.

        A replica that follows a team does nothing else until that is over. One that leads is at it
        when it is told to call it off, which is done when this returns.
        """
        if step not in _AT_ONCE:
            return self.call(lambda backend: getattr(_part_of(backend, part), step)(*args))
        future: Future[Any] = Future()
        try:
            future.set_result(getattr(_part_of(self._backend, part), step)(*args))
        except TeamError as error:
            future.set_exception(error)
        return future

    def go_on(self, row: RowStates) -> None:
        """Go on with a row that has left an engine, this one or another."""
        request_id = row.request.request_id
        with self._changed:
            self._incoming.append(row.request)
            self._begun[request_id] = row.states
            self._rows.add([row.request])
            if row.finished:
                self._samples[request_id] = list(row.finished)
            self._changed.notify()

    def abort(self, first_id: int, last_id: int) -> Future[int]:
        """Drop the requests with ids in this range, both ends included, wherever they are.

        Nothing of them is collected once the future is done, which tells how many there were.
        """
        return self.call(lambda backend: self._drop(backend, first_id, last_id))

    def room(self) -> Room | None:
        """Return how much to pull, or None while enough waits in the engine."""
        with self._changed:
            num_waiting = len(self._incoming) + self._num_in_hand + self.stats.num_waiting
            cached_fraction = self.stats.cached_fraction
            return room_for(
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
        """Return what `call` does, on the event loop."""
        return await asyncio.wrap_future(self.call(work))

    def call(self, work: Callable[[Backend], _T]) -> Future[_T]:
        """Run `work` in the thread, after the requests that were submitted before.

        The future raises `EngineEndedError` where the thread ends before, and TeamError, which the
        engine survives.
        """
        future: Future[_T] = Future()

        def call(backend: Backend) -> None:
            # who asked may have been cancelled, and the future with it
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(work(backend))
            except TeamError as error:
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
        backend.watch(lambda: self._look(backend))
        self._started.set_result(capacity)
        try:
            while self._step(backend):
                pass
            backend.close()
        except BaseException as error:
            self.failure = error
            self._wake()

    def _set_lead(self, capacity: Capacity) -> None:
        """Let as much wait in the engine as the steps that it takes now want."""
        self._lead = Lead.of(capacity, min_tokens=self._min_lead_tokens)

    def _refuse_calls(self) -> None:
        """Tell those who wait for calls that the thread will not make them."""
        with self._changed:
            calls, self._calls = self._calls, deque()
        for _, future in calls:
            # the one at which the engine broke is running
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(EngineEndedError("the engine has ended"))

    def _step(self, backend: Backend) -> bool:
        with self._changed:
            while not (
                self._incoming or self._calls or self._is_closing or backend.num_unfinished()
            ):
                if (sharing := backend.sharing) is not None and sharing.is_in_rounds:
                    self._changed.wait(_LOOK_S)
                    break
                self._changed.wait()
            requests, self._incoming = self._incoming, []
            begun, self._begun = self._begun, {}
            num_calls, self._num_in_hand = len(self._calls), len(requests)
        if self._is_closing:
            return False
        if begun:
            backend.restore([state for states in begun.values() for state in states])
        if requests:
            backend.submit([r for r in requests if r.request_id not in begun])
        for _ in range(num_calls):
            # it stays in the line until it is made: an error leaves it there
            self._calls[0][0](backend)
            self._calls.popleft()
        if backend.sharing is not None and not backend.num_unfinished():
            _serve(backend.sharing)
        completions = self._poll(backend) if backend.num_unfinished() else []
        # an engine may have chosen another way to run
        stats, capacity = backend.stats(), backend.capacity()
        with self._changed:
            self._set_lead(capacity)
            self.capacity = capacity
            num_before = len(self._finished)
            for completion in completions:
                self._gather(completion)
            self._stats, self._step_began_s = stats, None
            self._num_in_hand = 0
            is_hungry = self.room() is not None and not self._is_asking
            self._is_asking |= is_hungry
            has_events = is_hungry or num_calls > 0 or len(self._finished) > num_before
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

    def _look(self, backend: Backend) -> None:
        """Read what a step is about, if it may be a long one."""
        if self._step_s < _LONG_STEP_S:
            return
        stats = backend.stats()
        with self._changed:
            # its seconds are counted when it ends
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
        """Pass a row on when it is whole; an error ends its row, whatever its other samples do."""
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
