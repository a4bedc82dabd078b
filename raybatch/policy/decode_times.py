"""Time of a decode pass by batch size: saturation point, and batch size that hides weight fetch.

Source: SiDP, sections 1, 3.1 and 4.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.roofline import Roofline, solve_nonnegative

# share of a pass that is proportional to rows at saturation
_SATURATED = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCurve:
    """Seconds of a decode pass by batch size, linear between points and beyond the last.

    Args:
        rows: batch sizes of one replica, ascending, at least two.
        seconds: seconds of a pass with each of these batch sizes.

    Raises ConfigError: fewer than two sizes, not ascending, or seconds that are not above 0.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.rows, self.rows[1:], strict=False))
        if len(self.rows) < 2 or len(self.rows) != len(self.seconds) or not ascending:
            raise ConfigError(
                "a decode curve needs seconds for two or more ascending batch sizes, got sizes "
                f"{self.rows} and seconds {self.seconds}"
            )
        if self.rows[0] <= 0 or min(self.seconds) <= 0:
            raise ConfigError("batch sizes and seconds of a decode curve must be above 0")

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Return the convex, non-decreasing curve closest to measured (rows, seconds of a pass).

        Errors are relative. A pass has constant time until the hardware is saturated and then
        grows with its rows, so deviations from convexity are measurement noise.
        """
        rows = sorted({size for size, _ in points})
        if len(rows) < 2 or min(seconds for _, seconds in points) <= 0:
            raise ConfigError("a decode curve needs seconds above 0 for two or more batch sizes")
        sizes, seconds = np.array(points, float).T
        least = np.array(rows[:-1])
        hinges = [np.ones(len(sizes)), *np.maximum(0.0, sizes - least[:, None])]
        weighted = np.column_stack(hinges) / seconds[:, None]
        base, *slopes = solve_nonnegative(weighted, np.ones(len(sizes))).tolist()
        at = np.array(rows)
        fitted = base + np.maximum(0.0, at[:, None] - least) @ np.array(slopes)
        return cls(rows=tuple(rows), seconds=tuple(fitted.tolist()))

    def at(self, rows: float) -> float:
        """Return the seconds of a pass of `rows` rows; constant below the first batch size."""
        if rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        (r0, r1), (s0, s1) = self.rows[-2:], self.seconds[-2:]
        return s1 + (rows - r1) * (s1 - s0) / (r1 - r0)

    def saturation_rows(self) -> float | None:
        """Return the batch size from which at least half of a pass is proportional to rows (B_e).

        It is the corner of a curve that is flat and then a line through 0, and `a / b` of the line
        `a + b * rows`. None if there is no such size. Requires a convex curve.
        """
        spans = zip(self.rows, self.rows[1:], self.seconds, self.seconds[1:], strict=False)
        for r0, r1, s0, s1 in spans:
            slope = (s1 - s0) / (r1 - r0)
            fixed = s0 - slope * r0
            if slope * r0 >= _SATURATED * s0:
                return r0
            if slope * r1 >= _SATURATED * s1:
                return fixed / slope * _SATURATED / (1 - _SATURATED)
        return None

    def hiding_rows(self, fetch_s: float) -> int | None:
        """Return the smallest batch whose pass takes at least `fetch_s`, its weight fetch (B_th).

        None if no size of the curve does. Requires a non-decreasing curve.
        """
        if self.seconds[0] >= fetch_s:
            return max(1, math.ceil(self.rows[0]))
        spans = zip(self.rows, self.rows[1:], self.seconds, self.seconds[1:], strict=False)
        for r0, r1, s0, s1 in spans:
            if s1 >= fetch_s:
                return math.ceil(r0 + (fetch_s - s0) * (r1 - r0) / (s1 - s0) - 1e-9)
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRates:
    """Rates that one GPU achieves, below those of its data sheet.

    Args:
        bytes_per_s: bandwidth of its memory.
        flops: FLOP/s of dense matrix products in the weights' dtype.
        link_bytes_per_s: bandwidth of reading from another GPU of its host, one direction.
    """

    bytes_per_s: float
    flops: float
    link_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} of a GPU must be a number above 0, got {getattr(self, name)}"
                )

    @property
    def roofline(self) -> Roofline:
        return Roofline(fixed_s=0.0, operation_s=1 / self.flops, byte_s=1 / self.bytes_per_s)
