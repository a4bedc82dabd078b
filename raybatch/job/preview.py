"""Answers some rows of a job on its engines, and writes nothing."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pyarrow as pa

from raybatch.durable.journal import ROW
from raybatch.errors import ConfigError
from raybatch.explanation.explain import Question
from raybatch.explanation.extrapolation import SampledRows, extrapolate
from raybatch.inputs.source import Source
from raybatch.job.config import JobConfig
from raybatch.job.executor import Executor, stage_of_executor
from raybatch.job.progress import ProgressPrinter, shown
from raybatch.job.run import planned_run
from raybatch.job.watching import PoolWatch, ProgressCallback, RunClock
from raybatch.planning.fingerprint import output_schema
from raybatch.planning.run import fit_units
from raybatch.planning.sample import Sample
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PreviewRun:
    """A job whose source has been read and checked; its stage is that of the whole run."""

    config: JobConfig
    stage: type[StageFeeder]
    source: Source
    executor: Executor

    def execute(self, limit: int, progress: ProgressCallback | ProgressPrinter | None) -> Preview:
        """Generate `limit` rows spread over the source, or all where it has fewer."""
        config, source = self.config, self.source
        schema, output = output_schema(source.schema, config.stage), config.stage.output
        preview = Preview(
            source=redacted(config.source),
            model=redacted(config.stage.model),
            rows=schema.empty_table(),
            prompts=(),
            output=output,
            rest=None,
        )
        if not source.num_rows:
            return preview
        sample = Sample.of(source, limit)
        # rows of a probe would be generated twice
        plan = replace(fit_units(config.plan, sample), lengths="auto")
        job = planned_run(replace(config, plan=plan), sample)
        stage, spec = self._small_stage(sample.num_rows), self.stage.pool.spec
        stage = stage.of_run(id_column=job.row_id_column)
        before = stage.stats()
        is_local = self.executor.is_local
        collect = partial(collect_rows, stage=stage, waves=config.waves, is_local=is_local)
        with shown(progress) as show, _watch(stage, sample.num_rows, show):
            # engines load their weights while prompts are rendered
            stage.pool.start()
            rows, planned, finished = generate_small(job, collect)
        after = stage.stats()
        finished = finished.sort_by(ROW)
        counted = counted_columns(finished, output)
        sampled = SampledRows(
            prompt_tokens=_per_row(counted.column("num_input_tokens")),
            generated_tokens=_per_row(counted.column("num_generated_tokens")),
            busy_s=max(0.0, after.busy_s - before.busy_s),
            cost=after.cost,
        )
        question = Question(
            job=planned_run(config, source),
            spec=spec,
            name=config.source,
            price_per_engine_hour=config.limits.price_per_engine_hour,
            measure=False,
            is_local=is_local,
        )
        decode = load_tokenizer(job.config, find_model(job.config)).decode
        return replace(
            preview,
            rows=in_schema(finished, schema),
            prompts=tuple(
                "" if p.token_ids is None else decode(p.token_ids, skip_special_tokens=False)
                for p in rows.prompts
            ),
            rest=extrapolate(question, planned, sampled, num_rows=source.num_rows),
        )

    def _small_stage(self, num_rows: int) -> type[StageFeeder]:
        """Return the stage with as many local engines as so few rows are worth."""
        if not self.executor.is_local:
            return self.stage
        num_engines = engines_for(num_rows, self.executor.num_engines)
        return stage_of_executor(self.stage, replace(self.executor, num_engines=num_engines), ())


def _watch(stage: type[StageFeeder], num_rows: int, show: ProgressCallback) -> PoolWatch:
    return PoolWatch(read_stats=stage.stats, num_rows=num_rows, callback=show, clock=RunClock())


def _per_row(column: pa.ChunkedArray) -> Floats:
    """Return tokens of each row over all samples; 0 where there are none."""
    return np.array([np.sum(value or 0) for value in column.to_pylist()], float)
