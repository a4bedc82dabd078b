"""Blocks with the KV of rows that migrate between engines; no running sequence owns them.

The target engine writes the KV before the sequence arrives. The source engine keeps it until the
target has everything.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.block_manager import BlockManager, hash_blocks
from raybatch.engine.sequences.table import Sequence
from raybatch.records.arrays import Int32s, Ints


@dataclass(slots=True)
class _Held:
    """Blocks in order of position; the first `num_filled` are filled completely."""

    blocks: Int32s
    num_filled: int = 0


class MigratingKV:
    """Holds the KV blocks of rows that migrate into or out of an engine, by request.

    They are held until `settle` makes them findable by hash, or `drop` frees them. A row may have
    such blocks only while exactly one of its samples is unfinished.

    Args:
        write_blocks: writes KV [blocks, 2, L, G, B, R] into blocks of the pool.
    """

    def __init__(
        self, blocks: BlockManager, write_blocks: Callable[[npt.NDArray[Any], Ints], None]
    ) -> None:
        self.num_tokens = 0  # whose KV migrated into this engine
        self._blocks, self._write_blocks = blocks, write_blocks
        self._held: dict[int, _Held] = {}

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Allocate blocks for an incoming sequence; False if too few are available."""
        if request_id in self._held or num_blocks > self._blocks.num_available:
            return False
        self._held[request_id] = _Held(np.array(self._blocks.allocate(num_blocks), np.int32))
        return True

    def keep(self, request_id: int, blocks: Int32s) -> None:
        """Pin full KV blocks of a sequence that is about to leave, so that it can resume here."""
        self._blocks.pin(blocks.tolist())
        self._held[request_id] = _Held(blocks, num_filled=len(blocks))

    def write(self, request_id: int, rows: npt.NDArray[Any], first_block: int) -> bool:
        """Append the KV `rows` of an incoming sequence, which begin at its block `first_block`.

        Returns False, and writes nothing, if earlier blocks are missing or the pool is full.
        """
        held = self._held.get(request_id)
        if held is None or held.num_filled != first_block:
            return False
        num_missing = first_block + len(rows) - len(held.blocks)
        if num_missing > 0:
            # the sequence has grown at its source
            if num_missing > self._blocks.num_available:
                return False
            more = np.array(self._blocks.allocate(num_missing), np.int32)
            held.blocks = np.concatenate((held.blocks, more))
        stop = first_block + len(rows)
        self._write_blocks(rows, held.blocks[first_block:stop].astype(np.int64))
        held.num_filled = stop
        return True

    def settle(self, record: Sequence, *, has_cache: bool) -> None:
        """Release the blocks of a sequence into the cache; it finds them by hash when it starts."""
        request = record.request
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        size = self._blocks.block_size
        # the last token has no KV
        num_filled = min(held.num_filled, (record.num_tokens - 1) // size)
        # other requests may find the prompt too
        num_hashed = max(num_filled, len(request.prompt_token_ids) // size)
        known = np.concatenate((request.prompt_token_ids, record.token_ids))
        root = b"" if has_cache else request.request_id.to_bytes(16, "little", signed=True)
        record.block_hashes = hash_blocks(known[: num_hashed * size], size, root=root)
        filled = held.blocks[:num_filled].tolist()
        for block, block_hash in zip(filled, record.block_hashes, strict=False):
            self._blocks.register(block, block_hash)
        self._blocks.release(held.blocks)
        self.num_tokens += num_filled * size

    def drop(self, request_id: int) -> None:
        """Free the blocks held for a row, if any."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._blocks.release(held.blocks)

    def tables(self) -> list[Int32s]:
        return [held.blocks for held in self._held.values()]
