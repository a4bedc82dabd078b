"""Replicas that share weights: they start together, and end together (mechanism S13); no Ray.

```
ranks of a pool of 6 with pool.share_group 3      0 1 2 | 3 4 5
one of the first group ends                       all three are started again, as the next
                                                  generation of that group; 3 4 5 go on
```

While they load, they leave texts for each other here, see `raybatch.engine.ext.sharing.weights`.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from raybatch.records.share import ShareSeat


@dataclass(slots=True)
class _Round:
    """Texts of one exchange, by rank in the group; `done` has them all, or None where one ended."""

    texts: dict[int, str] = field(default_factory=dict)
    done: asyncio.Future[list[str] | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


@dataclass(slots=True, eq=False)
class ShareGroup:
    """One generation of a group: replicas that were started to share weights with each other."""

    number: int
    size: int
    # what is kept of the cluster for all of them, with those who use it
    reserved: Any = None
    num_users: int = 0
    # why it is over, "" while it is not
    ends: str = ""
    _rounds: list[_Round] = field(default_factory=list)
    _num_left: dict[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        first = self.number * self.size
        return f"replicas {first} to {first + self.size - 1}"

    def seat(self, rank: int) -> ShareSeat:
        """Return the seat of a rank of the pool."""
        return ShareSeat(rank % self.size, self.size)

    async def exchange(self, rank: int, text: str) -> list[str] | None:
        """Leave a text, and return those of all once they are there; None where one has ended."""
        if self.ends:
            return None
        seat = self.seat(rank).rank
        number = self._num_left.get(seat, 0)
        self._num_left[seat] = number + 1
        if number == len(self._rounds):
            self._rounds.append(_Round())
        of_all = self._rounds[number]
        of_all.texts[seat] = text
        if len(of_all.texts) == self.size:
            of_all.done.set_result([of_all.texts[r] for r in range(self.size)])
        # who waits may be cancelled, and must not cancel the others
        return await asyncio.shield(of_all.done)

    def end(self, why: str) -> None:
        """Let nobody wait for one that has ended."""
        self.ends = why
        for of_all in self._rounds:
            if not of_all.done.done():
                of_all.done.set_result(None)


class ShareGroups:
    """The groups of one pool, of `size` replicas each."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._groups: dict[int, ShareGroup] = {}
        # why no more are started, by the number of the group
        self._given_up: dict[int, str] = {}

    def join(self, rank: int) -> ShareGroup:
        """Return the group that a new replica of a rank belongs to."""
        number = rank // self._size
        group = self._groups.get(number)
        if group is None or group.ends:
            group = self._groups[number] = ShareGroup(number, self._size)
        return group

    def give_up(self, rank: int, cause: str) -> None:
        """Start none of the group of a rank any more, as that cannot be started."""
        self._given_up.setdefault(rank // self._size, cause)

    def why_given_up(self, rank: int) -> str | None:
        """Return why no replica of a rank is started any more; None where it is."""
        return self._given_up.get(rank // self._size)
