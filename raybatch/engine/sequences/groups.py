"""Prefix-sharing groups: which blocks hold the common prefix, and how long they stay.

There is no sequence for a prefix. Whichever member runs first computes it with its own prompt, and
the group takes a share in every prefix block as soon as it is scheduled:

    blocks      | 0 | 1 | 2 | 3 |    first member: computes 0..3, then its own part
    group       | x | x | x |        pinned so far; a member that starts now computes 3 itself

So the prefix survives the preemption of that member, and another one goes on where it stopped.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.records.types import Request, TokenIds


@dataclass(kw_only=True, slots=True, eq=False)
class PrefixGroup:
    """The sequences of one engine that share a prefix."""

    group_id: int
    # the common tokens, whole blocks; read only
    prefix: TokenIds
    max_blocks: int
    # sequences that wait or run
    num_members: int = 0
    # a member was admitted, so that the others go before new groups
    has_started: bool = False
    # pinned blocks, the first ones of the prefix
    blocks: list[int] = field(default_factory=list)


class PrefixGroups:
    """The groups of one engine by their id; a group lives as long as it has members.

    A pin is a user of a block like any other. `keep_cached`: blocks stay findable after their last
    user.
    """

    def __init__(self, blocks: BlockManager, *, keep_cached: bool) -> None:
        self._manager = blocks
        self._keep_cached = keep_cached
        self._groups: dict[int, PrefixGroup] = {}

    @property
    def num_pinned(self) -> int:
        return sum(len(group.blocks) for group in self._groups.values())

    def join(self, request: Request) -> PrefixGroup | None:
        """Count a sequence of `request` in, and return its group.

        None without a group, without a whole block to share, or where the tokens are not those
        of the group: such a request shares what the hash of its blocks finds.
        """
        num_blocks = request.prefix_len // self._manager.block_size
        if request.group_id is None or num_blocks < 1:
            return None
        prompt = request.prompt_token_ids
        group = self._groups.get(request.group_id)
        if group is None:
            num_tokens = num_blocks * self._manager.block_size
            if num_tokens > len(prompt):
                return None
            group = PrefixGroup(
                group_id=request.group_id, prefix=prompt[:num_tokens], max_blocks=num_blocks
            )
            self._groups[group.group_id] = group
        elif not np.array_equal(prompt[: len(group.prefix)], group.prefix):
            return None
        group.num_members += 1
        return group

    def leave(self, group: PrefixGroup | None) -> None:
        """Count a sequence out; the last one gives the prefix back."""
        if group is None:
            return
        group.num_members -= 1
        if not group.num_members:
            self.unpin(group)
            del self._groups[group.group_id]

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

    def unpin(self, group: PrefixGroup | None, keep: int = 0) -> None:
        """Give up all but the first `keep` blocks; who runs next computes them again."""
        if group is None:
            return
        dropped = np.array(group.blocks[keep:], np.int32)
        del group.blocks[keep:]
        self._manager.release(dropped, keep_cached=self._keep_cached)

    def unpin_idle(self, used: npt.NDArray[np.int32]) -> None:
        """Give up all but the `used` blocks of running members, where nothing else is left."""
        for group in self._groups.values():
            is_idle = ~np.isin(group.blocks, used)
            if is_idle.any():
                self.unpin(group, keep=int(is_idle.argmax()))

    def tables(self) -> list[npt.NDArray[np.int32]]:
        return [np.array(group.blocks, np.int32) for group in self._groups.values()]

    def check(self, members: Iterable[PrefixGroup | None]) -> None:
        """Raise RuntimeError unless the groups are those of all waiting and running `members`."""
        counts = Counter(id(group) for group in members if group is not None)
        expected = {id(group): group.num_members for group in self._groups.values()}
        if counts != expected:
            raise RuntimeError("prefix groups: members differ from the sequences in the engine")
        if any(len(group.blocks) > group.max_blocks for group in self._groups.values()):
            raise RuntimeError("prefix groups: more blocks are pinned than the prefix has")
