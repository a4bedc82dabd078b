"""Which replica has the prefix of a group; no Ray, no clock.

A group is live where rows of it are held: there its prefix is in memory. For a while after its
last row the replica still counts as the group's home, since its cache may remember the prefix.
"""

from collections.abc import Iterable, Set

_MAX_PAST = 4096
# rows that may go to the home of their group before earlier rows, until the group has its next
# turn in the line
_MAX_JOINED = 1024


class PrefixAffinity:
    """Home replicas of the groups that are live, and of the last few thousand that were.

    Attributes:
        num_cuts: times that a replica got rows of a group that was live at another one.
        cut_tokens: prefix tokens that are computed once more for these.
    """

    def __init__(self) -> None:
        self.num_cuts = 0
        self.cut_tokens = 0
        self._live: dict[int, list[int]] = {}
        # oldest first
        self._past: dict[int, int] = {}
        self._joined: dict[int, int] = {}

    def of(self, group: int) -> int | None:
        """Return the first replica that got rows of a group, None where none is known."""
        live = self._live.get(group)
        return live[0] if live else self._past.get(group)

    def groups(self) -> tuple[Set[int], Set[int]]:
        """Return all groups that have a home: those that are live, and the others."""
        return self._live.keys(), self._past.keys()

    def start(self, replica_id: int, started: Iterable[tuple[int, int]]) -> None:
        """Note groups that a replica had no rows of, each with the tokens of its prefix."""
        for group, prefix_len in started:
            self._past.pop(group, None)
            homes = self._live.setdefault(group, [])
            if homes:
                self.num_cuts += 1
                self.cut_tokens += prefix_len
            homes.append(replica_id)

    def end(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note groups whose last row at a replica is done."""
        for group in groups:
            self.leave(replica_id, [group])
            if group not in self._live:
                self._past[group] = replica_id
        while len(self._past) > _MAX_PAST:
            group = next(iter(self._past))
            del self._past[group]
            self._joined.pop(group, None)

    def leave(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note groups whose rows a replica has given back; it is no home of them any more."""
        for group in groups:
            live = self._live[group]
            live.remove(replica_id)
            if not live:
                del self._live[group]

    def forget(self, replica_id: int, groups: Iterable[int]) -> None:
        """Note that a replica is gone, which had rows of `groups`."""
        self.leave(replica_id, groups)
        self._past = {g: home for g, home in self._past.items() if home != replica_id}
        self._joined = {g: n for g, n in self._joined.items() if self.of(g) is not None}

    def join(self, group: int, num_rows: int) -> int | None:
        """Return the home that more rows of a group may go to at once.

        None without a home, and when so many have done so that those who wait would starve.
        """
        home = self.of(group)
        num_joined = self._joined.get(group, 0)
        if home is None or num_joined >= _MAX_JOINED:
            return None
        self._joined[group] = num_joined + num_rows
        return home

    def take_turn(self, group: int) -> None:
        """Note that a group is at the head of the line, so that more rows may join it again."""
        self._joined.pop(group, None)
