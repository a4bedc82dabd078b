"""What a waiting sequence needs to start, by the blocks that are there for it; changes no books."""

from typing import NamedTuple

from raybatch.engine.sequences.block_manager import BlockManager, hash_prompt
from raybatch.engine.sequences.table import Sequence


class Need(NamedTuple):
    """Blocks that are there for a sequence, and counts.

    Args:
        hits: blocks of its prefix that hold what it would compute, in order.
        num_total: blocks of all its known tokens.
        num_available: of the available blocks, how many it takes.
        num_shared: blocks that it uses together with others.
        num_new_shared: of these, blocks that nobody uses yet.
    """

    hits: list[int]
    num_total: int
    num_available: int
    num_shared: int
    num_new_shared: int


class Needs:
    """Looks up what sequences need.

    Args:
        blocks: the KV pool's books.
        has_cache: requests share equal leading blocks; samples of one request always do.
    """

    def __init__(self, blocks: BlockManager, *, has_cache: bool) -> None:
        self._blocks = blocks
        self._has_cache = has_cache

    def of(self, record: Sequence) -> Need:
        """Return what a sequence needs to start now."""
        hits = self.hits(record)
        num_total = -(-record.num_tokens // self._blocks.block_size)
        num_unused = self._blocks.num_unused(hits)
        num_shared = max(record.group.max_blocks if record.group else 0, len(hits))
        return Need(
            hits=hits,
            num_total=num_total,
            num_available=num_total - len(hits) + num_unused,
            num_shared=num_shared,
            num_new_shared=num_shared - len(hits) + num_unused,
        )

    def hits(self, record: Sequence) -> list[int]:
        """Return the blocks of a sequence's prefix that are there; hashes its prompt once."""
        if record.block_hashes is None:
            record.block_hashes = hash_prompt(
                record.request, self._blocks.block_size, has_cache=self._has_cache
            )
        # the last known token is always computed, because its logits are needed
        max_hits = (record.num_tokens - 1) // self._blocks.block_size
        pinned = record.group.blocks[:max_hits] if record.group else []
        return pinned + self._blocks.find_prefix(record.block_hashes[len(pinned) : max_hits])
