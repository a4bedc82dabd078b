"""Hashes prompts for planning: a chained hash per whole block, and a digest of the entire prompt.

Hashes are the same on every machine. They are 64 bits wide, so among n different prefixes two
share a key with probability n^2 / 2^65 (0.3 % at 10^7 prompts of 30 blocks). A collision makes a
plan slightly worse but no result wrong, because engines share KV by their own hashes. Two different
prompts count as identical only if their `digest` collides as well, independently of the keys; see
`find_representatives`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numpy.lib.stride_tricks import sliding_window_view

from raybatch.records.arrays import GOLDEN, Bools, Int32s, Ints, Uint64s, mix64
from raybatch.records.types import TokenIds

# indices of rows or keys, or a slice of consecutive ones, which selects a view
_Rows = Ints | slice
# hash of each run of tokens, and the sum of the hash states before its words
_Hashes = tuple[Uint64s, Uint64s]

# blocks hashed at a time: their tokens and the words in flight stay in the CPU's second level cache
_CHUNK = 1 << 13
# start value of every chain. The hash of one word is `mix64(word + GOLDEN)`, so no block of one
# word (at most two tokens, none below 0) hashes to it; an equal hash would cancel it in the xor.
_ROOT = mix64(np.array([-1]).view(np.uint64) + GOLDEN)
# number of all 64-bit keys, and most keys in a sample
_ALL_KEYS = 1 << 64
_MAX_KEYS = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockKeys:
    """Keys of the whole blocks of many prompts, one prompt after another.

    Key i of a row stands for all of its tokens up to the end of block i: equal keys mean equal
    prefixes, and rows that agree in one block agree in all blocks before it.
    """

    keys: Uint64s  # [K], chained hashes of the whole blocks of all rows
    offsets: Ints  # [R + 1], the keys of row r are `keys[offsets[r]:offsets[r + 1]]`
    num_tokens: Ints  # [R], including those after the last whole block
    digest: Uint64s  # [R], hash of each entire prompt
    block_size: int

    @property
    def num_rows(self) -> int:
        return len(self.num_tokens)

    @property
    def num_blocks(self) -> Ints:
        """Whole blocks of each row, int64 [R]."""
        return np.diff(self.offsets)

    @classmethod
    def concat(cls, parts: Sequence["BlockKeys"]) -> "BlockKeys":
        """Return the rows of all parts, in order; at least one part."""
        sizes = sorted({part.block_size for part in parts})
        assert len(sizes) == 1, f"cannot join parts with different block sizes: {sizes}"
        num_blocks = np.concatenate([part.num_blocks for part in parts])
        return cls(
            keys=np.concatenate([part.keys for part in parts]),
            offsets=start_offsets(num_blocks),
            num_tokens=np.concatenate([part.num_tokens for part in parts]),
            digest=np.concatenate([part.digest for part in parts]),
            block_size=sizes[0],
        )

    def slice(self, start: int, stop: int) -> "BlockKeys":
        """Return rows `start` to `stop` (exclusive, cut at the last row); their keys are a view."""
        start, stop = min(start, self.num_rows), min(stop, self.num_rows)
        bounds = self.offsets[start : max(start, stop) + 1]
        return self._of(slice(start, stop), bounds - bounds[0], slice(bounds[0], bounds[-1]))

    def take(self, rows: Ints) -> "BlockKeys":
        """Return the keys of some rows, in the order given."""
        num_blocks = self.num_blocks[rows]
        return self._of(rows, start_offsets(num_blocks), ranges(self.offsets[rows], num_blocks))

    def _of(self, rows: _Rows, offsets: Ints, keys: _Rows) -> "BlockKeys":
        return replace(
            self,
            keys=self.keys[keys],
            offsets=offsets,
            num_tokens=self.num_tokens[rows],
            digest=self.digest[rows],
        )

    def to_table(self) -> pa.Table:
        """Return an Arrow table with a row per prompt: `keys`, `num_tokens`, `digest`."""
        keys = pa.LargeListArray.from_arrays(pa.array(self.offsets), pa.array(self.keys))
        table = pa.table({"keys": keys, "num_tokens": self.num_tokens, "digest": self.digest})
        return table.replace_schema_metadata({"block_size": str(self.block_size)})

    def salted(self, prefixes: Uint64s, results: Uint64s) -> "BlockKeys":
        """Return the keys where rows share prefixes, or are identical, only within equal salts.

        Salts are uint64 [R]: hashes of everything besides its tokens that decides the KV of a row
        (`prefixes`) and its result (`results`).
        """
        return replace(
            self,
            keys=self.keys ^ np.repeat(prefixes, self.num_blocks),
            digest=self.digest ^ prefixes ^ results,
        )

    @classmethod
    def from_table(cls, table: pa.Table) -> "BlockKeys":
        """Return the keys that `to_table` wrote; a table of one chunk is not copied."""
        lists = table["keys"]
        lists = lists.chunk(0) if lists.num_chunks == 1 else lists.combine_chunks()
        offsets = lists.offsets.to_numpy()
        return cls(
            keys=lists.values.to_numpy()[offsets[0] : offsets[-1]],
            offsets=offsets - offsets[0],
            num_tokens=table["num_tokens"].to_numpy(),
            digest=table["digest"].to_numpy(),
            block_size=int(table.schema.metadata[b"block_size"]),
        )


def hash_blocks(token_ids: TokenIds, offsets: Ints, block_size: int) -> BlockKeys:
    """Hash the prompts of a row batch; linear in tokens, fastest for some 10,000 rows at a time.

    The tokens of row r are `token_ids[offsets[r]:offsets[r + 1]]`, read only.
    """
    is_cut = offsets[0] == 0 and offsets[-1] == len(token_ids) and (np.diff(offsets) >= 0).all()
    assert is_cut, f"offsets do not cut {len(token_ids)} tokens into prompts"
    # little endian everywhere, so that two tokens are the same 64-bit word on all machines
    tokens = np.ascontiguousarray(token_ids, "<i4")
    offsets = offsets.astype(np.int64, copy=False)
    num_tokens = np.diff(offsets)
    num_blocks = num_tokens // block_size
    first = start_offsets(num_blocks)
    shifts = np.repeat(offsets[:-1] - first[:-1] * block_size, num_blocks)
    starts = shifts + np.arange(first[-1]) * block_size

    def whole_blocks(here: slice) -> TokenIds:
        blocks: TokenIds = sliding_window_view(tokens, block_size)[starts[here]]
        return blocks

    keys, trails = _hash_chunks(whole_blocks, len(starts))
    roots = np.repeat(_ROOT, len(num_tokens))
    _chain(keys, first, num_blocks, roots)
    tail_starts, tail_lengths = offsets[:-1] + num_blocks * block_size, num_tokens % block_size
    columns = np.arange(block_size)

    def tail_blocks(here: slice) -> TokenIds:
        """Return runs that are shorter than a block, filled up with zeros."""
        is_token = columns < tail_lengths[here, None]
        filled = np.zeros(is_token.shape, tokens.dtype)
        filled[is_token] = tokens[(tail_starts[here, None] + columns)[is_token]]
        return filled

    tails, tail_trails = _hash_chunks(tail_blocks, len(tail_starts))
    # sum of all hash states: it differs for two prompts whose states collide by chance
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(keys + trails)])
    digest = _combine(roots, sums[first[1:]] - sums[first[:-1]] + tail_trails)
    digest = _combine(_combine(digest, tails), num_tokens.astype(np.uint64))
    return BlockKeys(
        keys=keys, offsets=first, num_tokens=num_tokens, digest=digest, block_size=block_size
    )


def find_representatives(keys: BlockKeys) -> Ints:
    """Return for each row the first row that is identical, int64 [R].

    Rows count as identical when length, digest and last key are equal; the latter two collide
    independently. A prompt without a whole block has its digest alone.
    """
    first_rows = np.arange(keys.num_rows)
    order = np.argsort(keys.digest)
    same = equal_to_previous(keys.digest[order])
    rows = np.sort(order[same | np.append(same[1:], False)])
    last_keys = np.zeros(len(rows), np.uint64)
    has_key = keys.num_blocks[rows] > 0
    last_keys[has_key] = keys.keys[keys.offsets[rows[has_key] + 1] - 1]
    traits = (keys.num_tokens[rows], last_keys, keys.digest[rows])
    by_traits = np.lexsort((rows, *traits))
    starts = ~np.logical_and.reduce([equal_to_previous(trait[by_traits]) for trait in traits])
    rows = rows[by_traits]
    first_rows[rows] = rows[np.flatnonzero(starts)][np.cumsum(starts) - 1]
    return first_rows


def start_offsets(counts: Ints | Int32s) -> Ints:
    """Return the running total before each count, and the sum: int64 [n + 1]."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def ranges(starts: Ints, sizes: Ints) -> Ints:
    """Return the integers of all ranges, one range after another.

    Example:
        >>> ranges(np.array([7, 2]), np.array([2, 3])).tolist()
        [7, 8, 2, 3, 4]
    """
    offsets = start_offsets(sizes)
    return np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])


