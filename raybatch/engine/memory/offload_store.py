"""Host memory as the store of all KV: what each sequence has there, shared prefixes, and copies.

A copy that fails costs one sequence its KV in host memory, and the others nothing.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.memory.kv_cache import COPY_ERRORS
from raybatch.engine.memory.kv_tiers import KVTiers
from raybatch.engine.memory.swap import SwapCounters
from raybatch.engine.sequences.block_manager import HostBlocks
from raybatch.engine.sequences.table import Sequence, SequenceTable
from raybatch.policy.boundary.records import Status

logger = logging.getLogger(__name__)
# an engine ends, with the error, once so many copies in a row failed for one sequence
_MAX_FAILURES = 3


@dataclass(kw_only=True, slots=True, eq=False)
class StoredSequence:
    """A sequence of an engine whose KV lives in host memory."""

    record: Sequence
    # as `raybatch.policy.boundary.records.SequencePages` has it
    status: Status
    # that it holds, in order of position
    host_blocks: list[int] = field(default_factory=list)
    # tokens whose KV is in them
    num_stored: int = 0
    slot: int | None = None
    # boundaries since its status changed
    waited: int = 0
    # loads of its KV that failed in a row
    num_failures: int = 0

    @property
    def id(self) -> int:
        return self.record.arrival


@dataclass(frozen=True, slots=True)
class StoredPrefixes:
    """Who has which prefix; a hash covers a block and all before it, so also its place."""

    _block_size: int
    _has_cache: bool
    _holders: dict[bytes, dict[int, StoredSequence]] = field(default_factory=dict)
    _num_known: dict[int, int] = field(default_factory=dict)
    # who has the whole prompt of a request, the last block as well
    _prompts: dict[bytes, dict[int, StoredSequence]] = field(default_factory=dict)

    def hashes(self, record: Sequence) -> list[bytes]:
        return record.prompt_hashes(self._block_size, has_cache=self._has_cache)

    def add(self, holder: StoredSequence) -> None:
        """Let others find the full blocks that a sequence has stored since the last call."""
        hashes, first = self.hashes(holder.record), self._num_known.get(holder.id, 0)
        stop = min(len(hashes), holder.num_stored // self._block_size)
        for block_hash in hashes[first:stop]:
            self._holders.setdefault(block_hash, {})[holder.id] = holder
        self._num_known[holder.id] = max(first, stop)
        if holder.num_stored >= len(holder.record.request.prompt_token_ids):
            for key in _prompt_key(holder.record):
                self._prompts.setdefault(key, {})[holder.id] = holder

    def keys(self, record: Sequence) -> list[bytes]:
        """Return what others wait for while a sequence is computed."""
        own_prompt = [] if len(record.token_ids) else _prompt_key(record)
        return [*self.hashes(record), *own_prompt]

    def find_prompt(self, record: Sequence) -> StoredSequence | None:
        """Return another sample of the same request whose prompt is stored."""
        holders = (h for key in _prompt_key(record) for h in self._prompts.get(key, {}).values())
        return next(holders, None)

    def drop(self, holder: StoredSequence) -> None:
        for key in _prompt_key(holder.record):
            holders = self._prompts.get(key, {})
            holders.pop(holder.id, None)
            if not holders:
                self._prompts.pop(key, None)
        # a prompt that nobody has looked at yet is not hashed for this
        count = self._num_known.pop(holder.id, 0)
        for block_hash in self.hashes(holder.record)[:count] if count else ():
            holders = self._holders[block_hash]
            del holders[holder.id]
            if not holders:
                del self._holders[block_hash]

    def will_find_more(self, record: Sequence, running: Container[bytes]) -> bool:
        """Return whether sequences that are being computed will leave a longer prefix.

        `running` are the hashes of all their full blocks.
        """
        wanted, count = self._find(record)
        # a holder of the next block has all before it
        if count < len(wanted) and wanted[count] in running:
            return True
        return not len(record.token_ids) and any(key in running for key in _prompt_key(record))

    def find(self, record: Sequence) -> tuple[int, StoredSequence | None]:
        """Return how many leading blocks another sequence has, and which one."""
        wanted, count = self._find(record)
        # a holder of a block has all before it
        return count, next(iter(self._holders[wanted[count - 1]].values())) if count else None

    def check(self, holders: Iterable[StoredSequence]) -> None:
        """Raise RuntimeError unless exactly these are found, by what they have stored."""
        expected: dict[bytes, set[int]] = {}
        for holder in holders:
            for block_hash in self.hashes(holder.record)[: self._num_known.get(holder.id, 0)]:
                expected.setdefault(block_hash, set()).add(holder.id)
            if self._num_known.get(holder.id, 0) * self._block_size > holder.num_stored:
                raise RuntimeError(
                    f"sequence {holder.id} is found by blocks that it has not stored"
                )
        if expected != {key: set(ids) for key, ids in self._holders.items()}:
            raise RuntimeError("stored prefixes: who is found differs from who has stored")

    def _find(self, record: Sequence) -> tuple[list[bytes], int]:
        """Return the blocks that are wanted, and how many of the first somebody has stored."""
        # the last known token is always computed, because its logits are needed
        wanted = self.hashes(record)[: (record.num_tokens - 1) // self._block_size]
        count = next((i for i, h in enumerate(wanted) if h not in self._holders), len(wanted))
        return wanted, count


def _prompt_key(record: Sequence) -> list[bytes]:
    """Return the key of a prompt that several samples have; none where there is one sample."""
    request = record.request
    is_shared = request.sampling.n > 1
    return [b"prompt" + request.request_id.to_bytes(16, "little", signed=True)] * is_shared


class OffloadStore:
    """Owns the host's blocks.

    `has_cache`: requests share equal leading blocks; samples of one request always do.
    """

    def __init__(self, block_size: int, copier: KVTiers, *, has_cache: bool) -> None:
        self.counters = SwapCounters()
        self.prefixes = StoredPrefixes(block_size, has_cache)
        self.blocks = HostBlocks(copier.num_host_blocks)
        self._block_size = block_size
        self._copier = copier

    def grow(self, stored: StoredSequence, count: int) -> None:
        stored.host_blocks += self.blocks.allocate(count)

    def drop(self, stored: StoredSequence) -> None:
        self.prefixes.drop(stored)
        self.blocks.release(stored.host_blocks)
        stored.host_blocks, stored.num_stored = [], 0

    def sync(self, running: Mapping[int, StoredSequence], table: SequenceTable) -> None:
        """Let host memory catch up with what sequences have decoded.

        Where the copy fails, host memory has as much of them as before.
        """
        sources, targets = [], []
        for slot, stored in running.items():
            first = stored.num_stored // self._block_size
            stop = -(-int(table.num_computed[slot]) // self._block_size)
            sources.append(table.blocks(slot)[first:stop].astype(np.int64))
            targets.append(np.array(stored.host_blocks[first:stop], np.int64))
        if not sum(map(len, sources)):
            return
        try:
            self._copier.save_blocks(np.concatenate(sources), np.concatenate(targets))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            logger.warning("KV of this step did not go to host memory: %s", error)
            return
        for (slot, stored), blocks in zip(running.items(), sources, strict=True):
            stored.num_stored = int(table.num_computed[slot])
            self.counters.saved_bytes += len(blocks) * self._copier.block_bytes

    def note_saved(self, stored: StoredSequence, num_tokens: int, num_blocks: int) -> None:
        """Note that the KV of so many tokens is in host memory, after a copy of some blocks."""
        stored.num_stored = num_tokens
        self.prefixes.add(stored)
        self.counters.saved_bytes += num_blocks * self._copier.block_bytes

    def take_prefix(self, stored: StoredSequence) -> int:
        """Copy leading blocks that another sequence has into a sequence's own; return how many.

        Pages have one owner each, so a prefix is computed once and kept by each that has it.
        """
        count, holder = self.prefixes.find(stored.record)
        if holder is None:
            return 0
        if not self._copy_prefix(holder, stored, count):
            return 0
        stored.num_stored = count * self._block_size
        self.prefixes.add(stored)
        return count

    def take_carried(self, stored: StoredSequence) -> bool:
        """Store the KV that came with a sequence, if it is whole and there is room for it."""
        record, kept = stored.record, stored.record.swapped
        record.swapped = None
        if kept is None or kept.rows is None or kept.first_block:
            return False
        is_whole = len(record.token_ids) > 0 and kept.num_tokens == record.num_tokens - 1
        if not is_whole or kept.num_blocks > self.blocks.num_available:
            return False
        self.grow(stored, kept.num_blocks)
        self._copier.write_host_blocks(kept.rows, np.array(stored.host_blocks, np.int64))
        stored.num_stored = kept.num_tokens
        self.prefixes.add(stored)
        self.counters.num_carried_tokens += kept.num_tokens
        return True

    def take_prompt(self, stored: StoredSequence) -> None:
        """Copy the whole prompt of another sample; nothing is stored where that fails."""
        holder = self.prefixes.find_prompt(stored.record)
        assert holder is not None, "a sample without another one to start from"
        num_tokens = len(stored.record.request.prompt_token_ids)
        count = -(-num_tokens // self._block_size)
        if self._copy_prefix(holder, stored, count):
            stored.num_stored = num_tokens
            self.prefixes.add(stored)

    def _copy_prefix(self, holder: StoredSequence, stored: StoredSequence, count: int) -> bool:
        sources = np.array(holder.host_blocks[:count], np.int64)
        try:
            self._copier.copy_host_blocks(sources, np.array(stored.host_blocks[:count], np.int64))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            logger.warning("a prefix is computed again, because a copy failed: %s", error)
            return False
        return True

    def load(self, stored: StoredSequence, blocks: list[int]) -> bool:
        """Copy the KV of a sequence into blocks of the device; False if that failed.

        Raises Exception: of the copy, where it failed several times in a row for this sequence.
        """
        host_ids = np.array(stored.host_blocks[: len(blocks)], np.int64)
        try:
            self._copier.load_blocks(host_ids, np.array(blocks, np.int64))
        except COPY_ERRORS as error:
            self.counters.num_failures += 1
            stored.num_failures += 1
            if stored.num_failures >= _MAX_FAILURES:
                raise
            logger.warning("KV of a sequence is computed again, because a copy failed: %s", error)
            return False
        stored.num_failures = 0
        self.counters.loaded_bytes += len(blocks) * self._copier.block_bytes
        if stored.status == "suspended":
            # what a round of prompts left there was never on the device before
            self.counters.num_tokens += stored.num_stored
        return True

    def check(self, sequences: Iterable[StoredSequence]) -> None:
        """Raise RuntimeError unless these, all there are, hold the host's used blocks."""
        sequences = list(sequences)
        self.prefixes.check(sequences)
        self.blocks.check([np.array(stored.host_blocks, np.int32) for stored in sequences])
        for stored in sequences:
            if stored.num_stored > len(stored.host_blocks) * self._block_size:
                raise RuntimeError(
                    f"host memory has {len(stored.host_blocks)} blocks for {stored.num_stored} "
                    f"tokens of sequence {stored.id}"
                )
