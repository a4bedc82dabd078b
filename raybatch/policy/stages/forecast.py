"""How long a job takes with rows sorted by length, and with stages; neither with its last rows."""

import numpy as np

from raybatch.policy.stages.heterogeneity import FLAT, MixCurve
from raybatch.policy.stages.lengths import RangeWork, RowLengths, whole_rows
from raybatch.policy.stages.plan import StagePlan
from raybatch.policy.stages.replica_seconds import (
    StagePool,
    iteration_seconds,
    stage_seconds,
    work_seconds,
)


def sorted_seconds(pool: StagePool, lengths: RowLengths, curve: MixCurve | None = None) -> float:
    """Return the seconds of a job whose replicas admit rows in order of final length.

    All replicas get the same mix (`raybatch.policy.stages.even_split`), so that a batch has rows of
    neighbouring final lengths, at any progress. No row moves. O(N log N).

    Args:
        curve: in place of that of the pool.
    """
    order = np.argsort(lengths.final_lens, kind="stable")
    rows = whole_rows(lengths.prompt_lens[order], lengths.final_lens[order])
    total = RangeWork.of_sums(rows.sum(axis=1))
    held = pool.limits.kv_tokens / max(float(total.mean_len), 1.0)
    batch = max(1, int(min(pool.limits.max_num_seqs, held, len(lengths) / pool.num_replicas)))
    firsts = np.arange(0, len(lengths), batch * pool.num_replicas)
    batches = RangeWork.of_sums(np.add.reduceat(rows, firsts, axis=1))
    priced = StagePool(
        num_replicas=pool.num_replicas,
        quality=pool.quality,
        curve=pool.curve if curve is None else curve,
        limits=pool.limits,
        moves=pool.moves,
    )
    # the next rows are there before the last ones of a batch have ended
    return float(work_seconds(priced, batches, len(lengths), pool.num_replicas).sum())


def like_seconds(pool: StagePool, lengths: RowLengths) -> float:
    """Return the seconds if every batch had rows of one length: what no plan of stages is below."""
    return sorted_seconds(pool, lengths, FLAT)


def staged_seconds(pool: StagePool, lengths: RowLengths, plan: StagePlan) -> float:
    """Return the seconds until the last stage is done.

    A stage in which no prompt ends waits until the first row has grown into it.
    """
    done_s, grown_s = 0.0, 0.0
    for stage in plan.stages:
        low, high = np.array(stage.above), np.array(stage.up_to)
        counts = np.array(stage.num_replicas)
        work_s = float(stage_seconds(pool, lengths, low, high, counts))
        has_starts = RangeWork.of_sums(lengths.below(high) - lengths.below(low)).starts > 0
        done_s = max(done_s, work_s if has_starts else grown_s + work_s)
        token_s = iteration_seconds(pool, lengths, stage.above, stage.up_to, stage.num_replicas)
        first = max(stage.above, int(lengths.prompt_lens.min()))
        grown_s += max(0, stage.up_to - first) * token_s
    return done_s
