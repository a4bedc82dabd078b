"""What backends have in common: queues of requests, and counters."""

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.records.types import Completion, Request, SequenceState


class Intake:
    """Requests from their submission to their last completion; one sequence per sample.

    Sequences that began elsewhere come first, then the others in order of arrival.

    Args:
        check: returns the completion of a sequence that cannot run, None for one that can.
    """

    def __init__(self, check: Callable[[SequenceState], Completion | None]) -> None:
        self._check = check
        self._begun: deque[SequenceState] = deque()
        self._waiting: deque[SequenceState] = deque()
        self._num_open: dict[int, int] = {}
        self._failed: list[Completion] = []

    @property
    def num_open(self) -> int:
        """Requests with unfinished samples."""
        return len(self._num_open)

    @property
    def num_waiting(self) -> int:
        """Sequences that have not been taken."""
        return len(self._begun) + len(self._waiting)

    def submit(self, requests: Iterable[Request]) -> None:
        """Queue all samples of requests.

        Raises:
            ValueError: a request id that is still open.
        """
        for request in requests:
            if request.request_id in self._num_open:
                raise ValueError(f"request {request.request_id} is already in the engine")
            self._num_open[request.request_id] = request.sampling.n
            no_tokens = np.empty(0, np.int32)
            for sample_idx in range(request.sampling.n):
                state = SequenceState(request=request, sample_idx=sample_idx, token_ids=no_tokens)
                self._queue(state, self._waiting)

    def restore(self, states: Iterable[SequenceState]) -> None:
        """Queue sequences that began elsewhere."""
        for state in states:
            request_id = state.request.request_id
            self._num_open[request_id] = self._num_open.get(request_id, 0) + 1
            self._queue(state, self._begun)

    def take(self) -> tuple[SequenceState, bool]:
        """Return the next sequence, and whether it began elsewhere; there must be one."""
        is_begun = bool(self._begun)
        return (self._begun if is_begun else self._waiting).popleft(), is_begun

    def put_back(self, states: Sequence[SequenceState]) -> None:
        """Queue sequences that were taken and have not started, before the others that wait."""
        self._waiting.extendleft(reversed(states))

    def drain(self) -> list[Request]:
        """Give back the requests of which no sample was taken or failed, last submitted last."""
        num_waiting = Counter(state.request.request_id for state in self._waiting)
        requests = {state.request.request_id: state.request for state in self._waiting}
        drained = {i: r for i, r in requests.items() if num_waiting[i] == r.sampling.n}
        self._waiting = deque(s for s in self._waiting if s.request.request_id not in drained)
        for request_id in drained:
            del self._num_open[request_id]
        return list(drained.values())

    def withdraw(
        self, request_ids: Collection[int], taken: Sequence[SequenceState] = ()
    ) -> list[SequenceState]:
        """Take sequences of these requests out.

        Args:
            request_ids: unknown ones are ignored.
            taken: those of the requests that were taken, in order of arrival.

        Returns:
            `taken`, and then those that wait.
        """
        wanted, withdrawn = set(request_ids), list(taken)
        for line in (self._begun, self._waiting):
            withdrawn += [state for state in line if state.request.request_id in wanted]
        self._begun = deque(s for s in self._begun if s.request.request_id not in wanted)
        self._waiting = deque(s for s in self._waiting if s.request.request_id not in wanted)
        for state in withdrawn:
            self._close(state.request.request_id)
        return withdrawn

    def forget(self, request_ids: Collection[int]) -> None:
        """Drop what is left of requests whose sequences are gone, such as their errors."""
        wanted = set(request_ids)
        self._failed = [c for c in self._failed if c.request_id not in wanted]
        for request_id in wanted:
            self._num_open.pop(request_id, None)

    def close(self, completions: Iterable[Completion]) -> list[Completion]:
        """Count samples as finished; return them and those of sequences that could not run."""
        finished, self._failed = [*self._failed, *completions], []
        for completion in finished:
            self._close(completion.request_id)
        return finished

    def _queue(self, state: SequenceState, line: deque[SequenceState]) -> None:
        failure = self._check(state)
        if failure is None:
            line.append(state)
        else:
            self._failed.append(failure)

    def _close(self, request_id: int) -> None:
        self._num_open[request_id] -= 1
        if not self._num_open[request_id]:
            del self._num_open[request_id]


@dataclass(slots=True)
class Counters:
    """What a backend counts from its start on, under the names of `ReplicaStats`."""

    num_steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    num_recomputed_tokens: int = 0
    engine_s: float = 0.0


class IntakeBackend(ABC):
    """What backends with an intake have in common of the `Backend` protocol."""

    def __init__(self, check: Callable[[SequenceState], Completion | None]) -> None:
        self._intake = Intake(check)
        self._counters = Counters()

    def submit(self, requests: Sequence[Request]) -> None:
        self._intake.submit(requests)

    def num_unfinished(self) -> int:
        return self._intake.num_open

    def drain(self) -> list[Request]:
        return self._intake.drain()

    def abort(self, request_ids: Collection[int]) -> None:
        self.export(request_ids)
        self._intake.forget(request_ids)

    @abstractmethod
    def export(self, request_ids: Collection[int]) -> list[SequenceState]: ...

    def restore(self, states: Sequence[SequenceState]) -> None:
        self._intake.restore(states)
