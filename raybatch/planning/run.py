"""Plans a source in the driver or, if large, with Ray tasks, and runs the plan.

In the driver, prompts are rendered and tokenized once, and travel with their rows to the feeders.
Larger sources are planned by `raybatch.planning.large`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.durable.fault_points import reach
from raybatch.durable.units import UnitPlan, row_sums
from raybatch.inputs.source import Source
from raybatch.planning.dataset import pieces_of, planned_tables, with_places, with_plan
from raybatch.planning.layout_lint import can_change_layout
from raybatch.planning.planned import LargePlan, PlanIndex, PlannedInput, RunSpec, describe_rows
from raybatch.planning.probe import estimate, generated_lengths, probe_rows
from raybatch.planning.shards import (
    MAX_UNIT_BYTES,
    contents_digest,
    digest_of,
    even_units,
    shard_of,
    stretches,
)
from raybatch.planning.store import (
    PlanSubject,
    StoredPlan,
    log_plan,
    read_shards,
    write_plan,
    write_shard,
)
from raybatch.prefix.order import EngineCapacity
from raybatch.prefix.plan import RowFeatures, append_skipped, plan_rows, put_first
from raybatch.records.arrays import Floats, Ints
from raybatch.rows.batches import as_movable
from raybatch.rows.options import StageConfig
from raybatch.rows.plan_columns import prompt_columns, with_columns
from raybatch.rows.prepare import Prepared, prepare, take_input_errors
from raybatch.rows.render import PromptReader
from raybatch.rows.stage_model import find_model, load_tokenizer, max_model_len
from raybatch.text.tokenizer import Prompt


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


class RowDescriber:
    """Callable that renders and tokenizes a table of a source; it loads the tokenizer once."""

    def __init__(self, config: StageConfig, plan: PlanConfig) -> None:
        model_dir = find_model(config)
        # the plan finds copies itself
        self._config = replace(config, dedup=False)
        self._plan = plan
        self._max_model_len = length = max_model_len(config, model_dir)
        tokenizer = load_tokenizer(config, model_dir)
        self._reader = PromptReader(config, tokenizer, max_model_len=length)

    @property
    def has_adapters(self) -> bool:
        return self._config.lora_column is not None

    def __call__(self, table: pa.Table) -> tuple[Prepared, PlanIndex]:
        """Return the prompts of a table and their plan index."""
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
    """All rows of a source in memory, in input order, also those with errors."""

    table: pa.Table
    prompts: Sequence[Prompt]
    plan_index: PlanIndex


def run_small(job: RunSpec, stored: StoredPlan | None) -> PlannedInput:
    """Plan a source in this process, write the plan, generate the rows, and return the plan."""
    began, probe_s, probed = time.monotonic(), 0.0, None
    rows = gather(job)
    planned = plan_gathered(rows, job.config, job.plan)
    if stored is None:
        if job.plan.lengths == "probe" and len(planned.requested):
            probe_began = time.monotonic()
            rows, planned, probed = _after_probe(job, rows, planned)
            probe_s = time.monotonic() - probe_began
        expected = np.full(planned.num_rows, np.nan)
        if job.plan.lengths == "probe" or job.plan.expected_tokens_column is not None:
            expected[planned.requested] = planned.expected_tokens
        stored = store_plan(job, planned, expected)
        seconds = time.monotonic() - began - probe_s
        log_plan(stored, seconds, can_change_layout=can_change_layout(job.config))
    shard = read_shards(job.sink, stored, 0, stored.num_rows)
    if probed is not None:
        job.runner.keep(stored, *with_places(job.sink, stored, probed))
    unit = shard.column("unit").to_numpy()
    order = np.lexsort((shard.column("pos").to_numpy(), unit))
    bounds = np.searchsorted(unit[order], np.arange(stored.num_units + 1))
    job.on_stored(stored)
    todo = np.flatnonzero(job.runner.todo(stored, planned))
    blocks = [_block(rows, shard, order[bounds[u] : bounds[u + 1]]) for u in todo.tolist()]
    if blocks:
        job.runner.run(stored, blocks)
    return planned


def gather(job: RunSpec) -> GatheredRows:
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
        plan_index=PlanIndex.concat([plan_index for _, plan_index in described]),
    )


def plan_gathered(rows: GatheredRows, config: StageConfig, plan: PlanConfig) -> PlannedInput:
    plan_index = rows.plan_index
    plan_of_requested, arrangement = plan_rows(
        RowFeatures(
            keys=plan_index.keys,
            expected_tokens=plan_index.expected_tokens,
            adapters=plan_index.adapters if len(np.unique(plan_index.adapters)) > 1 else None,
        ),
        plan,
        dedup=config.dedup,
        capacity=EngineCapacity.of(config.engine, config.pool.replicas or 1),
    )
    return PlannedInput(
        keys=plan_index.keys,
        requested=plan_index.requested,
        num_rows=plan_index.num_rows,
        max_tokens=plan_index.max_tokens,
        expected_tokens=plan_index.expected_tokens,
        skipped=plan_index.skipped,
        plan=plan_of_requested,
        whole=append_skipped(plan_of_requested, plan_index.is_requested, plan),
        arrangement=arrangement,
        prompts=[p.token_ids for p in rows.prompts if p.is_requested and p.token_ids is not None],
    )


def store_plan(job: RunSpec, planned: PlannedInput, expected: Floats) -> StoredPlan:
    """Write a plan below the sink unless one exists; return the plan in effect.

    `expected` are output tokens, float64 [rows of the source]; NaN if unknown.
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
    job: RunSpec, collect: Callable[[Sequence[pa.Table]], pa.Table]
) -> tuple[GatheredRows, PlannedInput, pa.Table]:
    """Plan a source in this process, generate its rows, and return rows, plan and answers.

    Nothing is written: `collect` generates rows and returns them in the schema of the journal.
    """
    rows = gather(job)
    planned = plan_gathered(rows, job.config, job.plan)
    return rows, planned, collect(_blocks(rows, planned, planned.whole.order, job.plan))


