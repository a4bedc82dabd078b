"""A round of prompts that are computed while nothing decodes; their KV goes to host memory."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.memory.offload_store import OffloadStore, StoredSequence
from raybatch.engine.sequences.block_manager import HostBlocks
from raybatch.engine.sequences.forks import PromptForks
from raybatch.engine.sequences.schedule import LayerMoves, OpenStep, Schedule, SchedulerCounters
from raybatch.engine.sequences.table import PREFILL, Sequence, SequenceTable
from raybatch.records.arrays import Ints


@dataclass(slots=True)
class PrefillRound:
    """Fills steps with prompts, first come, first served, and lists the blocks each layer moves.

    A prompt may be cut where the budget of a step ends; its next chunk reads the one before from
    host memory. So does one whose beginning another sequence has there. A prompt waits for others
    that are computing blocks which it lacks, and lets those behind it pass. A sample whose prompt
    another one has computed gets a copy of its blocks, and no block of the window.
    """

    # running sequences; those of a round have blocks of the window there
    _table: SequenceTable
    _store: OffloadStore
    _forks: PromptForks
    _window: HostBlocks
    # tokens of a step
    _budget: int
    _counters: SchedulerCounters
    _waiting: deque[StoredSequence] = field(default_factory=deque)
    _running: dict[int, StoredSequence] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        return bool(self._waiting or self._running)

    def begin(self, sequences: Iterable[StoredSequence]) -> None:
        """Take sequences that have host blocks for all their tokens and some more."""
        self._waiting += sorted(sequences, key=lambda stored: stored.id)

    def schedule(self, preempted: Iterable[int], ended: Iterable[Sequence]) -> Schedule:
        step = OpenStep(self._budget)
        for slot in sorted(self._running, key=lambda slot: self._running[slot].id):
            self._take(slot, step)
        self._admit(step)
        columns = step.columns()
        return Schedule(
            chunk_slots=columns[:, 0],
            chunk_starts=columns[:, 1],
            chunk_lens=columns[:, 2],
            admitted=tuple(step.admitted),
            preempted=tuple(preempted),
            ended=tuple(ended),
            moves=self._moves(columns),
            forked=tuple(step.forked),
            opened=tuple(step.opened),
        )

    def note_computed(self, schedule: Schedule) -> None:
        block_size = self._table.block_size
        columns = (schedule.chunk_slots, schedule.chunk_starts, schedule.chunk_lens)
        for slot, start, length in zip(*(c.tolist() for c in columns), strict=True):
            num_blocks = -(-(start + length) // block_size) - start // block_size
            self._store.note_saved(self._running[slot], start + length, num_blocks)
        for slot, _ in schedule.forked:
            self._store.take_prompt(self._running[slot])

    def leave(self) -> list[int]:
        """Let sequences whose prompts are computed go; return the slots that they had."""
        done = [slot for slot in self._running if self._table.phase[slot] != PREFILL]
        for slot in done:
            stored = self.vacate(slot)
            stored.status, stored.waited = "prefilled", 0
            if not stored.num_stored:
                # of a copy that failed
                self._store.drop(stored)
                stored.status = "evicted"
                stored.record.num_computed_before = stored.record.num_tokens - 1
        return done

    def has(self, slot: int) -> bool:
        return slot in self._running

    def vacate(self, slot: int) -> StoredSequence:
        stored = self._running.pop(slot)
        self._window.release(self._table.blocks(slot))
        self._table.remove(slot)
        stored.slot = None
        return stored

    def discard(self, stored: StoredSequence) -> None:
        """Take out a sequence that has no slot; one that is not in the round changes nothing."""
        if stored in self._waiting:
            self._waiting.remove(stored)

    def check(self) -> None:
        """Raise RuntimeError unless the blocks of the window are those of the round's sequences."""
        self._window.check([self._table.blocks(slot) for slot in self._running])

    def _admit(self, step: OpenStep) -> None:
        """Give waiting sequences slots, as long as the step has tokens left."""
        prefixes = self._store.prefixes
        running = {h for s in self._running.values() for h in prefixes.keys(s.record)}
        kept: list[StoredSequence] = []
        while self._waiting and self._table.has_free_slot:
            stored = self._waiting[0]
            is_fork = self._can_fork(stored, step)
            num_blocks = 0 if is_fork else -(-stored.record.num_tokens // self._table.block_size)
            if num_blocks > self._window.num_available or (step.budget <= 0 and not is_fork):
                break
            self._waiting.popleft()
            if not is_fork and prefixes.will_find_more(stored.record, running):
                kept.append(stored)
                continue
            running.update(prefixes.keys(stored.record))
            self._start(stored, self._window.allocate(num_blocks), step, is_fork=is_fork)
        self._waiting.extendleft(reversed(kept))

    def _can_fork(self, stored: StoredSequence, step: OpenStep) -> bool:
        """Return whether another sample has the prompt in host memory, after this step at last."""
        if self._forks.find(stored.record) is None:
            return False
        is_new = any(i == stored.record.request.request_id for _, i in step.opened)
        return is_new or self._store.prefixes.find_prompt(stored.record) is not None

    def _start(
        self, stored: StoredSequence, blocks: list[int], step: OpenStep, *, is_fork: bool
    ) -> None:
        table, record = self._table, stored.record
        num_hits = 0 if is_fork else self._store.take_prefix(stored)
        slot = stored.slot = table.place(record, blocks[:num_hits])
        table.add_blocks(slot, blocks[num_hits:])
        if is_fork:
            table.num_computed[slot] = record.num_tokens
        num_computed = int(table.num_computed[slot])
        self._counters.note_start(record, num_computed, table.block_size)
        self._running[slot] = stored
        step.admitted.append(slot)
        if is_fork:
            step.forked.append((slot, record.request.request_id))
        self._forks.leave(record)
        if not is_fork:
            self._take(slot, step)

    def _take(self, slot: int, step: OpenStep) -> None:
        table = self._table
        start, record = int(table.num_computed[slot]), table.record(slot)
        length = min(step.budget, int(table.num_tokens[slot]) - start)
        if length <= 0:
            return
        step.add(slot, start, length)
        is_prompt = start + length == table.num_tokens[slot] == table.num_prompt[slot]
        if is_prompt and self._forks.open(record, []):
            step.opened.append((slot, record.request.request_id))

    def _moves(self, chunks: Ints) -> LayerMoves:
        block_size = self._table.block_size
        loads, saves = [], []
        for slot, start, length in chunks.tolist():
            loads.append((slot, 0, -(-start // block_size)))
            saves.append((slot, start // block_size, -(-(start + length) // block_size)))
        load_blocks, load_host = self._pairs(loads)
        save_blocks, save_host = self._pairs(saves)
        return LayerMoves(load_host, load_blocks, save_blocks, save_host)

    def _pairs(self, ranges: list[tuple[int, int, int]]) -> list[Ints]:
        """Return blocks of the window and of the host for ranges of blocks of some slots."""
        window = [self._table.blocks(slot)[first:stop] for slot, first, stop in ranges]
        host = [self._running[slot].host_blocks[first:stop] for slot, first, stop in ranges]
        none = np.empty(0, np.int64)
        return [np.concatenate((none, *ids)).astype(np.int64) for ids in (window, host)]
