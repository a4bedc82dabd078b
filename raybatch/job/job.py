"""One run over a dataset: files in, one stage, Parquet out, and a report from the output."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from raybatch.config.option import signature_of
from raybatch.durable.layout import PLAN, PLAN_ORDER
from raybatch.durable.sink import check_partitions, check_place, output_files, prepare_sink
from raybatch.durable.storage import error_context, is_below, store_of
from raybatch.errors import ConfigError, shell_path
from raybatch.explanation.explain import explain_source
from raybatch.explanation.question import Question
from raybatch.explanation.record import Explanation
from raybatch.inputs.source import Source, check_outside, scan_source
from raybatch.job.config import JobConfig, job_config, read_job_file, without_effect
from raybatch.job.executor import (
    Executor,
    beside_earlier_stage,
    check_weights_here,
    choose,
    stage_of_cluster,
    stage_of_executor,
    with_pinned_model,
    with_weights_of_engines,
)
from raybatch.job.plans import is_whole, plans_of
from raybatch.job.preview import Preview, check_limit, preview_rows
from raybatch.job.progress import ProgressPrinter
from raybatch.job.run import JobExecution, planned_run
from raybatch.job.watching import ProgressCallback, RunClock
from raybatch.job.weight_choice import how_weights_are_held
from raybatch.outputs.failed_rows import ERROR_STATUSES, FailedRows, failed_rows
from raybatch.outputs.ordered import restore_order
from raybatch.planning.layout_lint import without_columns
from raybatch.planning.sidecar import check_expected
from raybatch.planning.source_checks import check_partition_values, check_unique_ids
from raybatch.redaction import redacted
from raybatch.report import RunReport
from raybatch.report.rebuild import keep_report, report_of_complete
from raybatch.rows.batches import check_parquet_types
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.rows.plan_columns import check_names
from raybatch.rows.prompt_inputs import check_inputs
from raybatch.rows.stage_model import check_model
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.llm_stage import build_stage

logger = logging.getLogger(__name__)

Progress = ProgressCallback | ProgressPrinter | None


def _check_order(config: JobConfig) -> None:
    """Refuse, or with `overwrite` remove, what a run with another `output_order` has begun."""
    if config.output_order == "input" or not _has_plan(_folder(config)):
        return
    if not config.overwrite:
        raise ConfigError(
            f"the output in {config.sink} was begun with output_order=input; set that again, or "
            "choose another folder"
        )
    prepare_sink(_folder(config), is_overwrite=True)


def _execute_in_order(run: JobExecution, progress: Progress) -> RunReport:
    """Generate and write every row that is not written yet, then bring them into input order."""
    config, folder = run.config, _folder(run.config)
    job = run.described()
    plans = plans_of(job, may_grow=config.extend)
    if plans and is_whole(job, plans):
        if any(stored.is_reordered for stored in plans):
            raise ConfigError(
                f"the output in {config.sink} is complete, in the order of the plan; `raybatch "
                f"ordered {shell_path(config.sink)} NEW_FOLDER` makes a copy in the order of the "
                "input"
            )
        return report_of_complete(config.sink)
    if plans and not _has_plan(folder):
        raise ConfigError(
            f"the output in {config.sink} has a plan and nothing in {folder}, so it was begun "
            "with output_order=plan, or that folder was removed; choose another folder"
        )
    prepare_sink(folder, is_overwrite=config.overwrite)
    inner = replace(config, sink=folder, output_order="plan", partition_by=())
    report = replace(run, config=inner).execute(progress)
    report = replace(report, sink=redacted(config.sink), is_rebuilt=False)
    if not (report.rows_todo or report.rows_lost or report.rows_duplicated):
        restore_order(folder, config.sink, subject=job.subject)
        below = store_of(config.sink).uri + "/"
        names = tuple(path.removeprefix(below) for path in output_files(config.sink))
        report = replace(report, output_files=names)
    return keep_report(report, config.sink)


def _folder(config: JobConfig) -> str:
    return f"{config.sink.rstrip('/')}/{PLAN_ORDER}"


def _has_plan(folder: str) -> bool:
    with error_context(f"{folder!r} cannot be read"):
        return store_of(folder).size(PLAN) is not None


class Job:
    """A job over a dataset: built from options or a job file, then `run`.

    Args:
        source: Parquet, JSONL or Arrow IPC: a file, a folder or a glob; a path or a URI.
        sink: folder for the output; where a part of it is there already, the job goes on.
        stage: what `LLMStage(...)` returned.
        options: those of `JobConfig`; docs/reference/options.md lists them. `plan`, `limits` and
            `waves` may be mappings, `columns` and `partition_by` texts such as "id,document".

    Raises:
        ConfigError: an unknown option (with a suggestion), or a value out of range.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}")  # doctest: +SKIP
        >>> print(Job("prompts/", "answers/", stage).run())  # doctest: +SKIP
    """

    def __init__(
        self,
        source: str | Path,
        sink: str | Path,
        stage: type[StageFeeder],
        **options: Any,  # noqa: ANN401
    ) -> None:
        if not (isinstance(stage, type) and issubclass(stage, StageFeeder)):
            raise ConfigError(f"stage must be what LLMStage(...) returned, got {stage!r}")
        self.config = job_config({"source": source, "sink": sink, "stage": stage.config, **options})
        self._stage = stage

    @classmethod
    def _of(cls, config: JobConfig) -> Self:
        job = cls.__new__(cls)
        job.config, job._stage = config, build_stage(config.stage)
        return job

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, where: str | Path = "job") -> Self:
        """Build a job from nested options, as in a job file; ConfigError: an option is wrong."""
        where = str(where)
        stage_options = {f.name for f in fields(StageConfig)}
        for key in mapping:
            if key in stage_options:
                raise ConfigError(f"{where}: option {key!r} belongs below 'stage'")
        for key, flag in (("source", "--input"), ("sink", "--output")):
            if key not in mapping:
                raise ConfigError(f"{where}: {key!r} is missing; set it, or {flag} in a shell")
        stage = mapping.get("stage")
        if not isinstance(stage, Mapping) or "model" not in stage:
            raise ConfigError(f"{where}: 'stage' must hold the options of the stage with a 'model'")
        options = {name: value for name, value in stage.items() if name != "model"}
        stage_config = build_stage_config(stage["model"], options, where=f"{where}: stage")
        return cls._of(job_config({**mapping, "stage": stage_config}, where=where))

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Build a job from a YAML file; ConfigError: it cannot be read, or an option is wrong."""
        return cls.from_mapping(read_job_file(path), where=path)

    def run(
        self,
        *,
        progress: Progress = None,
        ending: Callable[[], str | None] | None = None,
        start_ray: Callable[[], None] | None = None,
    ) -> RunReport:
        """Read, generate, write, and return a report, which also lies below the sink.

        Args:
            progress: called about every second with the state of the pool and the number of
                rows; None, or a printer of one's own, shows a panel on a terminal and log lines
                elsewhere.
            ending: called about every second; a text that it returns ends the run early, as a
                limit does, and is the reason that the report tells.
            start_ray: called before Ray is used, where it is: nothing is left to refuse then, and
                something to do; None leaves its start to Ray.

        Raises:
            ConfigError: found before any work starts, where it can be.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.
            RowError: a row failed and the stage has on_error="raise".
        """
        clock = RunClock()
        return self._run(self._scan(), clock, progress, start_ray, ending=ending)

    def retry_errors(
        self,
        sink: str | Path,
        *,
        statuses: Collection[str] = ERROR_STATUSES,
        progress: Progress = None,
        start_ray: Callable[[], None] | None = None,
    ) -> RunReport:
        """Run the error rows of this job's finished output again, into a folder of their own.

        Rows keep their ids. Options of the job may have changed since, as long as the output has
        the same columns. What this job has written stays as it is: rows of the new folder stand in
        for those with the same `row_id`.

        Args:
            sink: folder for the new answers; a second call goes on where the first has stopped.
            statuses: of the rows to run again.
            progress: see `run`.
            start_ray: see `run`.

        Raises:
            ConfigError: the output is not finished, the folder lies in it or in the source of this
                job, or as with `run`.
            RowError: as with `run`.
        """
        if is_below(str(sink), self.config.sink):
            raise ConfigError(
                f"the folder {str(sink)!r} for the new answers lies in the output "
                f"{self.config.sink!r}; choose one beside it"
            )
        check_outside(str(sink), self.config.source)
        clock, stage = RunClock(), self.config.stage
        id_column = stage.id_column or f"{stage.output_prefix}row_id"
        source = failed_rows(self.config.sink, stage.output, id_column=id_column, statuses=statuses)
        begun, retried = self.config.sink, replace(stage, id_column=id_column)
        job = Job._of(replace(self.config, source=begun, sink=str(sink), stage=retried))
        return job._run(source, clock, progress, start_ray, begun_in=(begun,))

    def _run(
        self,
        source: Source,
        clock: RunClock,
        progress: Progress,
        start_ray: Callable[[], None] | None,
        *,
        ending: Callable[[], str | None] | None = None,
        begun_in: Sequence[str] = (),
    ) -> RunReport:
        check_place(self.config.sink)
        check_outside(self.config.sink, self.config.source)
        # what is overwritten is no output that goes on
        executor, stage = self._placed(
            source, (self.config.sink, *begun_in)[self.config.overwrite :]
        )
        check_weights_here(stage, executor)
        prepare_sink(
            self.config.sink,
            is_overwrite=self.config.overwrite,
            source_paths={part.path for part in source.slices},
        )
        _check_order(self.config)
        stage = stage_of_cluster(stage, source.schema, start_ray)
        stage = with_weights_of_engines(stage, start_ray)
        run = JobExecution(
            config=replace(self.config, stage=stage.config),
            stage=stage,
            source=source,
            clock=clock,
            ending=ending,
            executor=executor,
            start_ray=start_ray,
        )
        if self.config.output_order == "input":
            return _execute_in_order(run, progress)
        return run.execute(progress)

    def explain(
        self,
        *,
        kv_tokens: int | None = None,
        price_per_engine_hour: float | None = None,
        measure: bool = True,
        start_ray: Callable[[], None] | None = None,
    ) -> Explanation:
        """Plan the job without running it, and say what it shares, saves, takes and costs.

        The first time, an engine is started for some seconds to measure its speed.

        Args:
            kv_tokens: KV cache of one engine, for which orders are compared; None takes that of
                the measured engine.
            price_per_engine_hour: of one replica, in any currency.
            measure: False starts no engine; there is a time then only if one was measured before.
            start_ray: see `run`.

        Raises:
            ConfigError: found before any work starts, where it can be.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.
        """
        source = self._scan()
        executor, stage = self._placed(source, (self.config.sink,))
        if measure and start_ray is not None and not executor.is_local:
            start_ray()
        stage = stage_of_cluster(stage, source.schema, connect=measure)
        explanation = explain_source(
            Question(
                job=planned_run(replace(self.config, stage=stage.config), source),
                spec=stage.pool.spec,
                is_local=executor.is_local,
                name=self.config.source,
                backend_reason="" if stage.choice is None else stage.choice.why,
                weights=how_weights_are_held(stage),
                kv_tokens=kv_tokens,
                price_per_engine_hour=price_per_engine_hour,
                measure=measure,
                deadline_s=self.config.deadline_s,
            )
        )
        return replace(explanation, executor=str(executor))

    def preview(
        self,
        limit: int = 20,
        *,
        progress: Progress = None,
        start_ray: Callable[[], None] | None = None,
    ) -> Preview:
        """Answer some rows on the engines of the job, write nothing, and return the rows.

        They are spread over the whole input, of which little more is read, and are the same in
        every call with the same limit. Beside them comes what the whole input would take, about.

        Args:
            limit: number of rows; where the input has fewer, all.
            progress: see `run`.
            start_ray: see `run`.

        Raises:
            ConfigError: found before any work starts, where it can be.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.

        Example:
            >>> print(job.preview(20))  # doctest: +SKIP
        """
        check_limit(limit)
        # a row that fails is shown like others
        config = replace(self.config, stage=replace(self.config.stage, on_error="row"))
        job, source = Job._of(config), self._scan()
        executor, stage = job._placed(source, (config.sink,), is_preview=True)
        check_weights_here(stage, executor)
        if start_ray is not None and not executor.is_local:
            start_ray()
        stage = with_weights_of_engines(stage_of_cluster(stage, source.schema))
        config = replace(config, stage=stage.config)
        return preview_rows(config, stage, source, executor, limit, progress)

    def _scan(self) -> Source:
        source = scan_source(
            self.config.source,
            columns=self.config.columns,
            schema_policy=self.config.schema_policy,
            skip_bad_files=self.config.skip_bad_files,
            max_row_group_bytes=self.config.max_row_group_bytes,
            max_decompressed_bytes=self.config.max_decompressed_bytes,
        )
        self.config.check_columns()
        return source

    def _placed(
        self, source: Source, sinks: Sequence[str], *, is_preview: bool = False
    ) -> tuple[Executor, type[StageFeeder]]:
        """Return where the job runs, and its stage there; raise ConfigError if they do not fit.

        A preview looks at no value of rows that it does not answer.
        """
        executor = choose(self.config.executor, self._stage.pool.spec, source, self.config.plan)
        placed = stage_of_executor(self._stage, executor, sinks)
        placed = beside_earlier_stage(placed, source.schema)
        stage, plan = placed.config, self.config.plan
        stage.output.check_collisions(source.schema, id_column=stage.id_column)
        check_parquet_types(source.schema)
        check_inputs(source.schema, stage, of_folders=source.folder_columns)
        check_names(source.schema)
        check_partitions(source.schema, self.config.partition_by)
        if template := without_columns(stage):
            logger.warning(
                "the template %a names no column, so every row asks the same; write {column} "
                "where the text of a column belongs",
                template,
            )
        if ignored := without_effect(plan):
            names = ", ".join(f"plan.{name}" for name in ignored)
            logger.warning(
                "the plan is off, so %s changes nothing; set plan.mode=auto, or leave it out", names
            )
        if plan.mode != "off":
            check_expected(source.schema, plan.expected_tokens_column)
        # the job that wrote an output looked at its rows
        if not isinstance(source, FailedRows) and not is_preview:
            check_partition_values(source, self.config.partition_by)
            if stage.id_column is not None:
                check_unique_ids(source, stage.id_column)
        placed = with_pinned_model(placed, sinks)
        check_model(placed.config, source.schema)
        return executor, placed


# editors and `help` show the options where they are given
Job.__init__.__signature__ = signature_of(  # type: ignore[attr-defined]
    Job.__init__, JobConfig, without=("source", "sink", "stage")
)
