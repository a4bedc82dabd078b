"""The shared parts of one pool, and the protocol of its optional extensions."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from raybatch.actors.coordinator.pool_view import PoolView
from raybatch.actors.coordinator.registry import BatchRegistry
from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.replica_set import Member, ReplicaSet
from raybatch.actors.replicas.runtime import PoolRuntime, Spawn
from raybatch.actors.replicas.starts import StuckWatch
from raybatch.actors.wire.records import Assignment, Credit, RowRange
from raybatch.config import PoolConfig
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot

# longest time that a replica waits for another one
_TIMEOUT_S = 15.0
# a waiting replica takes no step, and must not count as hung
_OF_STUCK = 1 / 4

# rows, or None to stop the replica
Answered = asyncio.Future[list[Assignment] | None]


class PendingPull(NamedTuple):
    credit: Credit
    answered: Answered


class PendingPulls(dict[int, PendingPull]):
    """The pending pull of each replica, by id."""

    def ask(self, replica_id: int, credit: Credit) -> Answered:
        """Record that a replica pulls rows; return a future of the answer."""
        self[replica_id] = PendingPull(credit, asyncio.get_running_loop().create_future())
        return self[replica_id].answered

    def answer(self, replica_id: int, work: list[Assignment] | None) -> None:
        """Answer the pending pull of a replica, if any; None tells it to exit."""
        pull = self.pop(replica_id, None)
        # Ray cancels the call of a replica that died
        if pull is not None and not pull.answered.done():
            pull.answered.set_result(work)

    def end_all(self) -> None:
        for replica_id in list(self):
            self.answer(replica_id, None)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolParts:
    """The parts of one pool that its mechanisms and extensions share.

    Args:
        spawn: runs a coroutine as a task of the coordinator.
        on_change: to be called when rows have moved or replicas have become idle.
    """

    pool: PoolConfig
    plan: Placement
    runtime: PoolRuntime
    registry: BatchRegistry
    replicas: ReplicaSet
    view: PoolView
    stuck: StuckWatch
    pending_pulls: PendingPulls
    spawn: Spawn
    on_change: Callable[[], None]

    @property
    def queue(self) -> RowQueue:
        return self.registry.queue

    @property
    def members(self) -> Mapping[int, Member]:
        """Return the live replicas by id."""
        return self.replicas.members

    @property
    def timeout_s(self) -> float:
        """Return the seconds after which a replica stops waiting for another one."""
        return min(_TIMEOUT_S, _OF_STUCK * (self.pool.stuck_after_s or math.inf))

    def demand(self) -> dict[int, Credit]:
        """Return the credit of each replica that pulls and may get rows, by replica id."""
        pending = self.pending_pulls.items()
        asking = {r: pull.credit for r, pull in pending if not pull.answered.done()}
        return {r: credit for r, credit in asking.items() if self.members[r].takes_rows}

    def hand_out(self, replica_id: int, row_ranges: list[RowRange]) -> None:
        """Answer the pull of a replica with rows."""
        self.pending_pulls.answer(replica_id, self.registry.assign(row_ranges))


class PoolExtension(Protocol):
    """An optional mechanism of a pool, see `raybatch.actors.installed_extensions`.

    It gets the parts of its pool, and installs its hooks there (`RowQueue.attach`,
    `ReplicaSet.groups`).

    Attributes:
        actions: the types of the actions that it plans.
    """

    actions: tuple[type, ...]

    def snapshot(self, pool: PoolSnapshot | None, now: float) -> Any:  # noqa: ANN401 - its own
        """Return the input of `plan`, of any type; None for `pool` if running rows do not count.

        `now` is the time of the monotonic clock.
        """

    def plan(self, snapshot: Any, plan: PoolPlan) -> Sequence[object]:  # noqa: ANN401
        """Return actions to apply in addition to the plan of the pool."""

    def apply(self, action: Any) -> None:  # noqa: ANN401
        """Start one action of its plan."""

    def note_change(self) -> None:
        """React at once when rows wait, a replica drains, or a row has finished."""

    def counts(self) -> dict[str, int]:
        """Return its counts since the start of the pool, by their names in `PoolCounts`."""
        return {}


MakeExtension = Callable[[PoolParts], PoolExtension]
