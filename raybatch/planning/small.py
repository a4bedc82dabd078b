"""The plan of a source that fits the driver's memory: rows in their order, ready to be run.

Prompts are rendered and tokenized once, here, and travel with their rows to the feeders. What is
larger is planned by `raybatch.planning.large`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.durable.fault_points import reach
from raybatch.durable.units import UnitPlan, row_sums
from raybatch.planning.dataset import with_places, with_plan
from raybatch.planning.layout_lint import can_change_layout
from raybatch.planning.planned import PlannedInput, PlannedRun
from raybatch.planning.probe import estimate, generated_lengths, probe_rows
from raybatch.planning.shards import contents_digest, digest_of, shard_of
from raybatch.planning.sidecar import Sidecar, describe_rows
from raybatch.planning.store import log_plan, read_shards, write_plan, write_shard
from raybatch.planning.stored import StoredPlan
from raybatch.prefix.order import EngineCapacity
from raybatch.prefix.plan import PlanRows, plan_rows, put_first, with_unasked
from raybatch.records.arrays import Floats, Ints
from raybatch.rows.batches import as_movable
from raybatch.rows.options import StageConfig
from raybatch.rows.plan_columns import prompt_columns, with_columns
from raybatch.rows.prepare import Prepared, prepare, take_input_errors
from raybatch.rows.prompt import Prompt
from raybatch.rows.render import PromptReader
from raybatch.rows.stage_model import find_model, load_tokenizer, max_model_len


class RowDescriber:
    """Renders, tokenizes and describes tables of a source; loads the tokenizer once."""

    def __init__(self, config: StageConfig, plan: PlanConfig) -> None:
        model_dir = find_model(config)
        # copies are found by the plan, and are rows like others to it
        self._config = replace(config, dedup=False)
        self._plan = plan
        self._max_model_len = length = max_model_len(config, model_dir)
        tokenizer = load_tokenizer(config, model_dir)
        self._reader = PromptReader(config, tokenizer, max_model_len=length)

    @property
    def has_adapters(self) -> bool:
        return self._config.lora_column is not None

    def __call__(self, table: pa.Table) -> tuple[Prepared, Sidecar]:
        """Return the prompts of a table and what planning needs of them."""
        table, input_errors = take_input_errors(table, self._config.input_error_column)
        prepared = prepare(
            table,
            config=self._config,
            reader=self._reader,
            max_model_len=self._max_model_len,
            input_errors=input_errors,
        )
        return prepared, describe_rows(
            table,
            prepared,
            block_size=self._config.engine.block_size_tokens,
            expected_column=self._plan.expected_tokens_column,
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GatheredRows:
    """All rows of a source in memory, in input order, errors included."""

    table: pa.Table
    prompts: Sequence[Prompt]
    sidecar: Sidecar


def run_small(job: PlannedRun, stored: StoredPlan | None) -> PlannedInput:
    """Plan a source in this process, write the plan, generate the rows, and return the plan."""
    began, probe_s, probed = time.monotonic(), 0.0, None
    rows = gather(job)
    planned = plan_gathered(rows, job.config, job.plan)
    if stored is None:
        if job.plan.lengths == "probe" and len(planned.asked):
            probe_began = time.monotonic()
            rows, planned, probed = _after_probe(job, rows, planned)
            probe_s = time.monotonic() - probe_began
        expected = np.full(planned.num_rows, np.nan)
        if job.plan.lengths == "probe" or job.plan.expected_tokens_column is not None:
            expected[planned.asked] = planned.expected_tokens
        stored = store_plan(job, planned, expected)
        seconds = time.monotonic() - began - probe_s
        log_plan(stored, seconds, can_change_layout=can_change_layout(job.config))
    shard = read_shards(job.sink, stored, 0, stored.num_rows)
    if probed is not None:
        job.runner.keep(stored, *with_places(job.sink, stored, probed))
    unit = shard.column("unit").to_numpy()
    order = np.lexsort((shard.column("pos").to_numpy(), unit))
    bounds = np.searchsorted(unit[order], np.arange(stored.num_units + 1))
    todo = np.flatnonzero(job.runner.todo(stored, planned))
    blocks = [_block(rows, shard, order[bounds[u] : bounds[u + 1]]) for u in todo.tolist()]
    if blocks:
        job.runner.run(stored, blocks)
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
    sidecar = rows.sidecar
    plan_of_asked, arrangement = plan_rows(
        PlanRows(
            keys=sidecar.keys,
            expected_tokens=sidecar.expected_tokens,
            adapters=sidecar.adapters if len(np.unique(sidecar.adapters)) > 1 else None,
        ),
        plan,
        dedup=config.dedup,
        capacity=EngineCapacity.of(config.engine, config.pool.replicas or 1),
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
        arrangement=arrangement,
        prompts=[p.token_ids for p in rows.prompts if p.is_asked and p.token_ids is not None],
    )


def store_plan(job: PlannedRun, planned: PlannedInput, expected: Floats) -> StoredPlan:
    """Write a plan below the sink, once; return the plan that holds, whoever has written it.

    `expected` is float64 [rows of the source], NaN where nothing is known.
    """
    whole = planned.whole
    shard = shard_of(whole, expected)
    reach("before_shards")
    name = job.subject.hash_of([digest_of(shard)], [contents_digest(planned.keys)])
    stored = job.subject.stored(
        hash=name,
        num_rows=whole.num_rows,
        num_units=whole.num_units,
        num_groups=planned.arrangement.groups.num_groups if whole.is_reordered else 0,
        is_reordered=whole.is_reordered,
        logical_tokens=planned.arrangement.stats.logical_tokens,
        computed_tokens=planned.arrangement.computed_tokens,
        block_size=planned.keys.block_size,
        shards=((write_shard(job.sink, name, 0, shard), 0),),
    )
    sums = row_sums(shard.column("unit").to_numpy(), np.arange(whole.num_rows), whole.num_units)
    units = UnitPlan(hash=name, unit_rows=np.diff(whole.unit_starts), row_sums=sums)
    return write_plan(job.sink, stored, units)


def generate_small(
    job: PlannedRun, collect: Callable[[Sequence[pa.Table]], pa.Table]
) -> tuple[GatheredRows, PlannedInput, pa.Table]:
    """Plan a source in this process, generate its rows, and return rows, plan and answers.

    Nothing is written: `collect` generates rows and returns them as the journal has them.
    """
    rows = gather(job)
    planned = plan_gathered(rows, job.config, job.plan)
    return rows, planned, collect(_blocks(rows, planned, planned.whole.order, job.plan))


def _blocks(
    rows: GatheredRows, planned: PlannedInput, chosen: Ints, plan: PlanConfig
) -> list[pa.Table]:
    """Return the `chosen` rows in this order, with a plan that is not stored, as many tables."""
    shard = shard_of(planned.whole, np.full(planned.num_rows, np.nan))
    cuts = np.arange(0, len(chosen), plan.unit_rows)[1:]
    return [_block(rows, shard, part) for part in np.split(chosen, cuts)]


def _block(rows: GatheredRows, shard: pa.Table, chosen: Ints) -> pa.Table:
    """Return the `chosen` rows as they run, with their prompts and the columns of their plan."""
    prompts = prompt_columns([rows.prompts[row] for row in chosen.tolist()])
    # neighbours are not copied
    is_slice = len(chosen) > 0 and bool((np.diff(chosen) == 1).all())
    table = rows.table.slice(chosen[0], len(chosen)) if is_slice else rows.table.take(chosen)
    return with_columns(with_plan(table, shard.take(chosen), chosen), prompts)


def _after_probe(
    job: PlannedRun, rows: GatheredRows, planned: PlannedInput
) -> tuple[GatheredRows, PlannedInput, pa.Table]:
    """Generate the rows of a probe; return rows and plan with the lengths, and the results."""
    group_id = planned.arrangement.groups.group_id
    probe = probe_rows(group_id, planned.max_tokens, job.plan)
    chosen = planned.asked[probe]
    finished = job.runner.collect(_blocks(rows, planned, chosen, job.plan))
    lengths = generated_lengths(chosen, finished, job.config.output)
    expected = estimate(probe, lengths, group_id, planned.max_tokens)
    rows = replace(rows, sidecar=replace(rows.sidecar, expected_tokens=expected))
    planned = plan_gathered(rows, job.config, job.plan)
    ordered = put_first(planned.plan, probe, job.plan)
    whole = with_unasked(ordered, rows.sidecar.is_asked, job.plan)
    planned = replace(planned, plan=ordered, whole=whole, is_probed=True)
    return rows, planned, finished
