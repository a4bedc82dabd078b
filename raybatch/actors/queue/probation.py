"""Tells an engine that is broken from rows that break engines; no Ray, no clock.

Both look alike at first: replicas die, one after the other, and no row finishes. What tells them
apart is a *control*, a row that no death speaks against, run alone. If it finishes, the engine is
fine, however many neighbouring rows end their replicas. If control after control ends its replica,
it is not the rows.

A row that has finished before is the best control. While there is none, rows that wait unsuspected
are taken from places far apart, since bad rows are often neighbours.

Until a first row has finished or come far, a pool expects a broken engine: a control is due at the
first death, nothing else is handed out meanwhile, and two controls are enough.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Loss, Submission

# by whether the pool is new
_DEATHS_BEFORE_CONTROL = {True: 1, False: 2}
_MAX_CONTROL_DEATHS = {True: 2, False: 3}
# where nothing is left to try as a control: so many rows, and not one that ever finished
_MAX_GIVEN_UP_BEFORE_FIRST = 8
# rows that ended their engines, in the life of a pool, whatever finished between them
MAX_GIVEN_UP = 128
_PLACES = (1.0, 0.5, 0.25)


@dataclass(slots=True)
class Probation:
    """Tells a broken engine from bad rows, by deaths and finished rows.

    Counts run from the last row that finished without an error. That row is kept for a control, and
    its request table with it, until the pool stops or the feeder is gone.

    Args:
        batch_ids: of later row batches; a control that has finished before gets one of its own.
        batch_id: of such a control while it waits or runs.
    """

    queue: RowQueue
    batch_ids: Iterator[int]
    batch_id: int | None = None
    # the row that finished last, with its batch
    _good: tuple[Submission, int] | None = None
    _has_worked: bool = False
    # no row has finished or come far
    _is_new: bool = True
    _num_deaths: int = 0
    _num_control_deaths: int = 0
    _num_given_up: int = 0
    _given_up_in_all: int = 0

    def refs(self, batch_id: int) -> list[object] | None:
        """Return the references of the control that runs as this batch, None for other batches."""
        if self._good is None or batch_id != self.batch_id:
            return None
        return self._good[0].refs

    def worked(self, submission: Submission, row: int) -> None:
        if self.batch_id is None:
            # not while the other runs as a control, whose table is asked for by its batch
            self._good = (submission, row)
        self._reset()

    def came_far(self) -> None:
        """Note that an engine has run rows for many steps."""
        self._is_new = self.queue.is_cautious = False

    def take(
        self, replica_id: int, batch_id: int, rows: npt.NDArray[np.int32], *, is_good: bool
    ) -> int:
        """Take result rows of a control that had finished before; return how many it held."""
        if batch_id != self.batch_id:
            return 0
        num_rows = int(self.queue.finish(replica_id, batch_id, rows).sum())
        if num_rows:
            self._end_control()
            if is_good:
                self._reset()
        return num_rows

    def note_loss(self, loss: Loss) -> str:
        """Note a death, and queue a control where one is due.

        Returns why the engine must be broken, "" while rows may be the reason.
        """
        if not loss.crashes:
            return ""
        self._num_deaths += 1
        num_given_up = len(loss.given_up())
        self._num_given_up += num_given_up
        self._given_up_in_all += num_given_up
        if self._given_up_in_all >= MAX_GIVEN_UP:
            return (
                f"{self._given_up_in_all} rows ended an engine, each while it ran alone, which is "
                "too many to go on; start the job again to go on without them"
            )
        self.queue.is_cautious = self._is_new
        if loss.was_control:
            self._num_control_deaths += 1
            self._end_control()
        if self._num_control_deaths >= _MAX_CONTROL_DEATHS[self._is_new]:
            kind = "from another place" if self._good is None else "that had finished before"
            finished = "finished no row in between" if self._has_worked else "never finished a row"
            return (
                f"the engine died {self._num_deaths} times and {finished}; "
                f"{self._num_control_deaths} times it ran nothing but a row {kind}"
            )
        is_due = self._num_deaths >= _DEATHS_BEFORE_CONTROL[self._is_new]
        if is_due and not self.queue.has_control():
            is_hopeless = not self._queue_control() and not self._has_worked
            if is_hopeless and self._num_given_up >= _MAX_GIVEN_UP_BEFORE_FIRST:
                return (
                    f"the engine died {self._num_deaths} times and never finished a row; "
                    f"{self._num_given_up} rows ended it while they ran alone"
                )
        return ""

    def forget_good_row(self) -> None:
        self._good = self.batch_id = None

    def _queue_control(self) -> bool:
        if self._good is None:
            return self.queue.pick_control(_PLACES[self._num_control_deaths % len(_PLACES)])
        of, row = self._good
        self.batch_id = next(self.batch_ids)
        self.queue.add_control(self.batch_id, of.prompt_tokens, of.max_new_tokens, row)
        return True

    def _end_control(self) -> None:
        if self.batch_id is not None:
            self.queue.drop(self.batch_id)
            self.batch_id = None

    def _reset(self) -> None:
        self._has_worked = True
        self.came_far()
        self._num_deaths = self._num_control_deaths = self._num_given_up = 0
