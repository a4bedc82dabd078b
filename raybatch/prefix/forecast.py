"""Forecasts the prompt tokens that each order of the rows computes with a KV cache of a given size.

input    in the order of the input, with a prefix cache alone
sorted   by prompt, with a prefix cache alone
planned  in the order of the plan: prefixes pinned during their groups, identical rows once
bound    every shared prefix at every depth computed once: a cache of unlimited size

Cache hits are simulated over block keys, without an engine. Rows start in order, at most
`concurrency` at a time if they fit; the oldest ends when space is needed. Unused blocks stay
cached and are evicted in LRU order, the last positions of a row first.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, lgamma
from typing import Literal

import numpy as np

from raybatch.errors import CapacityError
from raybatch.prefix.block_keys import BlockKeys, ranges, start_offsets
from raybatch.prefix.plan import Arrangement, RowSchedule
from raybatch.records.arrays import Floats, Ints

NUM_WINDOWS = 8
# two-sided 95 % of Student's t for the mean of eight windows
_T_QUANTILE = 2.36
# rows count as sorted if the first half of the sample has fewer distinct keys than this share of
# the number expected in a random half
_RANDOM_SHARE = 0.9
# least number of keys seen twice to extrapolate from
_FEW_PAIRS = 5

ForecastName = Literal["input", "sorted", "planned", "bound"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheLoad:
    """Block keys of the rows, and the tokens that each generates; arrays are read only."""

    keys: BlockKeys
    output_tokens: Floats

    @property
    def blocks_held(self) -> Ints:
        """Blocks that each row holds when it ends, int64 [R]."""
        tokens = self.keys.num_tokens + np.ceil(self.output_tokens).astype(np.int64)
        return -(-tokens // self.keys.block_size)

    def rows_that_fit(self, size: "CacheSize") -> Ints:
        """Return the rows that can run alone in a cache of this size, in rising order."""
        return np.flatnonzero(self.blocks_held <= size.num_blocks)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """Limits of an engine; without `finds_blocks`, rows reuse only the prefix of their group."""

    num_blocks: int
    concurrency: int
    finds_blocks: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderForecast:
    """Prompt tokens that one order would compute."""

    name: ForecastName
    prompt_tokens: int
    computed_tokens: int  # those whose KV an engine computes
    # half width of the 95 % interval of the hit rate; 0 if all rows were simulated
    error: float = 0.0
    # the cache was not full at the start of counting in some window, so there may be more hits
    is_lower_bound: bool = False
    num_rows_too_large: int = 0  # rows that do not fit the cache even alone, and are left out

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that need no computing; 0 without tokens."""
        return self.saved_tokens / max(1, self.prompt_tokens)

    @property
    def saved_tokens(self) -> int:
        return self.prompt_tokens - self.computed_tokens


def simulate_hits(load: CacheLoad, order: Ints, size: CacheSize) -> Ints:
    """Return the prompt tokens that each row of `order` finds in the cache, int64 [n].

    The order has distinct rows, all or some. The last token of a prompt is always computed, as its
    logits are needed. Runs of blocks that occur only together count as one, so the cost is
    O(N log N) for the sort of the keys and O(branches on the path) per row.

    Raises:
        CapacityError: a row does not fit the empty cache.

    Source: vLLM's automatic prefix caching (eviction rules).
    """
    if not size.finds_blocks:
        return np.zeros(len(order), np.int64)
    return _Cache(load, order, size).run(0, len(order))


