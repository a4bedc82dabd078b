"""Whether a pool takes stages, and which, as `pool.stages` asks; pure."""

from dataclasses import dataclass, replace

import numpy as np

from raybatch_lab.stages.choice import (
    MIN_SAVED,
    choose_stages,
    like_seconds,
    sorted_seconds,
    staged_seconds,
)
from raybatch_lab.stages.heterogeneity import variation
from raybatch_lab.stages.lengths import RowLengths
from raybatch_lab.stages.plan import StagePlan, plan_stages
from raybatch_lab.stages.quality import StepQuality
from raybatch_lab.stages.replica_seconds import StagePool, stage_seconds

# nothing costs anything but attention, which bounds what stages can save
ATTENTION_ALONE = StepQuality(
    step_s=0.0, row_s=0.0, prompt_token_s=0.0, prompt_pair_s=0.0, context_s=1.0
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """Whether a pool gets stages.

    Args:
        plan: the chosen stages; None for no stages.
        text: the reason with its numbers, in one sentence for a log.
    """

    plan: StagePlan | None
    text: str


def decide_auto(
    pool: StagePool, lengths: RowLengths, quality: StepQuality | None, measured: str
) -> Decision | None:
    """Decide whether stages pay; return None if that depends on step costs not known yet.

    Args:
        pool: its `quality` is not used.
        quality: costs of steps of its replicas; None before enough steps were observed.
        measured: text that says where `pool.curve` was measured.
    """
    spread = _spread(lengths)
    factor = float(pool.curve.at(spread))
    cost = (
        f"attention over lengths that vary by {spread:.2f} of their mean costs {factor:.2f} times "
        f"that over one length ({measured})"
    )
    alone = replace(pool, quality=ATTENTION_ALONE)
    bound = 1 - like_seconds(alone, lengths) / sorted_seconds(alone, lengths)
    if bound < MIN_SAVED:
        return Decision(
            plan=None,
            text=f"no stages: {cost}, and the forecast saves {bound:.1%} at most even if all the "
            f"time were attention; it takes {MIN_SAVED:.0%}",
        )
    if quality is None:
        return None
    choice = choose_stages(replace(pool, quality=quality), lengths)
    return Decision(plan=choice.plan, text=f"{choice.reason}: {cost}; {quality}")


def decide_number(
    pool: StagePool, lengths: RowLengths, quality: StepQuality | None, num_stages: int
) -> Decision:
    """Return the best plan of exactly `num_stages` stages, even if they do not pay."""
    pool = replace(pool, quality=quality or ATTENTION_ALONE)
    plan = plan_stages(pool, lengths, num_stages)
    helped, unhelped = rebalanced_saved(pool, lengths, plan), forecast_saved(pool, lengths, plan)
    ranges = ", ".join(
        f"up to {stage.up_to} tokens on {stage.num_replicas}" for stage in plan.stages
    )
    by = "steps as they are" if quality else "steps of attention alone, as none was seen yet"
    return Decision(
        plan=plan,
        text=f"{num_stages} stages, as asked for: {ranges} engines; the forecast saves "
        f"{helped:.1%} over sorted rows where engines help each other to the end, {unhelped:.1%} "
        f"where none does, by {by}",
    )


def forecast_saved(pool: StagePool, lengths: RowLengths, plan: StagePlan) -> float:
    """Return the share of a job's time that a plan saves, compared with rows admitted by length.

    No stage helps another, so the slowest one counts. Below 0 if the job takes longer.
    """
    return 1 - staged_seconds(pool, lengths, plan) / sorted_seconds(pool, lengths)


def rebalanced_saved(pool: StagePool, lengths: RowLengths, plan: StagePlan) -> float:
    """Return what `forecast_saved` would, if rows moved so that all engines end together."""
    work_s = 0.0
    for stage in plan.stages:
        bounds = np.array(stage.above), np.array(stage.up_to)
        count = stage.num_replicas
        work_s += count * float(stage_seconds(pool, lengths, *bounds, np.array(count)))
    return 1 - work_s / pool.num_replicas / sorted_seconds(pool, lengths)


def _spread(lengths: RowLengths) -> float:
    """Return the variation of lengths in a batch of all rows at any progress."""
    tokens, contexts, squares = lengths.below(lengths.longest)[:3]
    return float(variation(np.array(tokens), np.array(contexts), np.array(squares)))
