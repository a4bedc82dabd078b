"""How many drafts a step has room for; pure bookkeeping, like the scheduler that asks."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import SequenceTable

Int64s = npt.NDArray[np.int64]

_NONE: Int64s = np.empty(0, np.int64)


class DraftRoom:
    """Cuts drafts to what the step, the sequence and the KV memory hold.

    A draft takes nothing that known tokens need: no place in the budget of a decoding sequence, no
    block that running sequences will ask for soon, and never another one's blocks.

    Args:
        table: running sequences.
        blocks: the KV pool's books.
        spare_steps: steps for whose growth blocks are left free.
    """

    def __init__(self, table: SequenceTable, blocks: BlockManager, *, spare_steps: int) -> None:
        self._table = table
        self._blocks = blocks
        self._spare_steps = spare_steps

    def place(
        self, decode_slots: Int64s, drafts: Mapping[int, list[int]], budget: int
    ) -> tuple[Int64s, Int64s]:
        """Return the number of drafts of each slot and the drafts; allocates their blocks.

        Args:
            decode_slots: int64 [D], each with the block of its next token.
            drafts: by slot; those of other slots are ignored.
            budget: drafts that the step may compute.

        Returns:
            int64 [D] and all drafts, slot after slot; two empty arrays where there are none.
        """
        if not drafts or budget <= 0:
            return _NONE, _NONE
        lens = np.zeros(len(decode_slots), np.int64)
        taken: list[int] = []
        for i, slot in enumerate(decode_slots.tolist()):
            draft = drafts.get(slot)
            if draft:
                lens[i] = self._grow(slot, min(len(draft), budget - len(taken)))
                taken += draft[: lens[i]]
        return (lens, np.array(taken, np.int64)) if taken else (_NONE, _NONE)

    def _grow(self, slot: int, wanted: int) -> int:
        """Return how many of the `wanted` drafts fit, once blocks were added for them."""
        table = self._table
        # the last token that a sequence may have is never fed back
        wanted = min(wanted, int(table.max_len[slot] - table.num_tokens[slot]) - 1)
        next_position = int(table.num_computed[slot]) + 1
        room = int(table.num_blocks[slot]) * table.block_size - next_position
        while room < wanted and self._has_spare_block():
            table.add_blocks(slot, self._blocks.allocate(1))
            room += table.block_size
        return max(0, min(wanted, room))

    def _has_spare_block(self) -> bool:
        return self._blocks.num_available > self._table.num_needed_blocks(self._spare_steps)


def spread(values: Int64s, slots: Int64s, among: Int64s) -> Int64s:
    """Return the values of ascending slots at their places among more of them, 0 elsewhere."""
    spread = np.zeros(len(among), np.int64)
    spread[np.searchsorted(among, slots)] = values
    return spread
