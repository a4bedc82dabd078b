"""The open row batches of a pool: their partial results, counters and answers."""

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
from raybatch.actors.coordinator.dedup import InFlightDedup, copied_results
from raybatch.actors.coordinator.learned_lengths import LearnedLengths
from raybatch.actors.queue.quarantine import CrashQuarantine
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.columns import (
    CheckpointedTokens,
    crash_error,
    encode_completions,
    has_error,
    row_numbers,
)
from raybatch.actors.wire.records import (
    ROW_BITS,
    ROW_MASK,
    Answer,
    Assignment,
    Loss,
    ResultBatches,
    RowCrashes,
    RowRange,
    Submission,
)
from raybatch.records.arrays import Ints
from raybatch.records.types import Completion, RowProgress

# cancelled tokens to remember; more than feeders may have calls in flight
_MAX_CANCELLED = 10_000
# generated tokens after which an engine counts as working
_FAR_TOKENS = 16

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenBatch:
    """One row batch between submission and answer."""

    batch_id: int
    submission: Submission
    last_polled: float
    results: list[pa.RecordBatch] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)
    # set with `done`, and while crashes are unreported
    stirred: asyncio.Event = field(default_factory=asyncio.Event)
    crashes: dict[int, RowCrashes] = field(default_factory=dict)
    checkpointed: CheckpointedTokens = field(default_factory=CheckpointedTokens)
    # attempts of each row, once the pool has failed and the queue has dropped the batch
    last_attempts: npt.NDArray[np.int16] | None = None

    def end(self) -> None:
        self.done.set()
        self.stirred.set()

    def take_crashes(self) -> tuple[RowCrashes, ...]:
        """Return the crashes that no answer has reported yet."""
        crashes, self.crashes = self.crashes, {}
        if not self.done.is_set():
            self.stirred.clear()
        return tuple(crashes.values())


