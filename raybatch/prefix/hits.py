"""What a prefix cache of a given size would hit, if rows ran in a given order.

A deterministic simulation over block keys, without an engine. Rows start in order, at most
`concurrency` at a time and as many as fit; the oldest ends when room is needed. Blocks without a
user stay cached and are evicted in LRU order, of one row the last positions first.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.errors import CapacityError, ConfigError
from raybatch.prefix.load import Floats, Ints

NUM_WINDOWS = 8
# two-sided 95 % of Student's t for the mean of eight windows
_T_QUANTILE = 2.36


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheLoad:
    """The rows as a cache sees them; arrays are read only.

    Args:
        keys: uint64 [N], one key per full block of every prompt, row after row. A key names its
            block and all blocks before it.
        offsets: int64 [R + 1], where each row's keys begin.
        num_tokens: int [R], length of each prompt.
        output_tokens: int [R], tokens that each row generates; None counts none.
    """

    keys: npt.NDArray[np.uint64]
    offsets: Ints
    num_tokens: Ints
    block_size: int
    output_tokens: Ints | None = None

    def __post_init__(self) -> None:
        num_rows = len(self.num_tokens)
        if len(self.offsets) != num_rows + 1 or int(self.offsets[-1]) != len(self.keys):
            raise ConfigError(
                f"{len(self.offsets)} offsets end at {int(self.offsets[-1])}; {num_rows} rows need "
                f"{num_rows + 1} that end at the number of keys, {len(self.keys)}"
            )
        num_keys = np.diff(self.offsets)
        is_wrong = num_keys != self.num_tokens // self.block_size
        if is_wrong.any():
            row = int(np.argmax(is_wrong))
            raise ConfigError(
                f"row {row} has {num_keys[row]} keys, but {self.num_tokens[row]} tokens hold "
                f"{self.num_tokens[row] // self.block_size} full blocks of {self.block_size}"
            )

    def blocks_held(self, rows: Ints) -> Ints:
        """Return the blocks that each of `rows` holds when it ends."""
        tokens = self.num_tokens[rows].astype(np.int64)
        if self.output_tokens is not None:
            tokens = tokens + self.output_tokens[rows]
        return -(-tokens // self.block_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSize:
    """The engine's side.

    Args:
        concurrency: rows that run at the same time at most.
        finds_blocks: whether rows find what others have left; else only groups share.
    """

    num_blocks: int
    concurrency: int
    finds_blocks: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class HitEstimate:
    """Share of prompt tokens found in the cache.

    Args:
        error: half width of the 95 % interval over windows; 0 where all rows were simulated.
        is_lower_bound: the cache was not yet full when counting began in some window, so rows
            before that window may have left more to hit.
    """

    rate: float
    error: float = 0.0
    is_lower_bound: bool = False


def simulate_hits(load: CacheLoad, order: Ints, size: CacheSize) -> Ints:
    """Return the prompt tokens that each row of `order` finds in the cache.

    The last token of a prompt is always computed, as its logits are needed. Runs of blocks that
    occur only together count as one, so the cost is O(N log N) for the sort of the keys and
    O(branches on the path) per row.

    Args:
        order: int64 [n], distinct rows in the order in which they start; may be a part of all.

    Returns:
        int64 [n], aligned with `order`.

    Raises:
        CapacityError: a row does not fit the empty cache.

    Source: vLLM's automatic prefix caching (eviction rules).
    """
    if not size.finds_blocks:
        return np.zeros(len(order), np.int64)
    return _Cache(load, order, size).run(0, len(order))


def estimate_hit_rate(
    load: CacheLoad, order: Ints, size: CacheSize, *, max_rows: int = 200_000
) -> HitEstimate:
    """Return the hit rate of an order, from evenly spaced windows if it has over `max_rows` rows.

    Each window begins with an empty cache and counts its second half only.

    Args:
        order: int64 [n], distinct rows in the order in which they start.
        max_rows: rows to simulate at most, at least 16.

    Raises:
        CapacityError: a simulated row does not fit the empty cache.
    """
    if len(order) <= max_rows or not size.finds_blocks:
        num_cached = int(simulate_hits(load, order, size).sum())
        return HitEstimate(rate=num_cached / max(int(load.num_tokens[order].sum()), 1))
    hits, tokens = np.zeros(NUM_WINDOWS), np.zeros(NUM_WINDOWS)
    is_lower_bound = False
    for i, (window, counted) in enumerate(windows_of(len(order), max_rows)):
        cache = _Cache(load, order[window], size)
        cache.run(0, counted.start - window.start)
        is_lower_bound |= window.start > 0 and not cache.has_evicted
        hits[i] = cache.run(counted.start - window.start, window.stop - window.start).sum()
        tokens[i] = load.num_tokens[order[counted]].sum()
    return HitEstimate(
        rate=float(hits.sum() / max(tokens.sum(), 1)),
        error=half_width(hits / np.maximum(tokens, 1)),
        is_lower_bound=is_lower_bound,
    )


def windows_of(num_rows: int, max_rows: int) -> list[tuple[slice, slice]]:
    """Return evenly spaced windows of rows in order, each with its second half, which is counted.

    Args:
        num_rows: to take windows of, more than `max_rows`.
        max_rows: of all windows together.
    """
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


@dataclass(frozen=True, slots=True)
class _Paths:
    """Every row as a path of runs: stretches of blocks that always occur together.

    Args:
        run: int64 [M], id of each run, row after row.
        offsets: int64 [n + 1], where each row's runs begin.
        is_whole: bool [n], the prompt ends with a full block, which is a run of its own.
    """

    run: Ints
    length: Ints
    offsets: Ints
    is_whole: npt.NDArray[np.bool_]
    num_ids: int

    @classmethod
    def of(cls, load: CacheLoad, order: Ints) -> "_Paths":
        begin, count = load.offsets[order], np.diff(load.offsets)[order]
        row_start = np.cumsum(count) - count
        flat = np.repeat(begin - row_start, count) + np.arange(int(count.sum()))
        unique, key_id, num_rows = np.unique(
            load.keys[flat], return_inverse=True, return_counts=True
        )
        is_whole = (load.num_tokens[order] == count * load.block_size) & (count > 0)
        ends_a_row = np.zeros(len(unique), bool)
        ends_a_row[key_id[(row_start + count - 1)[is_whole]]] = True
        is_start = ends_a_row[key_id]
        is_start[1:] |= num_rows[key_id[1:]] != num_rows[key_id[:-1]]
        is_start[row_start[count > 0]] = True
        at = np.flatnonzero(is_start)
        return cls(
            run=key_id[at],
            length=np.diff(np.append(at, len(flat))),
            offsets=np.searchsorted(at, np.append(row_start, len(flat))),
            is_whole=is_whole,
            num_ids=len(unique),
        )


class _Cache:
    """Blocks by run: how many of its leading ones are resident, and how many rows use them."""

    def __init__(self, load: CacheLoad, order: Ints, size: CacheSize) -> None:
        held = load.blocks_held(order)
        if len(order) and held.max() > size.num_blocks:
            row = int(order[np.argmax(held)])
            raise CapacityError(
                f"row {row} needs {held.max()} KV blocks, the cache has {size.num_blocks}; leave "
                "rows out that are too long",
                needed_tokens=int(held.max()) * load.block_size,
                available_tokens=size.num_blocks * load.block_size,
            )
        self.block_size, self.concurrency = load.block_size, size.concurrency
        self.held: list[int] = held.tolist()
        paths = _Paths.of(load, order)
        self.runs: list[int] = paths.run.tolist()
        self.lengths: list[int] = paths.length.tolist()
        self.offsets: list[int] = paths.offsets.tolist()
        self.is_whole: list[bool] = paths.is_whole.tolist()
        self.num_resident = [0] * paths.num_ids
        self.num_users = [0] * paths.num_ids
        self.lru: OrderedDict[int, None] = OrderedDict()
        self.num_free, self.num_cached = size.num_blocks, 0
        self.live: deque[tuple[list[int], int]] = deque()
        self.has_evicted = False

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
        while num_new > self.num_free + self.num_cached - self._num_unused(path):
            self._end_oldest()
        self._pin(path)
        self._allocate(num_new)
        if again is not None and not self.num_resident[again]:
            # making room evicted the known one, so the new one takes its place
            path.append(again)
            self.num_users[again] += 1
        for run, length in zip(path, lengths, strict=False):
            self.num_resident[run] = length
        self.live.append((path, self.held[position] - sum(lengths[: len(path)])))
        return num_hits

    def _num_unused(self, path: list[int]) -> int:
        return sum(self.num_resident[run] for run in path if not self.num_users[run])

    def _pin(self, path: list[int]) -> None:
        for run in path:
            if not self.num_users[run] and self.num_resident[run]:
                del self.lru[run]
                self.num_cached -= self.num_resident[run]
            self.num_users[run] += 1

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
