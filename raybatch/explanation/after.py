"""What the engines of a pool did for one run, from their counters before and after it."""

from collections.abc import Callable

from raybatch.durable.units import UnitCounts
from raybatch.explanation.outcome import RunActual
from raybatch.records.types import PoolStats, ReplicaStats


def actual_of(
    counts: UnitCounts, before: PoolStats, after: PoolStats, *, num_restarts: int, wall_s: float
) -> RunActual:
    """Return the counts of a run; None stands for what died with an engine.

    Args:
        counts: of the output.
        before: state of the pool when the run began; its engines may have worked before.
        after: state of the pool when the run had ended.
        num_restarts: of engines during the run.
        wall_s: from the first row at a ready engine to the last row back.
    """

    def count(name: Callable[[ReplicaStats], int]) -> int | None:
        if num_restarts:
            return None
        return _sum(after, name) - min(_sum(before, name), _sum(after, name))

    sizes = [replica.kv_tokens for replica in after.replicas if replica.kv_tokens]
    return RunActual(
        prompt_tokens=counts.prompt_tokens,
        computed_tokens=counts.prompt_tokens - counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        num_rows=counts.num_asked,
        num_generated=counts.num_asked - counts.num_copies,
        kv_tokens=min(sizes, default=None),
        num_replicas=after.num_replicas,
        num_restarts=num_restarts,
        num_preemptions=count(lambda replica: replica.num_preemptions),
        recomputed_tokens=count(lambda replica: replica.num_recomputed_tokens),
        swapped_tokens=count(lambda replica: replica.num_swapped_tokens),
        swapped_bytes=count(lambda replica: replica.swapped_bytes),
        weight_copy_bytes=count(lambda replica: replica.weight_copy_bytes),
        num_weight_copies=count(lambda replica: replica.num_weight_copies),
        num_weight_stalls=count(lambda replica: replica.num_weight_stalls),
        drafted_tokens=count(lambda replica: replica.num_drafted_tokens),
        accepted_tokens=count(lambda replica: replica.num_accepted_tokens),
        num_group_cuts=max(0, after.num_group_cuts - before.num_group_cuts),
        cut_tokens=max(0, after.cut_tokens - before.cut_tokens),
        engine_s=max(0.0, after.busy_s - before.busy_s),
        wall_s=wall_s,
        is_warm=before.busy_s > 0 and before.num_ready > 0,
    )


def _sum(stats: PoolStats, name: Callable[[ReplicaStats], int]) -> int:
    return sum(name(replica) for replica in stats.replicas)
