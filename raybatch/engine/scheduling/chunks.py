"""Fills a step: with chunks of prompts, whose blocks it allocates and shares, and with drafts."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raybatch.engine.memory.swap import SwapSpace
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.forks import PromptForks
from raybatch.engine.sequences.groups import PrefixGroups
from raybatch.engine.sequences.schedule import OpenStep, SchedulerCounters
from raybatch.engine.sequences.table import DECODE, SequenceTable
from raybatch.records.arrays import Ints

_NONE: Ints = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What a step computes of sequences that are not decoding, or brings back from host memory."""

    _table: SequenceTable
    _blocks: BlockManager
    _groups: PrefixGroups
    _forks: PromptForks
    _swap: SwapSpace
    _counters: SchedulerCounters

    def take(self, slot: int, step: OpenStep) -> None:
        """Bring back what host memory has of `slot`, or add a chunk of it to the step."""
        table = self._table
        stop, kept = int(table.num_tokens[slot]), table.record(slot).swapped
        if kept is not None and step.budget > 0:
            hole_end = kept.first_block * table.block_size
            if table.num_computed[slot] < hole_end:
                stop = hole_end
            elif self._shares_unfinished(slot, step.chunks):
                return
            elif self._restore(slot) and table.phase[slot] == DECODE:
                step.budget -= 1
                return
        start = int(table.num_computed[slot])
        length = min(step.budget, stop - start)
        if length <= 0:
            return
        stop = start + length
        num_new = -(-stop // table.block_size) - int(table.num_blocks[slot])
        self._add_reserved(slot, self._blocks.allocate(num_new, is_reserved=True))
        self._share(slot, start // table.block_size, stop)
        step.add(slot, start, length)
        if stop == table.num_tokens[slot] == table.num_prompt[slot]:
            self._open_fork(slot, step)

    def _open_fork(self, slot: int, step: OpenStep) -> None:
        """Let other samples start with the prompt of `slot`, which ends in this step."""
        table, record = self._table, self._table.record(slot)
        if table.num_exact[slot] < table.num_blocks[slot]:
            # blocks and logits are those of a sequence whose KV was rounded
            return
        if self._forks.open(record, table.blocks(slot).tolist()):
            table.shares_last[slot] = table.num_tokens[slot] % table.block_size > 0
            step.opened.append((slot, record.request.request_id))

    def _shares_unfinished(self, slot: int, chunks: list[tuple[int, int, int]]) -> bool:
        """Return whether `slot` has blocks that this step fills; a decode must find its KV."""
        table = self._table
        filled = [table.blocks(other)[start // table.block_size :] for other, start, _ in chunks]
        return bool(filled) and bool(np.isin(table.blocks(slot), np.concatenate(filled)).any())

    def _restore(self, slot: int) -> bool:
        """Bring back what host memory has of `slot`; False if it has to be computed after all."""
        table, record = self._table, self._table.record(slot)
        kept, start = record.swapped, int(table.num_blocks[slot])
        assert kept is not None, "nothing to bring back"
        count = -(-kept.num_tokens // table.block_size) - start
        if count <= 0:
            # others have computed all of it in the meantime
            self._swap.drop(record)
            return False
        blocks = self._blocks.allocate(count, is_reserved=True)
        if not self._swap.load(record, start, blocks):
            self._blocks.release(np.array(blocks, np.int32), keep_cached=False)
            self._blocks.reserve(count)
            self._counters.num_recomputed_tokens += kept.num_tokens - start * table.block_size
            return False
        self._add_reserved(slot, blocks)
        if kept.num_exact is not None:
            # blocks before `start` are those of others by now
            table.num_exact[slot] = max(kept.num_exact, start)
        table.skip_to(slot, kept.num_tokens)
        self._share(slot, start, kept.num_tokens)
        if table.phase[slot] == DECODE:
            # its token of this step may need a block of its own
            count = int(table.num_reserved[slot])
            self._add_reserved(slot, self._blocks.allocate(count, is_reserved=True))
        return True

    def _add_reserved(self, slot: int, blocks: list[int]) -> None:
        self._table.add_blocks(slot, blocks)
        self._table.num_reserved[slot] -= len(blocks)

    def _share(self, slot: int, first: int, stop: int) -> None:
        """Let others find the exact full blocks of `slot` from `first` on, up to token `stop`."""
        # findable from this step on: KV is written before any row of the step attends
        record, filled = self._table.record(slot), self._table.blocks(slot)
        last = min(stop // self._table.block_size, int(self._table.num_exact[slot]))
        filled = filled[first:last].tolist()
        for block, block_hash in zip(filled, (record.block_hashes or [])[first:], strict=False):
            self._blocks.register(block, block_hash)
        self._groups.pin(record.group, first, filled)


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """Cuts drafts to what the step, the sequence and the KV memory hold.

    A draft takes nothing that known tokens need: no place in the budget of a decoding sequence, no
    block that running sequences will ask for soon, and never another one's blocks. `_spare_steps`:
    steps for whose growth blocks are left free.
    """

    _table: SequenceTable
    _blocks: BlockManager
    _spare_steps: int

    def place(
        self, decode_slots: Ints, drafts: Mapping[int, list[int]], budget: int
    ) -> tuple[Ints, Ints]:
        """Return the number of drafts of each slot, int64 [D], and all drafts, slot after slot.

        Allocates their blocks; the arrays are empty where there are none. Each decoding slot, int64
        [D], has the block of its next token.
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
        while room < wanted and self._blocks.num_available > table.num_needed_blocks(
            self._spare_steps
        ):
            table.add_blocks(slot, self._blocks.allocate(1))
            room += table.block_size
        return max(0, min(wanted, room))