def _blocks(
    rows: GatheredRows, planned: PlannedInput, chosen: Ints, plan: PlanConfig
) -> list[pa.Table]:
    """Return the `chosen` rows in this order as tables, with a plan that is not stored."""
    shard = shard_of(planned.whole, np.full(planned.num_rows, np.nan))
    cuts = np.arange(0, len(chosen), plan.unit_rows)[1:]
    return [_block(rows, shard, part) for part in np.split(chosen, cuts)]


def _block(rows: GatheredRows, shard: pa.Table, chosen: Ints) -> pa.Table:
    """Return the `chosen` rows in order, with their prompts and plan columns."""
    prompts = prompt_columns([rows.prompts[row] for row in chosen.tolist()])
    # adjacent rows are not copied
    is_slice = len(chosen) > 0 and bool((np.diff(chosen) == 1).all())
    table = rows.table.slice(chosen[0], len(chosen)) if is_slice else rows.table.take(chosen)
    return with_columns(with_plan(table, shard.take(chosen), chosen), prompts)


def _after_probe(
    job: RunSpec, rows: GatheredRows, planned: PlannedInput
) -> tuple[GatheredRows, PlannedInput, pa.Table]:
    """Generate the rows of a probe; return rows and plan with estimated lengths, and results."""
    group_id = planned.arrangement.groups.group_id
    probe = probe_rows(group_id, planned.max_tokens, job.plan)
    chosen = planned.requested[probe]
    finished = job.runner.collect(_blocks(rows, planned, chosen, job.plan))
    lengths = generated_lengths(chosen, finished, job.config.output)
    expected = estimate(probe, lengths, group_id, planned.max_tokens)
    rows = replace(rows, plan_index=replace(rows.plan_index, expected_tokens=expected))
    planned = plan_gathered(rows, job.config, job.plan)
    ordered = put_first(planned.plan, probe, job.plan)
    whole = append_skipped(ordered, rows.plan_index.is_requested, job.plan)
    planned = replace(planned, plan=ordered, whole=whole, is_probed=True)
    return rows, planned, finished
