"""When rows that decode read a run of cached positions together: from how many positions on."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from raybatch.records.arrays import Floats

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
        position_s: of a position in a layer, seconds for each row but the one that reads it from
            memory, in the quicker way; empty where nothing was timed.
    """

    num_rows: tuple[int, ...]
    min_tokens: tuple[float, ...]
    position_s: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, times: Iterable[tuple[int, ReadTimes, ReadTimes]], *, num_runs: float = 1.0
    ) -> Self:
        """Return the rule from the times of a short run and a long one, for each number of rows.

        Args:
            num_runs: that the times are of, over all layers.
        """
        found = sorted((rows, _least(*both), _growth(*both)) for rows, *both in times)
        num_rows, min_tokens, growths = zip(*found, strict=True)
        position_s = [each / (n * num_runs) for n, each in zip(num_rows, growths, strict=True)]
        return cls(num_rows=num_rows, min_tokens=min_tokens, position_s=tuple(position_s))

    def times(self, factor: float) -> Self:
        """Return the same rule on something that takes so many times as long."""
        return replace(self, position_s=tuple(factor * each for each in self.position_s))

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        """Return whether so many rows read a run of so many positions in less time together.

        A number of rows between two that were timed needs what both of them need.
        """
        place = bisect_left(self.num_rows, num_rows)
        is_timed = self.num_rows[place : place + 1] == (num_rows,)
        near = self.min_tokens[place if is_timed else max(place - 1, 0) : place + 1]
        return num_tokens >= max(near)

    def cost(self, num_rows: Floats, num_tokens: float) -> "PositionCost":
        """Return what a position of a run of `num_tokens` costs each of so many rows that decode.

        One row reads it from memory, the others find it in a cache, or read it with the first.
        """
        once = 1.0 / num_rows
        if self.position_s:
            beside_s = np.interp(num_rows, self.num_rows, self.position_s) * (1 - once)
            return PositionCost(computed=once, read=once, beside_s=beside_s)
        least = np.interp(num_rows, self.num_rows, self.min_tokens)
        read = np.where(least <= num_tokens, once, 1.0)
        return PositionCost(computed=np.ones(len(read)), read=read, beside_s=np.zeros(len(read)))


class PositionCost(NamedTuple):
    """How often a row computes with a position and reads it from memory; seconds beside both."""

    computed: Floats
    read: Floats
    beside_s: Floats


def _growth(short: ReadTimes, long: ReadTimes) -> float:
    """Return the seconds that one more position takes in the quicker way."""
    num_tokens = long.num_tokens - short.num_tokens
    together_s = (long.together_s - short.together_s) / num_tokens
    separate_s = (long.separate_s - short.separate_s) / num_tokens
    return max(0.0, min(together_s, separate_s))


def _least(short: ReadTimes, long: ReadTimes) -> float:
    """Return where the time saved, which grows with the positions, is none."""
    growth = (long.saved_s - short.saved_s) / (long.num_tokens - short.num_tokens)
    if growth <= 0:
        return 0.0 if long.saved_s > 0 else math.inf
    return max(0.0, short.num_tokens - short.saved_s / growth)


# about 128 reads saved: for GPUs, on which none was timed
UNTIMED = SharedReads(num_rows=(2, 3, 5, 9), min_tokens=(128, 64, 32, 16))
