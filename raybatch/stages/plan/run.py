"""Plans a source in the driver or by Ray tasks, whichever suits its size, and runs the plan."""

from dataclasses import replace

from raybatch.config import PlanConfig
from raybatch.stages.plan.large import LargePlan, run_large
from raybatch.stages.plan.planned import PlannedInput, PlannedRun
from raybatch.stages.plan.small import run_small
from raybatch.stages.source import Source

__all__ = ["fit_units", "is_small", "run_planned"]

# what a unit may hold in memory, prompts included
_MAX_UNIT_BYTES = 64 << 20


def run_planned(job: PlannedRun) -> PlannedInput | LargePlan:
    """Plan a source, write the plan, generate the rows in its order, and return the plan.

    Raises:
        ConfigError: another plan lies below the sink, or the folder cannot be written.
    """
    job = replace(job, plan=fit_units(job.plan, job.source))
    return run_small(job) if is_small(job.source, job.plan) else run_large(job)


def fit_units(plan: PlanConfig, source: Source) -> PlanConfig:
    """Return options whose units stay small in memory, whatever the size of a row."""
    most = max(1, _MAX_UNIT_BYTES * source.num_rows // max(1, _num_bytes(source)))
    return replace(
        plan,
        unit_rows=min(plan.unit_rows, most),
        max_unit_rows=min(plan.max_unit_rows, most),
    )


def is_small(source: Source, plan: PlanConfig) -> bool:
    """Return whether the driver gathers and plans the source by itself."""
    return _num_bytes(source) <= plan.max_driver_bytes


def _num_bytes(source: Source) -> int:
    return sum(part.num_bytes for part in source.slices)
