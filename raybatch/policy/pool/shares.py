"""How much work each replica gets, so that all end together: predicted seconds, not tokens."""

import math
from collections.abc import Iterable

from raybatch.policy.pool.snapshot import ReplicaSnapshot, Steal


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
