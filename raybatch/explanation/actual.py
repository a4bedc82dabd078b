"""From what was counted in a run to the actual side of its plan."""

from raybatch.explanation.outcome import RunActual
from raybatch.stages.tally import TokenTally
from raybatch.types import PoolStats, ReplicaStats

__all__ = ["count_actual"]


def count_actual(
    tokens: TokenTally,
    *,
    before: PoolStats,
    after: PoolStats,
    wall_s: float,
    kv_tokens: int | None = None,
    num_group_cuts: int | None = None,
    cut_tokens: int | None = None,
) -> RunActual:
    """Return what a run did; a pool may have worked before, and counts since its start.

    Args:
        tokens: of the whole output.
        before: the pool before the run.
        after: the pool after it; engines that have ended take their preemptions along.
        wall_s: from the first row at a ready engine to the last row back.
        kv_tokens: KV cache of one engine; None where it is not known.
        num_group_cuts: see `RunActual`.
        cut_tokens: see `RunActual`.
    """
    has_engines = bool(after.replicas)
    return RunActual(
        prompt_tokens=tokens.prompt,
        computed_tokens=tokens.prompt - tokens.cached,
        generated_tokens=tokens.generated,
        num_rows=tokens.num_asked,
        num_generated=tokens.num_asked - tokens.num_copies,
        kv_tokens=kv_tokens,
        num_replicas=after.num_replicas,
        num_restarts=max(0, after.num_restarts - before.num_restarts),
        num_preemptions=_since(before, after, "num_preemptions") if has_engines else None,
        recomputed_tokens=_since(before, after, "num_recomputed_tokens") if has_engines else None,
        num_group_cuts=num_group_cuts,
        cut_tokens=cut_tokens,
        engine_s=max(0.0, after.busy_s - before.busy_s),
        wall_s=wall_s,
    )


def _since(before: PoolStats, after: PoolStats, counter: str) -> int:
    def total(replicas: tuple[ReplicaStats, ...]) -> int:
        return sum(getattr(replica, counter) for replica in replicas)

    return max(0, total(after.replicas) - total(before.replicas))