def equal_to_previous(values: npt.NDArray[np.generic]) -> Bools:
    equal = np.zeros(len(values), np.bool_)
    equal[1:] = values[1:] == values[:-1]
    return equal


def _combine(states: Uint64s, words: Uint64s) -> Uint64s:
    return mix64((states ^ words) + GOLDEN)


def _hash_chunks(blocks: Callable[[slice], TokenIds], count: int) -> _Hashes:
    hashes, trails = np.zeros((2, count), np.uint64)
    for start in range(0, count, _CHUNK):
        here = slice(start, start + _CHUNK)
        tokens = blocks(here)
        if tokens.shape[1] % 2:
            tokens = np.pad(tokens, ((0, 0), (0, 1)))
        states, trail = np.zeros((2, len(tokens)), np.uint64)
        for words in tokens.view("<u8").T:
            trail += states
            states = _combine(states, words)
        hashes[here], trails[here] = states, trail
    return hashes, trails


def _chain(keys: Uint64s, first: Ints, num_blocks: Ints, roots: Uint64s) -> None:
    """Replace the hash of each block by one of the block and all before it, in place."""
    rows = np.argsort(-num_blocks, kind="stable")
    # rows with a block at position i come first in the order
    num_alive = np.searchsorted(-num_blocks[rows], -np.arange(num_blocks.max(initial=0)))
    places, states = first[rows], roots[rows]
    for count in num_alive.tolist():
        states = _combine(states[:count], keys[places[:count]])
        keys[places[:count]] = states
        places += 1


