"""Which rows are done by a deadline, and the cheapest engines that do all of them by then.

Before a run a forecast decides (`largest_in_time`), during it the rate that was measured
(`is_in_time`). Source: BatchGen, section 6.2, deadline mode.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

# a table is read by people
_MOST_COUNTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDeadline:
    """Until when the units of a run have to be done; times are seconds since 1970.

    Args:
        ready_at: when engines are predicted to take their first row.
        row_s: predicted seconds per row of all engines together; None where nothing is predicted.
    """

    ends_at: float
    ready_at: float
    row_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How far the rows of a run are.

    Args:
        rows_open: handed to engines, or about to be, and not done.
        rows_running: of them, those that engines have begun.
        work_s: seconds by the clock that engines have worked.
    """

    rows_done: int = 0
    rows_open: int = 0
    rows_running: float = 0.0
    work_s: float = 0.0

    @property
    def half_done(self) -> float:
        """Rows that the running ones are worth: they are half way on average."""
        return min(self.rows_running, self.rows_open) / 2

    def row_s(self, predicted: float | None) -> float | None:
        """Return the seconds per row; None where nothing is known.

        What is predicted counts until many times as many rows are done as run at once.
        """
        if not self.rows_done:
            return predicted
        measured = self.work_s / (self.rows_done + self.half_done)
        if predicted is None:
            return measured
        trust = self.rows_done / (self.rows_done + self.rows_running)
        return trust * measured + (1 - trust) * predicted


def is_in_time(pace: Pace, num_rows: int, deadline: UnitDeadline, now_s: float) -> bool:
    """Return whether `num_rows` more rows would be done in time, behind those that are open.

    While nothing is known of the speed, they are.
    """
    begins_s = now_s if pace.rows_done else max(now_s, deadline.ready_at)
    left_s = deadline.ends_at - begins_s
    row_s = pace.row_s(deadline.row_s)
    if row_s is None:
        return left_s > 0
    return (pace.rows_open + num_rows - pace.half_done) * row_s <= left_s


def largest_in_time(done_after_s: Callable[[int], float], most: int, deadline_s: float) -> int:
    """Return the largest number of units, up to `most`, that is predicted to be done in time.

    What is returned is in time and one unit more is not, also where `done_after_s` does not rise
    everywhere; more time never means fewer units. O(log most) predictions.

    Args:
        done_after_s: seconds after which the first so many units are done, at least one.

    Example:
        >>> largest_in_time(lambda units: 2.0 + 3.0 * units, 10, 15.0)
        4
    """
    if most and done_after_s(most) <= deadline_s:
        return most
    return bisect_right(range(1, most), deadline_s, key=done_after_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """So many engines, each with so many rows at once, and what all rows take on them.

    Args:
        done_after_s: seconds by the clock, the start of the engines included.
    """

    num_replicas: int
    max_num_seqs: int
    done_after_s: float

    @property
    def engine_hours(self) -> float:
        """Hours of engines, each from the begin of the run to its end."""
        return self.num_replicas * self.done_after_s / 3600


def cheapest_in_time(choices: Iterable[EngineChoice], deadline_s: float) -> EngineChoice | None:
    """Return the choice with the least engine-hours that meets the deadline; None: none does.

    Of equal ones it is that with the fewest engines, then that with the most rows at once.
    """
    in_time = [choice for choice in choices if choice.done_after_s <= deadline_s]
    return min(
        in_time, key=lambda c: (c.engine_hours, c.num_replicas, -c.max_num_seqs), default=None
    )


def replica_counts(most: int, limit: int = _MOST_COUNTS) -> tuple[int, ...]:
    """Return numbers of replicas to compare, from 1 to `most`, `limit` of them or fewer.

    Example:
        >>> replica_counts(3), replica_counts(128)
        ((1, 2, 3), (1, 2, 4, 8, 16, 32, 64, 128))
    """
    if most <= limit:
        return tuple(range(1, most + 1))
    steps = [round(most ** (step / (limit - 1))) for step in range(limit)]
    return tuple(sorted(set(steps)))
