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
    """One measurement: seconds over those of as many tokens in sequences of one length."""

    variation: float  # standard deviation of lengths over their mean
    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MixCurve:
    """Factors of the time of decode attention over the variation of lengths in its batch.

    Args:
        points: by ascending variation, the first at 0.

    Source: CascadeInfer, section 2.3: 1.1 to 2.1 on an H100.
    """

    points: tuple[MixPoint, ...]

    def __post_init__(self) -> None:
        found = [point.variation for point in self.points]
        if not found or found[0] != 0 or sorted(set(found)) != found:
            raise ConfigError(f"a curve has variations of {found}; they must ascend from 0")
        for point in self.points:
            if not 0 < point.factor < float("inf"):
                allowed = range_text("above 0", point.factor)
                raise ConfigError(f"a curve has a factor of {point.factor}; it must be {allowed}")

    @classmethod
    def of_seconds(cls, variations: Sequence[float], seconds: Sequence[float]) -> Self:
        """Return the curve of times for equal tokens in all, the first those of one length."""
        pairs = zip(variations, seconds, strict=True)
        return cls(points=tuple(MixPoint(variation=v, factor=s / seconds[0]) for v, s in pairs))

    def at(self, variation: npt.ArrayLike) -> Floats:
        """Return factors; beyond the last point that of the last."""
        known = [point.variation for point in self.points]
        factors = [point.factor for point in self.points]
        return np.asarray(np.interp(np.asarray(variation, float), known, factors), float)


# lengths do not matter
FLAT = MixCurve(points=(MixPoint(variation=0.0, factor=1.0),))


def variation(rows: Floats, total: Floats, squares: Floats) -> Floats:
    """Return standard deviations of lengths over their means, by number, sum and sum of squares.

    It is 0 where there are no rows; the arrays have one shape.
    """
    ratio = np.divide(rows * squares, total**2, out=np.ones_like(total), where=total > 0)
    # rounding alone may take it below 0
    return np.asarray(np.sqrt(np.maximum(ratio - 1.0, 0.0)), float)
