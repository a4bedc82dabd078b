"""Estimates output lengths from finished and running outputs; arrays only.

Short outputs finish first, so finished ones alone are biased. An output that is running, or that
was cut off by its bound, counts as longer than it is now (censored; the product-limit estimate of
Kaplan and Meier 1958). Estimates order work and predict its end; they never limit a row.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Bools, Floats, Ints
from raybatch.records.types import TokenLengths

# one bin per length below _EXACT, then _PER_DOUBLING bins per doubling
_EXACT, _PER_DOUBLING = 32, 16
# longer outputs share the last bin; 2 ** 20 tokens
_NUM_BINS = _EXACT + 15 * _PER_DOUBLING
# indices of count rows
_CUT, _RUNNING = 3, 4
# samples per bin, each for an equal share
_PER_BIN = 4
# outputs that a sketch needs before it is used
_MIN_ROWS = 32
# bounds memory to a few megabytes
_MAX_KEYS = 512
# offset above all powers of two, for rows with an expected length
_PLANNED = 64
# outputs in a sketch from which older ones are halved: lengths may change over a run
_MAX_ROWS = 8192

# client, kind of key (group, band or all), and its value
_Key = tuple[str, str, int]


def product_limit(num_ended: npt.ArrayLike, num_at_risk: npt.ArrayLike) -> Floats:
    """Return the survival function, float64 [K + 1]: shares of outputs longer than each length.

    Entry 0 is before all lengths, so it is 1. Of `num_at_risk[k]` outputs that reached length k,
    `num_ended[k]` ended with it.
    """
    shares = 1 - np.asarray(num_ended, float) / np.asarray(num_at_risk, float)
    return np.concatenate(([1.0], np.cumprod(shares)))


class LengthDistribution:
    """A distribution of output lengths; `longer` is the result of `product_limit`.

    An output that is longer than all `lengths` is assumed to end at `beyond` or at twice its
    current length, whichever is more, and at most at its `max_tokens`.

    Args:
        lengths: output lengths [K], ascending, read only.
    """

    def __init__(self, lengths: Ints | Floats, longer: Floats, beyond: float = np.inf) -> None:
        self._lengths, self._longer, self._beyond = lengths, longer, beyond
        weighted = lengths * -np.diff(longer)
        # entry i sums index i and beyond
        self._tail = np.append(np.cumsum(weighted[::-1])[::-1], 0.0)

    def expect(self, num_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike) -> Floats:
        """Return the expected final length of outputs that have `num_tokens`, float64 [n].

        It is at least one token more and at most `max_tokens`, and does not decrease with tokens.
        """
        now, bound, first = self._places(num_tokens, max_tokens)
        # lengths from here on are clipped to the bound
        cut = np.maximum(first, np.searchsorted(self._lengths, bound))
        total = self._tail[first] - self._tail[cut] + self._longer[cut] * bound
        alive = self._longer[first]
        mean = np.divide(total, alive, out=bound.copy(), where=alive > 0)
        bounded: Floats = np.clip(mean, np.minimum(now + 1, bound), bound)
        return bounded

    def quantiles(
        self, shares: npt.ArrayLike, num_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike
    ) -> Floats:
        """Return quantiles of final lengths, at most `max_tokens`: float64 [n, shares].

        They are those of n outputs that have `num_tokens` so far.
        """
        _, bound, first = self._places(num_tokens, max_tokens)
        left = self._longer[first][:, None] * (1 - np.asarray(shares, float))
        # tolerate rounding in sums
        place = np.searchsorted(-self._longer[1:], -left - 1e-12)
        reached = np.append(self._lengths, np.inf)[np.maximum(place, first[:, None])]
        bounded: Floats = np.minimum(reached, bound[:, None])
        return bounded

    def _places(
        self, num_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike
    ) -> tuple[Floats, Floats, Ints]:
        """Return current tokens, upper bounds, and the index of the first longer length."""
        now, bound = np.asarray(num_tokens, float), np.asarray(max_tokens, float)
        first = np.searchsorted(self._lengths, now, side="right")
        return now, np.minimum(bound, np.maximum(self._beyond, 2 * now)), first

    def sample(self, size: int, max_tokens: int) -> TokenLengths:
        """Return `size` ascending lengths that each represent an equal share of new outputs."""
        shares = (np.arange(size) + 0.5) / size
        of_all = self.quantiles(shares, np.zeros(1), np.array([max_tokens]))[0]
        return tuple(of_all.astype(int).tolist())


@dataclass(frozen=True, eq=False, slots=True)
class Outputs:
    """What n outputs add to the counts of a `LengthSketch`.

    Several sketches count the same outputs, whose bins are computed here once.
    """

    _places: Ints  # [n, k]
    _numbers: Floats  # [n, k]
    _changes: Ints  # [n]

    @classmethod
    def ended(cls, lengths: Ints, is_cut: Bools, before: Ints) -> Self:
        """Return the changes by n finished outputs of these lengths.

        Args:
            is_cut: whether each was cut off by a bound.
            before: tokens of each as last recorded by `running`; 0 if never.
        """
        bins, ran = _bins(np.stack((lengths, before)))
        more = np.where(is_cut, 0, lengths - _FIRST[bins])
        # cut-off outputs count only in their own row
        first = bins + _NUM_BINS * np.where(is_cut, _CUT, 0)
        others = (bins + _NUM_BINS, bins + 2 * _NUM_BINS, ran + _RUNNING * _NUM_BINS)
        has_run = before > 0
        numbers = (np.ones(len(bins)), more, more * more, np.where(has_run, -1.0, 0.0))
        return cls(np.stack((first, *others), axis=1), np.stack(numbers, axis=1), 1 + has_run)

    @classmethod
    def running(cls, before: Ints, now: Ints) -> Self:
        """Return the changes by n running outputs: tokens as last recorded (0: never), and now."""
        bins = _bins(np.stack((now, before), axis=1))
        is_known = np.stack((now > 0, before > 0), axis=1)
        return cls(
            bins + _RUNNING * _NUM_BINS,
            np.where(is_known, np.array([1.0, -1.0]), 0.0),
            np.ones(len(now), np.int64),
        )

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_changes(self) -> int:
        return int(self._changes.sum())

    def take(self, at: npt.NDArray[np.integer[Any]]) -> "Outputs":
        """Return the changes by some of the outputs, given by distinct indices."""
        if len(at) == len(self):
            return self
        return Outputs(self._places[at], self._numbers[at], self._changes[at])

    def add_to(self, counts: npt.NDArray[np.float64]) -> None:
        """Add the changes to the counts of a sketch, [5, bins], in place."""
        np.add.at(counts.reshape(-1), self._places.ravel(), self._numbers.ravel())


class LengthSketch:
    """Sketch of output lengths with fixed bins, in bounded memory.

    Quantiles are exact up to 32 tokens and within 1/16 beyond. The bins are those of a DDSketch
    (arXiv:1908.10693). Sketches with free centroids (tdigest, datasketches) support neither running
    outputs nor decay; with fixed bins both are sums.
    """

    def __init__(self) -> None:
        # per bin: finished outputs; sums of their tokens beyond the bin's first length, and of the
        # squares of these; cut-off outputs; running outputs
        self._counts = np.zeros((5, _NUM_BINS))
        self._ended, self._more, self._squares, self._cut, self._running = self._counts
        self._num_rows = 0.0
        # rows added since the distribution was computed
        self._num_new, self._made = 0, LengthDistribution(np.zeros(0), np.ones(1))

    @property
    def num_rows(self) -> float:
        """Number of finished and cut-off outputs; older ones count less."""
        return self._num_rows

    def note(self, outputs: "Outputs") -> None:
        """Add finished outputs; cut-off ones count as longer than they are (censored)."""
        self.note_running(outputs)
        self._num_rows += len(outputs)
        if self._num_rows > _MAX_ROWS:
            self._counts[:_RUNNING] /= 2
            self._num_rows = float(self._ended.sum() + self._cut.sum())

    def note_running(self, outputs: "Outputs") -> None:
        """Update the tokens of running outputs."""
        outputs.add_to(self._counts)
        self._num_new += outputs.num_changes

    def distribution(self) -> LengthDistribution:
        """Return the distribution of lengths, cached until 1/16 of the rows is new. O(bins)."""
        if self._num_new > self.num_rows / 16:
            self._made, self._num_new = self._estimate(), 0
        return self._made

    def _estimate(self) -> LengthDistribution:
        # a key that was dropped and added again may miss outputs that ran before
        cut = self._cut + np.maximum(self._running, 0)
        # cut-off outputs are at risk for half of their bin on average, in bins of one length fully
        beyond = _sums_from(self._ended) + _sums_from(cut) - cut + cut * _AT_RISK
        filled = np.flatnonzero(self._ended > 0)
        longer = product_limit(self._ended[filled], beyond[filled])
        more = self._more[filled] / self._ended[filled]
        spread = np.sqrt(np.maximum(3 * (self._squares[filled] / self._ended[filled] - more**2), 0))
        # spread evenly with the variance of the bin, so that equal outputs stay one length
        places = (2 * np.arange(_PER_BIN) + 1) / _PER_BIN - 1
        last = np.diff(_FIRST)[filled, None] - 1
        inside = np.clip(np.rint(more[:, None] + spread[:, None] * places), 0, last)
        lengths = _FIRST[filled, None] + inside
        seen = np.flatnonzero(self._ended + cut > 0)
        beyond = 2.0 * _FIRST[seen[-1] + 1] if len(seen) else np.inf
        parts = np.arange(1, _PER_BIN + 1) / _PER_BIN
        inner = longer[:-1, None] + np.diff(longer)[:, None] * parts
        return LengthDistribution(lengths.ravel(), np.concatenate(([1.0], inner.ravel())), beyond)


@dataclass(frozen=True, kw_only=True, eq=False)
class RowKinds:
    """Properties of one client's rows that predict their lengths.

    Args:
        bands: int64 [n], see `bands`.
        groups: int64 [n], prefix groups; below 0 for none.
    """

    client: str
    bands: Ints
    groups: Ints

    def take(self, at: npt.NDArray[np.integer[Any]]) -> "RowKinds":
        return RowKinds(client=self.client, bands=self.bands[at], groups=self.groups[at])

    @classmethod
    def joined(cls, kinds: Sequence[Self]) -> Self:
        """Concatenate rows of one client; at least one item."""
        bands, groups = (
            np.concatenate([getattr(of, name) for of in kinds]) for name in ("bands", "groups")
        )
        return cls(client=kinds[0].client, bands=bands, groups=groups)

    @cached_property
    def by_key(self) -> list[tuple[_Key, Ints]]:
        """Return (key of a sketch, indices of its rows) pairs, the most specific keys first."""
        keys: list[tuple[_Key, Ints]] = []
        for kind, labels in (("group", self.groups), ("band", self.bands)):
            for label, at in _places_of(labels):
                if kind == "band" or label >= 0:
                    keys.append(((self.client, kind, label), at))
        return [*keys, ((self.client, "all", 0), np.arange(len(self.bands)))]


class LengthModel:
    """Estimates lengths from sketches by prefix group, by band, and by client.

    A row is estimated by the first of its sketches with enough rows. The least recently used keys
    are dropped beyond a limit.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        # least recently used first
        self._sketches: dict[_Key, LengthSketch] = {}

    def __len__(self) -> int:
        return len(self._sketches)

    def num_rows(self, client: str) -> float:
        """Return how many output lengths of a client are known; old ones count less than 1."""
        sketch = self._sketches.get((client, "all", 0))
        return 0.0 if sketch is None else sketch.num_rows

    def note(self, rows: RowKinds, lengths: Ints, is_cut: Bools, before: Ints) -> None:
        """Add finished outputs, see `Outputs.ended`."""
        outputs = Outputs.ended(lengths, is_cut, before)
        for key, at in rows.by_key:
            self._sketch(key).note(outputs.take(at))

    def note_running(self, rows: RowKinds, before: Ints, now: Ints) -> None:
        """Update running outputs, see `Outputs.running`."""
        outputs = Outputs.running(before, now)
        for key, at in rows.by_key:
            self._sketch(key).note_running(outputs.take(at))

    def distributions(self, rows: RowKinds) -> Iterator[tuple[LengthDistribution, Ints]]:
        """Yield (distribution, indices of its rows) pairs; rows without one are left out.

        Complexity: O(rows log rows + distributions).
        """
        is_open, num_open = np.ones(len(rows.bands), np.bool_), len(rows.bands)
        for key, at in rows.by_key:
            sketch = self._sketches.get(key)
            if sketch is None or sketch.num_rows < _MIN_ROWS:
                continue
            its = at[is_open[at]]
            if len(its):
                is_open[its] = False
                num_open -= len(its)
                yield sketch.distribution(), its
            if not num_open:
                return

    def expect(self, rows: RowKinds, num_tokens: Ints | None, max_tokens: Ints) -> Floats:
        """Return the expected final length of each row, float64 [n]; NaN if unknown.

        `num_tokens` are those generated so far; None for rows that have not begun, which are fast
        if most bounds are equal.
        """
        expected = np.full(len(max_tokens), np.nan)
        for distribution, at in self.distributions(rows):
            bounds = max_tokens[at]
            if num_tokens is None and (bounds == bounds[0]).all():
                bounds = bounds[:1]
            now = np.zeros(len(bounds)) if num_tokens is None else num_tokens[at]
            expected[at] = distribution.expect(now, bounds)
        return expected

    def _sketch(self, key: _Key) -> LengthSketch:
        sketch = self._sketches.pop(key, None) or LengthSketch()
        self._sketches[key] = sketch
        if len(self._sketches) > self._max_keys:
            del self._sketches[next(iter(self._sketches))]
        return sketch


