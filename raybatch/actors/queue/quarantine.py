"""Finds whether crashes are due to rows or to the engine itself; no Ray, no clock."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Loss, Submission

# limits by `_is_new`
_DEATHS_BEFORE_CANARY = {True: 1, False: 2}
_MAX_CANARY_DEATHS = {True: 2, False: 3}
# rows given up before any has finished, with no canary left to try
_MAX_GIVEN_UP_BEFORE_FIRST = 8
# rows that crashed an engine while alone, over the life of a pool
MAX_GIVEN_UP = 128
_PLACES = (1.0, 0.5, 0.25)


@dataclass(slots=True)
class CrashQuarantine:
    """Distinguishes a broken engine from rows that crash engines.

    Both look alike at first: replicas crash, one after the other, and no row finishes. A *canary*
    row, run alone and without crashes so far, tells them apart. If it finishes, the engine works,
    and other rows caused the crashes. If canary after canary crashes its replica, the engine is
    broken.

    A row that has finished before is the best canary; the last such row is kept, with its request
    table, until the pool stops or its feeder is gone. Until there is one, canaries are unsuspected
    waiting rows from distant places of the queue, since bad rows are often neighbours.

    Until a first row has finished or generated some tokens, a pool expects a broken engine: a
    canary is due at the first crash, no other row is handed out meanwhile, and two canaries are
    enough. Counts restart with each row that finishes without an error.

    Call `worked` for finished rows and `note_loss` for dead replicas.

    Args:
        batch_ids: ids of new row batches; a canary that has finished before runs as its own batch.
        batch_id: id of this batch while the canary waits or runs; else None.
    """

    queue: RowQueue
    batch_ids: Iterator[int]
    batch_id: int | None = None
    # the row that finished last, with its batch
    _good: tuple[Submission, int] | None = None
    _has_worked: bool = False
    # no row has finished or generated some tokens
    _is_new: bool = True
    _num_deaths: int = 0
    _num_canary_deaths: int = 0
    _num_given_up: int = 0
    _given_up_in_all: int = 0

    def refs(self, batch_id: int) -> list[object] | None:
        """Return the request table references of the canary's batch, None for any other batch."""
        if self._good is None or batch_id != self.batch_id:
            return None
        return self._good[0].refs

    def worked(self, submission: Submission, row: int) -> None:
        if self.batch_id is None:
            # a running canary is looked up by its batch
            self._good = (submission, row)
        self._reset()

    def came_far(self) -> None:
        """Note that an engine has run rows for many steps, so it can start and compute."""
        self._is_new = self.queue.is_cautious = False

    def take(
        self, replica_id: int, batch_id: int, rows: npt.NDArray[np.int32], *, is_good: bool
    ) -> int:
        """Accept results of the canary's batch; return the number of rows that the replica held.

        `is_good` if they have no error.
        """
        if batch_id != self.batch_id:
            return 0
        num_rows = int(self.queue.finish(replica_id, batch_id, rows).sum())
        if num_rows:
            self._end_canary()
            if is_good:
                self._reset()
        return num_rows

    def note_loss(self, loss: Loss) -> str:
        """Note the crash of a replica, and queue a canary row if it is time for one.

        Returns why the engine itself must be broken, "" while rows may be the cause.
        """
        if not loss.crashes:
            return ""
        self._num_deaths += 1
        num_given_up = len(loss.given_up())
        self._num_given_up += num_given_up
        self._given_up_in_all += num_given_up
        if self._given_up_in_all >= MAX_GIVEN_UP:
            return (
                f"{self._given_up_in_all} rows crashed an engine, each while it ran alone, which "
                "is the limit; rerun the job to resume without them"
            )
        self.queue.is_cautious = self._is_new
        if loss.was_canary:
            self._num_canary_deaths += 1
            self._end_canary()
        if self._num_canary_deaths >= _MAX_CANARY_DEATHS[self._is_new]:
            kind = "an unrelated row" if self._good is None else "a row that had finished before"
            finished = "finished no row in between" if self._has_worked else "never finished a row"
            return (
                f"the engine died {self._num_deaths} times and {finished}; "
                f"{self._num_canary_deaths} times it ran only {kind}"
            )
        is_due = self._num_deaths >= _DEATHS_BEFORE_CANARY[self._is_new]
        if is_due and not self.queue.has_canary():
            is_hopeless = not self._queue_canary() and not self._has_worked
            if is_hopeless and self._num_given_up >= _MAX_GIVEN_UP_BEFORE_FIRST:
                return (
                    f"the engine died {self._num_deaths} times and never finished a row; "
                    f"{self._num_given_up} rows crashed it while they ran alone"
                )
        return ""

    def forget_good_row(self) -> None:
        self._good = self.batch_id = None

    def _queue_canary(self) -> bool:
        if self._good is None:
            return self.queue.pick_canary(_PLACES[self._num_canary_deaths % len(_PLACES)])
        of, row = self._good
        self.batch_id = next(self.batch_ids)
        self.queue.add_canary(self.batch_id, of.prompt_tokens, of.max_new_tokens, row)
        return True

    def _end_canary(self) -> None:
        if self.batch_id is not None:
            self.queue.drop(self.batch_id)
            self.batch_id = None

    def _reset(self) -> None:
        self._has_worked = True
        self.came_far()
        self._num_deaths = self._num_canary_deaths = self._num_given_up = 0
