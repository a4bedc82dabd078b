"""One run of a job: rows from files through the engines into files, and its report."""

import logging
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyarrow as pa

from raybatch.explanation.after import actual_of
from raybatch.explanation.explain import Question, explain_run
from raybatch.explanation.outcome import PlanOutcome, RunActual
from raybatch.job_config import JobConfig
from raybatch.progress import ProgressPrinter, shown
from raybatch.report import RunReport, installed_versions
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.plan.large import LargePlan
from raybatch.stages.plan.planned import PlannedInput, PlannedRun
from raybatch.stages.plan.run import run_planned
from raybatch.stages.pool_watch import PoolWatch, ProgressCallback, RunClock
from raybatch.stages.ray_errors import errors_told_once, own_cause
from raybatch.stages.sink import PartSink, output_files, write_part
from raybatch.stages.source import Source
from raybatch.stages.storage import told_as
from raybatch.stages.tally import RowTally, TokenTally, read_outputs
from raybatch.types import PoolStats

__all__ = ["JobRun", "planned_run"]

logger = logging.getLogger(__name__)

# rows of which each order is simulated for the report
_MAX_ROWS_SIMULATED = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRun:
    """A job whose source has been read and checked, and whose sink is ready.

    Args:
        config: of the job.
        stage: what it runs.
        source: rows to read.
        clock: began with the run.
    """

    config: JobConfig
    stage: type[StageFeeder]
    source: Source
    clock: RunClock

    def run(self, progress: ProgressCallback | ProgressPrinter | None) -> RunReport:
        """Generate and write every row, and count what was written."""
        output, source = self.config.stage.output, self.source
        schema = pa.schema([f for f in source.schema if f.name != output.prefix + "row_id"])
        schema = pa.schema([*schema, *output.arrow()], metadata=source.schema.metadata)
        before, planned = self.stage.stats(), None
        if source.num_rows:
            planned = self._execute(PartSink(self.config.sink, schema), progress)
        else:
            write_part(self.config.sink, "part-000000.parquet", schema.empty_table())
        report = self._report(before, self.stage.stats(), planned)
        with told_as(f"the report cannot be written below {self.config.sink!r}"):
            report.write()
        return report

    def _execute(
        self, sink: PartSink, progress: ProgressCallback | ProgressPrinter | None
    ) -> PlannedInput | LargePlan | None:
        """Run the rows; return their plan, None where there is none."""
        num_rows = self.source.num_rows
        job = planned_run(self.config, self.source)
        stage = self.stage.of_run(id_column=job.row_id_column)
        watch_with = partial(PoolWatch, stage.stats, num_rows, clock=self.clock)
        watch: PoolWatch | None = None
        try:
            with shown(progress) as callback, watch_with(callback=callback) as watch:
                # engines load their weights while the plan is made and Ray starts feeders
                stage.pool.start()
                if self.config.plan.mode == "off":
                    _map(self.source.dataset(row_id_column=job.row_id_column), stage, sink)
                    return None
                return run_planned(replace(job, run=partial(_map_next, stage, sink)))
        except KeyboardInterrupt:
            self._tell_interrupted(0 if watch is None else watch.rows_done)
            raise

    def _tell_interrupted(self, rows_done: int) -> None:
        logger.warning(
            "interrupted: %d of %d rows were done, and the output in %s is not complete; start the "
            "job again with overwrite=True (--overwrite in a shell), or into another folder",
            rows_done,
            self.source.num_rows,
            self.config.sink,
        )

    def _report(
        self, before: PoolStats, after: PoolStats, planned: PlannedInput | LargePlan | None
    ) -> RunReport:
        tally, tokens = RowTally(), TokenTally(self.config.stage.output)
        with told_as(f"sink {self.config.sink!r} cannot be read back"):
            files = output_files(self.config.sink)
            for path in files:
                table = read_outputs(path, self.config.stage.output)
                tally.add(table)
                tokens.add(table)
        distinct, clock = tally.rows_distinct(), self.clock
        total_s = clock.elapsed_s()
        started_s = clock.started_s if clock.started_s is not None else total_s
        ended_s = max(started_s, clock.ended_s if clock.ended_s is not None else total_s)
        # an idle pool that has stopped since counts from 0 again
        restarts = max(0, after.num_restarts - before.num_restarts)
        actual = actual_of(tokens, before, after, num_restarts=restarts, wall_s=ended_s - started_s)
        return RunReport(
            source=self.config.source,
            sink=self.config.sink,
            model=self.config.stage.model,
            rows_in=self.source.num_rows,
            rows_out=tally.rows_out,
            rows_lost=self.source.num_rows - distinct,
            rows_duplicated=tally.rows_out - distinct,
            statuses=tally.statuses(),
            errors=tally.errors(),
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            generated_tokens=tokens.generated,
            startup_s=started_s,
            engines_s=ended_s - started_s,
            write_s=total_s - ended_s,
            total_s=total_s,
            replicas=after.num_replicas,
            restarts=restarts,
            versions=installed_versions(),
            output_files=tuple(path.rpartition("/")[2] for path in files),
            plan=self._outcome(planned, actual),
        )

    def _outcome(
        self, planned: PlannedInput | LargePlan | None, actual: RunActual
    ) -> PlanOutcome | None:
        if planned is None:
            return None
        question = Question(
            job=planned_run(self.config, self.source),
            spec=self.stage.pool.spec,
            name=self.config.source,
            kv_tokens_found=actual.kv_tokens,
            measure=False,
            max_rows=_MAX_ROWS_SIMULATED,
            lint=False,
        )
        return explain_run(question, planned, actual)


def planned_run(config: JobConfig, source: Source) -> PlannedRun:
    """Return what a plan of the job is about; it generates nothing yet."""
    stage = config.stage
    row_id_column = None if stage.id_column is not None else stage.output.prefix + "row_id"
    return PlannedRun(
        source=source,
        config=stage if row_id_column is None else replace(stage, id_column=row_id_column),
        plan=config.plan,
        sink=config.sink,
        row_id_column=row_id_column,
        run=_run_nothing,
    )


def _run_nothing(*_: object, **__: object) -> None:
    raise AssertionError("this plan is not to be run")


def _map_next(stage: type[StageFeeder], sink: PartSink, dataset: Any, **options: Any) -> None:  # noqa: ANN401
    """Run one of several datasets; its files come after those that lie there."""
    _map(dataset, stage, sink.after_existing(), **options)


def _map(
    dataset: Any,  # noqa: ANN401
    stage: type[StageFeeder],
    sink: PartSink,
    **options: Any,  # noqa: ANN401
) -> None:
    # A run of long outputs may finish no block for half an hour, and progress is shown here.
    dataset.context.execution_no_progress_timeout_s = -1
    dataset.context.enable_progress_bars = False
    # Ray's detectors take feeders that wait for engines for hanging or greedy tasks.
    dataset.context.issue_detectors_config.detectors = []
    # Ray's wrapper of an exception loses the cause on its way to the driver.
    dataset.context.raise_original_map_exception = True
    try:
        with errors_told_once():
            stage.apply(dataset, **options).write_datasink(sink)
    except Exception as error:
        raise own_cause(error) or error from None
