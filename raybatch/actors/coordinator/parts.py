"""What the mechanisms of one pool have in common, and the door for those that some jobs ask for."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raybatch.actors.coordinator.mailbox import Mailbox
from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member, ReplicaSet
from raybatch.actors.replicas.site import Site, Spawn
from raybatch.actors.replicas.starts import StuckWatch
from raybatch.actors.wire.records import Assignment, Room, Span
from raybatch.config import PoolConfig
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot

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
        asking = {r: pull.room for r, pull in self.pulls.items() if not pull.answered.done()}
        return {r: room for r, room in asking.items() if self.members[r].takes_rows}

    def hand_out(self, replica_id: int, spans: list[Span]) -> None:
        """Answer a replica that asks with rows."""
        self.pulls.answer(replica_id, self.mailbox.assign(spans))

    def let_go(self, replica_id: int) -> None:
        """Let a replica end where it asks for rows."""
        self.pulls.answer(replica_id, None)


class PoolExtension(Protocol):
    """A mechanism of a pool that only some jobs ask for: a folder of `raybatch.actors.ext`.

    It is made with the parts of its pool, and hangs in there what queue and replicas are to ask
    (`RowQueue.attach`, `ReplicaSet.groups`).

    Attributes:
        actions: the types of what its plans have.
    """

    actions: tuple[type, ...]

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> Any:  # noqa: ANN401 - its own
        """Return what its plan reads; the pool is None where nobody looks at running rows now."""

    def plan(self, snapshot: Any, plan: PoolPlan) -> Sequence[object]:  # noqa: ANN401
        """Return what is to be done beside what the pool itself does by its plan."""

    def apply(self, action: Any) -> None:  # noqa: ANN401
        """Begin one action of its plan."""

    def note_change(self) -> None:
        """Do what cannot wait for a plan: rows wait, a replica leaves, or a row has ended."""

    def counts(self) -> dict[str, int]:
        """Return what there was of it so far, as `PoolCounts` names it."""
        return {}


MakeExtension = Callable[[PoolParts], PoolExtension]
