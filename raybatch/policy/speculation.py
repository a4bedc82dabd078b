"""Decides when speculation pays: the cost of one more row against the acceptance rate.

A step of R rows takes f(R) seconds and gives R tokens. A draft is one more row; if accepted, it
saves f(R) / R, a token's share of a step. Drafts that extend a step to R' rows pay if their
acceptance rate exceeds (f(R') - f(R)) / (R' - R), divided by f(R) / R. This break-even rate is
small while costs shared by all rows (weights, launches) dominate, and close to 1 in a large batch.
"""

import math
import statistics
from collections import deque

# above it even copied passages gain nothing
MAX_BREAK_EVEN = 0.9
# lower bound of the break-even rate; also limits the draft length
_MIN_BREAK_EVEN = 0.05
_MIN_SAMPLES, _MAX_SAMPLES = 3, 9
# assumed until steps with twice the rows are measured
_UNKNOWN_BREAK_EVEN = 0.3


class StepTimes:
    """Tracks the seconds of steps without prompts, as recent medians by power of two of rows.

    A size that was not measured for `max_age` steps is dropped and tried again: times change with
    context lengths, and a bad measurement must not persist. Steps with drafts have at most
    `max_growth` times the rows of those without.
    """

    def __init__(self, max_growth: float, *, max_age: int = 256) -> None:
        self._num_larger = math.ceil(math.log2(max_growth))
        self._max_age = max_age
        self._num_steps = 0
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._last_step: dict[int, int] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Add a step of `rows` rows, at least 1; each draft token counts as a row."""
        size = round(math.log2(rows))
        self._num_steps += 1
        if self._num_steps - self._last_step.get(size, 0) > self._max_age:
            self._samples.pop(size, None)
            self._medians.pop(size, None)
        self._last_step[size] = self._num_steps
        samples = self._samples.setdefault(size, deque(maxlen=_MAX_SAMPLES))
        samples.append(seconds)
        if len(samples) >= _MIN_SAMPLES:
            self._medians[size] = statistics.median(samples)

    def break_even(self, rows: int) -> float:
        """Return the acceptance rate from which drafts pay in a step of `rows` rows (1 or more).

        It is the highest rate over the measured larger steps that drafts would lead to. Infinite
        until steps of this size are measured, so that the first ones run without drafts.
        """
        size = round(math.log2(rows))
        plain_s = self._median(size)
        if not plain_s:
            return math.inf
        shares = [
            (seconds / plain_s - 1) / (2**more - 1)
            for more in range(1, self._num_larger + 1)
            if (seconds := self._median(size + more)) is not None
        ]
        return max(_MIN_BREAK_EVEN, max(shares, default=_UNKNOWN_BREAK_EVEN))

    def _median(self, size: int) -> float | None:
        return (
            None
            if self._num_steps - self._last_step.get(size, 0) > self._max_age
            else self._medians.get(size)
        )


def draft_length(acceptance: float, break_even: float, max_tokens: int) -> int:
    """Return the number of draft tokens for a sequence, at most `max_tokens`.

    The n-th draft counts only if all before it are accepted, so it pays if `acceptance ** n` is at
    least `break_even`, where `acceptance` is the acceptance rate, 0 to 1.

    Example:
        >>> [draft_length(share, 0.3, 8) for share in (0.2, 0.5, 0.9, 1.0)]
        [0, 1, 8, 8]
    """
    if break_even > MAX_BREAK_EVEN or acceptance < break_even:
        return 0
    if acceptance == 1:
        return max_tokens
    return min(max_tokens, int(math.log(break_even) / math.log(acceptance)))
