"""Steps of an engine whose KV lives in host memory: rounds of prompts, and decoding between stops.

`raybatch.policy.boundary.page_boundary` plans each stop, the page boundary: which sequences end,
are suspended, grow or are loaded. This module carries the plans out. A page is a block. Between two
boundaries every active sequence has the blocks that it needs in both memories.
"""

from collections.abc import Callable, Mapping
from itertools import islice

import numpy as np

from raybatch.engine.memory.kv_checkpoints import CheckpointCounters
from raybatch.engine.memory.offload_store import OffloadStore, StoredSequence
from raybatch.engine.scheduling.prefill_round import PrefillRound
from raybatch.engine.sequences.block_manager import BlockManager, HostBlocks, SwappedKV
from raybatch.engine.sequences.forks import PromptForks
from raybatch.engine.sequences.schedule import Schedule, SchedulerCounters, note_computed
from raybatch.engine.sequences.table import DECODE, Sequence, SequenceTable
from raybatch.policy.boundary.page_boundary import plan_boundary
from raybatch.policy.boundary.records import BoundaryOptions, BoundarySnapshot, SequencePages
from raybatch.records.arrays import Ints

# a boundary comes early once this share of the sequences that decode have ended, so that short
# outputs leave no empty slots for whole pages
_ENDED_SHARE = 0.125


