"""How long outputs are, learnt from those that ended and from those that still run; arrays alone.

Short outputs end first, so what has ended tells too little. An output that runs, or that its bound
cut off, therefore counts as one that is longer than it is now (the product-limit estimate of
survival analysis, Kaplan and Meier 1958). An estimate orders work and predicts its end; it is never
a limit of what a row may generate.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Bools, Floats, Ints
from raybatch.records.types import TokenLengths

# below: a bin for each length; from here on so many bins for each doubling
_EXACT, _PER_DOUBLING = 32, 16
# longer outputs share the last bin; 2 ** 20 tokens
_NUM_BINS = _EXACT + 15 * _PER_DOUBLING
# rows of counts
_CUT, _RUNNING = 3, 4
# lengths that stand for a bin, each of an equal share of it
_PER_BIN = 4
# that a sketch has to know before it is believed
_MIN_ROWS = 32
# the bins of so many fill a few megabytes
_MAX_KEYS = 512
# above all powers of two
_PLANNED = 64
# of a sketch, from which on older outputs count half: what rows are like may change over a run
_MAX_ROWS = 8192

# client, what rows have in common, and which of it
_Key = tuple[str, str, int]


def product_limit(num_ended: npt.ArrayLike, num_at_risk: npt.ArrayLike) -> Floats:
    """Return the share of outputs that is longer, float64 [K + 1], first before all lengths.

    Of outputs that came to the k-th length, `num_at_risk[k]`, `num_ended[k]` ended with it.
    """
    shares = 1 - np.asarray(num_ended, float) / np.asarray(num_at_risk, float)
    return np.concatenate(([1.0], np.cumprod(shares)))


class LengthDistribution:
    """A distribution of output lengths; `longer` is what `product_limit` returns.

    What is longer than all of them is taken to reach its bound, or `beyond`, or twice what it is.

    Args:
        lengths: [K], ascending, read only.
    """

    def __init__(self, lengths: Ints | Floats, longer: Floats, beyond: float = np.inf) -> None:
        self._lengths, self._longer, self._beyond = lengths, longer, beyond
        weighted = lengths * -np.diff(longer)
        # entry i sums what is at index i and beyond
        self._tail = np.append(np.cumsum(weighted[::-1])[::-1], 0.0)

    def expect(self, num_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike) -> Floats:
        """Return the mean final length of outputs that have `num_tokens` now, float64 [n].

        It is at least one token more, and at most `max_tokens`; it does not fall as tokens come.
        """
        now, bound, first = self._places(num_tokens, max_tokens)
        # lengths from here on are cut to the bound
        cut = np.maximum(first, np.searchsorted(self._lengths, bound))
        total = self._tail[first] - self._tail[cut] + self._longer[cut] * bound
        alive = self._longer[first]
        mean = np.divide(total, alive, out=bound.copy(), where=alive > 0)
        bounded: Floats = np.clip(mean, np.minimum(now + 1, bound), bound)
        return bounded

    def quantiles(
        self, shares: npt.ArrayLike, num_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike
    ) -> Floats:
        """Return the lengths that these shares of the outputs do not exceed, float64 [n, shares].

        Like `expect`, they are of outputs that have `num_tokens` now.
        """
        _, bound, first = self._places(num_tokens, max_tokens)
        left = self._longer[first][:, None] * (1 - np.asarray(shares, float))
        # sums that are equal but for rounding are equal
        place = np.searchsorted(-self._longer[1:], -left - 1e-12)
        reached = np.append(self._lengths, np.inf)[np.maximum(place, first[:, None])]
        bounded: Floats = np.minimum(reached, bound[:, None])
        return bounded

    def _places(
        self, num_tokens: npt.ArrayLike, max_tokens: npt.ArrayLike
    ) -> tuple[Floats, Floats, Ints]:
        """Return tokens now, what is reached at most, and the first length beyond the tokens."""
        now, bound = np.asarray(num_tokens, float), np.asarray(max_tokens, float)
        first = np.searchsorted(self._lengths, now, side="right")
        return now, np.minimum(bound, np.maximum(self._beyond, 2 * now)), first

    def sample(self, size: int, max_tokens: int) -> TokenLengths:
        """Return lengths, ascending, that each stand for an equal share of the outputs."""
        shares = (np.arange(size) + 0.5) / size
        of_all = self.quantiles(shares, np.zeros(1), np.array([max_tokens]))[0]
        return tuple(of_all.astype(int).tolist())


@dataclass(frozen=True, eq=False, slots=True)
class Outputs:
    """What outputs add to the counts of a sketch: places in it, and numbers, a row for each output.

    Several sketches count the same outputs, whose bins are found once.
    """

    _places: Ints  # [n, k]
    _numbers: Floats  # [n, k]
    _changes: Ints  # [n]

    @classmethod
    def ended(cls, lengths: Ints, is_cut: Bools, before: Ints) -> Self:
        """Return outputs that ended, [n].

        Args:
            is_cut: a bound cut them off.
            before: tokens that were known of them while they ran, 0 for none.
        """
        bins, ran = _bins(np.stack((lengths, before)))
        more = np.where(is_cut, 0, lengths - _FIRST[bins])
        # what is cut off counts in the row of its own alone
        first = bins + _NUM_BINS * np.where(is_cut, _CUT, 0)
        others = (bins + _NUM_BINS, bins + 2 * _NUM_BINS, ran + _RUNNING * _NUM_BINS)
        has_run = before > 0
        numbers = (np.ones(len(bins)), more, more * more, np.where(has_run, -1.0, 0.0))
        return cls(np.stack((first, *others), axis=1), np.stack(numbers, axis=1), 1 + has_run)

    @classmethod
    def running(cls, before: Ints, now: Ints) -> Self:
        """Return outputs that run on, [n], whose tokens were others before; 0 is of none known."""
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
        """Return those at some places, each once."""
        if len(at) == len(self):
            return self
        return Outputs(self._places[at], self._numbers[at], self._changes[at])

    def add_to(self, counts: npt.NDArray[np.float64]) -> None:
        """Add them to the counts of a sketch, [5, bins], modified in place."""
        np.add.at(counts.reshape(-1), self._places.ravel(), self._numbers.ravel())


class LengthSketch:
    """Output lengths in a fixed number of bins, so that memory is bounded and sketches add up.

    A quantile lies in the bin of the exact one: it is exact up to 32 tokens and within 1/16 beyond.
    The bins are those of a DDSketch (arXiv:1908.10693). Digests with free centroids, as of the
    packages tdigest and datasketches, know neither outputs that still run nor older ones that count
    less; with fixed bins both are sums.
    """

    def __init__(self) -> None:
        # in each bin: outputs that ended, the sums of their tokens beyond the first of the bin and
        # of the squares of these, outputs that a bound cut off, outputs that run
        self._counts = np.zeros((5, _NUM_BINS))
        self._ended, self._more, self._squares, self._cut, self._running = self._counts
        self._num_rows = 0.0
        # rows noted since the distribution was made
        self._num_new, self._made = 0, LengthDistribution(np.zeros(0), np.ones(1))

    @property
    def num_rows(self) -> float:
        """Outputs that ended or were cut off by their bounds; older ones may count as a part."""
        return self._num_rows

    def note(self, outputs: "Outputs") -> None:
        """Count outputs that ended; those that a bound cut off would have been longer."""
        self.note_running(outputs)
        self._num_rows += len(outputs)
        if self._num_rows > _MAX_ROWS:
            self._counts[:_RUNNING] /= 2
            self._num_rows = float(self._ended.sum() + self._cut.sum())

    def note_running(self, outputs: "Outputs") -> None:
        """Replace tokens of running outputs."""
        outputs.add_to(self._counts)
        self._num_new += outputs.num_changes

    def merge(self, other: "LengthSketch") -> None:
        """Add all that another sketch has counted."""
        self._counts += other._counts
        self._num_rows += other._num_rows
        self._num_new += 1 + int(self.num_rows)

    def distribution(self) -> LengthDistribution:
        """Return the distribution now; it may lack a sixteenth of the rows. O(bins)."""
        if self._num_new > self.num_rows / 16:
            self._made, self._num_new = self._estimate(), 0
        return self._made

    def _estimate(self) -> LengthDistribution:
        # one that was forgotten and is known again may lack some that ran before
        cut = self._cut + np.maximum(self._running, 0)
        # outputs of the same bin were at risk in half of it on average, and all in a bin of one
        beyond = _sums_from(self._ended) + _sums_from(cut) - cut + cut * _AT_RISK
        filled = np.flatnonzero(self._ended > 0)
        longer = product_limit(self._ended[filled], beyond[filled])
        more = self._more[filled] / self._ended[filled]
        spread = np.sqrt(np.maximum(3 * (self._squares[filled] / self._ended[filled] - more**2), 0))
        # even, and as wide as the outputs of the bin: equal ones stay one length
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
    """What rows of one client are known by before they run.

    Args:
        bands: int64 [n], see `bands`.
        groups: int64 [n], below 0 for a row that is alone.
    """

    client: str
    bands: Ints
    groups: Ints

    def take(self, at: npt.NDArray[np.integer[Any]]) -> "RowKinds":
        return RowKinds(client=self.client, bands=self.bands[at], groups=self.groups[at])

    @classmethod
    def joined(cls, kinds: Sequence[Self]) -> Self:
        """Return rows of one client one after the other; there must be some."""
        bands, groups = (
            np.concatenate([getattr(of, name) for of in kinds]) for name in ("bands", "groups")
        )
        return cls(client=kinds[0].client, bands=bands, groups=groups)

    @cached_property
    def by_key(self) -> list[tuple[_Key, Ints]]:
        """The keys of these rows with the places of each, the most specific first."""
        keys: list[tuple[_Key, Ints]] = []
        for kind, labels in (("group", self.groups), ("band", self.bands)):
            for label, at in _places_of(labels):
                if kind == "band" or label >= 0:
                    keys.append(((self.client, kind, label), at))
        return [*keys, ((self.client, "all", 0), np.arange(len(self.bands)))]


class LengthModel:
    """Sketches by what rows have in common: client and prefix group, client and band, client alone.

    A row is estimated by the first of its sketches with enough rows. Of keys that were not used for
    the longest, the oldest are forgotten where there are too many.
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        # the one that was not used for the longest comes first
        self._sketches: dict[_Key, LengthSketch] = {}

    def __len__(self) -> int:
        return len(self._sketches)

    def num_rows(self, client: str) -> float:
        """Return how many outputs of a client were noted, see `LengthSketch.num_rows`."""
        sketch = self._sketches.get((client, "all", 0))
        return 0.0 if sketch is None else sketch.num_rows

    def note(self, rows: RowKinds, lengths: Ints, is_cut: Bools, before: Ints) -> None:
        """Count outputs that ended, see `Outputs.ended`."""
        outputs = Outputs.ended(lengths, is_cut, before)
        for key, at in rows.by_key:
            self._sketch(key).note(outputs.take(at))

    def note_running(self, rows: RowKinds, before: Ints, now: Ints) -> None:
        """Replace tokens of running outputs, see `Outputs.running`."""
        outputs = Outputs.running(before, now)
        for key, at in rows.by_key:
            self._sketch(key).note_running(outputs.take(at))

    def distributions(self, rows: RowKinds) -> Iterator[tuple[LengthDistribution, Ints]]:
        """Yield what is known, each with the places of the rows that it is about, none of others.

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

    def expect(self, rows: RowKinds, num_tokens: Ints, max_tokens: Ints) -> Floats:
        """Return the final length to expect of each row, float64 [n]; NaN where none is known."""
        expected = np.full(len(max_tokens), np.nan)
        for distribution, at in self.distributions(rows):
            expected[at] = distribution.expect(num_tokens[at], max_tokens[at])
        return expected

    def expect_unbegun(self, rows: RowKinds, max_tokens: Ints) -> Floats:
        """Return what `expect` does of rows that have no tokens; most have one bound."""
        expected = np.full(len(max_tokens), np.nan)
        for distribution, at in self.distributions(rows):
            bounds = max_tokens[at]
            bounds = bounds[:1] if (bounds == bounds[0]).all() else bounds
            expected[at] = distribution.expect(np.zeros(len(bounds)), bounds)
        return expected

    def _sketch(self, key: _Key) -> LengthSketch:
        sketch = self._sketches.pop(key, None) or LengthSketch()
        self._sketches[key] = sketch
        if len(self._sketches) > self._max_keys:
            del self._sketches[next(iter(self._sketches))]
        return sketch


def bands(max_tokens: Ints, expected: Ints, is_expected: Bools) -> Ints:
    """Return int64 [n]: the power of two of what a plan expects of a row, else of its bound.

    Rows of which a plan expects something are in bands of their own.
    """
    known = np.where(is_expected, expected, max_tokens)
    powers = np.log2(np.maximum(known, 1)).astype(np.int64)
    return np.where(is_expected, powers + _PLANNED, powers)


def _places_of(labels: Ints) -> list[tuple[int, Ints]]:
    """Return each label with its places; most rows of a client are of one."""
    if not len(labels) or (labels == labels[0]).all():
        return [(label, np.arange(len(labels))) for label in labels[:1].tolist()]
    found, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    return list(zip(found.tolist(), np.split(which.argsort(), np.cumsum(counts)[:-1]), strict=True))


def _bins(lengths: Ints) -> Ints:
    """Return the bin of each length; those of a doubling are equally wide."""
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


# the first length of each bin, and of one beyond the last
_FIRST = _first_of(np.arange(_NUM_BINS + 1))
_AT_RISK = (np.diff(_FIRST) + 1) / (2 * np.diff(_FIRST))
