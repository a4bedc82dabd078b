"""Prompts that sequences have in common: which blocks hold them, and how long these stay.

There is no sequence for a prompt. Whoever runs first computes it, and others take its blocks:

    blocks      | 0 | 1 | 2 | 3 |    a prefix group whose prefix ends with block 2
    member 0    | x | x | x | x |    computes 0..2, then its own part
    group       | x | x |            pinned so far; a member that starts now computes 2 itself

    blocks      | 0 | 1 | 2 |        samples of one request, whose prompt ends within block 2
    sample 0    | x | x | x |        before it writes behind the prompt it takes a copy of block 2
    sample 1    | x | x | x |        the same; the last one that has block 2 writes into it
    fork        | x | x | x |        as long as samples wait for a slot or for memory

So a prefix survives the preemption of a member, and another one goes on where it stopped. Samples
that start with a fork draw their first tokens from the logits of the one that computed it.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import PrefixGroup, Sequence
from raybatch.records.arrays import Bools, Int32s


@dataclass(kw_only=True, slots=True, eq=False)
class PromptFork:
    """The samples of one request that have no token yet."""

    # arrivals of those that wait
    waiting: set[int] = field(default_factory=set)
    # of the prompt, once it is computed and its logits are kept for those that wait: an open fork
    blocks: list[int] = field(default_factory=list)
    # of the sample that computed it
    num_cached_tokens: int = 0


class SharedPrompts:
    """The prefix groups of one engine by their id, and its forks by request.

    A group lives as long as it has members, a fork as long as samples wait. Both are users of their
    blocks like any other.

    Args:
        has_cache: requests without a group find equal leading blocks of each other as well, and
            blocks stay findable after their last user.
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
        """Return the blocks of a sequence's prefix that are there; hashes its prompt once."""
        hashes = record.prompt_hashes(self._manager.block_size, has_cache=self._has_cache)
        # the last known token is always computed, because its logits are needed
        max_hits = (record.num_tokens - 1) // self._manager.block_size
        pinned = record.group.blocks[:max_hits] if record.group else []
        return pinned + self._manager.find_prefix(hashes[len(pinned) : max_hits])

    def num_found_again(self, record: Sequence, blocks: Int32s, stays: Bools) -> int:
        """Return how many leading ones of `blocks`, which are full, stay and are found again.

        `stays` [N] tells of each block of the pool.
        """
        hits = self.find(record)
        # a hash may have found another block with the same tokens
        length = min(len(hits), len(blocks))
        is_found = (blocks[:length] == hits[:length]) & stays[blocks[:length]]
        return length if is_found.all() else int(is_found.argmin())

    def join(self, record: Sequence) -> None:
        """Make a sequence a member of the group of its request.

        It has none without a group, without a whole block to share, or where the tokens are not
        those of the group: such a request shares what the hash of its blocks finds.
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
        """Count a sequence that waits, if others of its request may start with its prompt."""
        if _may_fork(record):
            fork = self._forks.setdefault(record.request.request_id, PromptFork())
            fork.waiting.add(record.arrival)

    def start(self, record: Sequence, hits: list[int]) -> None:
        """Note that a sequence does not wait any more, and has these blocks of its prefix."""
        self.pin(record.group, 0, hits)
        self._wait_no_more(record)

    def leave(self, record: Sequence) -> None:
        """Count a sequence out; the last one of a group gives the prefix back."""
        self._wait_no_more(record)
        group = record.group
        if group is None:
            return
        group.num_members -= 1
        if not group.num_members:
            self._unpin(group)
            del self._groups[group.group_id]

    def give_up(self, record: Sequence) -> None:
        """Give back what a sequence has in common with others: the next of them computes it."""
        if record.group is not None:
            self._unpin(record.group)
        self._close(record.request.request_id)

    def pin(self, group: PrefixGroup | None, start: int, blocks: Iterable[int]) -> None:
        """Take a share in those of `blocks` that go on where the pinned ones end.

        The `blocks` are used, and full after this step; `start` is the place of the first in its
        sequence.
        """
        if group is None or start > len(group.blocks):
            return
        new = list(blocks)[len(group.blocks) - start : group.max_blocks - start]
        self._manager.pin(new)
        group.blocks += new

    def unpin_idle(self, used: Int32s) -> None:
        """Give up all but the `used` blocks of running members, where nothing else is left."""
        for group in self._groups.values():
            is_idle = ~np.isin(group.blocks, used)
            if is_idle.any():
                self._unpin(group, keep=int(is_idle.argmax()))

    def fork_of(self, record: Sequence) -> PromptFork | None:
        """Return the open fork with which a waiting sequence may start."""
        fork = self._forks.get(record.request.request_id)
        return fork if fork is not None and fork.blocks and _may_fork(record) else None

    def has_fork(self, request_id: int) -> bool:
        """Return whether samples of a request wait for the logits of its prompt."""
        fork = self._forks.get(request_id)
        return fork is not None and len(fork.blocks) > 0

    def open_fork(self, record: Sequence, blocks: list[int]) -> bool:
        """Hold the prompt that `record` computes in this step, if others wait for it."""
        fork = self._forks.get(record.request.request_id)
        if fork is None or fork.blocks:
            return False
        self._manager.pin(blocks)
        fork.blocks, fork.num_cached_tokens = blocks, record.num_cached_tokens
        return True

    def close_one(self, *, but: Sequence | None = None) -> bool:
        """Close the oldest open fork but that of a sequence; False where there is none."""
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
        """Raise RuntimeError unless groups and forks are those of all these sequences."""
        members = (record.group for record in (*waiting, *running))
        counts = Counter(id(group) for group in members if group is not None)
        if counts != {id(group): group.num_members for group in self._groups.values()}:
            raise RuntimeError("prefix groups: members differ from the sequences in the engine")
        if any(len(group.blocks) > group.max_blocks for group in self._groups.values()):
            raise RuntimeError("prefix groups: more blocks are pinned than the prefix has")
        expected: dict[int, set[int]] = {}
        for record in filter(_may_fork, waiting):
            expected.setdefault(record.request.request_id, set()).add(record.arrival)
        if expected != {i: fork.waiting for i, fork in self._forks.items()}:
            raise RuntimeError("forks: their samples differ from those that wait")

    def _unpin(self, group: PrefixGroup, keep: int = 0) -> None:
        dropped = np.array(group.blocks[keep:], np.int32)
        del group.blocks[keep:]
        self._manager.release(dropped, keep_cached=self._has_cache)

    def _wait_no_more(self, record: Sequence) -> None:
        """Count a sequence out of those that wait; after the last one the fork ends."""
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
    """Return whether a sequence that waits has nothing but a prompt, which others have as well."""
    has_kv = record.swapped is not None
    return record.request.sampling.n > 1 and not len(record.token_ids) and not has_kv
