"""The row batches that feeders wait for: their results so far, and when they asked; no Ray."""

import asyncio
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from raybatch.actors.records import Submission


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
    """Open row batches by id, which is ours, and by token, which is the feeder's."""

    _open: dict[int, OpenBatch] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)
    _next_id: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenBatch]:
        return iter(list(self._open.values()))

    def add(self, submission: Submission, now: float) -> OpenBatch:
        """Open a batch under the next id."""
        batch = OpenBatch(next(self._next_id), submission, now)
        self._open[batch.batch_id] = batch
        self._ids[submission.token] = batch.batch_id
        return batch

    def get(self, batch_id: int) -> OpenBatch | None:
        """Return the batch, None when it is not open any more."""
        return self._open.get(batch_id)

    def find(self, token: str) -> OpenBatch | None:
        """Return the batch that a feeder named, None when it is not open any more."""
        batch_id = self._ids.get(token)
        return None if batch_id is None else self._open[batch_id]

    def close(self, batch: OpenBatch) -> None:
        """Forget a batch."""
        if self._open.pop(batch.batch_id, None) is not None:
            del self._ids[batch.submission.token]

    def abandoned(self, now: float, timeout_s: float) -> list[OpenBatch]:
        """Return the batches whose feeder has not asked for so long."""
        return [batch for batch in self if now - batch.last_asked > timeout_s]