def forecast_order(
    name: ForecastName, load: CacheLoad, order: Ints, size: CacheSize, *, max_rows: int
) -> OrderForecast:
    """Forecast an order with a prefix cache and no plan.

    An order of more than `max_rows` rows is forecast from evenly spaced windows. Each begins with
    an empty cache and counts its second half only; at least 16 rows.

    Raises:
        CapacityError: a simulated row does not fit the empty cache.
    """
    prompt_tokens = int(load.keys.num_tokens[order].sum())
    if len(order) <= max_rows or not size.finds_blocks:
        computed = prompt_tokens - int(simulate_hits(load, order, size).sum())
        return OrderForecast(name=name, prompt_tokens=prompt_tokens, computed_tokens=computed)
    hits, tokens = np.zeros(NUM_WINDOWS), np.zeros(NUM_WINDOWS)
    is_lower_bound = False
    for i, (window, counted) in enumerate(windows_of(len(order), max_rows)):
        cache = _Cache(load, order[window], size)
        cache.run(0, counted.start - window.start)
        is_lower_bound |= window.start > 0 and not cache.has_evicted
        hits[i] = cache.run(counted.start - window.start, window.stop - window.start).sum()
        tokens[i] = load.keys.num_tokens[order[counted]].sum()
    rate = float(hits.sum() / max(tokens.sum(), 1))
    return OrderForecast(
        name=name,
        prompt_tokens=prompt_tokens,
        computed_tokens=round(prompt_tokens * (1 - rate)),
        error=half_width(hits / np.maximum(tokens, 1)),
        is_lower_bound=is_lower_bound,
    )


