"""Replicas that ask for rows, until they are answered; no Ray."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from raybatch.actors.replicas.replica_set import Member
from raybatch.actors.wire.records import Assignment, Room

# of rows, or None, which tells a replica to end
Answered = asyncio.Future[list[Assignment] | None]


class Pull(NamedTuple):
    room: Room
    answered: Answered


class Pulls(dict[int, Pull]):
    """What each replica asks for, by its id."""

    def ask(self, replica_id: int, room: Room) -> Answered:
        """Return what a replica waits for from now on."""
        self[replica_id] = Pull(room, asyncio.get_running_loop().create_future())
        return self[replica_id].answered

    def answer(self, replica_id: int, work: list[Assignment] | None) -> None:
        """Answer a replica, if it asks."""
        pull = self.pop(replica_id, None)
        # Ray cancels the call of a replica that died
        if pull is not None and not pull.answered.done():
            pull.answered.set_result(work)

    def end_all(self) -> None:
        for replica_id in list(self):
            self.answer(replica_id, None)

    def hungry(self, members: Mapping[int, Member]) -> dict[int, Room]:
        """Return what replicas ask for that may get rows."""
        waiting = {r: room for r, (room, answered) in self.items() if not answered.done()}
        return {r: room for r, room in waiting.items() if members[r].takes_rows}
