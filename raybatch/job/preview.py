"""Answers some rows of a job on its engines, and writes nothing."""

from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from raybatch.durable.journal import ROW
from raybatch.durable.parts import empty_table
from raybatch.errors import ConfigError
from raybatch.explanation.extrapolation import extrapolate
from raybatch.explanation.question import Question
from raybatch.inputs.source import Source
from raybatch.job.config import JobConfig
from raybatch.job.executor import Executor, stage_of_executor
from raybatch.job.progress import ProgressPrinter, shown
from raybatch.job.run import planned_run
from raybatch.job.watching import PoolWatch, ProgressCallback, RunClock
from raybatch.planning.fingerprint import output_schema
from raybatch.planning.run import fit_units
from raybatch.planning.sample import SampledSource
from raybatch.planning.small import generate_small
from raybatch.planning.tally import counted_columns
from raybatch.policy.executor import engines_for
from raybatch.records.arrays import Floats
from raybatch.redaction import redacted
from raybatch.report.preview import Preview
from raybatch.rows.stage_model import find_model, load_tokenizer
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.unit_run import collect_rows
from raybatch.stages.unit_writer import in_schema


def check_limit(limit: object) -> None:
    """Raise ConfigError unless a preview can have so many rows."""
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise ConfigError(
            f"limit must be a whole number of rows, at least 1, got {limit!r}; 20 are a first look"
        )


def preview_rows(
    config: JobConfig,
    stage: type[StageFeeder],
    source: Source,
    executor: Executor,
    limit: int,
    progress: ProgressCallback | ProgressPrinter | None,
) -> Preview:
    """Generate `limit` rows spread over a source, or all where it has fewer.

    The source has been read and checked; executor and stage are those of the whole run.
    """
    schema, output = output_schema(source.schema, config.stage), config.stage.output
    preview = Preview(
        source=redacted(config.source),
        model=redacted(config.stage.model),
        rows=empty_table(schema),
        prompts=(),
        output=output,
        rest=None,
    )
    if not source.num_rows:
        return preview
    question = Question(
        job=planned_run(config, source),
        spec=stage.pool.spec,
        name=config.source,
        price_per_engine_hour=config.limits.price_per_engine_hour,
        measure=False,
        is_local=executor.is_local,
    )
    sample = SampledSource.of(source, limit)
    # rows of a probe would be generated twice
    plan = replace(fit_units(config.plan, sample), lengths="auto")
    job = planned_run(replace(config, plan=plan), sample)
    if executor.is_local:
        # as many as so few rows are worth, or a group that shares weights
        number = stage.pool.spec.pool.share_group
        number = number or engines_for(sample.num_rows, executor.num_engines)
        stage = stage_of_executor(stage, replace(executor, num_engines=number), ())
    stage = stage.of_run(id_column=job.row_id_column)
    stage.pool.connect()
    before = stage.stats()
    watch = partial(PoolWatch, read_stats=stage.stats, num_rows=sample.num_rows, clock=RunClock())
    with shown(progress) as show, watch(callback=show):
        # engines load their weights while prompts are rendered
        stage.pool.start()
        is_local = executor.is_local
        collect = partial(collect_rows, stage=stage, waves=config.waves, is_local=is_local)
        rows, planned, finished = generate_small(job, collect)
    after, again = stage.stats(), stage.stats(again=True)
    finished = finished.sort_by(ROW)
    counted = counted_columns(finished, output)
    decode = load_tokenizer(job.config, find_model(job.config)).decode
    return replace(
        preview,
        rows=in_schema(finished, schema),
        prompts=tuple(
            "" if p.token_ids is None else decode(p.token_ids, skip_special_tokens=False, after=())
            for p in rows.prompts
        ),
        rest=extrapolate(
            question,
            planned,
            prompt_tokens=_per_row(counted.column("num_input_tokens")),
            generated_tokens=_per_row(counted.column("num_generated_tokens")),
            busy_s=max(0.0, after.busy_s - before.busy_s),
            cost=after.cost + again.cost,
            num_rows=source.num_rows,
        ),
    )


def _per_row(column: pa.ChunkedArray) -> Floats:
    """Return tokens of each row over all samples; 0 where there are none."""
    values = (value if isinstance(value, list) else [value] for value in column.to_pylist())
    return np.array([sum(number or 0 for number in row) for row in values], float)
