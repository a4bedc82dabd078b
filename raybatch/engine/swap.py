"""Keeps the KV of preempted sequences in host memory where that is cheaper than computing it again.

A move is whole or it did not happen: one that fails leaves the sequence as if it had never been
tried, and its tokens are computed again.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from raybatch.engine.host_pool import HostBlocks, SwappedKV
from raybatch.engine.schedule import Schedule
from raybatch.engine.sequences import Sequence, SequenceTable

__all__ = ["BlockCopier", "RecoveryChoice", "SwapCounters", "SwapSpace"]

logger = logging.getLogger(__name__)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

# what a copy may raise where memory or the device is short of something
_COPY_ERRORS = (RuntimeError, MemoryError, OSError)


class BlockCopier(Protocol):
    """Copies blocks between the pools of device and host."""

    @property
    def num_host_blocks(self) -> int:
        """Blocks of the host's pool; 0 where there is none."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, keys and values of all layers."""

    def save_blocks(self, block_ids: Int64s, host_ids: Int64s) -> None:
        """Copy blocks of the device into as many of the host."""

    def load_blocks(self, host_ids: Int64s, block_ids: Int64s) -> None:
        """Copy blocks of the host into as many of the device."""


class RecoveryChoice(Protocol):
    """Chooses how a preempted sequence gets its KV back."""

    def is_copy_quicker(self, *, num_bytes: int, num_tokens: int, num_shared_tokens: int) -> bool:
        """Return whether copying takes no longer than computing.

        Args:
            num_bytes: to copy, there and back.
            num_tokens: with KV.
            num_shared_tokens: the first ones of them, which will be found again.
        """

    def note(self, schedule: Schedule, table: SequenceTable, seconds: float) -> None:
        """Learn from a step that has run, and whose tokens are in the table."""


@dataclass(kw_only=True, slots=True)
class SwapCounters:
    """Moves since the start.

    Args:
        num_saves: sequences whose KV went to host memory.
        num_loads: sequences that got it back.
        saved_bytes: copied to the host.
        loaded_bytes: copied back.
        num_tokens: whose KV came back.
        num_failures: moves that failed.
    """

    num_saves: int = 0
    num_loads: int = 0
    saved_bytes: int = 0
    loaded_bytes: int = 0
    num_tokens: int = 0
    num_failures: int = 0


class SwapSpace:
    """Owns the host's blocks; a sequence that waits with some has them in `Sequence.swapped`.

    Args:
        block_size: tokens of one block.
        copier: with the pools; None has no host memory.
        choice: between copying and computing; None copies whatever there is room for.
    """

    def __init__(
        self,
        block_size: int,
        copier: BlockCopier | None = None,
        choice: RecoveryChoice | None = None,
    ) -> None:
        self.counters = SwapCounters()
        self.blocks = HostBlocks(copier.num_host_blocks if copier else 0)
        self._block_size = block_size
        self._copier = copier
        self._choice = choice

    def save(self, record: Sequence, blocks: Int32s, *, num_shared: int, num_tokens: int) -> None:
        """Keep the KV of a sequence that is about to lose its blocks, if that pays.

        Args:
            record: of the sequence; one that has something in host memory keeps that.
            blocks: its block table.
            num_shared: leading blocks that are likely to be found again.
            num_tokens: with KV.
        """
        own = blocks[num_shared : -(-num_tokens // self._block_size)].astype(np.int64)
        if self._copier is None or record.swapped is not None or not len(own):
            return
        if len(own) > self.blocks.num_available:
            return
        num_bytes = len(own) * self._copier.block_bytes
        if self._choice is not None and not self._choice.is_copy_quicker(
            num_bytes=2 * num_bytes,
            num_tokens=num_tokens,
            num_shared_tokens=num_shared * self._block_size,
        ):
            return
        host_blocks = np.array(self.blocks.allocate(len(own)), np.int32)
        try:
            self._copier.save_blocks(own, host_blocks.astype(np.int64))
        except _COPY_ERRORS as error:
            self.blocks.release(host_blocks)
            self._note_failure(error)
            return
        record.swapped = SwappedKV(
            first_block=num_shared, host_blocks=host_blocks, num_tokens=num_tokens
        )
        self.counters.num_saves += 1
        self.counters.saved_bytes += num_bytes

    def load(self, record: Sequence, start: int, blocks: list[int]) -> bool:
        """Bring KV back into `blocks` and give the host's blocks up; False if that fails.

        Args:
            record: of a sequence that has something in host memory.
            start: place of the first of `blocks` in the sequence, not before what the host has.
            blocks: of the device, as many as there are to bring back from `start` on.
        """
        kept, copier = record.swapped, self._copier
        assert kept is not None, "a sequence without anything in host memory"
        assert copier is not None, "host blocks without a host"
        first = start - kept.first_block
        host_ids = kept.host_blocks[first : first + len(blocks)].astype(np.int64)
        try:
            copier.load_blocks(host_ids, np.array(blocks, np.int64))
        except _COPY_ERRORS as error:
            self._note_failure(error)
            return False
        finally:
            self.drop(record)
        self.counters.num_loads += 1
        self.counters.loaded_bytes += len(blocks) * copier.block_bytes
        self.counters.num_tokens += kept.num_tokens - start * self._block_size
        return True

    def drop(self, record: Sequence) -> None:
        """Give up what a sequence has in host memory, if anything."""
        if record.swapped is not None:
            self.blocks.release(record.swapped.host_blocks)
            record.swapped = None

    def check(self, records: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless `records`, all there are, hold the host's used blocks."""
        kept = [record.swapped for record in records if record.swapped is not None]
        self.blocks.check([swapped.host_blocks for swapped in kept])
        for swapped in kept:
            num_blocks = swapped.first_block + len(swapped.host_blocks)
            if num_blocks != -(-swapped.num_tokens // self._block_size):
                raise RuntimeError("swap space: host blocks do not end where the tokens do")

    def _note_failure(self, error: Exception) -> None:
        self.counters.num_failures += 1
        logger.warning("KV of a sequence is computed again, because a copy failed: %s", error)
