"""When rows that decode read a run of cached positions together: from how many positions on."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Self

# less is noise of the clock
_MIN_SAVED_SHARE = 0.03


class ReadTimes(NamedTuple):
    """Seconds of a step whose runs have so many positions, read row by row or together."""

    num_tokens: int
    separate_s: float
    together_s: float

    @property
    def saved_s(self) -> float:
        return self.separate_s * (1 - _MIN_SAVED_SHARE) - self.together_s


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedReads:
    """What was found for some numbers of rows.

    Args:
        num_rows: ascending.
        min_tokens: of a run that so many rows read in less time together; infinite where none is.
    """

    num_rows: tuple[int, ...]
    min_tokens: tuple[float, ...]

    @classmethod
    def of(cls, times: Iterable[tuple[int, ReadTimes, ReadTimes]]) -> Self:
        """Return the rule from the times of a short run and a long one, for each number of rows."""
        found = sorted((num_rows, _least(short, long)) for num_rows, short, long in times)
        num_rows, min_tokens = zip(*found, strict=True)
        return cls(num_rows=num_rows, min_tokens=min_tokens)

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        """Return whether so many rows read a run of so many positions in less time together.

        A number of rows between two that were timed needs what both of them need.
        """
        place = bisect_left(self.num_rows, num_rows)
        is_timed = self.num_rows[place : place + 1] == (num_rows,)
        near = self.min_tokens[place if is_timed else max(place - 1, 0) : place + 1]
        return num_tokens >= max(near)


def _least(short: ReadTimes, long: ReadTimes) -> float:
    """Return where the time saved, which grows with the positions, is none."""
    growth = (long.saved_s - short.saved_s) / (long.num_tokens - short.num_tokens)
    if growth <= 0:
        return 0.0 if long.saved_s > 0 else math.inf
    return max(0.0, short.num_tokens - short.saved_s / growth)


# about 128 reads saved: for GPUs, on which none was timed
UNTIMED = SharedReads(num_rows=(2, 3, 5, 9), min_tokens=(128, 64, 32, 16))
