"""Finds leading blocks of prompts that other sequences have in host memory; no tensors."""

from collections.abc import Container, Iterable
from typing import Generic, Protocol, TypeVar

from raybatch.engine.block_manager import hash_prompt
from raybatch.engine.sequences import Sequence

__all__ = ["StoredPrefixes"]


class Holder(Protocol):
    """A sequence that has host blocks."""

    @property
    def id(self) -> int:
        """The same for as long as the engine has the sequence."""

    @property
    def record(self) -> Sequence:
        """Of the sequence."""

    @property
    def num_stored(self) -> int:
        """Tokens, from its beginning, whose KV is in host memory."""


H = TypeVar("H", bound=Holder)


class StoredPrefixes(Generic[H]):
    """Who has which prefix; a hash covers a block and all before it, so it tells the place as well.

    Args:
        block_size: tokens of one block.
        has_cache: requests share equal leading blocks; samples of one request always do.
    """

    def __init__(self, block_size: int, *, has_cache: bool) -> None:
        self._block_size = block_size
        self._has_cache = has_cache
        self._holders: dict[bytes, dict[int, H]] = {}
        self._num_known: dict[int, int] = {}

    def hashes(self, record: Sequence) -> list[bytes]:
        """Return the hashes of the full blocks of a prompt, which are made once."""
        if record.block_hashes is None:
            record.block_hashes = hash_prompt(
                record.request, self._block_size, has_cache=self._has_cache
            )
        return record.block_hashes

    def add(self, holder: H) -> None:
        """Let others find the full blocks that a sequence has stored since this was last asked."""
        hashes, first = self.hashes(holder.record), self._num_known.get(holder.id, 0)
        stop = min(len(hashes), holder.num_stored // self._block_size)
        for block_hash in hashes[first:stop]:
            self._holders.setdefault(block_hash, {})[holder.id] = holder
        self._num_known[holder.id] = max(first, stop)

    def drop(self, holder: H) -> None:
        """Forget what a sequence has stored."""
        for block_hash in self.hashes(holder.record)[: self._num_known.pop(holder.id, 0)]:
            holders = self._holders[block_hash]
            del holders[holder.id]
            if not holders:
                del self._holders[block_hash]

    def find(self, record: Sequence) -> tuple[int, H | None]:
        """Return how many leading blocks another sequence has, and which one.

        The last known token is always computed, because its logits are needed.
        """
        count = self._count(record, self._holders)
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
        count = self._count(record, self._holders)
        most = (record.num_tokens - 1) // self._block_size
        hashes = self.hashes(record)[:most]
        # who has the next block to come has all before it
        return count < len(hashes) and hashes[count] in running

    def check(self, holders: Iterable[H]) -> None:
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

    def _count(self, record: Sequence, known: Container[bytes]) -> int:
        most = (record.num_tokens - 1) // self._block_size
        count = 0
        for block_hash in self.hashes(record)[:most]:
            if block_hash not in known:
                break
            count += 1
        return count
