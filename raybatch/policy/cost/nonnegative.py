"""Least squares with coefficients that are not negative."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_TOLERANCE = 1e-10


def solve_nonnegative(matrix: Floats, target: Floats) -> Floats:
    """Return the x of at least 0 that minimises |matrix @ x - target|.

    Args:
        matrix: float64 [M, N]; a column of zeros gets the coefficient 0.
        target: float64 [M].

    Source: Lawson and Hanson, Solving Least Squares Problems, chapter 23; columns are scaled to
    length 1 first, so that one tolerance holds for all.
    """
    norms = np.linalg.norm(matrix, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    columns = matrix / scale
    x = np.zeros(matrix.shape[1])
    is_free = np.zeros(len(x), bool)
    # every change of the free set lowers the residual; the bound is against rounding alone
    for _ in range(10 * len(x)):
        gradient = columns.T @ (target - columns @ x)
        gradient[is_free] = 0.0
        best = int(np.argmax(gradient))
        if gradient[best] <= _TOLERANCE * max(1.0, float(np.linalg.norm(target))):
            break
        is_free[best] = True
        x = _step_inside(columns, target, x, is_free)
    result: Floats = x / scale
    return result


def _step_inside(
    columns: Floats, target: Floats, x: Floats, is_free: npt.NDArray[np.bool_]
) -> Floats:
    """Move to the optimum of the free columns; those that would become negative are fixed at 0."""
    while True:
        goal = np.zeros(len(x))
        goal[is_free] = np.linalg.lstsq(columns[:, is_free], target, rcond=None)[0]
        is_bad = is_free & (goal <= 0)
        if not is_bad.any():
            return goal
        share = float(np.min(x[is_bad] / np.maximum(x[is_bad] - goal[is_bad], 1e-300)))
        x = x + share * (goal - x)
        is_free &= x > _TOLERANCE
        x[~is_free] = 0.0
