"""The one decision about what the replicas of a pool do for each other; pure.

Rows that wait for all go out by `RowQueue.dispatch`. This is for the time after: rows that wait in
an engine go to one that is idle, then rows that run. All replicas are to end together, by predicted
seconds and not by tokens.
"""

import math
from collections.abc import Hashable, Iterable

from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, ReplicaSnapshot, Steal
from raybatch.policy.pool.spread import spread_rows

_NUM_BOUNDARIES = 2


def plan_pool(pool: PoolSnapshot) -> PoolPlan:
    """Return what is to be done now; the same snapshot has the same plan.

    Rows that run move only where nobody has rows that do not: giving those back costs nothing.

    Example:
        >>> busy = ReplicaSnapshot(replica_id=1, num_held=40, cost=4000, num_unstarted=30)
        >>> idle = ReplicaSnapshot(replica_id=2)
        >>> plan_pool(PoolSnapshot(replicas=(busy, idle), pulling=frozenset({2}))).steal
        Steal(replica_id=1, max_rows=15, max_cost=2000)
    """
    if pool.has_waiting:
        return PoolPlan()
    pulling = [replica for replica in pool.replicas if replica.replica_id in pool.pulling]
    steal = choose_steal(pulling, pool.replicas)
    if steal is not None:
        return PoolPlan(steal=steal)
    if any(replica.num_unstarted > 1 for replica in pool.replicas):
        return PoolPlan()
    moves, saved_s = spread_rows(pool)
    is_started = not any(replica.num_unstarted for replica in pool.replicas)
    return PoolPlan(moves=moves, saved_s=saved_s, is_settled=is_started and not moves)


def share_of(total: int, speed: float, others: Iterable[float]) -> int:
    """Return the part of a total cost that a replica of this speed takes beside others."""
    return int(total * speed / (speed + sum(others)))


def levelling_cost(giver: tuple[int, float], taker: tuple[int, float]) -> int:
    """Return what the giver hands over so that both end together, each given by cost and speed.

    It is at most 0 where the giver would end first.
    """
    (giver_cost, giver_speed), (taker_cost, taker_speed) = giver, taker
    surplus = giver_cost * taker_speed - taker_cost * giver_speed
    return math.floor(surplus / (giver_speed + taker_speed))


def choose_steal(
    pulling: Iterable[ReplicaSnapshot], all_: Iterable[ReplicaSnapshot]
) -> Steal | None:
    """Choose unstarted rows of the replica that would end last, where another has none.

    Of its unstarted rows as many go as the speeds of both say, half of them where they are equal,
    and no more than lets both end together. None where nobody is idle, or nobody has two rows to
    share.
    """
    takers = list(pulling)
    if all(replica.num_held for replica in takers):
        return None
    givers = [replica for replica in all_ if replica.can_give and replica.num_unstarted > 1]
    if not givers:
        return None
    giver = max(givers, key=lambda replica: replica.num_unstarted / replica.speed)
    taker = min(takers, key=lambda replica: replica.cost / replica.speed)
    max_cost = levelling_cost((giver.cost, giver.speed), (taker.cost, taker.speed))
    max_rows = round(giver.num_unstarted * taker.speed / (giver.speed + taker.speed))
    return Steal(giver.replica_id, max(1, max_rows), max_cost)


class Agreement:
    """Debounces a decision: enough boundaries in a row have to want the same."""

    def __init__(self) -> None:
        self._wanted: Hashable = None
        self._place, self._num_yes = -1, 0

    def look(self, wanted: Hashable, place: int) -> bool:
        """Return whether enough boundaries want this by now; what is false wants nothing.

        Args:
            place: of the boundary, such as the number of a measurement; one that was looked at
                before does not count again.
        """
        if not wanted or wanted != self._wanted:
            self._num_yes = 0
        if wanted and (place > self._place or not self._num_yes):
            self._num_yes += 1
        self._wanted, self._place = wanted, place
        return self._num_yes >= _NUM_BOUNDARIES
