"""Expected output lengths: from a column, from `max_tokens`, or from a probe of some rows.

An estimate orders work and predicts its end; it is never a limit of what a row may generate.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.errors import ConfigError
from raybatch.prefix.histogram import Histogram
from raybatch.prefix.load import Floats, Ints

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)


def expected_lengths(max_tokens: Ints, column: Floats | None = None) -> Floats:
    """Return the output length to expect of each row, at least 1 and at most its `max_tokens`.

    Args:
        column: float [R], what the user expects; NaN where nothing is known, which counts as
            `max_tokens`, as does a column that is None.
    """
    limit = max_tokens.astype(float)
    if column is None:
        return limit
    if column.shape != limit.shape:
        raise ConfigError(f"{len(column)} expected lengths for {len(limit)} rows")
    is_wrong = (column < 0) | np.isinf(column)
    if is_wrong.any():
        row = int(np.argmax(is_wrong))
        raise ConfigError(
            f"the expected output length of row {row} is {column[row]}; give a number of tokens, "
            "or null where it is not known"
        )
    return np.clip(np.where(np.isnan(column), limit, column), 1, limit)


def choose_probe(group_id: Ints, strata: Ints, *, fraction: float = 0.01, seed: int = 0) -> Ints:
    """Choose the rows whose outputs are generated first, to learn how long outputs are.

    Every stratum gives its share, rounded up, and so at least one row. Inside a stratum the rows
    are spread evenly over groups sorted by id, at random inside a group. O(R log R).

    Args:
        strata: int64 [R], what sets rows apart that may differ in length: their template, model or
            adapter, a band of `max_tokens`.

    Returns:
        int64 [n], row positions in rising order.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"a probe of {fraction} of the rows; the share is above 0 and at most 1")
    random = np.random.default_rng(seed)
    by_stratum = np.lexsort((random.random(len(strata)), group_id, strata))
    _, first, count = np.unique(strata[by_stratum], return_index=True, return_counts=True)
    num_chosen = np.ceil(fraction * count).astype(np.int64)
    stride = count / np.maximum(num_chosen, 1)
    start = random.random(len(count))
    nth = np.arange(int(num_chosen.sum())) - np.repeat(
        np.cumsum(num_chosen) - num_chosen, num_chosen
    )
    within = np.floor((nth + np.repeat(start, num_chosen)) * np.repeat(stride, num_chosen))
    within = np.minimum(within.astype(np.int64), np.repeat(count, num_chosen) - 1)
    return np.sort(by_stratum[np.repeat(first, num_chosen) + within])


def estimate_from_probe(probe_rows: Ints, lengths: Floats, group_id: Ints, strata: Ints) -> Floats:
    """Return float64 [R]: the mean length of a row's group in the probe, else of its stratum.

    A row without either gets the mean of the whole probe, a row of the probe its own length.

    Args:
        probe_rows: int64 [n], distinct rows that were generated.

    Source: BlendServe, arXiv:2411.16102, section 5; strata in place of neighbouring subtrees.
    """
    if not len(probe_rows):
        raise ConfigError("no output lengths can be estimated from a probe without rows")
    estimate = np.full(len(group_id), lengths.mean())
    for label in (strata, group_id):
        mean, is_known = _means(label, label[probe_rows], lengths)
        if label is group_id:
            is_known &= group_id >= 0
        estimate[is_known] = mean[is_known]
    estimate[probe_rows] = lengths
    return estimate


def _means(label: Ints, seen: Ints, lengths: Floats) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """Return for each row the mean length of its label's probe rows, and whether there are any."""
    known, which = np.unique(seen, return_inverse=True)
    mean = np.bincount(which, weights=lengths) / np.bincount(which)
    at = np.minimum(np.searchsorted(known, label), len(known) - 1)
    return mean[at], known[at] == label


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBands:
    """How output lengths spread.

    Args:
        tokens: length that this share of the rows does not exceed.
        top_tenth: share of all tokens that the longest tenth of the rows generates.
    """

    quantiles: tuple[float, ...]
    tokens: tuple[float, ...]
    mean: float
    top_tenth: float


def length_bands(lengths: Floats, quantiles: tuple[float, ...] = QUANTILES) -> LengthBands:
    """Summarise expected or measured output lengths."""
    if not len(lengths):
        raise ConfigError("output lengths of no rows have no bands")
    longest = np.sort(lengths)[-max(len(lengths) // 10, 1) :]
    return LengthBands(
        quantiles=quantiles,
        tokens=tuple(float(value) for value in np.quantile(lengths, quantiles)),
        mean=float(lengths.mean()),
        top_tenth=float(longest.sum() / max(lengths.sum(), 1)),
    )


def histogram_bands(lengths: Histogram, quantiles: tuple[float, ...] = QUANTILES) -> LengthBands:
    """Summarise output lengths of which only a histogram is known."""
    if not lengths.num_values:
        raise ConfigError("output lengths of no rows have no bands")
    edges, counts = np.array(lengths.edges()), np.array(lengths.counts)
    tokens = ((edges[:-1] + edges[1:] - 1) / 2).clip(lengths.lowest, lengths.highest)
    num_longest = max(lengths.num_values // 10, 1)
    longest = np.diff(np.minimum(np.cumsum(counts[::-1]), num_longest), prepend=0)
    return LengthBands(
        quantiles=quantiles,
        tokens=tuple(float(lengths.quantile(share)) for share in quantiles),
        mean=lengths.mean,
        top_tenth=float((longest * tokens[::-1]).sum() / max((counts * tokens).sum(), 1)),
    )
