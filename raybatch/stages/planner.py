"""From a source to a plan that lies below the sink, and to the rows in their planned order."""

import dataclasses
import logging
import time
from typing import Any

import numpy as np
import ray

from raybatch.config import PlanConfig
from raybatch.stages.options import StageConfig
from raybatch.stages.plan import GatheredRows, RowDescriber, gather, plan_gathered, units
from raybatch.stages.plan_store import (
    StoredPlan,
    digest_of,
    files_of,
    plan_hash,
    shard_of,
    write_plan,
    write_shard,
)
from raybatch.stages.planned import PlannedInput
from raybatch.stages.source import Source

__all__ = ["plan_in_memory", "planned_dataset", "store_plan"]

logger = logging.getLogger(__name__)


def plan_in_memory(
    source: Source, config: StageConfig, plan: PlanConfig, *, row_id_column: str | None
) -> tuple[GatheredRows, PlannedInput]:
    """Read, tokenize and plan a small source in this process.

    Args:
        source: with at least one row.
        config: of the stage, with the id column of the run.
        plan: options of the plan.
        row_id_column: column to make for ids; None where the user has one.
    """
    began = time.monotonic()
    rows = gather(source, RowDescriber(config, plan), row_id_column=row_id_column)
    planned = plan_gathered(rows, config, plan)
    found = planned.found
    logger.info(
        "planned %d rows in %.1f s: %s, %.1f %% of %d prompt tokens need not be computed",
        planned.num_rows,
        time.monotonic() - began,
        f"{found.groups.num_groups} prefix groups" if planned.plan.is_reordered else "input order",
        100 * found.saved_fraction,
        found.stats.logical_tokens,
    )
    return rows, planned


def store_plan(sink: str, source: Source, planned: PlannedInput, plan: PlanConfig) -> StoredPlan:
    """Write a plan below the sink, once; return what `plan.json` says.

    Raises:
        ConfigError: another plan lies there, or the folder cannot be written.
    """
    whole, files = planned.whole, files_of(source)
    shard = shard_of(whole)
    name_of_plan = plan_hash([digest_of(shard)], plan, files)
    stored = StoredPlan(
        hash=name_of_plan,
        num_rows=whole.num_rows,
        num_units=whole.num_units,
        num_groups=planned.found.groups.num_groups if whole.is_reordered else 0,
        is_reordered=whole.is_reordered,
        logical_tokens=planned.found.stats.logical_tokens,
        computed_tokens=planned.found.computed_tokens,
        block_size=planned.keys.block_size,
        options=dataclasses.asdict(plan),
        files=files,
        shards=((write_shard(sink, name_of_plan, 0, shard), 0),),
    )
    write_plan(sink, stored, np.diff(whole.unit_starts))
    return stored


def planned_dataset(rows: GatheredRows, planned: PlannedInput, plan: PlanConfig) -> Any:  # noqa: ANN401
    """Return a Ray dataset with a block for each unit, in their order."""
    is_length_known = plan.expected_tokens_column is not None
    blocks = list(units(rows, planned.whole, is_length_known=is_length_known))
    return ray.data.from_arrow(blocks)