class DistinctKeys:
    """Estimates the prompt tokens that one plan over all rows computes.

    `add` each row batch, then read `computed_tokens`. Keys are uniform, so those below a limit are
    a fair sample of the distinct ones. The limit is halved when the sample grows too large. Up to
    `max_keys` distinct keys are counted exactly; beyond that the standard error is at most
    sqrt(2 / max_keys), 0.6 % by default.

    Source: adaptive sampling (Wegman; Flajolet, On adaptive sampling, 1990).
    """

    def __init__(self, max_keys: int = _MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._limit = _ALL_KEYS
        self._sample: Uint64s = np.empty(0, np.uint64)
        self._new: list[Uint64s] = []
        self._num_new = 0
        self._tail_tokens = 0
        self._block_size = 0

    def add(self, keys: BlockKeys) -> None:
        """Add the keys of more rows; linear in the keys, apart from an occasional sort."""
        self._block_size = keys.block_size
        # a prompt always computes its last token
        tails = keys.num_tokens - keys.num_blocks * keys.block_size
        self._tail_tokens += int(np.maximum(tails, np.minimum(keys.num_tokens, 1)).sum())
        new = (
            keys.keys if self._limit == _ALL_KEYS else keys.keys[keys.keys < np.uint64(self._limit)]
        )
        self._new.append(np.unique(new))
        self._num_new += len(self._new[-1])
        if self._num_new > self._max_keys // 4:
            self._merge()

    def num_distinct(self) -> float:
        self._merge()
        return len(self._sample) * (_ALL_KEYS / self._limit)

    def computed_tokens(self) -> float:
        """Return the estimated prompt tokens to compute when every block is computed once."""
        return self.num_distinct() * self._block_size + self._tail_tokens

    def _merge(self) -> None:
        self._sample = np.unique(np.concatenate([self._sample, *self._new]))
        self._new.clear()
        self._num_new = 0
        while len(self._sample) > self._max_keys:
            self._limit //= 2
            self._sample = self._sample[: np.searchsorted(self._sample, np.uint64(self._limit))]
