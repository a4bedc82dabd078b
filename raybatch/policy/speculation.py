"""When drafts pay: what one more row of a step costs, against how many drafts are right.

A step of R rows takes f(R) seconds and makes R tokens. A draft is one row more; it saves a token's
share of a step, f(R) / R, if it is right. So drafts that make R' rows of it pay where more of them
are right than (f(R') - f(R)) / (R' - R), divided by f(R) / R. This break-even share is small while
a step is bound by what all rows share (weights, launches), and close to 1 in a large batch, where
rows are all that a step costs.
"""

import math
import statistics
from collections import deque

from raybatch.errors import ConfigError

# above it not even sequences that copy gain anything
MAX_BREAK_EVEN = 0.9
# below it the next draft is free in any case; it also bounds the length of drafts
_MIN_BREAK_EVEN = 0.05
_MIN_SAMPLES, _MAX_SAMPLES = 3, 9
# until steps of twice the rows have been seen
_UNKNOWN_BREAK_EVEN = 0.3


class StepTimes:
    """Seconds of steps without prompts, by powers of two of their rows; medians of the latest.

    A size that was not seen for `max_age` steps is forgotten, and so tried again: steps change with
    the length of contexts, and one bad measurement must not decide for ever. Steps with drafts have
    at most `max_growth` times the rows of those without.
    """

    def __init__(self, max_growth: float, *, max_age: int = 256) -> None:
        self._num_larger = math.ceil(math.log2(max_growth))
        self._max_age = max_age
        self._num_steps = 0
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._last_step: dict[int, int] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Note a step of so many rows, drafts included; at least 1."""
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
        """Return the share of drafts that must be right in a step of so many rows, at least 1.

        The worst of the larger steps that were seen counts. Infinite until steps of this size
        were seen, so that the first ones run without drafts.
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
    """Return how many drafts a sequence should get.

    The n-th draft counts only if all before it are right, so it is worth `acceptance ** n`, where
    acceptance is the share of right guesses, 0 to 1.

    Example:
        >>> [draft_length(share, 0.3, 8) for share in (0.2, 0.5, 0.9, 1.0)]
        [0, 1, 8, 8]
    """
    if not 0 <= acceptance <= 1 or not break_even > 0:
        raise ConfigError(
            f"an acceptance of {acceptance} with a break-even share of {break_even}; they must be "
            "within 0..1 and above 0"
        )
    if break_even > MAX_BREAK_EVEN or acceptance < break_even:
        return 0
    if acceptance == 1:
        return max_tokens
    return min(max_tokens, int(math.log(break_even) / math.log(acceptance)))
