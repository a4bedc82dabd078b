"""KV of rows that change their engine, in blocks of this pool that belong to no running sequence.

At the engine that a row comes to, it is written ahead of its sequence; at the one that it leaves,
it stays until the other one has it all.
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
    """Blocks in order of position; the first `num_filled` hold KV of whole blocks of tokens."""

    blocks: Int32s
    num_filled: int = 0


class Arrivals:
    """Owns these blocks until `settle` makes them findable for their sequence, by request.

    A row has some only while one of its samples is unfinished.

    Args:
        write_blocks: puts KV [blocks, 2, L, G, B, R] into blocks of the pool.
    """

    def __init__(
        self, blocks: BlockManager, write_blocks: Callable[[npt.NDArray[Any], Ints], None]
    ) -> None:
        self.num_tokens = 0  # whose KV came in this way
        self._blocks, self._write_blocks = blocks, write_blocks
        self._held: dict[int, _Held] = {}

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Take blocks for a sequence that is to come; False where there are not as many."""
        if request_id in self._held or num_blocks > self._blocks.num_available:
            return False
        self._held[request_id] = _Held(np.array(self._blocks.allocate(num_blocks), np.int32))
        return True

    def keep(self, request_id: int, blocks: Int32s) -> None:
        """Hold whole blocks of a sequence that is about to leave, beside their other users."""
        self._blocks.pin(blocks.tolist())
        self._held[request_id] = _Held(blocks, num_filled=len(blocks))

    def write(self, request_id: int, rows: npt.NDArray[Any], first_block: int) -> bool:
        """Write KV behind what is there; False where blocks before it are missing, or no room."""
        held = self._held.get(request_id)
        if held is None or held.num_filled != first_block:
            return False
        num_missing = first_block + len(rows) - len(held.blocks)
        if num_missing > 0:
            # the sequence has grown where it runs
            if num_missing > self._blocks.num_available:
                return False
            more = np.array(self._blocks.allocate(num_missing), np.int32)
            held.blocks = np.concatenate((held.blocks, more))
        stop = first_block + len(rows)
        self._write_blocks(rows, held.blocks[first_block:stop].astype(np.int64))
        held.num_filled = stop
        return True

    def settle(self, record: Sequence, *, has_cache: bool) -> None:
        """Let a sequence find its blocks by hash when it starts; they have no user until then."""
        request = record.request
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        size = self._blocks.block_size
        # the last token has no KV
        num_filled = min(held.num_filled, (record.num_tokens - 1) // size)
        # prompts are found by others as well
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
        """Free what is held for a row; there need be nothing."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._blocks.release(held.blocks)

    def tables(self) -> list[Int32s]:
        return [held.blocks for held in self._held.values()]
