"""Host memory as the store of all KV: what each sequence has there, and the copies from and to it.

A copy that fails costs its sequence what host memory has of it, and no other anything.
"""

import logging
from collections.abc import Iterable, Mapping

import numpy as np

from raybatch.engine.memory.kv_checkpoints import COPY_ERRORS, BlockCopier
from raybatch.engine.memory.stored_prefixes import StoredPrefixes
from raybatch.engine.memory.stored_sequence import StoredSequence
from raybatch.engine.memory.swap import SwapCounters
from raybatch.engine.sequences.host_pool import HostBlocks
from raybatch.engine.sequences.table import SequenceTable

logger = logging.getLogger(__name__)

# a sequence whose KV did not come back so often in a row ends the engine, which says why
_MAX_FAILURES = 3


class OffloadStore:
    """Owns the host's blocks.

    Args:
        block_size: tokens of one block.
        copier: with the pools.
        has_cache: requests share equal leading blocks; samples of one request always do.
    """

    def __init__(self, block_size: int, copier: BlockCopier, *, has_cache: bool) -> None:
        self.counters = SwapCounters()
        self.prefixes = StoredPrefixes(block_size, has_cache=has_cache)
        self.blocks = HostBlocks(copier.num_host_blocks)
        self._block_size = block_size
        self._copier = copier

    def grow(self, stored: StoredSequence, count: int) -> None:
        """Give a sequence more host blocks."""
        stored.host_blocks += self.blocks.allocate(count)

    def drop(self, stored: StoredSequence) -> None:
        """Give up what host memory has of a sequence."""
        self.prefixes.drop(stored)
        self.blocks.release(stored.host_blocks)
        stored.host_blocks, stored.num_stored = [], 0

    def sync(self, running: Mapping[int, StoredSequence], table: SequenceTable) -> None:
        """Let host memory catch up with what sequences have decoded.

        Where the copy fails, host memory has as much of them as before.

        Args:
            running: by slot.
            table: with the blocks of the device.
        """
        sources, targets = [], []
        for slot, stored in running.items():
            first = stored.num_stored // self._block_size
            stop = -(-int(table.num_computed[slot]) // self._block_size)
            sources.append(table.blocks(slot)[first:stop].astype(np.int64))
            targets.append(np.array(stored.host_blocks[first:stop], np.int64))
        if not sum(map(len, sources)):
            return
        try:
            self._copier.save_blocks(np.concatenate(sources), np.concatenate(targets))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            logger.warning("KV of this step did not go to host memory: %s", error)
            return
        for (slot, stored), blocks in zip(running.items(), sources, strict=True):
            stored.num_stored = int(table.num_computed[slot])
            self._count_saved(len(blocks))

    def note_saved(self, stored: StoredSequence, num_tokens: int, num_blocks: int) -> None:
        """Note that the KV of so many tokens is in host memory, after a copy of some blocks."""
        stored.num_stored = num_tokens
        self.prefixes.add(stored)
        self._count_saved(num_blocks)

    def take_prefix(self, stored: StoredSequence) -> int:
        """Copy leading blocks that another sequence has into a sequence's own; return how many.

        Pages have one owner each, so a prefix is computed once and kept by each that has it.
        """
        count, holder = self.prefixes.find(stored.record)
        if holder is None:
            return 0
        sources = np.array(holder.host_blocks[:count], np.int64)
        try:
            self._copier.copy_host_blocks(sources, np.array(stored.host_blocks[:count], np.int64))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            logger.warning("a prefix is computed again, because a copy failed: %s", error)
            return 0
        stored.num_stored = count * self._block_size
        self.prefixes.add(stored)
        return count

    def load(self, stored: StoredSequence, blocks: list[int]) -> bool:
        """Copy the KV of a sequence into blocks of the device; False if that failed.

        Raises:
            Exception: of the copy, where it failed several times in a row for this sequence.
        """
        host_ids = np.array(stored.host_blocks[: len(blocks)], np.int64)
        try:
            self._copier.load_blocks(host_ids, np.array(blocks, np.int64))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            stored.num_failures += 1
            if stored.num_failures >= _MAX_FAILURES:
                raise
            logger.warning("KV of a sequence is computed again, because a copy failed: %s", error)
            return False
        stored.num_failures = 0
        self.counters.num_loads += 1
        self.counters.loaded_bytes += len(blocks) * self._copier.block_bytes
        if stored.status == "suspended":
            # what a round of prompts left there was never on the device before
            self.counters.num_tokens += stored.num_stored
        return True

    def check(self, sequences: Iterable[StoredSequence]) -> None:
        """Raise RuntimeError unless these, all there are, hold the host's used blocks."""
        sequences = list(sequences)
        self.prefixes.check(sequences)
        self.blocks.check([np.array(stored.host_blocks, np.int32) for stored in sequences])
        for stored in sequences:
            if stored.num_stored > len(stored.host_blocks) * self._block_size:
                raise RuntimeError(
                    f"host memory has {len(stored.host_blocks)} blocks for {stored.num_stored} "
                    f"tokens of sequence {stored.id}"
                )

    def _count_saved(self, num_blocks: int) -> None:
        if num_blocks:
            self.counters.num_saves += 1
            self.counters.saved_bytes += num_blocks * self._copier.block_bytes
