"""What a prefix cache of a given size would hit, if rows ran in a given order.

A deterministic simulation over block keys, without an engine. Rows start in order, at most
`concurrency` at a time and as many as fit; the oldest ends when room is needed. Blocks without a
user stay cached and are evicted in LRU order, of one row the last positions first.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np

from raybatch.errors import CapacityError
from raybatch.prefix.block_keys import BlockKeys, ranges, start_offsets
from raybatch.records.arrays import Floats, Ints

NUM_WINDOWS = 8
# two-sided 95 % of Student's t for the mean of eight windows
_T_QUANTILE = 2.36


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CacheLoad:
    """The rows as a cache sees them, with the tokens that each generates; arrays are read only."""

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
    """The engine's side; rows find what others have left where they find blocks, else in groups."""

    num_blocks: int
    concurrency: int
    finds_blocks: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HitEstimate:
    """Share of prompt tokens found in the cache; `error` is half the 95 % interval over windows.

    A lower bound where the cache was not yet full when counting began in some window, so rows
    before that window may have left more to hit.
    """

    rate: float
    error: float = 0.0
    is_lower_bound: bool = False


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


def estimate_hit_rate(
    load: CacheLoad, order: Ints, size: CacheSize, *, max_rows: int
) -> HitEstimate:
    """Return the hit rate of an order, from evenly spaced windows if it has over `max_rows` rows.

    Each window begins with an empty cache and counts its second half only; at least 16 rows.

    Raises:
        CapacityError: a simulated row does not fit the empty cache.
    """
    if len(order) <= max_rows or not size.finds_blocks:
        num_cached = int(simulate_hits(load, order, size).sum())
        return HitEstimate(rate=num_cached / max(int(load.keys.num_tokens[order].sum()), 1))
    hits, tokens = np.zeros(NUM_WINDOWS), np.zeros(NUM_WINDOWS)
    is_lower_bound = False
    for i, (window, counted) in enumerate(windows_of(len(order), max_rows)):
        cache = _Cache(load, order[window], size)
        cache.run(0, counted.start - window.start)
        is_lower_bound |= window.start > 0 and not cache.has_evicted
        hits[i] = cache.run(counted.start - window.start, window.stop - window.start).sum()
        tokens[i] = load.keys.num_tokens[order[counted]].sum()
    return HitEstimate(
        rate=float(hits.sum() / max(tokens.sum(), 1)),
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
    """Blocks by run: how many of its leading ones are resident, and how many rows use them."""

    def __init__(self, load: CacheLoad, order: Ints, size: CacheSize) -> None:
        held, block_size = load.blocks_held[order], load.keys.block_size
        if len(order) and held.max() > size.num_blocks:
            row = int(order[np.argmax(held)])
            raise CapacityError(
                f"row {row} needs {held.max()} KV blocks, the cache has {size.num_blocks}; leave "
                "rows out that are too long",
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
        """Make each row a path of runs: stretches of blocks that always occur together.

        A prompt that ends with a full block has it as a run of its own.
        """
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
        # row after row; the runs of a row begin at its offset
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
        # a last block that is known is computed again for its logits
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
            # making room evicted the known one, so the new one takes its place
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
