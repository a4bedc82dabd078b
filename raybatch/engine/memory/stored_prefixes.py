"""Finds leading blocks of prompts that other sequences have in host memory; no tensors."""

from collections.abc import Container, Iterable

from raybatch.engine.memory.stored_sequence import StoredSequence
from raybatch.engine.sequences.block_manager import hash_prompt
from raybatch.engine.sequences.table import Sequence


class StoredPrefixes:
    """Who has which prefix; a hash covers a block and all before it, so it tells the place as well.

    Args:
        block_size: tokens of one block.
        has_cache: requests share equal leading blocks; samples of one request always do.
    """

    def __init__(self, block_size: int, *, has_cache: bool) -> None:
        self._block_size = block_size
        self._has_cache = has_cache
        self._holders: dict[bytes, dict[int, StoredSequence]] = {}
        self._num_known: dict[int, int] = {}

    def hashes(self, record: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks of a prompt, which are made once."""
        if record.block_hashes is None:
            record.block_hashes = hash_prompt(
                record.request, self._block_size, has_cache=self._has_cache
            )
        return record.block_hashes

    def add(self, holder: StoredSequence) -> None:
        """Let others find the full blocks that a sequence has stored since this was last asked."""
        hashes, first = self.hashes(holder.record), self._num_known.get(holder.id, 0)
        stop = min(len(hashes), holder.num_stored // self._block_size)
        for block_hash in hashes[first:stop]:
            self._holders.setdefault(block_hash, {})[holder.id] = holder
        self._num_known[holder.id] = max(first, stop)

    def drop(self, holder: StoredSequence) -> None:
        """Forget what a sequence has stored."""
        # a prompt that nobody has looked at yet is not hashed for this
        count = self._num_known.pop(holder.id, 0)
        for block_hash in self.hashes(holder.record)[:count] if count else ():
            holders = self._holders[block_hash]
            del holders[holder.id]
            if not holders:
                del self._holders[block_hash]

    def find(self, record: Sequence) -> tuple[int, StoredSequence | None]:
        """Return how many leading blocks another sequence has, and which one."""
        count = self._count(record)
        if not count:
            return 0, None
        # who has a block has all before it
        return count, next(iter(self._holders[self.hashes(record)[count - 1]].values()))

    def will_find_more(self, record: Sequence, running: Container[bytes]) -> bool:
        """Return whether sequences that are being computed will leave a longer prefix.

        Args:
            record: of a sequence that waits.
            running: hashes of all full blocks of these.
        """
        wanted, count = self._wanted(record), self._count(record)
        # who has the next block to come has all before it
        return count < len(wanted) and wanted[count] in running

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
        if expected != {key: set(found) for key, found in self._holders.items()}:
            raise RuntimeError("stored prefixes: who is found differs from who has stored")

    def _wanted(self, record: Sequence) -> list[bytes]:
        # the last known token is always computed, because its logits are needed
        return self.hashes(record)[: (record.num_tokens - 1) // self._block_size]

    def _count(self, record: Sequence) -> int:
        """Return how many of the wanted blocks, from the first on, somebody has stored."""
        wanted = self._wanted(record)
        return next((i for i, h in enumerate(wanted) if h not in self._holders), len(wanted))
