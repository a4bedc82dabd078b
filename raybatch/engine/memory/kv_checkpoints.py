"""KV of running sequences that host memory has ahead of a preemption, and which to copy next.

Full blocks never change, so a copy of them stays right until its sequence ends. When the sequence
is preempted, only what is behind them is copied; when it runs again, the copy stays.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.memory.kv_cache import COPY_ERRORS
from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.sequences.block_manager import BlockManager, HostBlocks, SwappedKV
from raybatch.engine.sequences.table import DECODE, Sequence, SequenceTable
from raybatch.records.arrays import Int32s

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, slots=True)
class CheckpointCounters:
    """Copies ahead since the start."""

    num_bytes: int = 0
    # that were in host memory when their sequence yielded
    num_used_blocks: int = 0
    num_failures: int = 0


@dataclass(slots=True)
class KVCheckpoints:
    """Keeps checkpoints in the host blocks that nothing else needs; `Sequence.checkpoint` has them.

    The host's blocks are shared with the KV of sequences that wait, which comes first. What was
    brought back stays in host memory as well where it `_keeps_loaded`.
    """

    _block_size: int
    _blocks: HostBlocks
    _copier: KVTiers | None
    _keeps_loaded: bool
    counters: CheckpointCounters = field(default_factory=CheckpointCounters)
    _holders: dict[int, Sequence] = field(default_factory=dict)

    def extend(
        self, record: Sequence, blocks: Int32s, *, num_shared: int, num_tokens: int, max_blocks: int
    ) -> int:
        """Copy full blocks that host memory does not have yet; return how many were tried.

        The sequence runs, and has nothing else in host memory; its first `num_shared` blocks are
        likely to be found again.
        """
        assert record.swapped is None, "a sequence that runs on what host memory alone has"
        if self._copier is None:
            return 0
        held = record.checkpoint
        first = num_shared if held is None else held.first_block
        before = np.empty(0, np.int32) if held is None else held.host_blocks
        start = first + len(before)
        count = min(num_tokens // self._block_size - start, max_blocks, self._blocks.num_available)
        if count <= 0:
            return 0
        added = np.array(self._blocks.allocate(count), np.int32)
        try:
            sources = blocks[start : start + count].astype(np.int64)
            self._copier.save_blocks(sources, added.astype(np.int64))
        except COPY_ERRORS as error:
            self._blocks.release(added)
            self.counters.num_failures += 1
            logger.warning("KV of a sequence is not copied ahead, because that failed: %s", error)
            return count
        self.counters.num_bytes += count * self._copier.block_bytes
        self._hold(record, first, np.concatenate((before, added)))
        return count

    def find(self, record: Sequence, start: int, stop: int) -> Int32s:
        """Return the host block of each place in [start, stop) of a sequence, -1 for none."""
        host_blocks = np.full(stop - start, -1, np.int32)
        held = record.checkpoint
        if held is not None:
            first, last = max(start, held.first_block), held.first_block + len(held.host_blocks)
            if first < last:
                of_places = held.host_blocks[first - held.first_block :]
                host_blocks[first - start : last - start] = of_places
        return host_blocks

    def take(self, record: Sequence, used: Int32s) -> None:
        """End the checkpoint of a sequence; the host blocks in `used` have another owner now."""
        if record.checkpoint is not None:
            self._release(record, np.setdiff1d(record.checkpoint.host_blocks, used))
            self.counters.num_used_blocks += len(used)

    def _release(self, record: Sequence, blocks: Int32s) -> None:
        self._blocks.release(blocks)
        record.checkpoint = None
        del self._holders[record.arrival]

    def keep(self, record: Sequence, loaded: SwappedKV) -> None:
        """Own the host blocks of a sequence that was brought back; those that change go."""
        num_full = 0
        if self._keeps_loaded:
            num_full = max(0, loaded.num_tokens // self._block_size - loaded.first_block)
        self._blocks.release(loaded.host_blocks[num_full:])
        if num_full:
            self._hold(record, loaded.first_block, loaded.host_blocks[:num_full])

    def drop(self, record: Sequence) -> None:
        if record.checkpoint is not None:
            self._release(record, record.checkpoint.host_blocks)

    def make_room(self, count: int, *, but: Sequence) -> None:
        """Give up checkpoints until so many host blocks are available, if possible.

        Those of the earliest go first, which are the last to yield; that of `but` stays.
        """
        for arrival in sorted(self._holders):
            if self._blocks.num_available >= count:
                return
            if self._holders[arrival] is not but:
                self.drop(self._holders[arrival])

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> list[Int32s]:
        """Return the host blocks of all checkpoints.

        Raises RuntimeError: these sequences, all there are, have other checkpoints than were made,
        or one that waits has any.
        """
        if any(record.checkpoint is not None for record in waiting):
            raise RuntimeError("checkpoints: a sequence that waits has one")
        holders = {r.arrival: r for r in running if r.checkpoint is not None}
        if holders != self._holders:
            raise RuntimeError("checkpoints: sequences have others than were made")
        tables = []
        for record in holders.values():
            held = record.checkpoint
            assert held is not None, "a holder without a checkpoint"
            num_blocks = held.first_block + len(held.host_blocks)
            if record.swapped is not None or held.num_tokens != num_blocks * self._block_size:
                raise RuntimeError("checkpoints: one is not of full blocks of a running sequence")
            tables.append(held.host_blocks)
        return tables

    def _hold(self, record: Sequence, first_block: int, host_blocks: Int32s) -> None:
        record.checkpoint = SwappedKV(
            first_block=first_block,
            host_blocks=host_blocks,
            num_tokens=(first_block + len(host_blocks)) * self._block_size,
        )
        self._holders[record.arrival] = record


@dataclass(frozen=True, slots=True)
class CopiesAhead:
    """Copies nothing while there is room, so that what is copied is likely to be needed."""

    _table: SequenceTable
    _blocks: BlockManager
    _checkpoints: KVCheckpoints
    # blocks of one step; 0 never copies
    _max_blocks: int
    # of a slot, leading blocks that others use as well
    _num_found_again: Callable[[int], int]

    def copy(self) -> None:
        """Copy KV of the next to be preempted, if blocks run out before all have filled theirs."""
        if not self._max_blocks:
            return
        table, num_left = self._table, self._max_blocks
        num_short = table.num_needed_blocks(table.block_size) - self._blocks.num_available
        if num_short <= 0:
            return
        slots = np.flatnonzero(table.phase == DECODE)
        for slot in slots[np.argsort(-table.arrival[slots])].tolist():
            num_shared = self._num_found_again(slot)
            num_left -= self._checkpoints.extend(
                table.record(slot),
                table.blocks(slot),
                num_shared=num_shared,
                num_tokens=int(table.num_computed[slot]),
                max_blocks=num_left,
            )
            num_short -= int(table.num_blocks[slot]) - num_shared
            if num_left <= 0 or num_short <= 0:
                return
