"""The row batches that feeders wait for: results so far, counters, answers; no Ray."""

import asyncio
import itertools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.coordinator.counters import ClientCounters
from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.coordinator.twins import Twins, copied_results
from raybatch.actors.queue.probation import Probation
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.begun import Begun
from raybatch.actors.wire.columns import crash_error, encode_completions
from raybatch.actors.wire.outcomes import has_error, row_numbers
from raybatch.actors.wire.records import (
    ROW_BITS,
    ROW_MASK,
    Answer,
    Assignment,
    Loss,
    RowCrashes,
    Span,
    Submission,
)
from raybatch.records.arrays import Ints
from raybatch.records.types import Completion, RowProgress

# cancelled before they arrived; more calls than feeders may have in flight
_MAX_CANCELLED = 10_000

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenBatch:
    """One row batch between its submission and its answer."""

    batch_id: int
    submission: Submission
    last_polled: float
    results: list[pa.RecordBatch] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    # set with `done`, and while there is something that cannot wait for it
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    crashes: dict[int, RowCrashes] = field(default_factory=dict)
    begun: Begun = field(default_factory=Begun)
    # of each row, once the pool has failed and the queue has forgotten the batch
    last_attempts: npt.NDArray[np.int16] | None = None

    def end(self) -> None:
        self.done.set()
        self.stirred.set()

    def take_crashes(self) -> tuple[RowCrashes, ...]:
        """Return the deaths that no answer has reported yet."""
        crashes, self.crashes = self.crashes, {}
        if not self.done.is_set():
            self.stirred.clear()
        return tuple(crashes.values())