@dataclass(slots=True)
class BatchRegistry:
    """Opens row batches (`add`), collects their results (`take`) and answers feeders (`answer`).

    The pool gives each batch an id, and its feeder gives it a token.

    Args:
        on_drop: called with (replica id, batch id) if a replica still runs rows of a dropped batch.
        failure: (rank, cause) once the pool has failed, with which every batch is answered.
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
    _dedup: InFlightDedup = field(default_factory=InFlightDedup)
    _quarantine: CrashQuarantine = field(init=False)

    def __post_init__(self) -> None:
        self._quarantine = CrashQuarantine(self.queue, self._next_id)

    def __len__(self) -> int:
        return len(self._open)

    def refs(self, batch_id: int) -> list[Any] | None:
        batch = self._open.get(batch_id)
        return self._quarantine.refs(batch_id) if batch is None else batch.submission.refs

    def find(self, token: str) -> OpenBatch | None:
        batch_id = self._ids.get(token)
        return None if batch_id is None else self._open[batch_id]

    def num_results(self) -> int:
        return sum(len(batch.results) for batch in self._open.values())

    def take_over(self, submission: Submission) -> OpenBatch | None:
        """Return the open batch with the name of a submission, and give it the submission's token.

        A feeder that waits for it by the earlier token gets the answer "unknown". None if there is
        no such batch, or the submission was cancelled before it arrived.
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

    def partial_results(self, client: str, name: str, *, skip: int) -> Answer:
        """Return the results of an open batch so far, except for the first `skip` record batches.

        They stay in the batch. The answer has the tokens of unfinished rows that no earlier answer
        had.
        """
        batch = self._named.get((client, name))
        if batch is None:
            return Answer(status="unknown")
        attempts, results = batch.last_attempts, ResultBatches(batch.results[skip:])
        if attempts is None:
            attempts = self.queue.attempts(batch.batch_id)
        checkpointed = batch.checkpointed.take_new()
        return Answer(
            status="pending", results=results, attempts=attempts, checkpointed=checkpointed
        )

    def add(self, submission: Submission) -> OpenBatch | None:
        """Open a batch and queue its rows; return None if it was cancelled before it arrived."""
        if submission.token in self._cancelled:
            del self._cancelled[submission.token]
            return None
        # a batch of the same name with other rows
        self.forget(submission.client, [submission.name])
        now, checkpointed = time.monotonic(), CheckpointedTokens(submission.checkpointed)
        batch = OpenBatch(next(self._next_id), submission, now, checkpointed=checkpointed)
        self._open[batch.batch_id] = batch
        self._ids[submission.token] = batch.batch_id
        if submission.name:
            self._named[submission.client, submission.name] = batch
        if self.failure is None:
            expected = self.lengths.open(batch.batch_id, submission)
            waiting, answered = self._dedup.join(batch.batch_id, submission)
            known = np.array([row for row, _ in answered], np.intp)
            self.queue.add(
                batch.batch_id,
                submission.prompt_tokens,
                expected,
                groups=submission.groups,
                keys=submission.block_keys,
                crash_counts=submission.crashes,
                held_back=np.concatenate([waiting, known]),
            )
            self.clients[submission.client].received(submission)
            for row, results in answered:
                self._copy(batch, row, results)
        self._settle(batch)
        return batch

    def cancel(self, token: str) -> None:
        """Drop the batch of a token, now or when it arrives."""
        if (batch := self.find(token)) is not None:
            self.drop(batch)
            return
        self._cancelled[token] = None
        if len(self._cancelled) > _MAX_CANCELLED:
            del self._cancelled[next(iter(self._cancelled))]

    async def answer(self, batch: OpenBatch, wait_s: float) -> Answer:
        """Wait up to `wait_s` seconds for a batch; return its results, or "pending".

        A finished batch without a name is closed. One with a name stays until `forget`, since its
        feeder may die before it has stored the results. Crashes end the wait, so that the feeder
        can record them before another one.
        """
        batch.last_polled = time.monotonic()
        token = batch.submission.token
        with suppress(TimeoutError):
            await asyncio.wait_for(batch.stirred.wait(), wait_s)
        if self.find(token) is None:
            return Answer(status="unknown")
        if not batch.done.is_set():
            crashes, checkpointed = batch.take_crashes(), batch.checkpointed.take_new()
            return Answer(status="pending", crashes=crashes, checkpointed=checkpointed)
        if self.failure is not None:
            rank, cause = self.failure
            answer = Answer(status="failed", rank=rank, cause=cause)
            is_kept = batch.last_attempts is not None
        else:
            results, attempts = ResultBatches(batch.results), self.queue.attempts(batch.batch_id)
            crashes, is_kept = batch.take_crashes(), bool(batch.submission.name)
            answer = Answer(status="done", results=results, attempts=attempts, crashes=crashes)
        if not is_kept:
            self.drop(batch)
        return answer

    def take(self, replica_id: int, batch_id: int, results: pa.RecordBatch) -> int:
        """Store the results of rows that a replica held; return the number of rows that finished.

        Results of other rows are dropped.
        """
        batch = self._open.get(batch_id)
        rows = row_numbers(results)
        if batch is None:
            is_good = not has_error(results).any()
            return self._quarantine.take(replica_id, batch_id, rows, is_good=is_good)
        is_held = self.queue.finish(replica_id, batch_id, rows)
        if not is_held.all():
            rows = rows[is_held]
            results = results.filter(pa.array(np.isin(results.column("row").to_numpy(), rows)))
        if len(rows):
            self._keep(batch, rows, results)
            good_rows = results.column("row").to_numpy()[~has_error(results)]
            if len(good_rows):
                self._learn(batch, results)
                self._quarantine.worked(batch.submission, int(good_rows[-1]))
        return len(rows)

    def note_running(self, replica_id: int, progress: RowProgress) -> None:
        """Learn from the tokens that a replica's running rows have generated so far."""
        ids, places = np.unique(progress.request_ids, return_inverse=True)
        # the longest sample of each row
        num_tokens = np.zeros(len(ids), np.int64)
        np.maximum.at(num_tokens, places, progress.num_generated)
        if num_tokens.max(initial=0) >= _FAR_TOKENS:
            self._quarantine.came_far()
        batch_ids, rows = ids >> ROW_BITS, ids & ROW_MASK
        reported = [(b, np.flatnonzero(batch_ids == b)) for b in np.unique(batch_ids).tolist()]
        held = [(b, at[self.queue.is_held(replica_id, b, rows[at])]) for b, at in reported]
        self.lengths.note_running((b, rows[at], num_tokens[at]) for b, at in held)

    def note_checkpointed(self, batch_id: int, tokens: pa.RecordBatch) -> None:
        """Keep tokens of unfinished rows for the next answer and the next replica."""
        self._quarantine.came_far()
        if batch_id in self._open:
            is_left = np.isin(tokens.column("row").to_numpy(), self.queue.rows_left(batch_id))
            self._open[batch_id].checkpointed.add(tokens.filter(pa.array(is_left)))

    def num_checkpointed(self, batch_id: int, rows: Iterable[int]) -> Ints:
        """Return the number of checkpointed tokens of each of `rows` of an open batch."""
        return self._open[batch_id].checkpointed.num_tokens(rows)

    def assign(self, row_ranges: Sequence[RowRange]) -> list[Assignment]:
        """Return row ranges as assignments, one for each row batch; cancelled rows are left out."""
        places: dict[int, list[int]] = defaultdict(list)
        for place, row_range in enumerate(row_ranges):
            places[row_range.batch_id].append(place)
        assignments = []
        for batch_id, of_batch in places.items():
            refs = self.refs(batch_id)
            if refs is None:
                # else they would count as held by a replica that never gets them
                _logger.error(
                    "dropping row batch %d: it is not open any more, so no feeder waits for it",
                    batch_id,
                )
                self.drop_rows(batch_id)
                continue
            batch = self._open.get(batch_id)
            of_batch_ranges = tuple(row_ranges[i] for i in of_batch)
            rows = {row for each in of_batch_ranges for row in range(each.start, each.stop)}
            assignments.append(
                Assignment(
                    batch_id=batch_id,
                    refs=refs,
                    row_ranges=of_batch_ranges,
                    places=tuple(of_batch),
                    groups=self.queue.groups_of(batch_id, of_batch_ranges),
                    checkpointed=None if batch is None else batch.checkpointed.of(rows),
                    likely=self.lengths.likely(batch_id, of_batch_ranges),
                )
            )
        return assignments

    def note_loss(self, loss: Loss, cause: str = "") -> str:
        """Handle the death of a replica: fail rows that are given up, report crashes of others.

        `cause` is what the replica reported before it died. Returns why the engine itself must be
        broken, "" while rows may be the cause.
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
        return self._quarantine.note_loss(loss)

    def fail(self, rank: int, cause: str) -> None:
        """Fail the pool: remove all rows, and answer every current and later batch with `cause`.

        `rank` is that of the replica that failed.
        """
        is_first = self.failure is None
        self.failure = self.failure or (rank, cause)
        # no row waits for a duplicate any more
        self._dedup = InFlightDedup()
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
        elif batch_id == self._quarantine.batch_id:
            self.forget_good_row()

    def forget_good_row(self) -> None:
        """Forget the canary row and cached results, to free the object store."""
        self._dedup.forget_results()
        canary = self._quarantine.batch_id
        self._quarantine.forget_good_row()
        if canary is not None:
            self.drop_rows(canary)

    def drop_rows(self, batch_id: int) -> None:
        """Remove the rows of a batch, open or not, from the queue and the replicas."""
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
        batch.checkpointed.drop(set(rows.tolist()))
        counters = self.clients[batch.submission.client]
        counters.finished(batch.submission, rows, results)
        served = self._dedup.finish(batch.batch_id, batch.submission, rows, results)
        for batch_id, row, of_row in served:
            self._copy(self._open[batch_id], row, of_row)
        self._settle(batch)

    def _learn(self, batch: OpenBatch, results: pa.RecordBatch) -> None:
        """Learn output lengths, and update the cost of waiting rows."""
        client = batch.submission.client
        self.lengths.note_finished(batch.batch_id, results, self.clients[client].coverage)
        self.queue.reweigh(self.lengths.reweighed(client))

    def _copy(self, batch: OpenBatch, row: int, results: pa.RecordBatch) -> None:
        """Answer a row with the results of its in-flight duplicate."""
        self.queue.close(batch.batch_id, row)
        copied = copied_results(results, row, int(batch.submission.prompt_tokens[row]))
        batch.results.append(copied)
        batch.checkpointed.drop({row})
        self.clients[batch.submission.client].copied(batch.submission, row, copied)
        self._settle(batch)

    def _take_out(self, batch: OpenBatch) -> None:
        rows = self.queue.rows_left(batch.batch_id)
        self.clients[batch.submission.client].dropped(batch.submission, rows)
        self.drop_rows(batch.batch_id)
        self.lengths.close(batch.batch_id)
        for batch_id, row in self._dedup.drop(batch.batch_id, batch.submission, rows):
            self.queue.open(batch_id, row)

    def _settle(self, batch: OpenBatch) -> None:
        if self.failure is not None or self.queue.is_done(batch.batch_id):
            batch.end()
