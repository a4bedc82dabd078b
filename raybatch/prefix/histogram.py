"""Histograms of whole numbers in fixed bins, so that histograms of parts add up to the whole."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.records.arrays import Floats, Ints

# smaller numbers have one bin each; from this number on, each doubling has four bins
_EXACT = 8
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


@dataclass(frozen=True, kw_only=True, slots=True)
class Histogram:
    """Counts whole numbers from 0 in bins that begin at 0, 1, ..., 8, 10, 12, 14, 16, 20, ..."""

    counts: tuple[int, ...] = ()  # numbers in each bin, without the empty bins at the end
    total: int = 0
    lowest: int = 0
    highest: int = 0

    @classmethod
    def of(cls, values: Ints | Floats) -> "Histogram":
        """Count `values`, at least 0 each; fractions count with the nearest whole number."""
        if not len(values):
            return cls()
        numbers = np.rint(values).astype(np.int64)
        large = np.maximum(numbers, _EXACT)
        doublings = np.frexp(large.astype(float))[1] - 1
        steps = (large >> (doublings - 2)) - 4
        bins = np.where(numbers < _EXACT, numbers, _EXACT + 4 * (doublings - 3) + steps)
        return cls(
            counts=tuple(np.bincount(bins).tolist()),
            total=int(numbers.sum()),
            lowest=int(numbers.min()),
            highest=int(numbers.max()),
        )

    @classmethod
    def of_bins(cls, counts: tuple[int, ...], total: int) -> "Histogram":
        """Return a histogram from the counts of bins and the sum of their numbers alone.

        `lowest` and `highest` are the outer ends of the first and the last filled bin.
        """
        filled = [index for index, number in enumerate(counts) if number]
        if not filled:
            return cls()
        return cls(
            counts=counts, total=total, lowest=_first(filled[0]), highest=_first(filled[-1] + 1) - 1
        )

    @classmethod
    def merge(cls, parts: Sequence["Histogram"]) -> "Histogram":
        filled = [part for part in parts if part.counts]
        if not filled:
            return cls()
        counts = np.zeros(max(len(part.counts) for part in filled), np.int64)
        for part in filled:
            counts[: len(part.counts)] += part.counts
        return cls(
            counts=tuple(counts.tolist()),
            total=sum(part.total for part in filled),
            lowest=min(part.lowest for part in filled),
            highest=max(part.highest for part in filled),
        )

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    @property
    def mean(self) -> float:
        return self.total / max(1, self.num_values)

    def edges(self) -> list[int]:
        """Return the first number of each bin, and of the bin after the last."""
        return [_first(index) for index in range(len(self.counts) + 1)]

    def quantile(self, share: float) -> float:
        """Return the value that this share of numbers does not exceed, interpolated in its bin."""
        if not self.counts:
            return 0.0
        sums = np.concatenate([[0], np.cumsum(self.counts)])
        value = float(np.interp(share * sums[-1], sums, self.edges()))
        return min(max(value, self.lowest), self.highest)


def _first(index: int) -> int:
    if index < _EXACT:
        return index
    doublings, steps = divmod(index - _EXACT, 4)
    return (4 + steps) << (doublings + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBands:
    """Quantiles and mean of output lengths; `top_tenth` is the token share of the longest tenth."""

    quantiles: tuple[float, ...]
    tokens: tuple[float, ...]  # length that this share of the rows does not exceed
    mean: float
    top_tenth: float


def length_bands(lengths: Floats) -> LengthBands:
    assert len(lengths), "length bands need at least one row"
    longest = np.sort(lengths)[-max(len(lengths) // 10, 1) :]
    return LengthBands(
        quantiles=QUANTILES,
        tokens=tuple(float(value) for value in np.quantile(lengths, QUANTILES)),
        mean=float(lengths.mean()),
        top_tenth=float(longest.sum() / max(lengths.sum(), 1)),
    )


def histogram_bands(lengths: Histogram) -> LengthBands:
    assert lengths.num_values, "length bands need at least one row"
    edges, counts = np.array(lengths.edges()), np.array(lengths.counts)
    tokens = ((edges[:-1] + edges[1:] - 1) / 2).clip(lengths.lowest, lengths.highest)
    num_longest = max(lengths.num_values // 10, 1)
    longest = np.diff(np.minimum(np.cumsum(counts[::-1]), num_longest), prepend=0)
    return LengthBands(
        quantiles=QUANTILES,
        tokens=tuple(float(lengths.quantile(share)) for share in QUANTILES),
        mean=lengths.mean,
        top_tenth=float((longest * tokens[::-1]).sum() / max((counts * tokens).sum(), 1)),
    )
