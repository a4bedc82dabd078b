"""A job over a dataset: files in, one LLM stage, Parquet out, and a report of the output.

An output may be made of another one in a folder below it: with `output_order` "input" that one has
the order of the plan, and is sorted at the end. Where the parts of units are joined, it has a part
per unit.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from raybatch.config.option import signature_of
from raybatch.durable.layout import PLAN, PLAN_ORDER, SOURCE, UNITS
from raybatch.durable.run_log import beating
from raybatch.durable.sink import check_partitions, check_place, output_files, prepare_sink
from raybatch.durable.storage import error_context, is_below, store_of
from raybatch.errors import ConfigError, shell_path
from raybatch.explanation.explain import explain_source
from raybatch.explanation.query import JobQuery
from raybatch.explanation.record import Explanation
from raybatch.inputs.source import KnownScans, Source, check_outside, scan_source
from raybatch.inputs.tables import check_apart, is_table, tables
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
from raybatch.job.preview import Preview, check_limit, preview_rows
from raybatch.job.progress import Progress
from raybatch.job.run import JobExecution, is_whole, plans_of, run_spec
from raybatch.job.staging import check_dataset, stage_dataset
from raybatch.job.watching import RunClock
from raybatch.outputs.failed_rows import ERROR_STATUSES, FailedRows, failed_rows
from raybatch.outputs.joined import FEW_UNITS, FILE_BYTES, PartJoiner, reopen_lost_parts
from raybatch.outputs.ordered import restore_order
from raybatch.planning.fingerprint import output_schema
from raybatch.planning.layout_lint import without_columns
from raybatch.planning.planned import check_expected
from raybatch.planning.run import fit_units
from raybatch.planning.source_checks import check_partition_values, check_unique_ids
from raybatch.planning.store import read_plans
from raybatch.redaction import redacted
from raybatch.report import RunReport, keep_report, report_of_complete
from raybatch.report.recorder import new_run_id
from raybatch.rows.batches import check_parquet_types
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.rows.plan_columns import check_names
from raybatch.rows.prompt_inputs import check_inputs
from raybatch.rows.stage_model import check_model
from raybatch.stages.feeder import StageFeeder, build_stage

logger = logging.getLogger(__name__)


class Job:
    """Run an LLM stage over a dataset: build a job from options or a job file, then call `run`.

    Args:
        source: Parquet, JSONL, CSV or Arrow IPC: a file, a folder or a glob; a path or a URI. Or a
            dataset of Ray Data or Hugging Face, or a table (PyArrow, pandas, Polars): `run`,
            `preview` and `explain` read it once, into `_source/` below the sink.
        sink: folder for the output; a job resumes the output that it finds there.
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
        source: str | Path | Any,  # noqa: ANN401 - a dataset of another library
        sink: str | Path,
        stage: type[StageFeeder],
        **options: Any,  # noqa: ANN401
    ) -> None:
        if not (isinstance(stage, type) and issubclass(stage, StageFeeder)):
            raise ConfigError(f"stage must be what LLMStage(...) returned, got {stage!r}")
        self._dataset = None
        if not isinstance(source, str | Path):
            check_dataset(source)
            self._dataset, source = source, f"{str(sink).rstrip('/')}/{SOURCE}"
        self.config = job_config({"source": source, "sink": sink, "stage": stage.config, **options})
        self._stage = stage

    @classmethod
    def _of(cls, config: JobConfig) -> Self:
        job = cls.__new__(cls)
        job.config, job._stage, job._dataset = config, build_stage(config.stage), None
        return job

    def _of_files(self, *, is_run: bool = False) -> "Job":
        """Return the job over files; a dataset is read into some, again only where it runs."""
        config, dataset = self.config, self._dataset
        if is_table(config.source):
            dataset = tables(f"source {config.source}").open(config.source)
            if config.extend:
                raise ConfigError(
                    "extend adds new files of the source, but a table is read once; for its new "
                    "rows choose another sink, or set overwrite=True"
                )
        if dataset is None:
            return self
        source = stage_dataset(dataset, config.sink, is_overwrite=is_run and config.overwrite)
        # blocks of a dataset may differ in the types of columns that hold nulls alone
        return Job._of(replace(config, source=source, schema_policy="cast"))

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
                raise ConfigError(
                    f"{where}: {key!r} is missing; set it, or pass {flag} on the command line"
                )
        stage = mapping.get("stage")
        if not isinstance(stage, Mapping) or "model" not in stage:
            raise ConfigError(
                f"{where}: 'stage' must be a mapping of the stage's options, with a 'model'"
            )
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
        """Read, generate and write; return a report, which is also written below the sink.

        Args:
            progress: called about every second with the state of the pool and the number of
                rows; None or a `ProgressPrinter` shows a panel on a terminal and log lines
                elsewhere.
            ending: called about every second; if it returns a text, the run ends early as at a
                limit, and the report states the text as the reason.
            start_ray: called before Ray is used, once all checks have passed and rows are left to
                do; None lets Ray start by itself.

        Raises:
            ConfigError: an option is wrong; raised before any work starts if possible.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.
            RowError: a row failed and the stage has on_error="raise".
        """
        clock, job = RunClock(), self._of_files(is_run=True)
        known = job._known_scans()
        return job._run(job._scan(known), clock, progress, start_ray, ending=ending, known=known)

    def retry_errors(
        self,
        sink: str | Path,
        *,
        statuses: Collection[str] = ERROR_STATUSES,
        progress: Progress = None,
        start_ray: Callable[[], None] | None = None,
    ) -> RunReport:
        """Run the error rows of this job's finished output again, into another folder.

        Rows keep their ids. Options of the job may have changed since, as long as the output has
        the same columns. The output of this job is not modified: rows of the new folder replace
        those with the same `row_id`.

        Args:
            sink: folder for the new answers; a second call resumes the first.
            statuses: statuses of the rows to run again.
            progress: see `run`.
            start_ray: see `run`.

        Raises:
            ConfigError: the output is not finished, the folder is inside it or inside the source
                of this job, or as with `run`.
            RowError: as with `run`.
        """
        if is_below(str(sink), self.config.sink):
            raise ConfigError(
                f"the folder {str(sink)!r} for the new answers is inside the output "
                f"{self.config.sink!r}; choose one outside"
            )
        if not is_table(self.config.source):
            check_outside(str(sink), self.config.source)
        clock, stage = RunClock(), self.config.stage
        id_column = stage.id_column or f"{stage.output_prefix}row_id"
        source = failed_rows(self.config.sink, stage.output, id_column=id_column, statuses=statuses)
        original, retried = self.config.sink, replace(stage, id_column=id_column)
        config = replace(self.config, source=original, sink=str(sink), stage=retried, publish=None)
        job = Job._of(config)
        return job._run(source, clock, progress, start_ray, started_in=(original,))

    def _run(
        self,
        source: Source,
        clock: RunClock,
        progress: Progress,
        start_ray: Callable[[], None] | None,
        *,
        ending: Callable[[], str | None] | None = None,
        started_in: Sequence[str] = (),
        known: KnownScans | None = None,
    ) -> RunReport:
        check_place(self.config.sink)
        check_outside(self.config.sink, self.config.source)
        # an output that is overwritten is not resumed
        executor, stage = self._placed(
            source, (self.config.sink, *started_in)[self.config.overwrite :], known=known
        )
        check_weights_here(stage, executor)
        if (table := self.config.publish) is not None:
            check_apart(table, self.config.sink, self.config.source)
            columns = output_schema(source.schema, stage.config)
            tables(f"publish {table}").prepare(table, columns)
        prepare_sink(
            self.config.sink,
            is_overwrite=self.config.overwrite,
            source_paths={part.path for part in source.slices},
        )
        if known is not None:
            known.save(store_of(self.config.sink))
        check_layout(self.config)
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
            report = _execute_in_order(run, progress)
        elif (file_bytes := _joined_bytes(run)) is not None:
            report = _execute_joined(run, progress, file_bytes)
        else:
            report = run.execute(progress)
        if table is not None and report.is_complete:
            try:
                tables(f"publish {table}").publish(self.config.sink, table)
            except ConfigError as error:
                raise ConfigError(
                    f"{error}. The output in {self.config.sink} is complete; to try again, run "
                    f"`raybatch publish {shell_path(self.config.sink)} {shell_path(table)}`"
                ) from error
        return report

    def explain(
        self,
        *,
        kv_tokens: int | None = None,
        price_per_engine_hour: float | None = None,
        measure: bool = True,
        start_ray: Callable[[], None] | None = None,
    ) -> Explanation:
        """Plan the job without running it; estimate prefix sharing, run time and cost.

        The first call starts an engine for some seconds to measure its speed. A source that is a
        dataset is first read into `_source/` below the sink.

        Args:
            kv_tokens: KV cache tokens of one engine, for comparing orders; None uses those of
                the measured engine.
            price_per_engine_hour: price of one replica, in any currency.
            measure: False starts no engine; run time is then estimated only from an earlier
                measurement.
            start_ray: see `run`.

        Raises:
            ConfigError: an option is wrong; raised before any work starts if possible.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.
        """
        job = self._of_files()
        source = job._scan()
        executor, stage = job._placed(source, (job.config.sink,))
        if measure and start_ray is not None and not executor.is_local:
            start_ray()
        stage = stage_of_cluster(stage, source.schema, connect=measure)
        explanation = explain_source(
            JobQuery(
                job=run_spec(replace(job.config, stage=stage.config), source),
                spec=stage.pool.spec,
                is_local=executor.is_local,
                name=job.config.source,
                backend_reason="" if stage.choice is None else stage.choice.why,
                weights=stage.how_weights_are_held(),
                kv_tokens=kv_tokens,
                price_per_engine_hour=price_per_engine_hour,
                measure=measure,
                deadline_s=job.config.deadline_s,
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
        """Generate some rows on the engines of the job, write no answers, and return the rows.

        A source that is a dataset is first read into `_source/` below the sink.
        Rows are sampled across the whole input, little more of which is read; the same limit gives
        the same rows. The preview also estimates tokens, time and cost of the whole input.

        Args:
            limit: number of rows; all if the input has fewer.
            progress: see `run`.
            start_ray: see `run`.

        Raises:
            ConfigError: an option is wrong; raised before any work starts if possible.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.

        Example:
            >>> print(job.preview(20))  # doctest: +SKIP
        """
        check_limit(limit)
        job = self._of_files()
        # failed rows are shown like others
        config = replace(job.config, stage=replace(job.config.stage, on_error="row"))
        job = Job._of(config)
        source = job._scan()
        executor, stage = job._placed(source, (config.sink,), is_preview=True)
        check_weights_here(stage, executor)
        if start_ray is not None and not executor.is_local:
            start_ray()
        stage = with_weights_of_engines(stage_of_cluster(stage, source.schema))
        config = replace(config, stage=stage.config)
        return preview_rows(config, stage, source, executor, limit, progress)

    def _known_scans(self) -> KnownScans:
        """Return the scans that an earlier run has kept below the sink."""
        config = self.config
        check_place(config.sink)
        known = KnownScans(
            *(config.source, config.columns),
            *(config.max_row_group_bytes, config.max_decompressed_bytes),
        )
        with error_context(f"sink {config.sink!r} cannot be used"):
            known.load(store_of(config.sink))
        return known

    def _scan(self, known: KnownScans | None = None) -> Source:
        source = scan_source(
            self.config.source,
            columns=self.config.columns,
            schema_policy=self.config.schema_policy,
            skip_bad_files=self.config.skip_bad_files,
            max_row_group_bytes=self.config.max_row_group_bytes,
            max_decompressed_bytes=self.config.max_decompressed_bytes,
            known=known,
        )
        self.config.check_columns()
        return source

    def _placed(
        self,
        source: Source,
        sinks: Sequence[str],
        *,
        is_preview: bool = False,
        known: KnownScans | None = None,
    ) -> tuple[Executor, type[StageFeeder]]:
        """Return the executor and the stage on it; raise ConfigError if source and stage mismatch.

        A preview does not read values of rows that it does not generate.
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
                "prompt template %a references no column, so every row gets the same prompt; "
                "write {column} where the text of a column belongs",
                template,
            )
        if ignored := without_effect(plan):
            names = ", ".join(f"plan.{name}" for name in ignored)
            logger.warning(
                "%s has no effect with plan.mode=off; set plan.mode=auto, or leave it out", names
            )
        if plan.mode != "off":
            check_expected(source.schema, plan.expected_tokens_column)
        how = stage.id_column, self.config.partition_by
        is_checked = known is not None and known.is_checked(*how)
        # the job that wrote an output has checked its rows
        if not (is_checked or is_preview or isinstance(source, FailedRows)):
            check_partition_values(source, self.config.partition_by)
            if stage.id_column is not None:
                check_unique_ids(source, stage.id_column)
            if known is not None:
                known.note_checked(*how)
        placed = with_pinned_model(placed, sinks)
        check_model(placed.config, source.schema)
        return executor, placed


# editors and `help` show the options in the signature
Job.__init__.__signature__ = signature_of(  # type: ignore[attr-defined]
    Job.__init__, JobConfig, without=("source", "sink", "stage")
)


def check_layout(config: JobConfig) -> None:
    """Raise ConfigError for an output that was started with another layout."""
    in_order, of_units = _folder(config, PLAN_ORDER), _folder(config, UNITS)
    if config.output_order != "input" and _has_plan(in_order):
        raise ConfigError(
            f"the output in {config.sink} was started with output_order=input; set it again, or "
            "choose another folder"
        )
    if config.output_order == "input" and _has_plan(of_units):
        copy = f"finish and copy it by `raybatch ordered {shell_path(config.sink)} NEW_FOLDER`, or "
        raise ConfigError(
            f"the output in {config.sink} was started with output_order=plan; "
            f"{'' if config.partition_by else copy}choose another folder"
        )


def _execute_in_order(run: JobExecution, progress: Progress) -> RunReport:
    """Generate and write every row that is not written yet, then sort them into input order."""
    config, folder = run.config, _folder(run.config, PLAN_ORDER)
    job = run.described()
    plans = plans_of(job, may_grow=config.extend)
    if plans and is_whole(job, plans):
        if any(stored.is_reordered for stored in plans):
            raise ConfigError(
                f"the output in {config.sink} is complete with output_order=plan; `raybatch "
                f"ordered {shell_path(config.sink)} NEW_FOLDER` makes a copy in input order"
            )
        return report_of_complete(config.sink)
    if plans and not _has_plan(folder):
        raise ConfigError(
            f"the output in {config.sink} has a plan but no {folder}: it was started with "
            "output_order=plan, or that folder was removed; choose another folder"
        )
    inner = replace(config, sink=folder, output_order="plan", partition_by=())

    def complete(_: RunReport) -> None:
        size = _wanted_bytes(run)
        restore_order(folder, config.sink, subject=job.subject, file_bytes=size)

    return _execute_below(replace(run, config=inner), config, progress, complete)


def _execute_joined(run: JobExecution, progress: Progress, file_bytes: int) -> RunReport:
    """Generate and write every row that is not written yet, and join the parts of units."""
    config, folder = run.config, _folder(run.config, UNITS)
    job = run.described()
    # files that an earlier run has added are in the plans of the units first
    is_growing = len(read_plans(folder)) > len(read_plans(config.sink))
    plans = plans_of(job, may_grow=config.extend or is_growing)
    if plans and is_whole(job, plans):
        return report_of_complete(config.sink)
    reopen_lost_parts(folder, config.sink)
    is_local = run.executor.is_local
    joiner = PartJoiner(folder, config.sink, file_bytes=file_bytes, is_local=is_local)
    with closing(joiner):

        def complete(report: RunReport) -> None:
            if not is_local and run.start_ray is not None:
                run.start_ray()
            joiner.finish(report.rows_in)

        inner = replace(run, config=replace(config, sink=folder))
        return _execute_below(inner, config, progress, complete)


def _execute_below(
    run: JobExecution,
    config: JobConfig,
    progress: Progress,
    complete: Callable[[RunReport], object],
) -> RunReport:
    """Run a job into a folder below its sink; if that is complete, complete the sink from it.

    `config` are the options of the job as the user gave them.
    """
    prepare_sink(run.config.sink, is_overwrite=config.overwrite)
    report = run.execute(progress)
    report = replace(report, sink=redacted(config.sink), is_rebuilt=False)
    if not (report.rows_todo or report.rows_lost or report.rows_duplicated):
        with beating(store_of(run.config.sink), new_run_id(time.time()), time.time):
            complete(report)
    below = store_of(config.sink).uri + "/"
    names = tuple(path.removeprefix(below) for path in output_files(config.sink))
    return keep_report(replace(report, output_files=names), config.sink)


def _joined_bytes(run: JobExecution) -> int | None:
    """Return the size of the files into which parts are joined; None if they are not.

    A started output keeps its layout.

    Raises:
        ConfigError: the job sets a size, but the output cannot have it.
    """
    config, wanted = run.config, run.config.output_file_bytes
    if _has_plan(_folder(config, UNITS)):
        if wanted is None:
            logger.warning("ignoring output_file_bytes: the output was started with joined files")
        return wanted if isinstance(wanted, int) else FILE_BYTES
    size = _wanted_bytes(run)
    if size is None:
        return None
    is_started, is_set = _has_plan(config.sink), isinstance(wanted, int)
    if is_started and is_set and not is_whole(run.described(), read_plans(config.sink)):
        raise ConfigError(
            f"the output in {config.sink} has no {UNITS}/: it was started with a file per unit, or "
            "that folder was removed; leave output_file_bytes out, and when the job is done copy "
            f"it by `raybatch compact {shell_path(config.sink)} NEW_FOLDER`"
        )
    with error_context(f"sink {config.sink!r} cannot be used"):
        is_exclusive = store_of(config.sink).is_exclusive
    if is_set and not is_exclusive:
        raise ConfigError(
            f"output_file_bytes: {config.sink} cannot create files exclusively, so two concurrent "
            "runs might join other files; leave it out, or choose a sink on a local disk or on S3"
        )
    return None if is_started or not is_exclusive else size


def _wanted_bytes(run: JobExecution) -> int | None:
    """Return the size of files that the job sets; "auto" sets one if there are many units."""
    wanted = run.config.output_file_bytes
    if wanted != "auto":
        return wanted
    unit_rows = fit_units(run.config.plan, run.source).unit_rows
    return FILE_BYTES if run.source.num_rows > FEW_UNITS * unit_rows else None


def _folder(config: JobConfig, name: str) -> str:
    return f"{config.sink.rstrip('/')}/{name}"


def _has_plan(folder: str) -> bool:
    with error_context(f"{folder!r} cannot be read"):
        return store_of(folder).size(PLAN) is not None
