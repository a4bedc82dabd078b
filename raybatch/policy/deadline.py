"""When a run ends early: by a deadline, or by limits of budget, time and errors.

A deadline decides which rows finish in time, and the cheapest engines that finish all: before a run
by the forecast (`largest_in_time`), during it by the measured rate (`is_in_time`).
Source: BatchGen, section 6.2.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from raybatch.config import LimitConfig

# rows of a table for humans
_MOST_COUNTS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitDeadline:
    """Deadline of the units of a run; times are Unix timestamps in seconds.

    Args:
        ready_at: predicted time at which engines accept their first row.
        row_s: predicted wall seconds per row with all engines at work; None if unknown.
    """

    ends_at: float
    ready_at: float
    row_s: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProgress:
    """Progress of the rows of a run.

    Args:
        rows_open: submitted rows that are not finished.
        rows_running: of these, rows that have started.
        work_s: wall seconds in which engines have worked.
    """

    rows_done: int = 0
    rows_open: int = 0
    rows_running: float = 0.0
    work_s: float = 0.0

    @property
    def half_done(self) -> float:
        """Number of finished rows that the running rows count as: half of them."""
        return min(self.rows_running, self.rows_open) / 2

    def row_s(self, predicted: float | None) -> float | None:
        """Return the wall seconds per row, from `predicted` and measured ones; None if unknown.

        The measured seconds count more, the more rows are finished compared with those that run.
        """
        if not self.rows_done:
            return predicted
        measured = self.work_s / (self.rows_done + self.half_done)
        if predicted is None:
            return measured
        trust = self.rows_done / (self.rows_done + self.rows_running)
        return trust * measured + (1 - trust) * predicted


def is_in_time(progress: RunProgress, num_rows: int, deadline: UnitDeadline, now_s: float) -> bool:
    """Return whether `num_rows` more rows would finish in time, after the open ones.

    True while the speed is unknown.
    """
    begins_s = now_s if progress.rows_done else max(now_s, deadline.ready_at)
    left_s = deadline.ends_at - begins_s
    row_s = progress.row_s(deadline.row_s)
    if row_s is None:
        return left_s > 0
    return (progress.rows_open + num_rows - progress.half_done) * row_s <= left_s


def largest_in_time(done_after_s: Callable[[int], float], most: int, deadline_s: float) -> int:
    """Return the largest number of units, up to `most`, that is predicted to finish in time.

    The result is in time and one more unit is not, even if `done_after_s` is not monotonic; more
    time never gives fewer units. O(log most) predictions.

    Args:
        done_after_s: seconds until the first n units are finished, n at least 1.

    Example:
        >>> largest_in_time(lambda units: 2.0 + 3.0 * units, 10, 15.0)
        4
    """
    if most and done_after_s(most) <= deadline_s:
        return most
    return bisect_right(range(1, most), deadline_s, key=done_after_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineChoice:
    """A number of engines, the rows that each runs at once, and the forecast for all rows.

    Args:
        done_after_s: wall seconds until all rows are finished, including the start of engines.
    """

    num_replicas: int
    max_num_seqs: int
    done_after_s: float

    @property
    def engine_hours(self) -> float:
        """Engine hours, if each engine is held from the start of the run to its end."""
        return self.num_replicas * self.done_after_s / 3600


def cheapest_in_time(choices: Iterable[EngineChoice], deadline_s: float) -> EngineChoice | None:
    """Return the choice with the fewest engine hours that meets the deadline; None if none does.

    Ties go to the fewest engines, then to the most rows at once.
    """
    in_time = [choice for choice in choices if choice.done_after_s <= deadline_s]
    return min(
        in_time, key=lambda c: (c.engine_hours, c.num_replicas, -c.max_num_seqs), default=None
    )


def replica_counts(most: int, limit: int = _MOST_COUNTS) -> tuple[int, ...]:
    """Return up to `limit` numbers of replicas to compare, from 1 to `most`.

    Example:
        >>> replica_counts(3), replica_counts(128)
        ((1, 2, 3), (1, 2, 4, 8, 16, 32, 64, 128))
    """
    if most <= limit:
        return tuple(range(1, most + 1))
    steps = [round(most ** (step / (limit - 1))) for step in range(limit)]
    return tuple(sorted(set(steps)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    wall_s: float = 0.0
    engine_s: float = 0.0
    num_replicas: int = 0
    cost: float = 0.0
    tokens: int = 0
    rows_done: int = 0
    rows_failed: int = 0


def amount_of_money(cost: float) -> str:
    """Format a cost for humans; small ones keep three digits.

    Example:
        >>> amount_of_money(12.345), amount_of_money(0.00012345)
        ('12.35', '0.000123')
    """
    return f"{cost:.2f}" if cost >= 0.1 or not cost else f"{cost:.3g}"


def reason_to_stop(limits: LimitConfig, spent: Spent) -> str | None:
    """Return why no further unit may start; None within all limits."""
    if limits.max_wall_s is not None and spent.wall_s >= limits.max_wall_s:
        return f"limits.max_wall_s reached: {spent.wall_s:.0f} s have passed"
    if limits.max_tokens is not None and spent.tokens >= limits.max_tokens:
        return f"limits.max_tokens reached: {spent.tokens} tokens generated"
    if limits.max_engine_hours is not None and spent.engine_s >= 3600 * limits.max_engine_hours:
        return f"limits.max_engine_hours reached: {spent.engine_s / 3600:.2f} engine hours"
    if limits.max_cost is not None:
        price = limits.price_per_engine_hour or 0.0
        cost = spent.cost + spent.wall_s / 3600 * spent.num_replicas * price
        if cost >= limits.max_cost:
            return f"limits.max_cost reached: {amount_of_money(cost)} for engines and answers"
    if limits.max_error_rate is not None and spent.rows_done >= limits.min_rows_for_error_rate:
        rate = spent.rows_failed / spent.rows_done
        if rate > limits.max_error_rate:
            return (
                f"limits.max_error_rate exceeded: {spent.rows_failed} of {spent.rows_done} rows "
                f"failed ({100 * rate:.1f} %)"
            )
    return None
