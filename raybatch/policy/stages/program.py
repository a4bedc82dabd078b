"""The stages with the least makespan, exactly, with cuts at powers of two."""

import numpy as np

from raybatch.policy.stages.lengths import RowLengths
from raybatch.policy.stages.plan import Stage, StagePlan, length_cuts
from raybatch.policy.stages.replica_seconds import StagePool, stage_seconds
from raybatch.records.arrays import Floats, Ints


def plan_exactly(pool: StagePool, lengths: RowLengths, cuts: Ints | None = None) -> StagePlan:
    """Return stages whose slowest takes the least time; of equal plans one with few stages.

    With S(b, e) the least makespan of lengths up to cut b on e replicas, it is the least of
    max(S(a, e - d), seconds of (a, b] on d replicas) over all cuts a < b and numbers d. One stage
    with all replicas is among the plans, so the result is never worse than no stages.
    O(E^2 K^2) for K cuts, by arrays of [K, E, E].

    Args:
        cuts: ascending from 0, the last no less than the longest row; powers of two by default.

    Source: CascadeInfer, section 4.2. It adds the latency of all requests up, where a job waits for
    its slowest stage, so the number of stages is no argument of S.
    """
    cuts = length_cuts(lengths.longest) if cuts is None else cuts
    stage_s = all_stage_seconds(pool, lengths, cuts)
    num_replicas, num_cuts = pool.num_replicas, len(cuts)
    # [cut, replicas]; only 0 replicas make nothing of nothing
    least = np.full((num_cuts, num_replicas + 1), np.inf)
    least[0, 0] = 0.0
    before = np.zeros((num_cuts, num_replicas + 1, 2), np.int64)
    used, given = np.arange(num_replicas + 1)[:, None], np.arange(1, num_replicas + 1)
    others = used - given
    for b in range(1, num_cuts):
        # [cut a, replicas up to b, replicas of (a, b]]
        earlier = np.where(others >= 0, least[:b, np.maximum(others, 0)], np.inf)
        slowest = np.maximum(earlier, stage_s[:b, b, None, :])
        flat = slowest.transpose(1, 0, 2).reshape(num_replicas + 1, -1)
        best = flat.argmin(axis=1)
        least[b] = flat[np.arange(num_replicas + 1), best]
        before[b] = np.stack(np.divmod(best, num_replicas), axis=1)
    stages: list[Stage] = []
    b, left = num_cuts - 1, num_replicas
    while b:
        a, fewer = before[b, left].tolist()
        stages.append(Stage(above=int(cuts[a]), up_to=int(cuts[b]), num_replicas=fewer + 1))
        b, left = a, left - fewer - 1
    return StagePlan(stages=tuple(reversed(stages)), seconds=float(least[-1, num_replicas]))


def all_stage_seconds(pool: StagePool, lengths: RowLengths, cuts: Ints) -> Floats:
    """Return [K, K, E]: seconds of the range from one cut to a later one on 1 to E replicas."""
    replicas = np.arange(1, pool.num_replicas + 1)
    return stage_seconds(pool, lengths, cuts[:, None, None], cuts[None, :, None], replicas)
