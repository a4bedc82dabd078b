"""Whether a pool has stages at all: only where the measured curve and a forecast say it pays.

The forecast is of rows sorted by length, and of stages. Neither is charged for the steps of its
last rows, which are few in a batch.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from raybatch.records.arrays import Floats, Ints
from raybatch_lab.stages.heterogeneity import variation
from raybatch_lab.stages.lengths import RangeWork, RowLengths
from raybatch_lab.stages.plan import StagePlan, plan_exactly
from raybatch_lab.stages.replica_seconds import (
    StagePool,
    batch_rows,
    iteration_seconds,
    stage_seconds,
    work_seconds,
)

# of the seconds of sorted admission; a forecast is no better than that
MIN_SAVED = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class StagesChoice:
    """Whether a job gets stages, and why.

    Args:
        plan: the chosen stages; None for no stages.
        reason: the reason in one sentence, for a log.
        sorted_s: forecast seconds of the job without stages, with rows admitted by length.
        staged_s: forecast seconds of the job with the best stages; None if none were planned.
    """

    plan: StagePlan | None
    reason: str
    sorted_s: float
    staged_s: float | None


def choose_stages(pool: StagePool, lengths: RowLengths) -> StagesChoice:
    """Choose stages if they save at least 5 % of the time of rows that are admitted by length.

    A pool can sort rows by length without stages, so stages must beat that and not a random order.
    If even batches of equal lengths would save less than 5 %, no stages are planned.
    """
    sorted_s = sorted_seconds(pool, lengths)
    bound = 1 - like_seconds(pool, lengths) / sorted_s

    def none(reason: str, staged_s: float | None = None) -> StagesChoice:
        return StagesChoice(plan=None, reason=reason, sorted_s=sorted_s, staged_s=staged_s)

    if pool.num_replicas == 1:
        return none("no stages: there is one replica")
    if bound < MIN_SAVED:
        return none(
            f"no stages: batches of one length would save {bound:.1%} at most, and it takes "
            f"{MIN_SAVED:.0%}"
        )
    plan = plan_exactly(pool, lengths)
    staged_s = staged_seconds(pool, lengths, plan)
    saved = 1 - staged_s / sorted_s
    if len(plan.stages) == 1:
        return none("no stages: one of all replicas is the best", staged_s)
    if saved < MIN_SAVED:
        return none(
            f"no stages: {len(plan.stages)} of them would save {saved:.1%} over sorted rows, and "
            f"it takes {MIN_SAVED:.0%}",
            staged_s,
        )
    return StagesChoice(
        plan=plan,
        reason=f"{len(plan.stages)} stages save {saved:.1%} over sorted rows",
        sorted_s=sorted_s,
        staged_s=staged_s,
    )


def sorted_seconds(pool: StagePool, lengths: RowLengths) -> float:
    """Return the forecast seconds of a job that admits rows by final length, the longest first.

    All replicas get the same mix of lengths, and no row moves. O(N log N + decode steps).
    """
    return _unstaged_seconds(pool, lengths, _sorted_factor(pool, lengths))


def like_seconds(pool: StagePool, lengths: RowLengths) -> float:
    """Return the forecast seconds of a job if unlike lengths in a batch cost no time."""
    return _unstaged_seconds(pool, lengths, 1.0)


def _unstaged_seconds(pool: StagePool, lengths: RowLengths, factor: float) -> float:
    work = RangeWork.of_sums(lengths.below(lengths.longest))
    return float(work_seconds(pool, work, len(lengths), pool.num_replicas, factor))


def _sorted_factor(pool: StagePool, lengths: RowLengths) -> float:
    """Return how much longer attention takes on one replica, for rows sorted by length.

    Its steps are counted one by one: rows that start and end together stay of one length, which
    averages over batches would not show.
    """
    order = np.argsort(-lengths.final_lens, kind="stable")
    # an even part, as all replicas get
    order = order[min(pool.num_replicas // 2, len(order) - 1) :: pool.num_replicas]
    prompts = lengths.prompt_lens[order]
    work = RangeWork.of_sums(lengths.below(lengths.longest))
    places = int(batch_rows(pool, work, len(lengths), pool.num_replicas))
    sums = _step_sums(prompts, lengths.final_lens[order] - prompts, places)
    return float((pool.curve.at(variation(*sums)) * sums[1]).sum() / sums[1].sum())


def _step_sums(prompts: Ints, outputs: Ints, places: int) -> Floats:
    """Return [3, steps]: number of rows, sum of lengths, and of squares, step by step.

    A row takes the place of the first that ends.
    """
    ends = [0] * places
    starts = np.empty(len(outputs), np.int64)
    for i, num_tokens in enumerate(outputs.tolist()):
        starts[i] = ends[0]
        heapq.heapreplace(ends, ends[0] + num_tokens)
    num_steps = max(ends)
    # at step t a row makes the token at length t + offset
    offsets = (prompts + 1 - starts).astype(float)

    def running(weights: Floats) -> Floats:
        begun = np.bincount(starts, weights, num_steps + 1)
        return np.cumsum(begun - np.bincount(starts + outputs, weights, num_steps + 1))[:-1]

    rows, first, second = (running(offsets**power) for power in range(3))
    steps = np.arange(float(num_steps))
    return np.stack([rows, first + rows * steps, second + 2 * steps * first + rows * steps**2])


def staged_seconds(pool: StagePool, lengths: RowLengths, plan: StagePlan) -> float:
    """Return the forecast seconds of a job with the stages of a plan, until the last stage ends.

    A stage in which no row starts has no work until the first row has grown into its range.
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