def windows_of(num_rows: int, max_rows: int) -> list[tuple[slice, slice]]:
    """Return evenly spaced windows of rows, each with its second half, which is counted."""
    length = max_rows // NUM_WINDOWS
    starts = np.linspace(0, num_rows - length, NUM_WINDOWS).astype(np.int64).tolist()
    return [
        (slice(start, start + length), slice(start + length // 2, start + length))
        for start in starts
    ]


def half_width(rates: Floats) -> float:
    """Return the half width of the 95 % interval of the mean over windows; 0 for a single one."""
    if len(rates) < 2:
        return 0.0
    return float(_T_QUANTILE * rates.std(ddof=1) / np.sqrt(len(rates)))


class _Cache:
    """Simulates a KV cache; counts the cached leading blocks of each run, and the rows that use it.

    A run is a stretch of blocks that always occur together.
    """

    def __init__(self, load: CacheLoad, order: Ints, size: CacheSize) -> None:
        held, block_size = load.blocks_held[order], load.keys.block_size
        if len(order) and held.max() > size.num_blocks:
            row = int(order[np.argmax(held)])
            raise CapacityError(
                f"row {row} needs {held.max()} KV blocks, but the cache has {size.num_blocks}; "
                "leave out rows that are too long",
                needed_tokens=int(held.max()) * block_size,
                available_tokens=size.num_blocks * block_size,
            )
        self.block_size, self.concurrency = block_size, size.concurrency
        self.held: list[int] = held.tolist()
        self._lay_out(load.keys, order)
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.num_free, self.num_cached = size.num_blocks, 0
        self.live: deque[tuple[list[int], int]] = deque()
        self.has_evicted = False

    def _lay_out(self, keys: BlockKeys, order: Ints) -> None:
        """Split each row into runs; the last block of a prompt of full blocks is a separate run."""
        count = keys.num_blocks[order]
        row_start = start_offsets(count)
        flat = ranges(keys.offsets[order], count)
        ids, key_id, num_rows = np.unique(keys.keys[flat], return_inverse=True, return_counts=True)
        is_whole = (keys.num_tokens[order] == count * keys.block_size) & (count > 0)
        ends_a_row = np.zeros(len(ids), bool)
        ends_a_row[key_id[row_start[1:][is_whole] - 1]] = True
        is_start = ends_a_row[key_id]
        is_start[1:] |= num_rows[key_id[1:]] != num_rows[key_id[:-1]]
        is_start[row_start[:-1][count > 0]] = True
        at = np.flatnonzero(is_start)
        # runs of all rows, one row after another; the runs of a row begin at its offset
        self.runs: list[int] = key_id[at].tolist()
        self.lengths: list[int] = np.diff(np.append(at, len(flat))).tolist()
        self.offsets: list[int] = np.searchsorted(at, row_start).tolist()
        self.is_whole: list[bool] = is_whole.tolist()
        self.num_resident = [0] * len(ids)
        self.num_users = [0] * len(ids)

    def run(self, begin: int, end: int) -> Ints:
        """Run the rows at positions `begin` to `end`; return their cached tokens."""
        blocks = [self._start(position) for position in range(begin, end)]
        return np.array(blocks, np.int64) * self.block_size

    def _start(self, position: int) -> int:
        if len(self.live) >= self.concurrency:
            self._end_oldest()
        first, last = self.offsets[position], self.offsets[position + 1]
        path, lengths = self.runs[first:last], self.lengths[first:last]
        # a cached last block is computed again for its logits
        again = path.pop() if self.is_whole[position] and self.num_resident[path[-1]] else None
        num_hits = 0
        for run, length in zip(path, lengths, strict=False):
            num_hits += self.num_resident[run]
            if self.num_resident[run] < length:
                break
        num_new = self.held[position] - num_hits
        while True:
            num_unused = sum(self.num_resident[run] for run in path if not self.num_users[run])
            if num_new <= self.num_free + self.num_cached - num_unused:
                break
            self._end_oldest()
        for run in path:
            if not self.num_users[run] and self.num_resident[run]:
                del self.lru[run]
                self.num_cached -= self.num_resident[run]
            self.num_users[run] += 1
        self._allocate(num_new)
        if again is not None and not self.num_resident[again]:
            # the eviction removed the cached block, and the new one replaces it
            path.append(again)
            self.num_users[again] += 1
        for run, length in zip(path, lengths, strict=False):
            self.num_resident[run] = length
        self.live.append((path, self.held[position] - sum(lengths[: len(path)])))
        return num_hits

    def _allocate(self, count: int) -> None:
        taken = min(count, self.num_free)
        self.num_free -= taken
        count -= taken
        while count:
            self.has_evicted = True
            run = next(iter(self.lru))
            evicted = min(count, self.num_resident[run])
            self.num_resident[run] -= evicted
            self.num_cached -= evicted
            count -= evicted
            if not self.num_resident[run]:
                del self.lru[run]

    def _end_oldest(self) -> None:
        path, num_private = self.live.popleft()
        self.num_free += num_private
        for run in reversed(path):
            self.num_users[run] -= 1
            if not self.num_users[run]:
                self.lru[run] = None
                self.num_cached += self.num_resident[run]


def forecast_orders(
    keys: BlockKeys,
    plan: RowSchedule,
    arrangement: Arrangement,
    *,
    output_tokens: Floats,
    size: CacheSize,
    max_rows: int = 100_000,
) -> tuple[OrderForecast, ...]:
    """Forecast all four orders; rows that do not fit the cache are left out of all of them.

    Costs three simulations of `max_rows` rows; of more rows, evenly spaced windows are simulated.
    """
    load, tree = CacheLoad(keys=keys, output_tokens=output_tokens), arrangement.tree
    in_input = load.rows_that_fit(size)
    fits = np.zeros(keys.num_rows, np.bool_)
    fits[in_input] = True
    is_generated = fits & (arrangement.groups.representative == np.arange(keys.num_rows))
    in_plan = plan.order[is_generated[plan.order]]
    # each node above a generated row is computed once
    num_before = np.concatenate([[0], np.cumsum(is_generated[tree.row_order])])
    is_used = num_before[tree.row_stop] > num_before[tree.row_start]
    own = np.maximum(keys.num_tokens - tree.depth_tokens[tree.deepest_nodes()], 1)
    bound = int(tree.edge_tokens()[is_used].sum() + own[is_generated].sum())
    in_tree = tree.row_order[fits[tree.row_order]]
    orders = (
        forecast_order("input", load, in_input, size, max_rows=max_rows),
        forecast_order("sorted", load, in_tree, size, max_rows=max_rows),
        _planned(load, plan, in_plan, size, max_rows),
        OrderForecast(name="bound", prompt_tokens=0, computed_tokens=bound),
    )
    return tuple(
        replace(
            order,
            # the prompts of identical rows count, but need no computing
            prompt_tokens=int(keys.num_tokens[in_input].sum()),
            # an order from a sample may seem to compute less than the bound
            computed_tokens=max(bound, order.computed_tokens),
            num_rows_too_large=keys.num_rows - len(in_input),
        )
        for order in orders
    )


def _planned(
    load: CacheLoad, plan: RowSchedule, order: Ints, size: CacheSize, max_rows: int
) -> OrderForecast:
    """Forecast the rows that are generated.

    The rows of a group run together, so the simulated cache finds at least what the group pins.
    That part is known for all rows. With more than `max_rows` rows, only the additional hits are
    simulated, in windows that begin with an empty cache and count their second half.
    """
    num_tokens, group_id = load.keys.num_tokens[order], plan.group_id[order]
    prompt_tokens, error, block_size = int(num_tokens.sum()), 0.0, load.keys.block_size
    # the last token of a prompt is always computed, and with it its block
    last = (num_tokens - 1) // block_size * block_size
    pinned = np.where(group_id >= 0, np.minimum(plan.prefix_len[order], last), 0)
    # the first row after a change of group computes the prefix; a probe runs rows of a group apart
    pinned[np.diff(group_id, prepend=-1) != 0] = 0
    if not size.finds_blocks:
        computed = prompt_tokens - int(pinned.sum())
    elif len(order) <= max_rows:
        computed = prompt_tokens - int(simulate_hits(load, order, size).sum())
    else:
        windows = windows_of(len(order), max_rows)
        extra = np.zeros(len(windows))
        for i, (window, counted) in enumerate(windows):
            hits = simulate_hits(load, order[window], size)[counted.start - window.start :]
            more = np.maximum(hits - pinned[counted], 0)
            extra[i] = more.sum() / max(1, num_tokens[counted].sum())
        computed = round(prompt_tokens * (1 - extra.mean())) - int(pinned.sum())
        error = half_width(extra)
    return OrderForecast(
        name="planned", prompt_tokens=prompt_tokens, computed_tokens=computed, error=error
    )


def merge_forecasts(
    parts: Sequence[tuple[OrderForecast, ...]],
    windows: Sequence[tuple[int, int]],
    *,
    is_whole: bool = False,
) -> tuple[OrderForecast, ...]:
    """Return the forecast of each order for all parts of an input together.

    The input order is forecast from `windows`, because rows of a part are not adjacent in it.

    Args:
        parts: for each part, what `forecast_orders` returns.
        windows: (cached, all) prompt tokens of simulated stretches of the input.
        is_whole: the only window is the whole input, so its hits are no lower bound.
    """
    merged = []
    for orders in zip(*parts, strict=True):
        weights = np.array([order.prompt_tokens for order in orders], float)
        errors = np.array([order.error for order in orders]) * weights
        merged.append(
            OrderForecast(
                name=orders[0].name,
                prompt_tokens=int(weights.sum()),
                computed_tokens=sum(order.computed_tokens for order in orders),
                error=float(np.sqrt((errors**2).sum()) / max(1.0, weights.sum())),
                is_lower_bound=any(order.is_lower_bound for order in orders),
                num_rows_too_large=sum(order.num_rows_too_large for order in orders),
            )
        )
    cached, tokens = np.array(windows, float).T
    rate = cached.sum() / max(1.0, tokens.sum())
    computed = round(merged[0].prompt_tokens * (1 - rate))
    from_input = replace(
        merged[0],
        computed_tokens=max(merged[-1].computed_tokens, computed),
        error=half_width(cached / np.maximum(tokens, 1)),
        is_lower_bound=not is_whole,
    )
    return (from_input, *merged[1:])


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
    """Forecast an input of `num_rows` from its first rows; `window_rows` of them wait at a time.

    The more rows are grouped at once, the more they share. The numbers of prefixes seen once and
    twice estimate the number of unseen ones.

    Source: Colwell et al., Models and estimators linking individual-based and sample-based
    rarefaction, extrapolation and comparison of assemblages, 2012 (equations 5, 9 and 18).
    """
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
