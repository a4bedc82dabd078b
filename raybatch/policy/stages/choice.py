"""Whether a pool has stages at all: only where the measured curve and the forecast say it pays."""

from dataclasses import dataclass

from raybatch.policy.stages.forecast import like_seconds, sorted_seconds, staged_seconds
from raybatch.policy.stages.lengths import RowLengths
from raybatch.policy.stages.merging import plan_by_merging
from raybatch.policy.stages.plan import StagePlan
from raybatch.policy.stages.program import plan_exactly
from raybatch.policy.stages.replica_seconds import StagePool

# of the seconds of sorted admission; a forecast is no better than that
_MIN_SAVED = 0.05
# the exact program takes 0.06 s with so many replicas, and 0.4 s with twice as many
_MAX_EXACT_REPLICAS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class StagesChoice:
    """What was decided, and why.

    Args:
        plan: None where no stages are taken.
        reason: one sentence, for a log.
        sorted_s: of the job by length-sorted admission without moves.
        staged_s: of the job with the best stages that were found; None where none were looked for.
    """

    plan: StagePlan | None
    reason: str
    sorted_s: float
    staged_s: float | None


def choose_stages(pool: StagePool, lengths: RowLengths) -> StagesChoice:
    """Take stages where they save at least 5 % over length-sorted admission without moves.

    Rows of a job can be sorted before they start, so stages have to beat that, not a random mix.
    What batches of one length would save bounds what stages can, so with a flat curve nothing is
    planned at all.
    """
    sorted_s = sorted_seconds(pool, lengths)
    bound = 1 - like_seconds(pool, lengths) / sorted_s

    def none(reason: str, staged_s: float | None = None) -> StagesChoice:
        return StagesChoice(plan=None, reason=reason, sorted_s=sorted_s, staged_s=staged_s)

    if pool.num_replicas == 1:
        return none("no stages: there is one replica")
    if bound < _MIN_SAVED:
        return none(
            f"no stages: batches of one length would save {bound:.1%} at most, and it takes "
            f"{_MIN_SAVED:.0%}"
        )
    is_large = pool.num_replicas > _MAX_EXACT_REPLICAS
    plan = (plan_by_merging if is_large else plan_exactly)(pool, lengths)
    staged_s = staged_seconds(pool, lengths, plan)
    saved = 1 - staged_s / sorted_s
    if len(plan.stages) == 1:
        return none("no stages: one of all replicas is the best", staged_s)
    if saved < _MIN_SAVED:
        return none(
            f"no stages: {len(plan.stages)} of them would save {saved:.1%} over sorted rows, and "
            f"it takes {_MIN_SAVED:.0%}",
            staged_s,
        )
    return StagesChoice(
        plan=plan,
        reason=f"{len(plan.stages)} stages save {saved:.1%} over sorted rows",
        sorted_s=sorted_s,
        staged_s=staged_s,
    )
