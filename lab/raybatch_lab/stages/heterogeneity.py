"""How much longer attention takes for a batch of unlike lengths, as it was measured."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError, range_text
from raybatch.records.arrays import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class MixPoint:
    """Factor on the time of attention at one variation of lengths, for the same total of tokens."""

    variation: float  # standard deviation of lengths over their mean
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MixCurve:
    """How much longer decode attention takes for a batch of unequal lengths than of equal ones.

    Args:
        points: factors by ascending variation of lengths, the first at variation 0.

    Source: CascadeInfer, section 2.3: 1.1 to 2.1 on an H100.
    """

    points: tuple[MixPoint, ...]

    def __post_init__(self) -> None:
        found = [point.variation for point in self.points]
        if not found or found[0] != 0 or sorted(set(found)) != found:
            raise ConfigError(f"the variations of a curve must ascend from 0, got {found}")
        for point in self.points:
            if not 0 < point.factor < float("inf"):
                allowed = range_text("above 0", point.factor)
                raise ConfigError(f"the factors of a curve must be {allowed}, got {point.factor}")

    @classmethod
    def of_seconds(cls, variations: Sequence[float], seconds: Sequence[float]) -> Self:
        """Return the curve of measured seconds at each variation, for the same total of tokens.

        The first variation must be 0; its seconds get the factor 1.
        """
        pairs = zip(variations, seconds, strict=True)
        return cls(points=tuple(MixPoint(variation=v, factor=s / seconds[0]) for v, s in pairs))

    def at(self, variation: npt.ArrayLike) -> Floats:
        """Return interpolated factors at variations; beyond the last point, that point's factor."""
        known = [point.variation for point in self.points]
        factors = [point.factor for point in self.points]
        return np.asarray(np.interp(np.asarray(variation, float), known, factors), float)


# lengths do not matter
FLAT = MixCurve(points=(MixPoint(variation=0.0, factor=1.0),))


def variation(rows: Floats, total: Floats, squares: Floats) -> Floats:
    """Return the coefficient of variation of the lengths of each batch; 0 if it has no rows.

    All arrays have the same shape, with one entry per batch.

    Args:
        rows: number of rows.
        total: sum of their lengths.
        squares: sum of the squares of their lengths.
    """
    ratio = np.divide(rows * squares, total**2, out=np.ones_like(total), where=total > 0)
    # rounding alone may take it below 0
    return np.asarray(np.sqrt(np.maximum(ratio - 1.0, 0.0)), float)
