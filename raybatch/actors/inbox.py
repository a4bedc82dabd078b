"""The row batches that feeders wait for: results so far, counters, answers; no Ray."""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.counters import ClientCounters
from raybatch.actors.queue import RowQueue
from raybatch.actors.records import Answer, PoisonRow, Submission
from raybatch.actors.wire import encode_completions, row_numbers
from raybatch.types import Completion


@dataclass(slots=True)
class OpenBatch:
    """One row batch between its submission and its answer."""

    batch_id: int
    submission: Submission
    last_asked: float
    results: list[pa.RecordBatch] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class Inbox:
    """Open row batches by id, which is ours, and by token, which is the feeder's.

    Args:
        queue: what the batches' rows go through; shared with the coordinator.
        failure: rank and cause once the pool has failed; every batch is answered with it.
    """

    queue: RowQueue
    failure: tuple[int, str] | None = None
    clients: dict[str, ClientCounters] = field(default_factory=lambda: defaultdict(ClientCounters))
    _open: dict[int, OpenBatch] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)
    _next_id: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, batch_id: int) -> OpenBatch | None:
        """Return the batch, None when it is not open any more."""
        return self._open.get(batch_id)

    def find(self, token: str) -> OpenBatch | None:
        """Return the batch that a feeder named, None when it is not open any more."""
        batch_id = self._ids.get(token)
        return None if batch_id is None else self._open[batch_id]

    def num_results(self) -> int:
        """Return the number of record batches that wait for their feeders."""
        return sum(len(batch.results) for batch in self._open.values())

    def add(self, submission: Submission) -> OpenBatch:
        """Open a batch and queue its rows."""
        now = time.monotonic()
        batch = OpenBatch(next(self._next_id), submission, now)
        self._open[batch.batch_id] = batch
        self._ids[submission.token] = batch.batch_id
        prompt, max_new = submission.prompt_tokens, submission.max_new_tokens
        self.queue.add(batch.batch_id, prompt, max_new)
        self.clients[submission.client].received(prompt, max_new, now)
        self._settle(batch)
        return batch

    async def answer(self, batch: OpenBatch, wait_s: float) -> Answer:
        """Wait for a batch; when it is done or the pool has failed, close it."""
        batch.last_asked = time.monotonic()
        try:
            await asyncio.wait_for(batch.done.wait(), wait_s)
        except TimeoutError:
            return Answer(status="pending")
        if batch.batch_id not in self._open:
            return Answer(status="unknown")
        if self.failure is not None:
            rank, cause = self.failure
            answer = Answer(status="failed", rank=rank, cause=cause)
        else:
            attempts = self.queue.attempts(batch.batch_id)
            answer = Answer(status="done", results=tuple(batch.results), attempts=attempts)
        self.drop(batch)
        return answer

    def take(self, replica_id: int, batch_id: int, results: pa.RecordBatch) -> int:
        """Keep those result rows that the replica held; return how many rows that finished."""
        batch = self._open.get(batch_id)
        if batch is None:
            return 0
        rows = row_numbers(results)
        is_held = self.queue.finish(replica_id, batch_id, rows)
        if not is_held.all():
            rows = rows[is_held]
            results = results.filter(pa.array(np.isin(results.column("row").to_numpy(), rows)))
        if len(rows):
            self._keep(batch, rows, results)
        return len(rows)

    def give_up(self, poison: PoisonRow) -> str:
        """Answer a row that kills its replicas with an error; return it."""
        error = f"ReplicaCrash: the engine died {poison.num_crashes} times with this row"
        batch = self._open.get(poison.batch_id)
        if batch is not None:
            completion = Completion(request_id=poison.row, finish_reason="error", error=error)
            rows = np.array([poison.row], np.int32)
            self._keep(batch, rows, encode_completions(rows, [completion]))
        return error

    def fail(self, rank: int, cause: str) -> None:
        """Answer every batch, open or to come, with a failure."""
        self.failure = self.failure or (rank, cause)
        for batch in self._open.values():
            batch.done.set()

    def drop(self, batch: OpenBatch) -> None:
        """Forget a batch and its rows."""
        if self._open.pop(batch.batch_id, None) is not None:
            del self._ids[batch.submission.token]
            self.queue.drop(batch.batch_id)
            batch.done.set()

    def abandoned(self, timeout_s: float) -> list[OpenBatch]:
        """Return the batches whose feeder has not asked for so long."""
        oldest = time.monotonic() - timeout_s
        return [batch for batch in self._open.values() if batch.last_asked < oldest]

    def _keep(self, batch: OpenBatch, rows: npt.NDArray[np.int32], results: pa.RecordBatch) -> None:
        submission = batch.submission
        batch.results.append(results)
        counters = self.clients[submission.client]
        counters.results(results)
        counters.done(
            len(rows),
            int(submission.prompt_tokens[rows].sum()),
            int(submission.max_new_tokens[rows].sum()),
            time.monotonic(),
        )
        self._settle(batch)

    def _settle(self, batch: OpenBatch) -> None:
        if self.failure is not None or self.queue.is_done(batch.batch_id):
            batch.done.set()