@dataclass(slots=True)
class Mailbox:
    """Open row batches by id, which is ours, and by token, which is the feeder's.

    Args:
        on_drop: called with a replica and a batch whose rows it still runs for nobody.
        failure: rank and cause once the pool has failed; every batch is answered with it.
    """

    queue: RowQueue
    on_drop: Callable[[int, int], None]
    failure: tuple[int, str] | None = None
    lengths: LearnedLengths = field(default_factory=LearnedLengths)
    clients: dict[str, ClientCounters] = field(default_factory=lambda: defaultdict(ClientCounters))
    _open: dict[int, OpenBatch] = field(default_factory=dict)
    _ids: dict[str, int] = field(default_factory=dict)
    # by client and the name that it gave them
    _named: dict[tuple[str, str], OpenBatch] = field(default_factory=dict)
    # the tokens in order of arrival
    _cancelled: dict[str, None] = field(default_factory=dict)
    _next_id: Iterator[int] = field(default_factory=itertools.count)
    _twins: Twins = field(default_factory=Twins)
    _probation: Probation = field(init=False)

    def __post_init__(self) -> None:
        self._probation = Probation(self.queue, self._next_id)

    def __len__(self) -> int:
        return len(self._open)

    def refs(self, batch_id: int) -> list[Any] | None:
        batch = self._open.get(batch_id)
        return self._probation.refs(batch_id) if batch is None else batch.submission.refs

    def find(self, token: str) -> OpenBatch | None:
        batch_id = self._ids.get(token)
        return None if batch_id is None else self._open[batch_id]

    def num_results(self) -> int:
        return sum(len(batch.results) for batch in self._open.values())

    def take_over(self, submission: Submission) -> OpenBatch | None:
        """Return the open batch of the same name, which is the submission's from now on.

        A feeder that waits for it under another token gets the answer "unknown". None where there
        is no such batch, or the submission was cancelled on its way.
        """
        batch = self._named.get((submission.client, submission.name))
        if batch is None or submission.token in self._cancelled:
            return None
        # rows of one name have the same lengths
        for name in ("prompt_tokens", "max_new_tokens"):
            if not np.array_equal(getattr(batch.submission, name), getattr(submission, name)):
                return None
        del self._ids[batch.submission.token]
        self._ids[submission.token] = batch.batch_id
        batch.submission = replace(batch.submission, token=submission.token)
        batch.last_polled = time.monotonic()
        return batch

    def has_named(self, client: str, name: str) -> bool:
        return (client, name) in self._named

    def forget(self, client: str, names: Iterable[str]) -> None:
        for name in names:
            if (batch := self._named.get((client, name))) is not None:
                self.drop(batch)

    def so_far(self, client: str, name: str, *, skip: int) -> Answer:
        """Return the results of an open batch without its first `skip`; it keeps them.

        Tokens that unfinished rows have gained are part of this answer and not of the next one.
        """
        batch = self._named.get((client, name))
        if batch is None:
            return Answer(status="unknown")
        attempts, results = batch.last_attempts, tuple(batch.results[skip:])
        if attempts is None:
            attempts = self.queue.attempts(batch.batch_id)
        begun = batch.begun.take_new()
        return Answer(status="pending", results=results, attempts=attempts, begun=begun)

    def add(self, submission: Submission) -> OpenBatch | None:
        """Open a batch and queue its rows; return None when it was cancelled on its way."""
        if submission.token in self._cancelled:
            del self._cancelled[submission.token]
            return None
        # of the same name, but of other rows
        self.forget(submission.client, [submission.name])
        now, begun = time.monotonic(), Begun(submission.begun)
        batch = OpenBatch(next(self._next_id), submission, now, begun=begun)
        self._open[batch.batch_id] = batch
        self._ids[submission.token] = batch.batch_id
        if submission.name:
            self._named[submission.client, submission.name] = batch
        if self.failure is None:
            expected = self.lengths.open(batch.batch_id, submission)
            waiting, answered = self._twins.join(batch.batch_id, submission)
            known = np.array([row for row, _ in answered], np.intp)
            self.queue.add(
                batch.batch_id,
                submission.prompt_tokens,
                expected,
                groups=submission.groups,
                keys=submission.block_keys,
                strikes=submission.crashes,
                held_back=np.concatenate([waiting, known]),
            )
            self.clients[submission.client].received(submission)
            for row, results in answered:
                self._copy(batch, row, results)
        self._settle(batch)
        return batch

    def cancel(self, token: str) -> None:
        """Drop the batch that a feeder named, now or when it arrives."""
        if (batch := self.find(token)) is not None:
            self.drop(batch)
            return
        self._cancelled[token] = None
        if len(self._cancelled) > _MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    async def answer(self, batch: OpenBatch, wait_s: float) -> Answer:
        """Wait for a batch; when it is done or the pool has failed, close it.

        One with a name stays until it is forgotten: its feeder may be dead already, or die before
        the results are safe. Deaths of engines are reported at once, because the next one may
        take the feeder with it.
        """
        batch.last_polled = time.monotonic()
        token = batch.submission.token
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.stirred.wait(), wait_s)
        if self.find(token) is None:
            return Answer(status="unknown")
        if not batch.done.is_set():
            crashes, begun = batch.take_crashes(), batch.begun.take_new()
            return Answer(status="pending", crashes=crashes, begun=begun)
        if self.failure is not None:
            rank, cause = self.failure
            answer = Answer(status="failed", rank=rank, cause=cause)
            is_kept = batch.last_attempts is not None
        else:
            results, attempts = tuple(batch.results), self.queue.attempts(batch.batch_id)
            crashes, is_kept = batch.take_crashes(), bool(batch.submission.name)
            answer = Answer(status="done", results=results, attempts=attempts, crashes=crashes)
        if not is_kept:
            self.drop(batch)
        return answer

    def take(self, replica_id: int, batch_id: int, results: pa.RecordBatch) -> int:
        """Keep those result rows that the replica held; return how many rows that finished."""
        batch = self._open.get(batch_id)
        rows = row_numbers(results)
        if batch is None:
            is_good = not has_error(results).any()
            return self._probation.take(replica_id, batch_id, rows, is_good=is_good)
        is_held = self.queue.finish(replica_id, batch_id, rows)
        if not is_held.all():
            rows = rows[is_held]
            results = results.filter(pa.array(np.isin(results.column("row").to_numpy(), rows)))
        if len(rows):
            self._keep(batch, rows, results)
            good_rows = results.column("row").to_numpy()[~has_error(results)]
            if len(good_rows):
                self._learn(batch, results)
                self._probation.worked(batch.submission, int(good_rows[-1]))
        return len(rows)

    def note_running(self, replica_id: int, progress: RowProgress) -> None:
        """Learn from the tokens so far of rows that run on: outputs are longer than that."""
        ids, places = np.unique(progress.request_ids, return_inverse=True)
        # of a row with several samples, the longest
        num_tokens = np.zeros(len(ids), np.int64)
        np.maximum.at(num_tokens, places, progress.num_generated)
        batch_ids, rows = ids >> ROW_BITS, ids & ROW_MASK
        told = [(b, np.flatnonzero(batch_ids == b)) for b in np.unique(batch_ids).tolist()]
        held = [(b, at[self.queue.is_held(replica_id, b, rows[at])]) for b, at in told]
        self.lengths.note_running((b, rows[at], num_tokens[at]) for b, at in held)

    def note_begun(self, batch_id: int, tokens: pa.RecordBatch) -> None:
        """Keep tokens of rows that are not finished, for the next answer and the next replica."""
        if batch_id in self._open:
            is_left = np.isin(tokens.column("row").to_numpy(), self.queue.rows_left(batch_id))
            self._open[batch_id].begun.add(tokens.filter(pa.array(is_left)))

    def num_begun(self, batch_id: int, rows: Iterable[int]) -> Ints:
        """Return how many tokens rows of an open batch would begin with."""
        return self._open[batch_id].begun.num_tokens(rows)

    def assign(self, spans: Sequence[Span]) -> list[Assignment]:
        """Return the spans by row batch; rows that nobody waits for are taken out."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, span in enumerate(spans):
            places[span.batch_id].append(place)
        assignments = []
        for batch_id, of_batch in places.items():
            refs = self.refs(batch_id)
            if refs is None:
                # left in, they would count as held for ever by a replica that never sees them
                _logger.error("row batch %d is dropped: nobody waits for it", batch_id)
                self.drop_rows(batch_id)
                continue
            batch, batch_spans = self._open.get(batch_id), tuple(spans[i] for i in of_batch)
            rows = {row for span in batch_spans for row in range(span.start, span.stop)}
            assignments.append(
                Assignment(
                    batch_id=batch_id,
                    refs=refs,
                    spans=batch_spans,
                    places=tuple(of_batch),
                    groups=self.queue.groups_of(batch_id, batch_spans),
                    begun=None if batch is None else batch.begun.of(rows),
                    likely=self.lengths.likely(batch_id, batch_spans),
                )
            )
        return assignments

    def note_loss(self, loss: Loss, cause: str = "") -> str:
        """Answer each row that is given up with an error, and report the deaths of others.

        `cause` is what the replica reported of its end. Returns why the engine must be broken, ""
        while rows may be the reason.
        """
        for batch_id, crashes in loss.crashes.items():
            if (batch := self._open.get(batch_id)) is not None:
                batch.crashes |= {one.row: one for one in crashes}
                batch.stirred.set()
        for batch_id, poison in loss.given_up():
            if (batch := self._open.get(batch_id)) is not None:
                error = crash_error(poison.num_crashes, cause)
                completion = Completion(request_id=poison.row, finish_reason="error", error=error)
                rows = np.array([poison.row], np.int32)
                self._keep(batch, rows, encode_completions(rows, [completion]))
        return self._probation.note_loss(loss)

    def fail(self, rank: int, cause: str) -> None:
        """Answer every batch, open or later, with a failure, and take all rows out."""
        is_first = self.failure is None
        self.failure = self.failure or (rank, cause)
        # no row runs in the place of another any more
        self._twins = Twins()
        for batch in self._open.values():
            if is_first and batch.submission.name:
                # its feeder keeps what is finished
                batch.last_attempts = self.queue.attempts(batch.batch_id)
            self._take_out(batch)
            batch.end()
        self.forget_good_row()

    def drop(self, batch: OpenBatch) -> None:
        if self._open.pop(batch.batch_id, None) is None:
            return
        submission = batch.submission
        del self._ids[submission.token]
        if self._named.get(key := (submission.client, submission.name)) is batch:
            del self._named[key]
        self._take_out(batch)
        batch.end()

    def lose_table(self, batch_id: int) -> None:
        """Forget a batch whose request table is gone, so that its feeder submits it again."""
        batch = self._open.get(batch_id)
        if batch is not None:
            self.drop(batch)
        elif batch_id == self._probation.batch_id:
            self.forget_good_row()

    def forget_good_row(self) -> None:
        """Forget the row that is kept for controls, and results; they fill the object store."""
        self._twins.forget_results()
        control = self._probation.batch_id
        self._probation.forget_good_row()
        if control is not None:
            self.drop_rows(control)

    def drop_rows(self, batch_id: int) -> None:
        """Take the rows of a batch, open or not, out of the queue and of the replicas."""
        for replica_id in self.queue.drop(batch_id):
            self.on_drop(replica_id, batch_id)

    def sharing_messages(self) -> list[str]:
        clients = self.clients.values()
        messages = (c.sharing.message(c.cached_tokens, c.prompt_tokens) for c in clients)
        return list(filter(None, messages))

    def abandoned(self, timeout_s: float) -> list[OpenBatch]:
        oldest = time.monotonic() - timeout_s
        return [batch for batch in self._open.values() if batch.last_polled < oldest]

    def _keep(self, batch: OpenBatch, rows: npt.NDArray[np.int32], results: pa.RecordBatch) -> None:
        batch.results.append(results)
        batch.begun.drop(set(rows.tolist()))
        counters = self.clients[batch.submission.client]
        counters.finished(batch.submission, rows, results)
        served = self._twins.finish(batch.batch_id, batch.submission, rows.tolist(), results)
        for batch_id, row, of_row in served:
            self._copy(self._open[batch_id], row, of_row)
        self._settle(batch)

    def _learn(self, batch: OpenBatch, results: pa.RecordBatch) -> None:
        """Learn how long outputs are, and weigh the rows that wait by what is known of it."""
        client = batch.submission.client
        self.lengths.note_finished(batch.batch_id, results, self.clients[client].coverage)
        self.queue.reweigh(self.lengths.reweighed(client))

    def _copy(self, batch: OpenBatch, row: int, results: pa.RecordBatch) -> None:
        """Answer a row that no replica got with the results of another that is like it."""
        self.queue.close(batch.batch_id, row)
        copied = copied_results(results, row, int(batch.submission.prompt_tokens[row]))
        batch.results.append(copied)
        batch.begun.drop({row})
        self.clients[batch.submission.client].copied(batch.submission, row, copied)
        self._settle(batch)

    def _take_out(self, batch: OpenBatch) -> None:
        rows = self.queue.rows_left(batch.batch_id)
        self.clients[batch.submission.client].dropped(batch.submission, rows)
        self.drop_rows(batch.batch_id)
        self.lengths.close(batch.batch_id)
        for batch_id, row in self._twins.drop(batch.batch_id, batch.submission, rows.tolist()):
            self.queue.open(batch_id, row)

    def _settle(self, batch: OpenBatch) -> None:
        if self.failure is not None or self.queue.is_done(batch.batch_id):
            batch.end()
