"""Plans a source in the driver or, if large, with Ray tasks, and runs the plan."""

from dataclasses import replace

import numpy as np

from raybatch.config import PlanConfig
from raybatch.inputs.source import Source
from raybatch.planning.dataset import pieces_of, planned_tables
from raybatch.planning.planned import LargePlan, PlannedInput, RunSpec
from raybatch.planning.shards import MAX_UNIT_BYTES, even_units, stretches
from raybatch.planning.small import run_small
from raybatch.planning.store import write_plan
from raybatch.planning.stored import PlanSubject, StoredPlan


def run_planned(job: RunSpec, stored: StoredPlan | None) -> PlannedInput | LargePlan | None:
    """Plan a source, write the plan, generate the rows in its order, and return the plan.

    `stored` is a plan that is already below the sink and is used; None for none. None is returned
    if nothing was planned: `plan.mode` is "off", or a large source has a stored plan.

    Raises:
        ConfigError: the folder cannot be written.
    """
    job = replace(job, plan=fit_units(job.plan, job.source))
    if job.plan.mode == "off":
        _run_without_plan(job, stored or store_input_order(job))
        return None
    if is_small(job.source, job.plan):
        return run_small(job, stored)
    from raybatch.planning.large import run_large  # Ray is slow to load

    return run_large(job, stored)


def _run_without_plan(job: RunSpec, stored: StoredPlan) -> None:
    """Generate the rows of the missing units in the order of reading."""
    if not job.runner.is_local:
        from raybatch.planning.large import run_stored  # Ray is slow to load

        run_stored(job, stored)
        return
    todo = job.runner.todo(stored, None)
    if todo.any():
        job.runner.run(stored, planned_tables(job, stored, todo))


def store_input_order(job: RunSpec) -> StoredPlan:
    """Write a plan without reading rows: units are consecutive stretches of the input."""
    return store_stretches(job.source, job.sink, job.subject, job.plan)


def store_stretches(
    source: Source, sink: str, subject: PlanSubject, plan: PlanConfig
) -> StoredPlan:
    """Write a plan whose units are consecutive stretches of a source; return the plan in effect."""
    first_rows = [first_row for _, first_row in pieces_of(source)]
    piece_rows = np.diff([*first_rows, source.num_rows]).tolist()
    # an input without rows has one part, so that readers find the columns
    unit_rows = even_units(piece_rows, plan) if piece_rows else np.zeros(1, np.int64)
    name = subject.hash_of([], [])
    stored = subject.stored(
        hash=name,
        num_rows=source.num_rows,
        num_units=len(unit_rows),
        num_groups=0,
        is_reordered=False,
        logical_tokens=0,
        computed_tokens=0,
        block_size=0,
        shards=(),
    )
    return write_plan(sink, stored, stretches(name, unit_rows))


def fit_units(plan: PlanConfig, source: Source) -> PlanConfig:
    """Return plan options whose units are small enough for the size of this source's rows."""
    return fit_units_to(plan, source.num_rows, _num_bytes(source))


def fit_units_to(plan: PlanConfig, num_rows: int, num_bytes: int) -> PlanConfig:
    """Return `fit_units` for a source of `num_rows` rows with `num_bytes` bytes in total."""
    most = max(1, MAX_UNIT_BYTES * num_rows // max(1, num_bytes))
    target, limit = min(plan.unit_rows, most), min(plan.max_unit_rows, most)
    return replace(plan, unit_rows=target, max_unit_rows=limit)


def is_small(source: Source, plan: PlanConfig) -> bool:
    """Return whether a source is small enough to be read and planned by the driver alone."""
    return _num_bytes(source) <= plan.max_driver_bytes


def _num_bytes(source: Source) -> int:
    return sum(part.num_bytes for part in source.slices)
