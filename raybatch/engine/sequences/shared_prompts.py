"""Sharing of prompts between sequences: which blocks hold them, and how long they stay.

The first sequence that runs computes a prompt, and others use its blocks:

    blocks      | 0 | 1 | 2 | 3 |    a prefix group whose prefix ends with block 2
    member 0    | x | x | x | x |    computes 0..2, then its own part
    group       | x | x |            pinned so far; a member that starts now computes 2 itself

    blocks      | 0 | 1 | 2 |        samples of one request (n > 1); the prompt ends within block 2
    sample 0    | x | x | x |        copies block 2 before it writes after the prompt
    sample 1    | x | x | x |        likewise; the last user of block 2 writes into it
    fork        | x | x | x |        held while samples wait for a slot or for memory

A prefix survives the preemption of a member, and another member continues where it stopped. Samples
that start from a fork draw their first token from the logits of the sample that computed it.

`MigratingKV` holds the blocks of rows that move between engines.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.block_manager import BlockManager, hash_blocks
from raybatch.engine.sequences.table import PrefixGroup, Sequence
from raybatch.records.arrays import Bools, Int32s, Ints


@dataclass(kw_only=True, slots=True, eq=False)
class PromptFork:
    """The prompt of a request with n > 1, and its samples that wait to start from it."""

    # arrivals of the waiting samples
    waiting: set[int] = field(default_factory=set)
    # blocks of the prompt, once it is computed and its logits are kept (an open fork)
    blocks: list[int] = field(default_factory=list)
    # of the sample that computed it
    num_cached_tokens: int = 0


class SharedPrompts:
    """Manages the prefix groups of one engine by id, and its prompt forks by request.

    A group lives while it has members, a fork while samples wait. Both count as users of their
    blocks.

    Args:
        has_cache: if there is a prefix cache: requests without a group share equal leading
            blocks too, and blocks stay findable after their last user.
    """

    def __init__(self, blocks: BlockManager, *, has_cache: bool) -> None:
        self._manager = blocks
        self._has_cache = has_cache
        self._groups: dict[int, PrefixGroup] = {}
        self._forks: dict[int, PromptFork] = {}

    @property
    def num_pinned(self) -> int:
        return sum(len(group.blocks) for group in self._groups.values())

    def find(self, record: Sequence) -> list[int]:
        """Return the blocks that already hold the first tokens of a sequence, in order."""
        hashes = record.prompt_hashes(self._manager.block_size, has_cache=self._has_cache)
        # the last token is always computed, because its logits are needed
        max_hits = (record.num_tokens - 1) // self._manager.block_size
        pinned = record.group.blocks[:max_hits] if record.group else []
        return pinned + self._manager.find_prefix(hashes[len(pinned) : max_hits])

    def num_found_again(self, record: Sequence, blocks: Int32s, stays: Bools) -> int:
        """Return how many of the first `blocks` of a sequence will be cache hits when it resumes.

        `blocks` are full, in order of position; `stays`, bool [all blocks of the pool], says which
        blocks keep their content.
        """
        hits = self.find(record)
        # the hash may refer to another block with equal tokens
        length = min(len(hits), len(blocks))
        is_found = (blocks[:length] == hits[:length]) & stays[blocks[:length]]
        return length if is_found.all() else int(is_found.argmin())

    def join(self, record: Sequence) -> None:
        """Make a sequence a member of the group of its request.

        It joins none if the request has no group, if there is no full block to share, or if its
        tokens differ from the group's; such a sequence shares blocks by hash only.
        """
        request, block_size = record.request, self._manager.block_size
        num_blocks = request.prefix_len // block_size
        if request.group_id is None or num_blocks < 1:
            return
        prompt = request.prompt_token_ids
        group = self._groups.get(request.group_id)
        if group is None:
            num_tokens = num_blocks * block_size
            if num_tokens > len(prompt):
                return
            group = PrefixGroup(
                group_id=request.group_id, prefix=prompt[:num_tokens], max_blocks=num_blocks
            )
            self._groups[group.group_id] = group
        elif not np.array_equal(prompt[: len(group.prefix)], group.prefix):
            return
        group.num_members += 1
        record.group = group

    def wait(self, record: Sequence) -> None:
        """Register a waiting sequence as one that may start from the prompt of another sample."""
        if _may_fork(record):
            fork = self._forks.setdefault(record.request.request_id, PromptFork())
            fork.waiting.add(record.arrival)

    def start(self, record: Sequence, hits: list[int]) -> None:
        """Record that a sequence starts with the cached blocks `hits`; pin those of its group."""
        self.pin(record.group, 0, hits)
        self._wait_no_more(record)

    def leave(self, record: Sequence) -> None:
        """Remove a sequence; the last member of a group releases the prefix."""
        self._wait_no_more(record)
        group = record.group
        if group is None:
            return
        group.num_members -= 1
        if not group.num_members:
            self._unpin(group)
            del self._groups[group.group_id]

    def give_up(self, record: Sequence) -> None:
        """Release the group prefix and the fork of a sequence; the next user recomputes them."""
        if record.group is not None:
            self._unpin(record.group)
        self._close(record.request.request_id)

    def pin(self, group: PrefixGroup | None, start: int, blocks: Iterable[int]) -> None:
        """Keep KV blocks of a prefix group in the cache until its last member ends.

        Only blocks that continue the group's pinned prefix are pinned.

        Args:
            start: index of the first of `blocks` in the block table of its sequence.
            blocks: in use, and full after this step.
        """
        if group is None or start > len(group.blocks):
            return
        new = list(blocks)[len(group.blocks) - start : group.max_blocks - start]
        self._manager.pin(new)
        group.blocks += new

    def unpin_idle(self, used: Int32s) -> None:
        """Unpin the blocks of groups except those in `used`, when no other memory can be freed."""
        for group in self._groups.values():
            is_idle = ~np.isin(group.blocks, used)
            if is_idle.any():
                self._unpin(group, keep=int(is_idle.argmax()))

    def fork_of(self, record: Sequence) -> PromptFork | None:
        """Return the fork from which a waiting sequence may start; None if there is none yet."""
        fork = self._forks.get(record.request.request_id)
        return fork if fork is not None and fork.blocks and _may_fork(record) else None

    def has_fork(self, request_id: int) -> bool:
        """Return whether samples of a request wait to start from the logits of its prompt."""
        fork = self._forks.get(request_id)
        return fork is not None and len(fork.blocks) > 0

    def open_fork(self, record: Sequence, blocks: list[int]) -> bool:
        """Pin `blocks`, the prompt that `record` computes in this step, if samples wait for it.

        Returns whether they were pinned: the fork is open until its last sample starts.
        """
        fork = self._forks.get(record.request.request_id)
        if fork is None or fork.blocks:
            return False
        self._manager.pin(blocks)
        fork.blocks, fork.num_cached_tokens = blocks, record.num_cached_tokens
        return True

    def close_one(self, *, but: Sequence | None = None) -> bool:
        """Unpin the prompt of the oldest open fork (not that of `but`); False: none is open."""
        kept = None if but is None else but.request.request_id
        opened = (i for i, fork in self._forks.items() if fork.blocks and i != kept)
        request_id = next(opened, None)
        if request_id is None:
            return False
        self._close(request_id)
        return True

    def tables(self) -> list[Int32s]:
        groups = [np.array(group.blocks, np.int32) for group in self._groups.values()]
        return groups + [np.array(fork.blocks, np.int32) for fork in self._forks.values()]

    def check(self, waiting: list[Sequence], running: list[Sequence]) -> None:
        """Raise RuntimeError unless groups and forks match all sequences of the engine."""
        members = (record.group for record in (*waiting, *running))
        counts = Counter(id(group) for group in members if group is not None)
        if counts != {id(group): group.num_members for group in self._groups.values()}:
            raise RuntimeError(
                "the member counts of prefix groups differ from the sequences in the engine"
            )
        if any(len(group.blocks) > group.max_blocks for group in self._groups.values()):
            raise RuntimeError("a prefix group has pinned more blocks than its prefix has")
        expected: dict[int, set[int]] = {}
        for record in filter(_may_fork, waiting):
            expected.setdefault(record.request.request_id, set()).add(record.arrival)
        if expected != {i: fork.waiting for i, fork in self._forks.items()}:
            raise RuntimeError(
                "the samples registered to start from a prompt differ from the waiting sequences"
            )

    def _unpin(self, group: PrefixGroup, keep: int = 0) -> None:
        dropped = np.array(group.blocks[keep:], np.int32)
        del group.blocks[keep:]
        self._manager.release(dropped, keep_cached=self._has_cache)

    def _wait_no_more(self, record: Sequence) -> None:
        """Remove a sequence from the waiting samples; the fork ends after the last one."""
        fork = self._forks.get(record.request.request_id)
        if fork is None:
            return
        fork.waiting.discard(record.arrival)
        if not fork.waiting:
            self._close(record.request.request_id)
            del self._forks[record.request.request_id]

    def _close(self, request_id: int) -> None:
        fork = self._forks.get(request_id)
        if fork is not None:
            blocks, fork.blocks = np.array(fork.blocks, np.int32), []
            self._manager.release(blocks, keep_cached=self._has_cache)


def _may_fork(record: Sequence) -> bool:
    """Return whether a waiting sequence has only a prompt, and its request several samples."""
    has_kv = record.swapped is not None
    return record.request.sampling.n > 1 and not len(record.token_ids) and not has_kv


@dataclass(slots=True)
class _Held:
    """Blocks in order of position; the first `num_filled` are filled completely."""

    blocks: Int32s
    num_filled: int = 0


class MigratingKV:
    """Holds the KV blocks of rows that migrate into or out of an engine, by request.

    The target engine writes the KV before the sequence arrives. The source engine keeps it until
    the target has everything. No running sequence owns the blocks.

    They are held until `settle` makes them findable by hash, or `drop` frees them. A row may have
    such blocks only while exactly one of its samples is unfinished.

    Args:
        write_blocks: writes KV [blocks, 2, L, G, B, R] into blocks of the pool.
    """

    def __init__(
        self, blocks: BlockManager, write_blocks: Callable[[npt.NDArray[Any], Ints], None]
    ) -> None:
        self.num_tokens = 0  # whose KV migrated into this engine
        self._blocks, self._write_blocks = blocks, write_blocks
        self._held: dict[int, _Held] = {}

    def reserve(self, request_id: int, num_blocks: int) -> bool:
        """Allocate blocks for an incoming sequence; False if too few are available."""
        if request_id in self._held or num_blocks > self._blocks.num_available:
            return False
        self._held[request_id] = _Held(np.array(self._blocks.allocate(num_blocks), np.int32))
        return True

    def keep(self, request_id: int, blocks: Int32s) -> None:
        """Pin full KV blocks of a sequence that is about to leave, so that it can resume here."""
        self._blocks.pin(blocks.tolist())
        self._held[request_id] = _Held(blocks, num_filled=len(blocks))

    def write(self, request_id: int, rows: npt.NDArray[Any], first_block: int) -> bool:
        """Append the KV `rows` of an incoming sequence, which begin at its block `first_block`.

        Returns False, and writes nothing, if earlier blocks are missing or the pool is full.
        """
        held = self._held.get(request_id)
        if held is None or held.num_filled != first_block:
            return False
        num_missing = first_block + len(rows) - len(held.blocks)
        if num_missing > 0:
            # the sequence has grown at its source
            if num_missing > self._blocks.num_available:
                return False
            more = np.array(self._blocks.allocate(num_missing), np.int32)
            held.blocks = np.concatenate((held.blocks, more))
        stop = first_block + len(rows)
        self._write_blocks(rows, held.blocks[first_block:stop].astype(np.int64))
        held.num_filled = stop
        return True

    def settle(self, record: Sequence, *, has_cache: bool) -> None:
        """Release the blocks of a sequence into the cache; it finds them by hash when it starts."""
        request = record.request
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        size = self._blocks.block_size
        # the last token has no KV
        num_filled = min(held.num_filled, (record.num_tokens - 1) // size)
        # other requests may find the prompt too
        num_hashed = max(num_filled, len(request.prompt_token_ids) // size)
        known = np.concatenate((request.prompt_token_ids, record.token_ids))
        root = b"" if has_cache else request.request_id.to_bytes(16, "little", signed=True)
        record.block_hashes = hash_blocks(known[: num_hashed * size], size, root=root)
        filled = held.blocks[:num_filled].tolist()
        for block, block_hash in zip(filled, record.block_hashes, strict=False):
            self._blocks.register(block, block_hash)
        self._blocks.release(held.blocks)
        self.num_tokens += num_filled * size

    def drop(self, request_id: int) -> None:
        """Free the blocks held for a row, if any."""
        if (held := self._held.pop(request_id, None)) is not None:
            self._blocks.release(held.blocks)

    def tables(self) -> list[Int32s]:
        return [held.blocks for held in self._held.values()]
