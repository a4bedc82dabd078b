"""Which running sequences attend to which blocks, kept as sums that change with each event.

Attention must know every step which blocks one sequence reads alone and which sets of sequences
read a block together. Recomputing that from block tables costs milliseconds; sums of slot
numbers and of random slot keys give both at once, and only blocks that gain or lose a reader are
touched.
"""

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]


class BlockUsers:
    """Readers of each block: their number, the sum of their slots and the sum of their keys.

    With one reader the slot sum is the reader; blocks with equal key sums have the same readers
    (64-bit keys, so that two sets agree by chance once in 10^19).
    """

    def __init__(self, num_blocks: int, max_slots: int) -> None:
        generator = np.random.Generator(np.random.PCG64(0x5EED))
        self._keys = generator.integers(0, 2**64, max_slots, dtype=np.uint64)
        self.count: Int64s = np.zeros(num_blocks, np.int64)
        self.slot_sum: Int64s = np.zeros(num_blocks, np.int64)
        self.key_sum: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self.position: Int64s = np.zeros(num_blocks, np.int64)
        self.num_attended: Int64s = np.zeros(max_slots, np.int64)
        self.high_water = 0

    def extend(self, slots: Int64s, targets: Int64s, block_table: npt.NDArray[np.int32]) -> None:
        """Let each slot attend to the first `targets` blocks of its row of the table.

        Args:
            slots: distinct slots [S].
            targets: blocks that each attends to; fewer than before changes nothing.
            block_table: int32 [max_slots, X], read only.
        """
        grows = self.num_attended[slots] < targets
        slots, targets = slots[grows], targets[grows]
        if not len(slots):
            return
        starts = self.num_attended[slots]
        counts = targets - starts
        owners = np.repeat(slots, counts)
        first = np.repeat(starts - (np.cumsum(counts) - counts), counts)
        position = first + np.arange(len(owners))
        blocks = block_table[owners, position]
        np.add.at(self.count, blocks, 1)
        np.add.at(self.slot_sum, blocks, owners)
        np.add.at(self.key_sum, blocks, self._keys[owners])
        self.position[blocks] = position
        self.num_attended[slots] = targets
        self.high_water = max(self.high_water, int(blocks.max()) + 1)

    def remove(self, slot: int, block_table: npt.NDArray[np.int32]) -> None:
        """Forget what `slot` attends to; its row of the table must still be in place."""
        blocks = block_table[slot, : self.num_attended[slot]]
        self.count[blocks] -= 1
        self.slot_sum[blocks] -= slot
        self.key_sum[blocks] -= self._keys[slot]
        self.num_attended[slot] = 0

    def check(self, block_table: npt.NDArray[np.int32]) -> None:
        """Raise RuntimeError unless the sums equal those of a full recount."""
        count, slot_sum = np.zeros_like(self.count), np.zeros_like(self.slot_sum)
        for slot in np.flatnonzero(self.num_attended).tolist():
            blocks = block_table[slot, : self.num_attended[slot]]
            count[blocks] += 1
            slot_sum[blocks] += slot
        if not (np.array_equal(count, self.count) and np.array_equal(slot_sum, self.slot_sum)):
            raise RuntimeError("block users: the sums differ from the block tables")
