"""Base of backends that queue requests themselves: queues, steps, counters, and moves of rows."""

import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from raybatch.backends.base import NO_EXTENSIONS, progress_of
from raybatch.records.types import Completion, Request, RowProgress, SequenceState


@dataclass(slots=True)
class Counters:
    """Counters of a backend, named as in `ReplicaStats`."""

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    engine_s: float = 0.0


class IntakeBackend(ABC):
    """Implements the queues of the `Backend` protocol, with one sequence per sample.

    Subclasses implement `export`, `_step` and `_find_failure`. Restored sequences start before
    submitted ones, each kind in order of arrival. These engines cannot export or import KV: a row
    that moves is recomputed from its tokens. There are no extensions.
    """

    extensions = NO_EXTENSIONS

    _restored: deque[SequenceState]
    _waiting: deque[SequenceState]
    _num_open: dict[int, int]
    _failed: list[Completion]

    def __init__(self) -> None:
        self._counters = Counters()
        self._forget_all()

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            if request.request_id in self._num_open:
                raise ValueError(f"request {request.request_id} is already in the engine")
            self._num_open[request.request_id] = request.sampling.n
            for sample_idx in range(request.sampling.n):
                state = SequenceState(request=request, sample_idx=sample_idx)
                self._queue(state, self._waiting)

    def restore(self, states: Sequence[SequenceState]) -> None:
        for state in states:
            request_id = state.request.request_id
            self._num_open[request_id] = self._num_open.get(request_id, 0) + 1
            # these engines cannot import KV
            self._queue(replace(state, kv=None), self._restored)

    def poll(self) -> list[Completion]:
        if not self._num_open:
            return []
        began = time.perf_counter()
        stepped = self._step()
        finished, self._failed = [*self._failed, *stepped], []
        for completion in finished:
            self._close_one(completion.request_id)
        self._counters.engine_s += time.perf_counter() - began
        return finished

    def num_unfinished(self) -> int:
        return len(self._num_open)

    def drain(self) -> list[Request]:
        # requests of which no sample has started or failed
        num_waiting = Counter(state.request.request_id for state in self._waiting)
        requests = {state.request.request_id: state.request for state in self._waiting}
        drained = {i: r for i, r in requests.items() if num_waiting[i] == r.sampling.n}
        self._waiting = deque(s for s in self._waiting if s.request.request_id not in drained)
        for request_id in drained:
            del self._num_open[request_id]
        return list(drained.values())

    def abort(self, request_ids: Collection[int]) -> None:
        self.export(request_ids)
        # errors of requests whose sequences are gone
        wanted = set(request_ids)
        self._failed = [c for c in self._failed if c.request_id not in wanted]
        for request_id in wanted:
            self._num_open.pop(request_id, None)

    @abstractmethod
    def export(
        self, request_ids: Collection[int], *, with_kv: bool = False
    ) -> list[SequenceState]: ...

    def watch(self, scheduled: Callable[[], None]) -> None:  # noqa: B027 - other engines have none
        """Do nothing."""

    def progress(self) -> RowProgress:
        return progress_of(())

    def peek(self, request_id: int, from_block: int, max_blocks: int) -> SequenceState | None:
        return None

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        return False

    def receive(self, state: SequenceState) -> bool:
        return False

    def depart(self, request_id: int, from_block: int | None) -> list[SequenceState]:
        return self.export([request_id])

    def forget(self, request_id: int) -> None:  # noqa: B027 - nothing is kept
        """Do nothing."""

    @abstractmethod
    def _step(self) -> list[Completion]:
        """Run a step if there is work, and return the samples that finished in it."""

    @abstractmethod
    def _find_failure(self, state: SequenceState) -> Completion | None:
        """Return the completion of a sequence that cannot run, None for one that can."""

    def _num_waiting(self) -> int:
        """Return the number of queued sequences."""
        return len(self._restored) + len(self._waiting)

    def _take_next(self) -> tuple[SequenceState, bool]:
        """Pop the next sequence, and whether it was restored; there must be one."""
        is_restored = bool(self._restored)
        return (self._restored if is_restored else self._waiting).popleft(), is_restored

    def _withdraw(
        self, request_ids: Collection[int], taken: Sequence[SequenceState]
    ) -> list[SequenceState]:
        """Close the `taken` sequences and the queued ones of these requests; return both."""
        wanted, withdrawn = set(request_ids), list(taken)
        for queue in (self._restored, self._waiting):
            withdrawn += [state for state in queue if state.request.request_id in wanted]
        self._restored = deque(s for s in self._restored if s.request.request_id not in wanted)
        self._waiting = deque(s for s in self._waiting if s.request.request_id not in wanted)
        for state in withdrawn:
            self._close_one(state.request.request_id)
        return withdrawn

    def _forget_all(self) -> None:
        self._restored, self._waiting = deque(), deque()
        self._num_open, self._failed = {}, []

    def _queue(self, state: SequenceState, queue: deque[SequenceState]) -> None:
        failure = self._find_failure(state)
        if failure is None:
            queue.append(state)
        else:
            self._failed.append(failure)

    def _close_one(self, request_id: int) -> None:
        self._num_open[request_id] -= 1
        if not self._num_open[request_id]:
            del self._num_open[request_id]
