"""Fills a step with drafts and prompt chunks, and allocates and shares their blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.memory.swap import SwapSpace
from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.schedule import Schedule, SchedulerCounters
from raybatch.engine.sequences.shared_prompts import SharedPrompts
from raybatch.engine.sequences.table import DECODE, Sequence, SequenceTable
from raybatch.records.arrays import Ints

_NONE: Ints = np.empty(0, np.int64)


@dataclass(slots=True)
class StepBuilder:
    """Builds one step from drafts and sequences, and allocates their blocks immediately."""

    _table: SequenceTable
    _blocks: BlockManager
    _shared: SharedPrompts
    _swap: SwapSpace
    _counters: SchedulerCounters
    # tokens left in addition to those of decoding sequences
    budget: int
    _drafted_slots: Ints = field(default_factory=lambda: _NONE)
    _draft_lens: Ints = field(default_factory=lambda: _NONE)
    _draft_tokens: Ints = field(default_factory=lambda: _NONE)
    # slot, first token and length of each
    _chunks: list[tuple[int, int, int]] = field(default_factory=list)
    _admitted: list[int] = field(default_factory=list)
    _forked: list[tuple[int, int]] = field(default_factory=list)
    _opened: list[tuple[int, int]] = field(default_factory=list)

    def take_drafts(self, slots: Ints, drafts: Mapping[int, list[int]], spare_steps: int) -> None:
        """Add draft tokens of decoding `slots`, int64 [D], to the step, as many as fit.

        Each slot must already have the block of its next token. Drafts never take resources of
        other tokens: neither the budget of decoding sequences, nor blocks that running sequences
        need within `spare_steps`, nor blocks of other sequences.
        """
        if not drafts or self.budget <= 0:
            return
        lens = np.zeros(len(slots), np.int64)
        taken: list[int] = []
        for i, slot in enumerate(slots.tolist()):
            draft = drafts.get(slot)
            if draft:
                wanted = min(len(draft), self.budget - len(taken))
                lens[i] = self._grow(slot, wanted, spare_steps)
                taken += draft[: lens[i]]
        if taken:
            self._drafted_slots, self._draft_lens = slots, lens
            self._draft_tokens = np.array(taken, np.int64)
            self._counters.num_drafted_tokens += len(taken)
            self.budget -= len(taken)

    def admit(self, slot: int, *, is_fork: bool) -> None:
        """Add a sequence that starts in this step.

        `is_fork`: it starts from a prompt that another sample has computed.
        """
        self._admitted.append(slot)
        if is_fork:
            self._forked.append((slot, self._table.record(slot).request.request_id))
        else:
            self.take(slot)

    def take(self, slot: int) -> None:
        """Restore the swapped KV of the sequence in `slot`, or add its next chunk to the step.

        The chunk is cut to the token budget that is left.
        """
        table = self._table
        stop, kept = int(table.num_tokens[slot]), table.record(slot).swapped
        if kept is not None and self.budget > 0:
            hole_end = kept.first_block * table.block_size
            if table.num_computed[slot] < hole_end:
                stop = hole_end
            elif self._shares_unfinished(slot):
                return
            elif self._restore(slot) and table.phase[slot] == DECODE:
                self.budget -= 1
                return
        start = int(table.num_computed[slot])
        length = min(self.budget, stop - start)
        if length <= 0:
            return
        stop = start + length
        num_new = -(-stop // table.block_size) - int(table.num_blocks[slot])
        self._add_reserved(slot, self._blocks.allocate(num_new, is_reserved=True))
        self._share(slot, start // table.block_size, stop)
        self._chunks.append((slot, start, length))
        self.budget -= length
        if stop == table.num_tokens[slot] == table.num_prompt[slot]:
            self._open_fork(slot)

    def build(self, preempted: list[int], ended: list[Sequence]) -> Schedule:
        columns = np.array(self._chunks, np.int64).reshape(-1, 3)
        # includes sequences restored from host memory, which have no drafts
        decode_slots = np.flatnonzero(self._table.phase == DECODE)
        draft_lens = _NONE
        if len(self._draft_lens):
            draft_lens = np.zeros(len(decode_slots), np.int64)
            draft_lens[np.searchsorted(decode_slots, self._drafted_slots)] = self._draft_lens
        return Schedule(
            decode_slots=decode_slots,
            chunk_slots=columns[:, 0],
            chunk_starts=columns[:, 1],
            chunk_lens=columns[:, 2],
            draft_lens=draft_lens,
            draft_tokens=self._draft_tokens,
            admitted=tuple(self._admitted),
            preempted=tuple(preempted),
            ended=tuple(ended),
            forked=tuple(self._forked),
            opened=tuple(self._opened),
        )

    def _grow(self, slot: int, wanted: int, spare_steps: int) -> int:
        """Allocate blocks for drafts; return how many of the `wanted` ones fit."""
        table = self._table
        # the last token of a sequence is never an input
        wanted = min(wanted, int(table.max_len[slot] - table.num_tokens[slot]) - 1)
        next_position = int(table.num_computed[slot]) + 1
        room = int(table.num_blocks[slot]) * table.block_size - next_position
        while room < wanted and self._blocks.num_available > table.num_needed_blocks(spare_steps):
            table.add_blocks(slot, self._blocks.allocate(1))
            room += table.block_size
        return max(0, min(wanted, room))

    def _open_fork(self, slot: int) -> None:
        """Share the prompt of `slot`, which ends in this step, with waiting samples."""
        table, record = self._table, self._table.record(slot)
        if table.num_exact[slot] < table.num_blocks[slot]:
            # its KV was rounded, so blocks and logits are not exact
            return
        if self._shared.open_fork(record, table.blocks(slot).tolist()):
            table.shares_last[slot] = table.num_tokens[slot] % table.block_size > 0
            self._opened.append((slot, record.request.request_id))

    def _shares_unfinished(self, slot: int) -> bool:
        """Return whether `slot` uses blocks that this step fills; a decode needs them filled."""
        table = self._table
        filled = [
            table.blocks(other)[start // table.block_size :] for other, start, _ in self._chunks
        ]
        return bool(filled) and bool(np.isin(table.blocks(slot), np.concatenate(filled)).any())

    def _restore(self, slot: int) -> bool:
        """Restore the swapped KV of `slot`; False if it must be recomputed."""
        table, record = self._table, self._table.record(slot)
        kept, start = record.swapped, int(table.num_blocks[slot])
        assert kept is not None, "the sequence has no swapped KV"
        count = -(-kept.num_tokens // table.block_size) - start
        if count <= 0:
            # all of it is cached by now
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
            # blocks before `start` are shared and exact
            table.num_exact[slot] = max(kept.num_exact, start)
        table.skip_to(slot, kept.num_tokens)
        self._share(slot, start, kept.num_tokens)
        if table.phase[slot] == DECODE:
            # its token of this step may need a new block
            count = int(table.num_reserved[slot])
            self._add_reserved(slot, self._blocks.allocate(count, is_reserved=True))
        return True

    def _add_reserved(self, slot: int, blocks: list[int]) -> None:
        self._table.add_blocks(slot, blocks)
        self._table.num_reserved[slot] -= len(blocks)

    def _share(self, slot: int, first: int, stop: int) -> None:
        """Register the exact full blocks of `slot` from `first` on, up to token `stop`."""
        # usable in this step already: KV is written before any row attends
        record, filled = self._table.record(slot), self._table.blocks(slot)
        last = min(stop // self._table.block_size, int(self._table.num_exact[slot]))
        filled = filled[first:last].tolist()
        for block, block_hash in zip(filled, (record.block_hashes or [])[first:], strict=False):
            self._blocks.register(block, block_hash)
        self._shared.pin(record.group, first, filled)
