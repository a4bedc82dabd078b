"""Roofline costs of one module of a layer, by operations and bytes; fitted to measured runs.

They forecast configurations that no measured step has: attention and experts at separate batch
sizes, with data on the device or the host. Estimates of jobs use
`raybatch.policy.cost.cost_model.CostModel`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from raybatch.errors import ConfigError, range_text
from raybatch.records.arrays import Floats

# candidate shares of the shorter of compute and transfer that add to the longer one
_SERIAL_FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
# minimum improvement of a later candidate, so that rounding does not decide
_BETTER_BY = 1e-9
# gradients and coefficients below this count as 0
_TOLERANCE = 1e-10


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Work of one run of a module: operations, and bytes read from or written to its memory."""

    operations: float
    moved_bytes: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredWork:
    tokens: int
    work: Work
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Roofline:
    """Seconds of a module: a fixed time plus the longer of compute and transfer."""

    fixed_s: float
    operation_s: float
    byte_s: float  # per byte; 0 if no measured run was memory bound
    # share of the shorter of the two that is not hidden: 0 is the textbook roofline, 1 a sum; high
    # for CPU cores that wait for memory
    serial_fraction: float = 0.0
    fit_error: float = 0.0  # root mean square of the relative errors over the measured runs

    def __post_init__(self) -> None:
        for cost in (self.fixed_s, self.operation_s, self.byte_s, self.fit_error):
            if not 0 <= cost < float("inf"):
                allowed = range_text("at least 0", cost)
                raise ConfigError(f"a cost of a module must be {allowed}, got {cost}")
        if not 0 <= self.serial_fraction <= 1:
            raise ConfigError(f"serial_fraction must be within 0..1, got {self.serial_fraction}")

    def seconds(self, work: Work) -> float:
        return float(self.run_seconds(work.operations, work.moved_bytes))

    def run_seconds(
        self, operations: Floats | float, moved_bytes: Floats | float, *, runs: Floats | float = 1.0
    ) -> Floats:
        """Return the seconds of a number of runs, given their total operations and bytes."""
        sides = self.operation_s * operations, self.byte_s * moved_bytes
        longer, shorter = np.maximum(*sides), np.minimum(*sides)
        seconds: Floats = runs * self.fixed_s + longer + self.serial_fraction * shorter
        return seconds

    def times(self, factor: float) -> "Roofline":
        """Return the costs of a device that is slower by `factor`."""
        return replace(
            self,
            fixed_s=factor * self.fixed_s,
            operation_s=factor * self.operation_s,
            byte_s=factor * self.byte_s,
        )

    def copy_s(self, num_bytes: float) -> float:
        """Return the seconds to move `num_bytes` without computation."""
        return self.seconds(Work(operations=0.0, moved_bytes=num_bytes))


def link(bytes_per_s: float, *, fixed_s: float = 0.0) -> Roofline:
    """Return the cost of copies between two memories; `fixed_s` is the latency of each."""
    if not bytes_per_s > 0:
        raise ConfigError(f"bytes_per_s of a link must be above 0, got {bytes_per_s}")
    return Roofline(fixed_s=fixed_s, operation_s=0.0, byte_s=1.0 / bytes_per_s)


def fit_roofline(points: Sequence[MeasuredWork]) -> Roofline:
    """Fit a roofline to measured runs, weighting the relative error of each equally.

    Whether a run is compute bound depends only on its operations per byte. Runs are sorted by it,
    every cut into memory-bound and compute-bound runs is tried, and each cut is a non-negative
    least-squares problem: O(N) problems of N rows per serial fraction. The first serial fraction
    wins ties. Among cuts, the one with the most compute-bound runs wins: larger batches than
    measured are then assumed to gain nothing.
    """
    if not points:
        raise ConfigError("the cost of a module needs measured runs, got none")
    # by operations per byte; runs without bytes last
    works = [point.work for point in points]
    by_intensity = [w.operations / w.moved_bytes if w.moved_bytes else np.inf for w in works]
    ordered = [points[i] for i in np.argsort(by_intensity, kind="stable")]
    counts = np.array([(p.work.operations, p.work.moved_bytes) for p in ordered], float)
    seconds = np.array([p.seconds for p in ordered])
    best: Roofline | None = None
    for serial_fraction in _SERIAL_FRACTIONS:
        for cut in range(len(ordered) + 1):
            candidate = _fit_cut(counts, seconds, cut, serial_fraction)
            if best is None or candidate.fit_error < best.fit_error - _BETTER_BY:
                best = candidate
            if serial_fraction == 1:
                # a sum does not depend on the cut
                break
    assert best is not None, "there are serial fractions"
    return best


def _fit_cut(counts: Floats, seconds: Floats, cut: int, serial_fraction: float) -> Roofline:
    """Fit with the first `cut` runs memory bound; the error is that of the roofline."""
    weights = np.full(counts.shape, serial_fraction)
    weights[:cut, 1] = 1.0
    weights[cut:, 0] = 1.0
    features = np.column_stack((np.ones(len(counts)), counts * weights))
    fixed_s, operation_s, byte_s = solve_nonnegative(
        features / seconds[:, None], np.ones(len(seconds))
    ).tolist()
    sides = counts * np.array([operation_s, byte_s])
    predicted = fixed_s + sides.max(axis=1) + serial_fraction * sides.min(axis=1)
    error = float(np.sqrt(np.mean((predicted / seconds - 1.0) ** 2)))
    return Roofline(
        fixed_s=fixed_s,
        operation_s=operation_s,
        byte_s=byte_s,
        serial_fraction=serial_fraction,
        fit_error=error,
    )


def solve_nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Return the x of at least 0 that minimises |matrix @ x - target|.

    Args:
        matrix: float64 [M, N]; a column of zeros gets the coefficient 0.

    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23; columns are normalised
    first, so that one tolerance fits all.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    columns, x = matrix / scale, np.zeros(matrix.shape[1])
    is_free = np.zeros(len(x), bool)
    # every change of the free set lowers the residual; the limit only guards against rounding
    for _ in range(10 * len(x)):
        gradient = columns.T @ (target - columns @ x)
        gradient[is_free] = 0.0
        best = int(np.argmax(gradient))
        if gradient[best] <= _TOLERANCE * max(1.0, float(np.linalg.norm(target))):
            break
        is_free[best] = True
        # move to the optimum of the free columns; fix those that would become negative at 0
        while True:
            goal = np.zeros(len(x))
            goal[is_free] = np.linalg.lstsq(columns[:, is_free], target, rcond=None)[0]
            is_bad = is_free & (goal <= 0)
            if not is_bad.any():
                break
            share = float(np.min(x[is_bad] / np.maximum(x[is_bad] - goal[is_bad], 1e-300)))
            x = x + share * (goal - x)
            is_free &= x > _TOLERANCE
            x[~is_free] = 0.0
        x = goal
    return x / scale
