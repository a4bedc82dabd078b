"""Extrapolates the savings of a plan over many rows from the first of them.

The more rows are grouped at once, the more they share. The numbers of prefixes seen once and twice
estimate the number of unseen ones.

Source: Colwell et al., Models and estimators linking individual-based and sample-based
rarefaction, extrapolation and comparison of assemblages, 2012 (equations 5, 9 and 18).
"""

from dataclasses import dataclass
from math import exp, lgamma

import numpy as np

from raybatch.prefix.block_keys import BlockKeys

# rows count as sorted if the first half of the sample has fewer distinct keys than this share of
# the number expected in a random half
_RANDOM_SHARE = 0.9
# least number of keys seen twice to extrapolate from
_FEW_PAIRS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class SharingForecast:
    """Prompt tokens of a whole input, and those that engines compute.

    Args:
        waiting_tokens: prompt tokens computed if rows are grouped while they wait.
        planned_tokens: prompt tokens computed if one plan groups all rows.
        is_sorted: whether rows that share a prefix are adjacent, so that both counts are equal.
    """

    prompt_tokens: float
    waiting_tokens: float
    planned_tokens: float
    is_sorted: bool

    @property
    def saved_tokens(self) -> float:
        return max(0.0, self.waiting_tokens - self.planned_tokens)

    @property
    def saved_fraction(self) -> float:
        return self.saved_tokens / max(1.0, self.prompt_tokens)


def forecast_sharing(sample: BlockKeys, num_rows: int, window_rows: int) -> SharingForecast:
    """Forecast an input of `num_rows` from its first rows; `window_rows` of them wait at a time."""
    size = max(1, sample.num_rows)
    tails = float((sample.num_tokens - sample.num_blocks * sample.block_size).sum())
    seen, half = _times_seen(sample), sample.slice(0, size // 2)
    expected = _expected_keys(seen, size, half.num_rows)
    is_sorted = len(np.unique(half.keys)) < _RANDOM_SHARE * expected
    if is_sorted:
        # further rows share nothing with the sample
        window_rows = num_rows = size

    def computed(rows: int) -> float:
        return sample.block_size * _expected_keys(seen, size, rows) + tails * rows / size

    return SharingForecast(
        prompt_tokens=float(sample.num_tokens.sum()) * num_rows / size,
        waiting_tokens=max(1.0, num_rows / window_rows) * computed(min(num_rows, window_rows)),
        planned_tokens=computed(num_rows),
        is_sorted=is_sorted,
    )


def _times_seen(sample: BlockKeys) -> list[dict[int, int]]:
    """Return how many keys were seen once, twice, ..., for each block position in a prompt."""
    _, first, counts = np.unique(sample.keys, return_index=True, return_counts=True)
    row = np.searchsorted(sample.offsets, first, side="right") - 1
    place, base = first - sample.offsets[row], sample.num_rows + 1
    kinds, numbers = np.unique(place * base + counts, return_counts=True)
    seen: list[dict[int, int]] = [{} for _ in range(int(place.max(initial=-1)) + 1)]
    for kind, number in zip(kinds.tolist(), numbers.tolist(), strict=True):
        seen[kind // base][kind % base] = number
    return seen


def _expected_keys(seen: list[dict[int, int]], size: int, num_rows: int) -> float:
    """Return the expected number of distinct keys in `num_rows`, from a sample of `size` rows."""
    if num_rows <= size:
        return sum(
            number * (1 - _chance_to_miss(times, size, num_rows))
            for numbers in seen
            for times, number in numbers.items()
        )
    return sum(_extrapolated(numbers, size, num_rows - size) for numbers in seen)


def _extrapolated(numbers: dict[int, int], size: int, num_more: int) -> float:
    """Return the expected number of distinct keys at one position after `num_more` rows."""
    found, once, twice = sum(numbers.values()), numbers.get(1, 0), numbers.get(2, 0)
    if twice < _FEW_PAIRS:
        # no sign that the number of such keys is bounded
        return found + once * num_more / size
    unseen = (size - 1) / size * once**2 / (2 * twice)
    chance = once / (size * unseen + once) if once else 0.0
    return found + unseen * (1 - (1 - chance) ** num_more)


def _chance_to_miss(times: int, size: int, num_rows: int) -> float:
    """Return the chance that a key in `times` of `size` rows is in none of `num_rows` of them."""
    rest = size - num_rows
    if times > rest:
        return 0.0
    ways = lgamma(rest + 1) - lgamma(rest - times + 1)
    return exp(ways - lgamma(size + 1) + lgamma(size - times + 1))
