"""Prompts of which several samples start: computed once, and held until all of them have started.

The first sample computes the prompt. The others take its blocks, also the last one, which the
prompt fills in part, and draw their first tokens from the same logits:

    blocks      | 0 | 1 | 2 |    the prompt ends within block 2
    sample 0    | x | x | x |    before it writes behind the prompt it takes a copy of block 2
    sample 1    | x | x | x |    the same; the last one that has block 2 writes into it
    fork        | x | x | x |    as long as samples wait for a slot or for memory
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.table import Sequence
from raybatch.records.arrays import Int32s


@dataclass(kw_only=True, slots=True, eq=False)
class PromptFork:
    """The samples of one request that have no token yet."""

    # arrivals of those that wait
    waiting: set[int] = field(default_factory=set)
    # the prompt is computed, and its logits are kept for those that wait
    is_open: bool = False
    # of the prompt, in order of position
    blocks: list[int] = field(default_factory=list)
    # of the sample that computed it
    num_cached_tokens: int = 0


class PromptForks:
    """The forks of one engine by request; an open fork is a user of its blocks like any other.

    `keep_cached`: blocks stay findable after their last user.
    """

    def __init__(self, blocks: BlockManager, *, keep_cached: bool) -> None:
        self._manager = blocks
        self._keep_cached = keep_cached
        self._forks: dict[int, PromptFork] = {}

    def enter(self, record: Sequence) -> None:
        """Count a sequence that waits, if others of its request may start with its prompt."""
        if may_fork(record):
            fork = self._forks.setdefault(record.request.request_id, PromptFork())
            fork.waiting.add(record.arrival)

    def leave(self, record: Sequence) -> None:
        """Note that a sequence does not wait any more; after the last one the fork ends."""
        fork = self._forks.get(record.request.request_id)
        if fork is None:
            return
        fork.waiting.discard(record.arrival)
        if not fork.waiting:
            self.close(record.request.request_id)
            del self._forks[record.request.request_id]

    def find(self, record: Sequence) -> PromptFork | None:
        """Return the open fork with which a waiting sequence may start."""
        fork = self._forks.get(record.request.request_id)
        return fork if fork is not None and fork.is_open and may_fork(record) else None

    def is_open(self, request_id: int) -> bool:
        fork = self._forks.get(request_id)
        return fork is not None and fork.is_open

    def open(self, record: Sequence, blocks: list[int]) -> bool:
        """Hold the prompt that `record` computes in this step, if others wait for it."""
        fork = self._forks.get(record.request.request_id)
        if fork is None or fork.is_open:
            return False
        self._manager.pin(blocks)
        fork.is_open, fork.blocks = True, blocks
        fork.num_cached_tokens = record.num_cached_tokens
        return True

    def close(self, request_id: int) -> None:
        """Give up the prompt of a request; the next of its samples computes it again."""
        fork = self._forks.get(request_id)
        if fork is not None and fork.is_open:
            blocks = np.array(fork.blocks, np.int32)
            fork.is_open, fork.blocks = False, []
            self._manager.release(blocks, keep_cached=self._keep_cached)

    def close_one(self, *, but: Sequence | None = None) -> bool:
        """Close the oldest open fork but that of a sequence; False where there is none."""
        kept = None if but is None else but.request.request_id
        is_closed = (i for i, fork in self._forks.items() if fork.is_open and i != kept)
        request_id = next(is_closed, None)
        if request_id is None:
            return False
        self.close(request_id)
        return True

    def tables(self) -> list[Int32s]:
        return [np.array(fork.blocks, np.int32) for fork in self._forks.values()]

    def check(self, waiting: Iterable[Sequence]) -> None:
        """Raise RuntimeError unless the forks are those of all `waiting` sequences."""
        expected: dict[int, set[int]] = {}
        for record in filter(may_fork, waiting):
            expected.setdefault(record.request.request_id, set()).add(record.arrival)
        if expected != {i: fork.waiting for i, fork in self._forks.items()}:
            raise RuntimeError("forks: their samples differ from those that wait")


def may_fork(record: Sequence) -> bool:
    """Return whether a sequence that waits has nothing but a prompt, which others have as well."""
    has_kv = record.swapped is not None
    return record.request.sampling.n > 1 and not len(record.token_ids) and not has_kv
