"""Decides whose KV is copied to the host ahead of a preemption, and how much of it in one step."""

from collections.abc import Callable

import numpy as np

from raybatch.engine.memory.kv_checkpoints import KVCheckpoints
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import DECODE, SequenceTable


class CopiesAhead:
    """Copies nothing while there is room, so that what is copied is likely to be needed.

    Args:
        table: running sequences.
        blocks: the device's books.
        checkpoints: makes the copies.
        most: blocks of one step; 0 never copies.
        num_found_again: of a slot, leading blocks that others use as well.
    """

    def __init__(
        self,
        table: SequenceTable,
        blocks: BlockManager,
        checkpoints: KVCheckpoints,
        *,
        most: int,
        num_found_again: Callable[[int], int],
    ) -> None:
        self._table = table
        self._blocks = blocks
        self._checkpoints = checkpoints
        self._most = most
        self._num_found_again = num_found_again

    def copy(self) -> None:
        """Copy KV of those that yield next, if blocks run out before all have filled theirs."""
        if not self._most:
            return
        table, most = self._table, self._most
        num_short = table.num_needed_blocks(table.block_size) - self._blocks.num_available
        if num_short <= 0:
            return
        slots = np.flatnonzero(table.phase == DECODE)
        for slot in slots[np.argsort(-table.arrival[slots])].tolist():
            num_shared = self._num_found_again(slot)
            most -= self._checkpoints.extend(
                table.record(slot),
                table.blocks(slot),
                num_shared=num_shared,
                num_tokens=int(table.num_computed[slot]),
                most=most,
            )
            num_short -= int(table.num_blocks[slot]) - num_shared
            if most <= 0 or num_short <= 0:
                return
