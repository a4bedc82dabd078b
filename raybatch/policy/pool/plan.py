"""The one decision about what the replicas of a pool do for each other; pure.

Rows that wait for all go out by `RowQueue.dispatch`. This is for the time after: rows that wait in
an engine go to one that is idle, then rows that run.
"""

from raybatch.policy.pool.partition import choose_team, teams_to_end
from raybatch.policy.pool.shares import choose_steal
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch.policy.pool.spread import spread_rows


def plan_pool(pool: PoolSnapshot) -> PoolPlan:
    """Return what is to be done now; the same snapshot has the same plan.

    Rows that run move only where nobody has rows that do not: giving those back costs nothing. And
    engines take part in the steps of others only where no row moves.
    """
    ends = teams_to_end(pool)
    if pool.has_waiting or ends:
        return PoolPlan(ends=ends)
    pulling = [replica for replica in pool.replicas if replica.replica_id in pool.pulling]
    steal = choose_steal(pulling, pool.replicas)
    if steal is not None:
        return PoolPlan(steal=steal)
    if any(replica.num_unstarted > 1 for replica in pool.replicas):
        return PoolPlan()
    moves, saved_s = spread_rows(pool)
    team = None if moves else choose_team(pool)
    return PoolPlan(moves=moves, saved_s=saved_s, team=team)
