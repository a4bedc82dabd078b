"""Decides what each step computes; pure bookkeeping over arrays, without model and clock."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from raybatch.engine.memory.swap import SwapSpace
from raybatch.engine.scheduling.admission import Admission, Need, WaitingQueue
from raybatch.engine.sequences.block_manager import BlockManager, SwappedKV
from raybatch.engine.sequences.schedule import Schedule, SchedulerCounters
from raybatch.engine.sequences.shared_prompts import MigratingKV, SharedPrompts
from raybatch.engine.sequences.table import DECODE, EMPTY, PREFILL, Sequence, SequenceTable
from raybatch.records.arrays import Bools, Ints

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


_NO_DRAFTS: Mapping[int, list[int]] = MappingProxyType({})


class Scheduler:
    """Schedules sequences: `add`, then alternate `schedule` and `advance`, and `finish`.

    Owns the queues, the block manager and the table of running sequences.

    Args:
        max_batched_tokens: token budget of one step, at least the slots of `table`.
        enable_prefix_caching: share equal leading blocks between requests; samples of one
            request always share them.
        full_step_tokens: smaller steps admit sequences regardless of the memory forecast.
        swap: host memory for the KV of preempted sequences; None disables it.
        copy_blocks: copies device blocks to other ones, immediately or before the next step.
        max_row_blocks: limit of one sequence; None: all blocks.

    Example:
        >>> from raybatch.records.types import Request, Sampling
        >>> table = SequenceTable(max_slots=2, num_blocks=8, block_size=4, max_model_len=32)
        >>> scheduler = Scheduler(
        ...     BlockManager(8, 4), table, max_batched_tokens=6, enable_prefix_caching=False
        ... )
        >>> for i in range(2):
        ...     prompt, sampling = np.arange(4, dtype=np.int32), Sampling(max_tokens=9)
        ...     row = Request(request_id=i, row_id="", prompt_token_ids=prompt, sampling=sampling)
        ...     scheduler.add(Sequence(request=row, sample_idx=0, arrival=i, max_len=13))
        >>> step = scheduler.schedule()
        >>> step.chunk_slots.tolist(), step.chunk_lens.tolist()  # 6 tokens: the second is cut
        ([0, 1], [4, 2])
        >>> table.append_tokens(scheduler.advance(step), np.array([77]))  # drawn for slot 0
        >>> step = scheduler.schedule()
        >>> step.decode_slots.tolist(), step.chunk_slots.tolist(), step.chunk_lens.tolist()
        ([0], [1], [2])
        >>> scheduler.finish(0).token_ids.tolist(), scheduler.blocks.num_used
        ([77], 1)
    """

    def __init__(
        self,
        blocks: BlockManager,
        table: SequenceTable,
        *,
        max_batched_tokens: int,
        enable_prefix_caching: bool,
        full_step_tokens: float = math.inf,
        swap: SwapSpace | None = None,
        copy_blocks: Callable[[Ints, Ints], None] = lambda *_: None,
        max_row_blocks: int | None = None,
    ) -> None:
        self.blocks = blocks
        self.table = table
        self.counters = SchedulerCounters()
        self._budget = max_batched_tokens
        self._max_row_blocks = blocks.num_blocks if max_row_blocks is None else max_row_blocks
        self._swap = swap or SwapSpace(table.block_size)
        # counters of swapped KV
        self.moves = self._swap.counters
        self.arrivals = MigratingKV(blocks, self._swap.write_blocks)
        self._has_cache = enable_prefix_caching
        self.shared = SharedPrompts(blocks, has_cache=enable_prefix_caching)
        self._copy_blocks = copy_blocks
        self._queue = WaitingQueue()
        self._admission = Admission(table, blocks, self.shared, full_step_tokens=full_step_tokens)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def kv_used_fraction(self) -> float:
        return self.blocks.num_used / self.blocks.num_blocks

    def add(self, record: Sequence) -> None:
        """Queue a sequence; one that ran before precedes all that have not started."""
        self._admission.lengths.begin(record.request.likely_output_lens)
        self.shared.join(record)
        self.arrivals.settle(record, has_cache=self._has_cache)
        self._enqueue(record)

    def waiting(self) -> list[Sequence]:
        return list(self._queue)

    def withdraw(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        taken = self._queue.withdraw(is_wanted)
        for record in taken:
            self._leave(record)
        return taken

    def kv_places(
        self, request_ids: set[int], *, from_block: int = 0, once: bool = False
    ) -> dict[int, SwappedKV | None]:
        """Return where the KV of the sequences of these requests is; None if there is no KV.

        The keys are the arrival numbers of the sequences. The KV of running sequences is that from
        block `from_block` on. With `once`, leading blocks that an earlier sequence has too are left
        out: if sequences are restored in this order, these blocks are cache hits.
        """
        table, places = self.table, {record.arrival: record.swapped for record in self._queue}
        running = np.flatnonzero(table.phase != EMPTY)
        is_taken = np.zeros(self.blocks.num_blocks, np.bool_)
        for slot in running[np.argsort(table.arrival[running])].tolist():
            record = table.record(slot)
            if record.request.request_id in request_ids:
                first = self._num_found_again(slot, is_taken) if once else from_block
                # include the last block, which tells how far the row is computed
                first = min(
                    first, max(0, -(-int(table.num_computed[slot]) // table.block_size) - 1)
                )
                blocks = table.blocks(slot).copy()
                is_taken[blocks] = True
                places[record.arrival] = SwappedKV(
                    first_block=first,
                    host_blocks=blocks[first:],
                    num_tokens=int(table.num_computed[slot]),
                    num_exact=int(table.num_exact[slot]),
                    is_on_device=True,
                )
        return places

    def schedule(
        self, drafts: Mapping[int, list[int]] = _NO_DRAFTS, *, most_tokens: int | None = None
    ) -> Schedule:
        """Return the next step: allocate its blocks and admit the sequences that fit.

        Args:
            drafts: draft tokens by slot of a decoding sequence; of each, the step takes as many as
                token budget, blocks and length allow.
            most_tokens: a smaller token budget for this step; None: `max_batched_tokens`.
        """
        # NOTE: there is no decode step and no prefill step. Each step has all decodes, their
        # drafts, started prompts and then new ones, within the budget. Five laws:
        # 1. Every decoding sequence gets its token, as the budget is never below the slots.
        # 2. If one lacks a block, open forks are closed, then the latest arrival is preempted.
        # 3. No sequence starts in a step with a preemption or an end for lack of blocks.
        # 4. A new sequence leaves blocks free for the growth of running ones over 4 steps at most,
        #    and over 16 if it resumes from host memory.
        # 5. A prefix group keeps its blocks until its last member leaves, unless a sequence that
        #    runs or starts alone lacks them.
        preempted, ended = self._grow_decodes()
        grown = np.flatnonzero(self.table.phase == DECODE)
        limit = self._budget if most_tokens is None else min(most_tokens, self._budget)
        budget = max(0, limit - len(grown))
        step = StepBuilder(self.table, self.blocks, self.shared, self._swap, self.counters, budget)
        step.take_drafts(grown, drafts, self._admission.spare_steps)
        started = np.flatnonzero(self.table.phase == PREFILL)
        for slot in started[np.argsort(self.table.arrival[started])].tolist():
            step.take(slot)
        if not preempted and not ended:
            ended = self._admit(step, max(limit, len(grown)))
        return step.build(preempted, ended)

    def advance(self, schedule: Schedule) -> Ints:
        """Record that a step is computed; return the slot of each row of its logits, in row order.

        A decoding slot occurs once for its token and once for each draft; drafts do not count as
        computed.
        """
        self.counters.num_chunk_tokens += int(schedule.chunk_lens.sum())
        table, slots = self.table, schedule.chunk_slots
        table.num_computed[schedule.decode_slots] += 1
        table.num_computed[slots] += schedule.chunk_lens
        done = slots[table.num_computed[slots] == table.num_tokens[slots]]
        table.phase[done] = DECODE
        table.phase[[slot for slot, _ in schedule.forked]] = DECODE
        return np.concatenate((np.repeat(schedule.decode_slots, schedule.decode_lens), done))

    def finish(self, slot: int) -> Sequence:
        length = self.table.num_tokens[slot] - self.table.num_prompt[slot]
        self._admission.lengths.note(int(length))
        return self.remove(slot)

    def remove(self, slot: int) -> Sequence:
        record = self._vacate(slot)
        self._leave(record)
        return record

    def discard(self, slot: int) -> tuple[Sequence, Ints]:
        """Remove a sequence with broken KV; return it, and the blocks that must be cleared.

        These are its blocks without other users. No other sequence finds its KV any more.
        """
        blocks = self.table.blocks(slot).astype(np.int64)
        self.blocks.forget(blocks.tolist())
        self.shared.give_up(self.table.record(slot))
        record = self.remove(slot)
        return record, blocks[self.blocks.num_refs[blocks] == 0]

    def restart(self, slot: int) -> tuple[Sequence, Ints]:
        """Requeue a running sequence, to recompute its KV; return the same as `discard`."""
        blocks = self.table.blocks(slot).astype(np.int64)
        # another sequence that matched these blocks would read zeros
        self.blocks.forget(blocks.tolist())
        num_computed = int(self.table.num_computed[slot])
        record = self._vacate(slot)
        record.num_computed_before = num_computed
        self._enqueue(record)
        return record, blocks[self.blocks.num_refs[blocks] == 0]

    def check(self) -> None:
        running = np.flatnonzero(self.table.phase != EMPTY).tolist()
        tables = [self.table.blocks(slot) for slot in running]
        self.blocks.check([*tables, *self.shared.tables(), *self.arrivals.tables()])
        waiting, records = self.waiting(), [self.table.record(slot) for slot in running]
        self.shared.check(waiting, records)
        self._swap.check([*records, *waiting])
        self.table.check(num_reserved=self.blocks.num_reserved)

    def _enqueue(self, record: Sequence) -> None:
        self.shared.wait(record)
        self._queue.add(record)

    def _leave(self, record: Sequence) -> None:
        self.shared.leave(record)
        self._swap.drop(record)

    def _vacate(self, slot: int) -> Sequence:
        self.blocks.unreserve(int(self.table.num_reserved[slot]))
        self.blocks.release(self.table.blocks(slot), keep_cached=self._has_cache)
        return self.table.remove(slot)

    def _grow_decodes(self) -> tuple[list[int], list[Sequence]]:
        table, preempted, ended = self.table, list[int](), list[Sequence]()
        copies: list[tuple[int, int]] = []
        full = table.full_slots()
        for slot in full[np.argsort(table.arrival[full])].tolist():
            # a copy replaces the shared block
            num_blocks = table.num_blocks[slot] + (not table.shares_last[slot])
            if table.phase[slot] == DECODE and num_blocks > self._max_row_blocks:
                ended.append(self.remove(slot))
                preempted.append(slot)
                continue
            # the victim may be a later slot of this loop, or the slot itself, but none with a
            # pending copy
            while self._lacks_block(slot):
                if self.shared.close_one():
                    continue
                if table.num_running > 1:
                    preempted.append(self._preempt_latest())
                    continue
                self.shared.unpin_idle(table.blocks(slot))
                if self.blocks.num_available < 1:
                    ended.append(self.remove(slot))
                    preempted.append(slot)
            if table.phase[slot] == DECODE:
                copies += self._take_block(slot)
        if copies:
            # before anything is written into blocks that were just freed
            sources, targets = np.array(copies, np.int64).T
            self._copy_blocks(sources, targets)
            self.counters.num_copied_blocks += len(copies)
        return preempted, ended

    def _lacks_block(self, slot: int) -> bool:
        table = self.table
        if table.phase[slot] != DECODE or self.blocks.num_available:
            return False
        return not table.shares_last[slot] or self.blocks.num_refs[table.blocks(slot)[-1]] > 1

    def _take_block(self, slot: int) -> list[tuple[int, int]]:
        """Give `slot` an unshared block for its next token; return the copies into it."""
        table, shared = self.table, self.table.blocks(slot)[-1:].copy()
        if not table.shares_last[slot]:
            table.add_blocks(slot, self.blocks.allocate(1))
            return []
        table.shares_last[slot] = False
        if self.blocks.num_refs[shared[0]] == 1:
            return []
        (block,) = self.blocks.allocate(1)
        table.replace_last(slot, block)
        self.blocks.release(shared)
        return [(int(shared[0]), block)]

    def _preempt_latest(self) -> int:
        table = self.table
        running = np.flatnonzero(table.phase != EMPTY)
        slot = int(running[np.argmax(table.arrival[running])])
        num_computed, record = int(table.num_computed[slot]), table.record(slot)
        num_shared = self._num_found_again(slot, self.blocks.num_refs > 1)
        self._swap.save(
            record,
            table.blocks(slot),
            num_shared=num_shared,
            num_tokens=num_computed,
            num_exact=int(table.num_exact[slot]),
        )
        self._vacate(slot)
        record.num_computed_before = num_computed
        self.counters.num_preemptions += 1
        self._enqueue(record)
        return slot

    def _num_found_again(self, slot: int, stays: Bools) -> int:
        num_full = int(self.table.num_computed[slot]) // self.table.block_size
        blocks = self.table.blocks(slot)[:num_full]
        return self.shared.num_found_again(self.table.record(slot), blocks, stays)

    def _admit(self, step: StepBuilder, limit: int) -> list[Sequence]:
        """Start waiting sequences in order while they fit; return one that can never fit."""
        table = self.table
        self._admission.begin_step()
        while table.has_free_slot and self._queue:
            record = self._queue.peek()
            fork = self.shared.fork_of(record)
            if step.budget <= 0 and fork is None:
                return []
            need = self._admission.need(record, fork)
            if need.num_total > self._max_row_blocks:
                self._leave(record)
                return [self._queue.pop()]
            if not self._admission.has_room(record, need):
                if self.shared.close_one(but=record if table.num_running else None):
                    continue
                if table.num_running:
                    return []
                if self.shared.num_pinned:
                    self.shared.unpin_idle(np.empty(0, np.int32))
                    continue
                self._leave(record)
                return [self._queue.pop()]
            step_tokens = limit - step.budget
            if table.num_running and not self._admission.accepts(
                record, need, step_tokens=step_tokens
            ):
                self.counters.num_admission_stalls += 1
                return []
            slot = self._place(self._queue.pop(), need)
            step.admit(slot, is_fork=fork is not None)
        return []

    def _place(self, record: Sequence, need: Need) -> int:
        self._admission.add(record, need)
        self.blocks.pin(need.hits)
        slot = self.table.place(record, need.hits)
        self.table.num_shared[slot] = need.num_shared
        num_reserved = need.num_total - len(need.hits)
        self.blocks.reserve(num_reserved)
        self.table.num_reserved[slot] = num_reserved
        if need.fork is not None:
            self.table.num_computed[slot] = record.num_tokens
            self.table.shares_last[slot] = record.num_tokens % self.table.block_size > 0
        num_computed = int(self.table.num_computed[slot])
        self.counters.note_start(record, num_computed, self.table.block_size)
        if need.fork is not None:
            # the prompt was computed for the same request
            record.num_cached_tokens = need.fork.num_cached_tokens
        self.shared.start(record, need.hits)
        return slot
