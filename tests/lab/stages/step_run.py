"""A job step by step: sorted rows without moves, or rows that move on as they outgrow a stage."""

import heapq
import itertools

import numpy as np

from raybatch_lab.stages.plan import StagePlan, stage_for
from raybatch_lab.stages.replica_seconds import StagePool


class Replica:
    def __init__(self):
        self.lens, self.finals = np.empty(0, int), np.empty(0, int)

    def admit(self, length, final):
        self.lens, self.finals = np.append(self.lens, length), np.append(self.finals, final)

    def step_s(self, pool):
        """Decode a token of each row; return the seconds."""
        mean = self.lens.mean()
        factor = float(pool.curve.at(self.lens.std() / mean if mean else 0.0))
        self.lens = self.lens + 1
        costs = pool.quality
        return (
            costs.step_s
            + costs.row_s * len(self.lens)
            + costs.context_s * factor * float(self.lens.sum())
        )

    def take(self, mask):
        taken = list(zip(self.lens[mask], self.finals[mask], strict=True))
        self.lens, self.finals = self.lens[~mask], self.finals[~mask]
        return taken


def run(pool: StagePool, prompts, finals, plan: StagePlan | None = None) -> float:
    """Return the seconds until the last row has ended; prompts cost as in the model.

    Rows are dealt to the replicas of their stage in turns, the longest first; without a plan all
    replicas are one stage. A row that outgrows its stage is dealt to the replicas of the next.
    """
    stage_of = plan.stage_of_replica if plan else np.zeros(pool.num_replicas, int)
    bounds = plan.bounds if plan else ()
    queues = [[] for _ in range(pool.num_replicas)]
    turns = [itertools.cycle(np.flatnonzero(stage_of == i)) for i in range(len(bounds) + 1)]

    def deal(due_s, length, final, stage, is_fresh):
        queues[next(turns[stage])].append((due_s, length, final, is_fresh))

    for row in np.argsort(-finals, kind="stable"):
        deal(0.0, prompts[row], finals[row], int(stage_for(bounds, prompts[row])), True)
    replicas = [Replica() for _ in range(pool.num_replicas)]
    clocks = [(0.0, i) for i in range(pool.num_replicas)]
    idle, left, done_s, costs = [], len(finals), 0.0, pool.quality
    while left:
        now, i = heapq.heappop(clocks)
        replica, stage = replicas[i], stage_of[i]
        queue = queues[i]
        places = pool.limits.max_num_seqs - len(replica.lens)
        due = [n for n, entry in enumerate(queue) if entry[0] <= now][:places]
        for _, length, final, is_fresh in (queue[n] for n in due):
            replica.admit(length, final)
            if is_fresh:
                now += costs.prompt_token_s * length
                now += costs.prompt_pair_s * length * (length + 1) / 2
            else:
                now += float(pool.moves.seconds(length, 1))
        for n in reversed(due):
            del queue[n]
        if not len(replica.lens):
            idle.append(i)
            continue
        now += replica.step_s(pool)
        left -= len(replica.take(replica.lens >= replica.finals))
        done_s = max(done_s, now)
        for length, final in replica.take(stage_for(bounds, replica.lens + 1) > stage):
            now += float(pool.moves.seconds(length, 1))
            deal(now, length, final, int(stage_for(bounds, np.array(length + 1))), False)
        # what has come in the meantime
        for other in (i, *idle):
            heapq.heappush(clocks, (now, other))
        idle.clear()
    return done_s
