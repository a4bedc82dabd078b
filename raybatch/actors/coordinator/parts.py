"""What a coordinator and those that follow one matter of its pool have in common; no Ray."""

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from raybatch.actors.coordinator.mailbox import Mailbox
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member, ReplicaSet
from raybatch.actors.replicas.site import Site, Spawn
from raybatch.actors.replicas.stuck import StuckWatch
from raybatch.actors.wire.records import Assignment, Room, Span
from raybatch.config import PoolConfig

# that a replica waits for another one, at most
_TIMEOUT_S = 15.0
# one that waits takes no step, and must not count as one that hangs for that
_OF_STUCK = 1 / 4

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


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParts:
    """One pool as those see it that follow one matter of it.

    Args:
        spawn: runs a coroutine beside others.
        on_change: called when rows have changed their place, or replicas are free.
    """

    pool: PoolConfig
    plan: Placement
    site: Site
    mailbox: Mailbox
    replicas: ReplicaSet
    view: PoolView
    stuck: StuckWatch
    pulls: Pulls
    spawn: Spawn
    on_change: Callable[[], None]

    @property
    def queue(self) -> RowQueue:
        return self.mailbox.queue

    @property
    def members(self) -> Mapping[int, Member]:
        """Return the replicas by id, which come and go."""
        return self.replicas.members

    @property
    def timeout_s(self) -> float:
        """Return for how long a replica waits for another one."""
        return min(_TIMEOUT_S, _OF_STUCK * (self.pool.stuck_after_s or math.inf))

    def hungry(self) -> dict[int, Room]:
        """Return what replicas ask for that may get rows."""
        return self.pulls.hungry(self.members)

    def hand_out(self, replica_id: int, spans: list[Span]) -> None:
        """Answer a replica that asks with rows."""
        self.pulls.answer(replica_id, self.mailbox.assign(spans))

    def let_go(self, replica_id: int) -> None:
        """Let a replica end where it asks for rows."""
        self.pulls.answer(replica_id, None)


class Routine(Protocol):
    """Follows one matter of a pool, and does what is worth it at a moment."""

    def look(self, now: float) -> None: ...
