"""Groups of replicas that share weights, and so start and stop together (mechanism S13); no Ray.

```
ranks of a pool of 6 with pool.share_group 3      0 1 2 | 3 4 5
one of the first group exits                      all three restart as the next generation of
                                                  that group; 3 4 5 continue
```

While they load, they exchange texts here, see `raybatch_extensions.sharing.weights`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from raybatch.records.share import ShareRank


@dataclass(slots=True)
class _Round:
    """Texts of one exchange, by rank in the group; `done` gets all, or None if one exited."""

    texts: dict[int, str] = field(default_factory=dict)
    done: asyncio.Future[list[str] | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True, eq=False)
class WeightSharingGroup:
    """A group of replicas that share weights, until one of them exits: `exchange` texts, `end` it.

    The next replicas of these ranks form a new group.
    """

    number: int
    size: int
    # reserved cluster resources, and the number of their users
    reserved: Any = None
    num_users: int = 0
    # why it ended, "" while it lives
    ends: str = ""
    _rounds: list[_Round] = field(default_factory=list)
    _num_left: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        first = self.number * self.size
        return f"replicas {first} to {first + self.size - 1}"

    def share_rank(self, rank: int) -> ShareRank:
        """Return the place of a replica in the group, given its rank in the pool."""
        return ShareRank(rank % self.size, self.size)

    async def exchange(self, rank: int, text: str) -> list[str] | None:
        """Add the text of a member; wait for those of all members, and return them by rank.

        None if a member has exited. The n-th call of each member belongs to the n-th exchange.
        """
        if self.ends:
            return None
        share_rank = self.share_rank(rank).rank
        number = self._num_left.get(share_rank, 0)
        self._num_left[share_rank] = number + 1
        if number == len(self._rounds):
            self._rounds.append(_Round())
        of_all = self._rounds[number]
        of_all.texts[share_rank] = text
        if len(of_all.texts) == self.size:
            of_all.done.set_result([of_all.texts[r] for r in range(self.size)])
        # a cancelled waiter must not cancel the others
        return await asyncio.shield(of_all.done)

    def end(self, why: str) -> None:
        """End the group for a reason; pending exchanges return None."""
        self.ends = why
        for of_all in self._rounds:
            if not of_all.done.done():
                of_all.done.set_result(None)


class WeightSharingGroups:
    """The groups of one pool, of `size` replicas each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[int, WeightSharingGroup] = {}
        # by group number, why no more replicas start
        self._given_up: dict[int, str] = {}

    def join(self, rank: int) -> WeightSharingGroup:
        """Return the group that a new replica of this rank joins."""
        number = rank // self._size
        group = self._groups.get(number)
        if group is None or group.ends:
            group = self._groups[number] = WeightSharingGroup(number, self._size)
        return group

    def give_up(self, rank: int, cause: str) -> None:
        """Note that a rank cannot start, so that no replica of its group is started any more."""
        self._given_up.setdefault(rank // self._size, cause)

    def why_given_up(self, rank: int) -> str | None:
        """Return why no replica of this rank is started any more; None if it may be started."""
        return self._given_up.get(rank // self._size)
