"""The plan of a source that fits the driver's memory: rows in their order, ready to be run.

Prompts are rendered and tokenized once, here, and travel with their rows to the feeders. What is
larger is planned by `raybatch.stages.plan.large`.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import ray

from raybatch.config import PlanConfig
from raybatch.engine.tokenizer import Tokenizer
from raybatch.prefix.plan import PlanRows, RowPlan, plan_rows, put_first, with_unasked
from raybatch.stages.options import StageConfig
from raybatch.stages.plan.columns import plan_columns, prompt_columns
from raybatch.stages.plan.movable import as_movable
from raybatch.stages.plan.planned import PlannedInput, PlannedRun
from raybatch.stages.plan.probe import estimate, generated_lengths, probe_rows
from raybatch.stages.plan.sidecar import Sidecar, describe_rows
from raybatch.stages.plan.store import (
    StoredPlan,
    digest_of,
    files_of,
    log_plan,
    plan_hash,
    shard_of,
    write_plan,
    write_shard,
)
from raybatch.stages.prepare import Prepared, find_model, max_model_len, prepare
from raybatch.stages.render import Prompt, PromptReader
from raybatch.stages.source import Source

__all__ = ["GatheredRows", "RowDescriber", "gather", "plan_gathered", "run_small", "units"]


class RowDescriber:
    """Renders, tokenizes and describes tables of a source; loads the tokenizer once.

    Args:
        config: of the stage, with the id column of the run.
        plan: options of the plan.
    """

    def __init__(self, config: StageConfig, plan: PlanConfig) -> None:
        model_dir = find_model(config)
        # copies are found by the plan, and are rows like others to it
        self._config = replace(config, dedup=False)
        self._plan = plan
        self._reader = PromptReader(config, Tokenizer.load(model_dir))
        self._max_model_len = max_model_len(config, model_dir)

    def __call__(self, table: pa.Table) -> tuple[Prepared, Sidecar]:
        """Return the prompts of a table and what planning needs of them."""
        prepared = prepare(
            table,
            config=self._config,
            reader=self._reader,
            max_model_len=self._max_model_len,
        )
        return prepared, describe_rows(
            table,
            prepared,
            block_size=self._config.engine.block_size_tokens,
            expected_column=self._plan.expected_tokens_column,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatheredRows:
    """All rows of a source in memory, in input order.

    Args:
        table: the user's columns, and the ids where the job makes them.
        prompts: of every row, errors included.
        sidecar: what planning knows of them.
    """

    table: pa.Table
    prompts: Sequence[Prompt]
    sidecar: Sidecar


def run_small(job: PlannedRun) -> PlannedInput:
    """Plan a source in this process, write the plan, generate the rows, and return the plan.

    Raises:
        ConfigError: another plan lies below the sink, or the folder cannot be written.
    """
    began, first_unit = time.monotonic(), 0
    rows = gather(job)
    planned = plan_gathered(rows, job.config, job.plan)
    if job.plan.lengths == "probe":
        rows, planned, first_unit = _after_probe(job, rows, planned)
    stored = store_plan(job.sink, job.source, planned, job.plan)
    log_plan(stored, time.monotonic() - began)
    is_length_known = job.plan.lengths == "probe" or job.plan.expected_tokens_column is not None
    blocks = units(rows, planned.whole, first_unit, is_length_known=is_length_known)
    job.run(ray.data.from_arrow(list(blocks)), batch_size=None)
    return planned


def gather(job: PlannedRun) -> GatheredRows:
    """Read, render and tokenize a whole source in this process."""
    describer = RowDescriber(job.config, job.plan)
    tables = [
        as_movable(table)
        for task in job.source.tasks()
        for table in job.source.read(task, row_id_column=job.row_id_column)
    ]
    described = [describer(table) for table in tables]
    return GatheredRows(
        table=pa.concat_tables(tables).combine_chunks(),
        prompts=[prompt for prepared, _ in described for prompt in prepared.prompts],
        sidecar=Sidecar.concat([sidecar for _, sidecar in described]),
    )


def plan_gathered(rows: GatheredRows, config: StageConfig, plan: PlanConfig) -> PlannedInput:
    """Plan rows that are in memory."""
    sidecar = rows.sidecar
    plan_of_asked, found = plan_rows(
        PlanRows(keys=sidecar.keys, expected_tokens=sidecar.expected_tokens),
        plan,
        dedup=config.dedup,
    )
    return PlannedInput(
        keys=sidecar.keys,
        asked=sidecar.asked,
        num_rows=sidecar.num_rows,
        max_tokens=sidecar.max_tokens,
        expected_tokens=sidecar.expected_tokens,
        unasked=sidecar.unasked,
        plan=plan_of_asked,
        whole=with_unasked(plan_of_asked, sidecar.is_asked, plan),
        found=found,
        prompts=[p.token_ids for p in rows.prompts if p.is_asked and p.token_ids is not None],
    )


def store_plan(sink: str, source: Source, planned: PlannedInput, plan: PlanConfig) -> StoredPlan:
    """Write a plan below the sink, once; return what `plan.json` says.

    Raises:
        ConfigError: another plan lies there, or the folder cannot be written.
    """
    whole, files = planned.whole, files_of(source)
    shard = shard_of(whole)
    name = plan_hash([digest_of(shard)], plan, files)
    stored = StoredPlan(
        hash=name,
        num_rows=whole.num_rows,
        num_units=whole.num_units,
        num_groups=planned.found.groups.num_groups if whole.is_reordered else 0,
        is_reordered=whole.is_reordered,
        logical_tokens=planned.found.stats.logical_tokens,
        computed_tokens=planned.found.computed_tokens,
        block_size=planned.keys.block_size,
        options=dataclasses.asdict(plan),
        files=files,
        shards=((write_shard(sink, name, 0, shard), 0),),
    )
    write_plan(sink, stored, np.diff(whole.unit_starts))
    return stored


def units(
    rows: GatheredRows, whole: RowPlan, first_unit: int = 0, *, is_length_known: bool
) -> Iterator[pa.Table]:
    """Yield the units of a plan in order, each with its prompts and the columns of the plan.

    Args:
        rows: in memory.
        whole: plan of all of them.
        first_unit: the units before are left out.
        is_length_known: expected lengths say more than the longest that is allowed.
    """
    sidecar = rows.sidecar
    expected = np.full(sidecar.num_rows, np.nan)
    if is_length_known:
        expected[sidecar.asked] = sidecar.expected_tokens
    for start, stop in pairwise(whole.unit_starts[first_unit:].tolist()):
        ranked = whole.order[start:stop]
        unit = rows.table.slice(start, stop - start)
        if whole.is_reordered:
            unit = rows.table.take(ranked)
        columns = {
            **plan_columns(whole.group_id[ranked], whole.prefix_len[ranked], expected[ranked]),
            **prompt_columns([rows.prompts[row] for row in ranked.tolist()]),
        }
        for name, column in columns.items():
            unit = unit.append_column(name, column)
        yield unit


def _after_probe(
    job: PlannedRun, rows: GatheredRows, planned: PlannedInput
) -> tuple[GatheredRows, PlannedInput, int]:
    """Generate the rows of a probe; return rows and plan with the lengths, and the next unit."""
    group_id = planned.found.groups.group_id
    probe = probe_rows(group_id, planned.max_tokens, job.plan)
    table = rows.table.take(planned.asked[probe])
    job.run(ray.data.from_arrow(table))
    lengths = generated_lengths(table, job.id_column, job.sink, job.config.output)
    expected = estimate(probe, lengths, group_id, planned.max_tokens)
    rows = replace(rows, sidecar=replace(rows.sidecar, expected_tokens=expected))
    planned = plan_gathered(rows, job.config, job.plan)
    ordered = put_first(planned.plan, probe, job.plan)
    whole = with_unasked(ordered, rows.sidecar.is_asked, job.plan)
    return rows, replace(planned, plan=ordered, whole=whole), -(-len(probe) // job.plan.unit_rows)
