"""Time of a decode pass by batch size, and the batch size that hides weight fetch.

Source: SiDP, sections 1, 3.1 and 4.3.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from raybatch.errors import ConfigError
from raybatch.policy.cost.roofline import solve_nonnegative

# shares of the rates in data sheets that kernels reach; links reach the full rate (SiDP, figure 9)
COMPUTE_SHARE, MEMORY_SHARE = 0.55, 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeCurve:
    """Seconds of a decode pass by batch size, linear between points and beyond the last.

    Args:
        rows: batch sizes of one replica, ascending, at least two.
        seconds: seconds above 0 of a pass with each of these batch sizes.
    """

    rows: tuple[float, ...]
    seconds: tuple[float, ...]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuKind:
    """Memory and rates of one kind of GPU."""

    memory_bytes: int
    rates: GpuRates


def _kind(memory: float, bytes_per_s: float, flops: float, link_bytes_per_s: float) -> GpuKind:
    rates = GpuRates(
        bytes_per_s=MEMORY_SHARE * bytes_per_s,
        flops=COMPUTE_SHARE * flops,
        link_bytes_per_s=link_bytes_per_s,
    )
    return GpuKind(memory_bytes=round(memory), rates=rates)


# Assumed, not measured: GPUs with NVLink, by Ray's accelerator names. Memory size and bandwidth,
# bfloat16 FLOP/s and NVLink bandwidth per direction are from NVIDIA's data sheets of SXM modules.
# PCIe cards have the same names; engines without peer access refuse to share.
GPU_KINDS = {
    # Ray uses this name for those with 80 GB, too
    "A100": _kind(40e9, 1.555e12, 312e12, 300e9),
    "A100-40G": _kind(40e9, 1.555e12, 312e12, 300e9),
    "A100-80G": _kind(80e9, 2.039e12, 312e12, 300e9),
    "H20": _kind(96e9, 4.0e12, 148e12, 450e9),
    "H100": _kind(80e9, 3.35e12, 989e12, 450e9),
    "H200": _kind(141e9, 4.8e12, 989e12, 450e9),
    "B200": _kind(180e9, 8.0e12, 2250e12, 900e9),
}
