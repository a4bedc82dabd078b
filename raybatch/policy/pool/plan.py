"""Plans steals and migrations between the replicas of a pool; pure.

`RowQueue.dispatch` hands out rows of the shared queue. Once that is empty, idle engines steal
unstarted rows, then running rows migrate. The aim is that all replicas finish together, in
predicted seconds rather than tokens.
"""

import math
from collections.abc import Iterable

from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot, ReplicaSnapshot, Steal
from raybatch.policy.pool.spread import spread_rows


def plan_pool(pool: PoolSnapshot) -> PoolPlan:
    """Return which unstarted rows to steal, or which running rows to move, now; deterministic.

    Running rows move only if no replica has unstarted rows, whose steal costs nothing.

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
    """Return the part of a total cost for a replica, in proportion to its speed.

    `others` are the speeds of the other replicas.
    """
    return int(total * speed / (speed + sum(others)))


def rebalancing_cost(giver: tuple[int, float], taker: tuple[int, float]) -> int:
    """Return the cost to hand over so that both replicas, (cost, speed), finish together.

    It is at most 0 if the giver would finish first.
    """
    (giver_cost, giver_speed), (taker_cost, taker_speed) = giver, taker
    surplus = giver_cost * taker_speed - taker_cost * giver_speed
    return math.floor(surplus / (giver_speed + taker_speed))


def choose_steal(
    pulling: Iterable[ReplicaSnapshot], all_: Iterable[ReplicaSnapshot]
) -> Steal | None:
    """Choose unstarted rows of the replica that would finish last, for an idle one of `pulling`.

    The rows are split by speed (evenly if equal), at most so that both finish together. None if no
    replica is idle, or none has two unstarted rows.
    """
    takers = list(pulling)
    if all(replica.num_held for replica in takers):
        return None
    givers = [replica for replica in all_ if replica.can_give and replica.num_unstarted > 1]
    if not givers:
        return None
    giver = max(givers, key=lambda replica: replica.num_unstarted / replica.speed)
    taker = min(takers, key=lambda replica: replica.cost / replica.speed)
    max_cost = rebalancing_cost((giver.cost, giver.speed), (taker.cost, taker.speed))
    max_rows = round(giver.num_unstarted * taker.speed / (giver.speed + taker.speed))
    return Steal(giver.replica_id, max(1, max_rows), max_cost)
