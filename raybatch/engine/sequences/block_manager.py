"""Bookkeeping of the paged KV pools: reference counts and prefix hashes of blocks."""

import hashlib
import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.records.arrays import Int32s
from raybatch.records.types import TokenIds


def hash_blocks(token_ids: TokenIds, block_size: int, *, root: bytes = b"") -> list[bytes]:
    """Return one 128-bit hash per full block, over its tokens and all blocks before it.

    `root` seeds the first block: equal tokens with another root hash differently.
    """
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
    hashes: list[bytes] = []
    parent = root
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = tokens[start : start + block_size]
        parent = hashlib.blake2b(block.data, digest_size=16, key=parent).digest()
        hashes.append(parent)
    return hashes


class BlockManager:
    """Allocates blocks, counts their users and finds blocks by prefix hash.

    A block is free, used or cached:

                     allocate              release by the last user
        free  ----------------->  used  -------------------------->  cached
         ^     lowest id first     | ^        if it is findable       | | |
         |                         | +-------------- pin -------------+ | |
         +--------- release -------+ +--- allocate, LRU, none free -----+ |
         +------------------------- drop_cached --------------------------+

    A used block is findable from `register` to `forget`. These add and remove users:

        running sequence   Scheduler._place, StepBuilder.take; _vacate, on preemption or leaving
        prefix group       SharedPrompts.pin, unpin_idle; leave of the last member
        prompt fork        SharedPrompts.open_fork; close_one, or the last sample has started
        migrating row      MigratingKV.reserve and keep; settle or drop

    `reserve` sets a number of free or cached blocks aside for a sequence that allocates them chunk
    by chunk; `num_available` excludes them. `unreserve` returns the rest.

    Example:
        >>> blocks = BlockManager(num_blocks=3, block_size=2)
        >>> table = np.array(blocks.allocate(2), np.int32)
        >>> hashes = hash_blocks([11, 12, 13, 14], block_size=2)
        >>> blocks.register(0, hashes[0])
        >>> blocks.release(table)  # block 0 is cached, block 1 free
        >>> blocks.num_used, blocks.num_available, blocks.find_prefix(hashes)
        (0, 3, [0])
        >>> blocks.pin([0])
        >>> blocks.reserve(1)
        >>> blocks.num_used, blocks.num_available, blocks.allocate(1, is_reserved=True)
        (1, 1, [1])
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_refs: Int32s = np.zeros(num_blocks, np.int32)
        self.num_reserved = 0
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free: list[int] = list(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """Blocks that may be allocated without a reservation, including cached ones."""
        return len(self._free) + len(self._cached) - self.num_reserved

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free) - len(self._cached)

    def find_prefix(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks with the longest known prefix of `hashes`, in order of position."""
        known = takewhile(self._block_of.__contains__, hashes)
        return [self._block_of[block_hash] for block_hash in known]

    def num_unused(self, blocks: Sequence[int]) -> int:
        return int(np.count_nonzero(self.num_refs[list(blocks)] == 0))

    def pin(self, blocks: Sequence[int]) -> None:
        """Add one user to each of `blocks`, which are distinct and used or cached."""
        self.num_refs[list(blocks)] += 1
        for block in blocks:
            self._cached.pop(block, None)

    def reserve(self, count: int) -> None:
        if count > self.num_available:
            raise RuntimeError(
                f"cannot reserve {count} KV blocks: {self.num_available} are available"
            )
        self.num_reserved += count

    def unreserve(self, count: int) -> None:
        self.num_reserved -= count

    def allocate(self, count: int, *, is_reserved: bool = False) -> list[int]:
        """Return `count` blocks with one user each: free ones first, then cached ones by LRU.

        With `is_reserved` they come from the blocks set aside by `reserve`. Raises RuntimeError:
        too few available blocks; callers check `num_available` first.
        """
        if is_reserved:
            self.unreserve(count)
        if count > self.num_available:
            raise RuntimeError(
                f"cannot allocate {count} KV blocks: {self.num_available} are available"
            )
        blocks = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        while len(blocks) < count:
            block, _ = self._cached.popitem(last=False)
            self._drop_hash(block)
            blocks.append(block)
        self.num_refs[blocks] = 1
        return blocks

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a used block findable; an already registered hash keeps its block."""
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._drop_hash(block)

    def used(self) -> npt.NDArray[np.int64]:
        """Return the blocks with users, ascending."""
        return np.flatnonzero(self.num_refs)

    def drop_cached(self) -> None:
        """Free the cached blocks, whose content is lost."""
        for block in self._cached:
            self._drop_hash(block)
            heapq.heappush(self._free, block)
        self._cached.clear()

    def release(self, blocks: Int32s, *, keep_cached: bool = True) -> None:
        """Remove one user from each of `blocks`, given in order of position.

        Findable blocks without a user become cached; later positions are evicted first. Without
        `keep_cached` they become free.
        """
        self.num_refs[blocks] -= 1
        for block in blocks[self.num_refs[blocks] == 0][::-1].tolist():
            if keep_cached and self._hash_of[block] is not None:
                self._cached[block] = None
            else:
                self._drop_hash(block)
                heapq.heappush(self._free, block)

    def check(self, tables: Sequence[Int32s]) -> None:
        free, cached = set(self._free), set(self._cached)
        users = Counter(block for table in tables for block in table.tolist())
        counted = {int(b): int(self.num_refs[b]) for b in np.flatnonzero(self.num_refs)}
        num_idle = len(free) + len(cached)
        rules = (
            ("a block is free twice", len(free) == len(self._free)),
            ("a block is free and cached", not free & cached),
            ("a used block is free or cached", not set(counted) & (free | cached)),
            ("reference counts differ from the block tables", counted == dict(users)),
            (
                "free + used + cached differs from the pool",
                num_idle + len(counted) == self.num_blocks,
            ),
            ("a table holds a block twice", all(len(set(t.tolist())) == len(t) for t in tables)),
            ("a cached block is not findable", all(self._hash_of[b] for b in cached)),
            ("more blocks are reserved than available", 0 <= self.num_reserved <= num_idle),
            (
                "the index of hashes disagrees with the blocks",
                {h: b for b, h in enumerate(self._hash_of) if h is not None} == self._block_of,
            ),
        )
        broken = [text for text, holds in rules if not holds]
        if broken:
            raise RuntimeError("the block manager is inconsistent: " + "; ".join(broken))

    def _drop_hash(self, block: int) -> None:
        block_hash = self._hash_of[block]
        if block_hash is not None:
            self._hash_of[block] = None
            del self._block_of[block_hash]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SwappedKV:
    """KV of a sequence in host memory; blocks before `first_block` are found by hash or pinned.

    ```
    blocks of the sequence   | 0 | 1 | 2 | 3 | 4 | 5 |      first_block = 2, three host blocks,
    found by hash            | x | x |                      num_tokens ends within block 4;
    in host memory                   | h | h | h |          block 5 is not computed yet
    ```
    """

    first_block: int
    # int32 [n], in order of position
    host_blocks: Int32s
    # leading tokens of the sequence that had KV
    num_tokens: int
    # the host blocks are in the 8-bit pool
    is_rounded: bool = False
    # leading blocks with exact KV; the others were rounded or computed from rounded KV; None if all
    # are exact
    num_exact: int | None = None
    # for a sequence that leaves the engine: the blocks are device blocks
    is_on_device: bool = False
    # migrated KV in place of host blocks; not shared
    rows: npt.NDArray[Any] | None = None

    @property
    def num_blocks(self) -> int:
        return len(self.host_blocks if self.rows is None else self.rows)
