"""Thresholds of cascade attention: prefix lengths from which decode rows share its reads."""

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from raybatch.records.arrays import Floats

# smaller gains are timing noise
_MIN_SAVED_SHARE = 0.03


class ReadTimes(NamedTuple):
    """Seconds of a step whose rows share prefixes of `num_tokens` tokens.

    `separate_s` if each row reads its prefix by itself, `together_s` with cascade attention.
    """

    num_tokens: int
    separate_s: float
    together_s: float

    @property
    def saved_s(self) -> float:
        return self.separate_s * (1 - _MIN_SAVED_SHARE) - self.together_s


@dataclass(frozen=True, kw_only=True, slots=True)
class CascadeThresholds:
    """Prefix lengths from which cascade attention pays, by number of rows that share the prefix.

    Args:
        num_rows: timed numbers of rows, ascending.
        min_tokens: for each, the least prefix length; infinite if cascade attention never pays.
        position_s: for each, seconds per prefix position, layer and row beyond the first, with the
            faster method; empty if not timed.
    """

    num_rows: tuple[int, ...]
    min_tokens: tuple[float, ...]
    position_s: tuple[float, ...] = ()

    @classmethod
    def of(
        cls, times: Iterable[tuple[int, ReadTimes, ReadTimes]], *, num_runs: float = 1.0
    ) -> Self:
        """Return the thresholds from timed steps.

        Args:
            times: (number of rows, times with a short prefix, times with a long one) each.
            num_runs: number of prefixes that a timed step reads, counted in each layer.
        """
        found = sorted((rows, _least(*both), _growth(*both)) for rows, *both in times)
        num_rows, min_tokens, growths = zip(*found, strict=True)
        position_s = [each / (n * num_runs) for n, each in zip(num_rows, growths, strict=True)]
        return cls(num_rows=num_rows, min_tokens=min_tokens, position_s=tuple(position_s))

    def times(self, factor: float) -> Self:
        """Return the thresholds with times of a device that is slower by `factor`."""
        return replace(self, position_s=tuple(factor * each for each in self.position_s))

    def pays(self, num_rows: int, num_tokens: int) -> bool:
        """Return whether cascade attention is faster if `num_rows` share `num_tokens`.

        Between two timed numbers of rows, both thresholds must be met.
        """
        place = bisect_left(self.num_rows, num_rows)
        is_timed = self.num_rows[place : place + 1] == (num_rows,)
        near = self.min_tokens[place if is_timed else max(place - 1, 0) : place + 1]
        return num_tokens >= max(near)

    def cost(self, num_rows: Floats, num_tokens: float) -> "PositionCost":
        """Return the cost per decode row of one position of a prefix that `num_rows` share.

        The prefix has `num_tokens` tokens. One row reads the position from memory; the others find
        it in a CPU cache, or share the read.
        """
        once = 1.0 / num_rows
        if self.position_s:
            beside_s = np.interp(num_rows, self.num_rows, self.position_s) * (1 - once)
            return PositionCost(computed=once, read=once, beside_s=beside_s)
        least = np.interp(num_rows, self.num_rows, self.min_tokens)
        read = np.where(least <= num_tokens, once, 1.0)
        return PositionCost(computed=np.ones(len(read)), read=read, beside_s=np.zeros(len(read)))


class PositionCost(NamedTuple):
    """Cost of one prefix position per row, by number of rows: float64 [S] each.

    `computed` and `read` are how often the position is computed and read, 1 without sharing;
    `beside_s` are further seconds.
    """

    computed: Floats
    read: Floats
    beside_s: Floats


def _growth(short: ReadTimes, long: ReadTimes) -> float:
    """Return the seconds of one more position with the faster method."""
    num_tokens = long.num_tokens - short.num_tokens
    together_s = (long.together_s - short.together_s) / num_tokens
    separate_s = (long.separate_s - short.separate_s) / num_tokens
    return max(0.0, min(together_s, separate_s))


def _least(short: ReadTimes, long: ReadTimes) -> float:
    """Return the length at which the saved time, linear in positions, is zero."""
    growth = (long.saved_s - short.saved_s) / (long.num_tokens - short.num_tokens)
    if growth <= 0:
        return 0.0 if long.saved_s > 0 else math.inf
    return max(0.0, short.num_tokens - short.saved_s / growth)


# about 128 saved reads: for GPUs, where nothing is timed
UNTIMED = CascadeThresholds(num_rows=(2, 3, 5, 9), min_tokens=(128, 64, 32, 16))
