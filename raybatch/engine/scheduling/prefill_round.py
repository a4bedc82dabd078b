"""A round of prompts that are computed while nothing decodes; their KV goes to host memory."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.memory.offload_store import OffloadStore, StoredSequence
from raybatch.engine.sequences.block_manager import HostBlocks
from raybatch.engine.sequences.schedule import LayerMoves, Schedule, SchedulerCounters
from raybatch.engine.sequences.table import PREFILL, Sequence, SequenceTable
from raybatch.records.arrays import Ints


@dataclass(slots=True)
class PrefillRound:
    """Fills steps with prompts, first come, first served, and lists the blocks each layer moves.

    A prompt may be cut where the budget of a step ends; its next chunk reads the one before from
    host memory. So does one whose beginning another sequence has there. A prompt waits for others
    that are computing blocks which it lacks, and lets those behind it pass.
    """

    # running sequences; those of a round have blocks of the window there
    _table: SequenceTable
    _store: OffloadStore
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
        chunks: list[tuple[int, int, int]] = []
        budget = self._budget
        for slot in sorted(self._running, key=lambda slot: self._running[slot].id):
            budget -= self._take(slot, budget, chunks)
        admitted = self._admit(budget, chunks)
        columns = np.array(chunks, np.int64).reshape(-1, 3)
        return Schedule(
            chunk_slots=columns[:, 0],
            chunk_starts=columns[:, 1],
            chunk_lens=columns[:, 2],
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            ended=tuple(ended),
            moves=self._moves(columns),
        )

    def note_computed(self, schedule: Schedule) -> None:
        block_size = self._table.block_size
        columns = (schedule.chunk_slots, schedule.chunk_starts, schedule.chunk_lens)
        for slot, start, length in zip(*(c.tolist() for c in columns), strict=True):
            num_blocks = -(-(start + length) // block_size) - start // block_size
            self._store.note_saved(self._running[slot], start + length, num_blocks)

    def leave(self) -> list[int]:
        """Let sequences whose prompts are computed go; return the slots that they had."""
        done = [slot for slot in self._running if self._table.phase[slot] != PREFILL]
        for slot in done:
            stored = self.vacate(slot)
            stored.status, stored.waited = "prefilled", 0
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

    def _admit(self, budget: int, chunks: list[tuple[int, int, int]]) -> list[int]:
        """Give waiting sequences slots, as long as the step has tokens left; return the slots."""
        prefixes, admitted = self._store.prefixes, list[int]()
        running = {h for s in self._running.values() for h in prefixes.hashes(s.record)}
        kept: list[StoredSequence] = []
        while budget > 0 and self._waiting and self._table.has_free_slot:
            stored = self._waiting[0]
            num_blocks = -(-stored.record.num_tokens // self._table.block_size)
            if num_blocks > self._window.num_available:
                break
            self._waiting.popleft()
            if prefixes.will_find_more(stored.record, running):
                kept.append(stored)
                continue
            record = stored.record
            running.update(prefixes.hashes(record))
            num_hits = self._store.take_prefix(stored)
            self._counters.note_start(record, num_hits, self._table.block_size)
            blocks = self._window.allocate(num_blocks)
            slot = stored.slot = self._table.place(record, blocks[:num_hits])
            self._table.add_blocks(slot, blocks[num_hits:])
            self._running[slot] = stored
            admitted.append(slot)
            budget -= self._take(slot, budget, chunks)
        self._waiting.extendleft(reversed(kept))
        return admitted

    def _take(self, slot: int, budget: int, chunks: list[tuple[int, int, int]]) -> int:
        start = int(self._table.num_computed[slot])
        length = min(budget, int(self._table.num_tokens[slot]) - start)
        if length > 0:
            chunks.append((slot, start, length))
        return max(0, length)

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