def bands(max_tokens: Ints, expected: Ints, is_expected: Bools) -> Ints:
    """Return the band of each row, int64 [n]; rows of one band have similar lengths.

    It is the power of two of the expected length, or of `max_tokens` for a row that has none; rows
    with an expected length have separate bands.
    """
    known = np.where(is_expected, expected, max_tokens)
    powers = np.log2(np.maximum(known, 1)).astype(np.int64)
    return np.where(is_expected, powers + _PLANNED, powers)


def _places_of(labels: Ints) -> list[tuple[int, Ints]]:
    """Return each label with its indices; fast if all labels are equal."""
    if not len(labels) or (labels == labels[0]).all():
        return [(label, np.arange(len(labels))) for label in labels[:1].tolist()]
    found, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return list(zip(found.tolist(), np.split(which.argsort(), np.cumsum(counts)[:-1]), strict=True))


def _bins(lengths: Ints) -> Ints:
    """Return the bin of each length; the bins of a doubling are equally wide."""
    large = np.maximum(lengths, _EXACT)
    doublings = np.frexp(large.astype(float))[1] - 6
    steps = (large >> (doublings + 1)) - _PER_DOUBLING
    bins = np.where(lengths < _EXACT, lengths, _EXACT + _PER_DOUBLING * doublings + steps)
    return np.clip(bins, 0, _NUM_BINS - 1).astype(np.int64)


def _sums_from(counts: Floats) -> Floats:
    return np.cumsum(counts[::-1])[::-1]


def _first_of(bins: Ints) -> Ints:
    doublings, steps = np.divmod(np.maximum(bins - _EXACT, 0), _PER_DOUBLING)
    return np.where(bins < _EXACT, bins, (_PER_DOUBLING + steps) << (doublings + 1))


# first length of each bin, and of one beyond the last
_FIRST = _first_of(np.arange(_NUM_BINS + 1))
_AT_RISK = (np.diff(_FIRST) + 1) / (2 * np.diff(_FIRST))
