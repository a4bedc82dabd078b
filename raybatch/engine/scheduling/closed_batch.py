"""Closed batches: sequences that start together, and that others wait for until all have ended."""

from raybatch.engine.scheduling.needs import Need
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence


class ClosedBatch:
    """Who belongs to the batch that runs.

    Its members may take several steps to start, as the prompts of a step are limited. Each takes
    the blocks of its full length, so that none of them has to give up its KV.

    Args:
        blocks: the KV pool's books; read only.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._pool = blocks
        self._num_places = 0
        self._num_blocks = 0
        self._is_empty = True

    def open(self, num_rows: int) -> None:
        """Begin a batch of so many rows, if memory holds them; nobody runs."""
        self._num_places, self._num_blocks = num_rows, self._pool.num_available
        self._is_empty = True

    def is_closed_to(self, record: Sequence) -> bool:
        """Return whether a waiting sequence has to wait for the end of the batch."""
        # one that had to yield is a member, and one that comes from elsewhere was
        return self._num_places <= 0 and not record.has_started

    def takes(self, record: Sequence, need: Need) -> bool:
        """Return whether memory holds a sequence as well; the first that it does not is the last.

        Args:
            record: that the batch is not closed to.
            need: its blocks.
        """
        if self._is_empty or record.has_started or self._size(record, need) <= self._num_blocks:
            return True
        self._num_places = 0
        return False

    def add(self, record: Sequence, need: Need) -> None:
        """Note a sequence that starts; the arguments are those of `takes`."""
        self._is_empty = False
        self._num_places -= 1
        self._num_blocks -= self._size(record, need)

    def _size(self, record: Sequence, need: Need) -> int:
        num_grown = record.max_blocks(self._pool.block_size) - need.num_total
        return need.num_available + max(0, num_grown)