class OffloadScheduler:
    """Owns sequences, the bookkeeping of both pools and the table of running ones.

    The window are blocks of the device's pool while prompts are computed; the token budget of one
    step of prompts is at least the slots of the table.
    """

    def __init__(
        self,
        blocks: BlockManager,
        table: SequenceTable,
        store: OffloadStore,
        *,
        num_window_blocks: int,
        max_batched_tokens: int,
        options: BoundaryOptions,
    ) -> None:
        self.blocks, self.table, self.store = blocks, table, store
        self.counters = SchedulerCounters()
        # all KV is copied before its sequence is suspended, so that nothing is copied ahead
        self.moves, self.ahead = store.counters, CheckpointCounters()
        self._options = options
        # of prompts in host memory, where every sample has its own
        self.forks = PromptForks(blocks, keep_cached=False)
        window = HostBlocks(num_window_blocks)
        self._round = PrefillRound(
            table, store, self.forks, window, max_batched_tokens, self.counters
        )
        # by arrival; a boundary looks at all of `_sequences`, and at no new one
        self._new: dict[int, Sequence] = {}
        self._sequences: dict[int, StoredSequence] = {}
        # by slot, of sequences that decode
        self._active: dict[int, StoredSequence] = {}
        self._steps_left = 0
        self._num_begun = 0
        self._boundaries_since_prefill = 0

    @property
    def num_waiting(self) -> int:
        return len(self._new) + len(self._sequences) - self.table.num_running

    @property
    def kv_used_fraction(self) -> float:
        """Share of the host's KV memory, where all of it lives, that sequences hold."""
        return self.store.blocks.num_used / max(1, self.store.blocks.num_blocks)

    def add(self, record: Sequence) -> None:
        if record.has_started:
            stored = StoredSequence(record=record, status="evicted")
            if self.store.take_carried(stored):
                stored.status = "prefilled"
            self._sequences[record.arrival] = stored
        else:
            self._new[record.arrival] = record
        self.forks.enter(record)

    def waiting(self) -> list[Sequence]:
        known = [stored.record for stored in self._sequences.values() if stored.slot is None]
        return sorted((*known, *self._new.values()), key=lambda record: record.arrival)

    def withdraw(self, is_wanted: Callable[[Sequence], bool]) -> list[Sequence]:
        taken = [record for record in self.waiting() if is_wanted(record)]
        for record in taken:
            self.forks.leave(record)
            if self._new.pop(record.arrival, None) is None:
                self._forget(self._sequences[record.arrival])
        return taken

    def kv_places(self, request_ids: set[int]) -> dict[int, SwappedKV]:
        """Return where the sequences of these requests have their KV, by arrival."""
        self.store.sync(self._active, self.table)
        return {
            stored.id: SwappedKV(
                first_block=0,
                host_blocks=np.array(stored.host_blocks, np.int32),
                num_tokens=stored.num_stored,
            )
            for stored in self._sequences.values()
            if stored.record.request.request_id in request_ids
        }

    def schedule(self, drafts: Mapping[int, list[int]]) -> Schedule:
        """Decide the next step, at a page boundary by a plan; drafts are not taken."""
        preempted, admitted = self._round.leave(), list[int]()
        ended: list[Sequence] = []
        if not self._round.is_open and self._is_at_boundary():
            ended = self._cross_boundary(preempted, admitted)
        if self._round.is_open:
            return self._round.schedule(preempted, ended)
        self._steps_left -= 1
        for slot in self.table.full_slots().tolist():
            self.table.add_blocks(slot, self.blocks.allocate(1, is_reserved=True))
            self.table.num_reserved[slot] -= 1
        return Schedule(
            decode_slots=np.flatnonzero(self.table.phase == DECODE),
            admitted=tuple(admitted),
            preempted=tuple(preempted),
            ended=tuple(ended),
        )

    def advance(self, schedule: Schedule) -> Ints:
        if schedule.moves is not None:
            self._round.note_computed(schedule)
        return note_computed(self.table, schedule)

    def remove(self, slot: int) -> Sequence:
        stored = self._vacate(slot)
        self._forget(stored)
        return stored.record

    finish = remove

    def discard(self, slot: int) -> tuple[Sequence, Ints]:
        """Take a sequence with broken KV out; return also the blocks of the pool to be cleared."""
        blocks = self._broken_blocks(slot)
        self.forks.close(self.table.record(slot).request.request_id)
        return self.remove(slot), blocks

    def restart(self, slot: int) -> tuple[Sequence, Ints]:
        """Let a sequence be computed again; return also the blocks of the pool to be cleared."""
        blocks = self._broken_blocks(slot)
        stored = self._vacate(slot)
        self._evict(stored)
        return stored.record, blocks

    def check(self) -> None:
        self.blocks.check([self.table.blocks(slot) for slot in self._active])
        self.store.check(self._sequences.values())
        self._round.check()
        self.forks.check(self.waiting())
        self.table.check(num_reserved=self.blocks.num_reserved)

    def _is_at_boundary(self) -> bool:
        if not self._sequences and not self._new:
            return False
        # one that needs a block must have some set aside
        is_starved = not self.table.num_reserved[self.table.full_slots()].all()
        if not self._active or self._steps_left <= 0 or is_starved:
            return True
        num_ended = self._num_begun - len(self._active)
        is_worth_it = num_ended >= max(1, _ENDED_SHARE * self._num_begun)
        return is_worth_it and self.num_waiting > 0

    def _cross_boundary(self, preempted: list[int], admitted: list[int]) -> list[Sequence]:
        """Carry a plan out; return the sequences that cannot fit even alone."""
        table, sequences = self.table, self._sequences
        self.store.sync(self._active, table)
        # as many sequences without KV as one round can take
        num_waiting = sum(stored.status == "waiting" for stored in sequences.values())
        for arrival in list(islice(self._new, max(0, len(table.records) - num_waiting))):
            record = self._new.pop(arrival)
            sequences[arrival] = StoredSequence(record=record, status="waiting")
        before = {id: stored.status for id, stored in sequences.items()}
        snapshot = BoundarySnapshot(
            sequences=tuple(self._pages(stored) for stored in sequences.values()),
            page_tokens=table.block_size,
            device_pages=self.blocks.num_blocks,
            device_free=self.blocks.num_available,
            host_pages=self.store.blocks.num_blocks,
            host_free=self.store.blocks.num_available,
            max_active=len(table.records),
            boundaries_since_prefill=self._boundaries_since_prefill,
        )
        plan = plan_boundary(snapshot, self._options)
        ended = [sequences[id] for id in plan.over_capacity]
        for stored in ended:
            self._yield(stored, preempted)
            self._forget(stored)
        for id in (*plan.evict, *plan.suspend):
            # the device's blocks of suspended sequences, and the host's of evicted ones
            is_behind = self._yield(sequences[id], preempted)
            if is_behind or id in plan.evict:
                self._evict(sequences[id])
            else:
                sequences[id].status = "suspended"
        self.counters.num_preemptions += len(plan.evict)
        if not plan.is_prefill:
            self.counters.num_preemptions += len(plan.suspend)
        for grant in plan.extend:
            slot = sequences[grant.id].slot
            assert slot is not None, "more blocks for a sequence that does not run"
            self.blocks.reserve(grant.num_pages)
            table.num_reserved[slot] += grant.num_pages
        for grant in plan.grow:
            self.store.grow(sequences[grant.id], grant.num_pages)
        for grant in plan.load:
            self._load(sequences[grant.id], grant.num_pages, admitted)
        for grant in plan.prefill:
            self.store.grow(sequences[grant.id], grant.num_pages)
        self._round.begin(sequences[grant.id] for grant in plan.prefill)
        for id, stored in sequences.items():
            stored.waited = stored.waited + 1 if stored.status == before[id] else 0
        self._boundaries_since_prefill = (
            0 if plan.is_prefill else self._boundaries_since_prefill + 1
        )
        self._steps_left = self._options.interval * table.block_size
        self._num_begun = len(self._active)
        return [stored.record for stored in ended]

    def _yield(self, stored: StoredSequence, preempted: list[int]) -> bool:
        """Empty the slot of a sequence; return whether host memory lacks some of its KV."""
        if stored.slot is None:
            return False
        is_behind = stored.num_stored < int(self.table.num_computed[stored.slot])
        preempted.append(stored.slot)
        self._vacate(stored.slot)
        return is_behind

    def _pages(self, stored: StoredSequence) -> SequencePages:
        record, slot = stored.record, stored.slot
        num_tokens = int(self.table.num_tokens[slot]) if slot is not None else record.num_tokens
        num_generated = num_tokens - len(record.request.prompt_token_ids)
        is_pending = stored.status in ("waiting", "evicted")
        # the last token of a sequence that decodes has no KV yet
        context = num_tokens if is_pending else num_tokens - 1
        device_pages = 0
        if slot is not None:
            device_pages = int(self.table.num_blocks[slot] + self.table.num_reserved[slot])
        return SequencePages(
            id=stored.id,
            status=stored.status,
            context_tokens=context,
            # a prompt of a single token has nothing to decode, and has not ended
            remaining_tokens=max(1, record.max_len - 1 - context),
            device_pages=device_pages,
            host_pages=len(stored.host_blocks),
            progress_tokens=min(context, num_generated),
            waited=stored.waited,
        )

    def _load(self, stored: StoredSequence, num_pages: int, admitted: list[int]) -> None:
        """Bring a sequence back to the device, with blocks for what it decodes next."""
        count = -(-stored.num_stored // self.table.block_size)
        blocks = self.blocks.allocate(count)
        if not self.store.load(stored, blocks):
            self.blocks.release(np.array(blocks, np.int32), keep_cached=False)
            self._evict(stored)
            return
        slot = stored.slot = self.table.place(stored.record, [])
        self.table.add_blocks(slot, blocks)
        self.table.skip_to(slot, stored.num_stored)
        self.blocks.reserve(num_pages - count)
        self.table.num_reserved[slot] += num_pages - count
        stored.status = "active"
        self._active[slot] = stored
        admitted.append(slot)

    def _evict(self, stored: StoredSequence) -> None:
        # the last token of a sequence that decodes has no KV
        stored.record.num_computed_before = stored.record.num_tokens - 1
        self.store.drop(stored)
        stored.status = "evicted"

    def _forget(self, stored: StoredSequence) -> None:
        self.forks.leave(stored.record)
        self._round.discard(stored)
        self.store.drop(stored)
        del self._sequences[stored.id]

    def _vacate(self, slot: int) -> StoredSequence:
        if self._round.has(slot):
            return self._round.vacate(slot)
        stored = self._active.pop(slot)
        self.blocks.unreserve(int(self.table.num_reserved[slot]))
        self.blocks.release(self.table.blocks(slot), keep_cached=False)
        self.table.remove(slot)
        stored.slot = None
        return stored

    def _broken_blocks(self, slot: int) -> Ints:
        """Return the blocks of the pool in which the KV of `slot` may be; no other has any."""
        if self._round.has(slot):
            # its blocks are those of the window, which may lie anywhere in the pool
            return np.arange(self.blocks.num_blocks)
        return self.table.blocks(slot).astype(np.int64)
