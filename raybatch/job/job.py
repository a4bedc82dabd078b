"""One run over a dataset: files in, one stage, Parquet out, and a report from the output."""

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Self

from raybatch.config import LimitConfig, PlanConfig, WaveConfig, from_mapping
from raybatch.durable.sink import check_partitions, check_place, prepare_sink
from raybatch.durable.storage import is_below
from raybatch.errors import ConfigError
from raybatch.explanation.explain import Question, explain_source
from raybatch.explanation.record import Explanation
from raybatch.inputs.schemas import SchemaPolicy
from raybatch.inputs.source import Source, check_outside, scan_source
from raybatch.job.config import (
    JobConfig,
    OutputOrder,
    column_names,
    limit_config,
    plan_config,
    read_job_file,
    wave_configs,
    without_effect,
)
from raybatch.job.executor import choose, with_pool
from raybatch.job.order import OrderedRun, check_order
from raybatch.job.parts import settled_stage, stage_of_cluster
from raybatch.job.pool_watch import ProgressCallback, RunClock
from raybatch.job.progress import ProgressPrinter
from raybatch.job.run import JobRun, planned_run
from raybatch.outputs.failed_rows import ERROR_STATUSES, FailedRows, failed_rows
from raybatch.planning.layout_lint import without_columns
from raybatch.planning.sidecar import check_expected
from raybatch.planning.source_checks import check_partition_values, check_unique_ids
from raybatch.policy.executor import ExecutorName
from raybatch.report import RunReport
from raybatch.rows.options import StageConfig, build_stage_config
from raybatch.rows.plan_columns import check_names
from raybatch.rows.prompt_inputs import check_inputs
from raybatch.rows.stage_model import check_model
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.llm_stage import build_stage

logger = logging.getLogger(__name__)


class Job:
    """A dataset through one stage, from files to files.

    Every row of the source has one row in the sink, with text or with an error. The `row_id` is
    the value of the stage's `id_column`, else "<file>:<position>" with the file's path below the
    source; it does not depend on blocks, order or cluster size.

    Args:
        source: Parquet, JSONL or Arrow IPC: a file, a folder or a glob, local or with a protocol.
        sink: folder for the output. The job goes on where an earlier run of it has stopped; a
            folder with other files, or with the output of another job, is refused.
        stage: what `LLMStage(...)` returned.
        plan: options of the plan; "off" runs the rows in input order.
        overwrite: remove the output of an earlier run and begin again.
        extend: add files that are new in the source to the output, as units of a further plan;
            files that it has must be the same.
        flush_every_s: finished rows of a unit that is not complete are kept so often, in seconds,
            so that a run that dies loses minutes of long rows at most.
        partition_by: columns of the source by whose values the output is laid out, as in
            data/lang=en/part-000000.parquet; they are not repeated inside the files.
        output_order: of the rows: "plan" leaves them as they were written, which costs nothing;
            "input" writes them once more when all are done, in the order of the source.
        limits: budgets, a deadline and a share of errors that end a run early; finished rows are
            kept, and the same job started again goes on.
        waves: rules by which rows of some status are asked once more before they are written, such
            as [{"on": "truncated", "sampling": {"max_tokens": 2048}}].
        columns: of the source that are read and written, in this order; None takes all.
        schema_policy: what to do with files whose schemas differ: "strict" refuses them, "cast"
            takes the narrowest types that hold all values exactly.
        skip_bad_files: leave out files that cannot be read (empty, cut, of another kind), in place
            of refusing the source; they are logged and reported.
        max_row_group_bytes: that a row group or record batch may take in memory.
        max_decompressed_bytes: that a compressed JSONL file may grow to; None allows 1 GiB, and
            larger files a hundred times their size.
        executor: of the engines: "ray" has them on a cluster; "local" on this host, as processes
            of this one, and does not load Ray; "auto" takes a cluster that is connected, else
            runs small inputs locally and others on Ray.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}")  # doctest: +SKIP
        >>> print(Job("prompts/", "answers/", stage).run())  # doctest: +SKIP
    """

    def __init__(
        self,
        source: str | Path,
        sink: str | Path,
        stage: type[StageFeeder],
        *,
        plan: PlanConfig | Mapping[str, Any] | str | None = None,
        overwrite: bool = False,
        extend: bool = False,
        flush_every_s: float = 5.0,
        partition_by: Sequence[str] | str = (),
        output_order: OutputOrder = "plan",
        limits: LimitConfig | Mapping[str, Any] | None = None,
        waves: Sequence[WaveConfig | Mapping[str, Any]] = (),
        columns: Sequence[str] | str | None = None,
        schema_policy: SchemaPolicy = "strict",
        skip_bad_files: bool = False,
        max_row_group_bytes: int = 2 << 30,
        max_decompressed_bytes: int | None = None,
        executor: ExecutorName = "auto",
    ) -> None:
        if not (isinstance(stage, type) and issubclass(stage, StageFeeder)):
            raise ConfigError(f"stage must be what LLMStage(...) returned, got {stage!r}")
        for name, path in (("source", source), ("sink", sink)):
            if not isinstance(path, str | Path) or not str(path):
                raise ConfigError(
                    f"{name} must be a path or a URI, got {path!r}; several files are a folder or "
                    "a glob"
                )
        self.config = JobConfig(
            source=str(source),
            sink=str(sink),
            stage=stage.config,
            plan=plan_config(plan, where="plan"),
            overwrite=overwrite,
            extend=extend,
            flush_every_s=flush_every_s,
            partition_by=column_names(partition_by, where="partition_by") or (),
            output_order=output_order,
            limits=limit_config(limits, where="limits"),
            waves=wave_configs(waves, where="waves"),
            columns=column_names(columns, where="columns"),
            schema_policy=schema_policy,
            skip_bad_files=skip_bad_files,
            max_row_group_bytes=max_row_group_bytes,
            max_decompressed_bytes=max_decompressed_bytes,
            executor=executor,
        )
        self._stage = stage

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], *, where: str | Path = "job") -> Self:
        """Build a job from nested options, as they stand in a job file.

        Raises:
            ConfigError: an unknown, missing or wrong option.
        """
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
        plan = plan_config(mapping.get("plan"), where=f"{where}: plan")
        columns = column_names(mapping.get("columns"), where=f"{where}: columns")
        nested = {
            **mapping,
            "stage": stage_config,
            "plan": plan,
            "columns": columns,
            "partition_by": column_names(
                mapping.get("partition_by"), where=f"{where}: partition_by"
            )
            or (),
            "waves": wave_configs(mapping.get("waves"), where=f"{where}: waves"),
            "limits": limit_config(mapping.get("limits"), where=f"{where}: limits"),
        }
        config = from_mapping(JobConfig, nested, where=where)
        return cls(
            config.source,
            config.sink,
            build_stage(config.stage),
            plan=config.plan,
            overwrite=config.overwrite,
            extend=config.extend,
            flush_every_s=config.flush_every_s,
            partition_by=config.partition_by,
            output_order=config.output_order,
            limits=config.limits,
            waves=config.waves,
            columns=config.columns,
            schema_policy=config.schema_policy,
            skip_bad_files=config.skip_bad_files,
            max_row_group_bytes=config.max_row_group_bytes,
            max_decompressed_bytes=config.max_decompressed_bytes,
            executor=config.executor,
        )

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Build a job from a YAML file.

        Raises:
            ConfigError: the file cannot be read, or an option is unknown, missing or wrong.
        """
        return cls.from_mapping(read_job_file(path), where=path)

    def run(
        self,
        *,
        progress: ProgressCallback | ProgressPrinter | None = None,
        ending: Callable[[], str | None] | None = None,
        start_ray: Callable[[], None] | None = None,
    ) -> RunReport:
        """Read, generate, write, and count what was written.

        Args:
            progress: called about every second with the state of the pool and the number of
                rows; None, or a printer of one's own, shows a panel on a terminal and log lines
                elsewhere.
            ending: called about every second; a text that it returns ends the run early, as a
                limit does, and is the reason that the report tells.
            start_ray: called before Ray is used, where it is: nothing is left to refuse then, and
                something to do; None leaves its start to Ray.

        Returns:
            The report, which also lies below the sink.

        Raises:
            ConfigError: found before any work starts, where it can be.
            CapacityError: `kv_cache_bytes` of the engine does not hold a block.
            RowError: a row failed and the stage has on_error="raise".
        """
        clock = RunClock()
        return self._run(self._scan(), clock, progress, ending, start_ray)

    def retry_errors(
        self,
        sink: str | Path,
        *,
        statuses: Collection[str] = ERROR_STATUSES,
        progress: ProgressCallback | ProgressPrinter | None = None,
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
        job = Job(
            self.config.sink,
            sink,
            build_stage(replace(stage, id_column=id_column)),
            plan=self.config.plan,
            overwrite=self.config.overwrite,
            extend=self.config.extend,
            flush_every_s=self.config.flush_every_s,
            partition_by=self.config.partition_by,
            output_order=self.config.output_order,
            limits=self.config.limits,
            waves=self.config.waves,
            executor=self.config.executor,
        )
        return job._run(source, clock, progress, start_ray=start_ray, begun_in=(self.config.sink,))

    def _run(
        self,
        source: Source,
        clock: RunClock,
        progress: ProgressCallback | ProgressPrinter | None,
        ending: Callable[[], str | None] | None = None,
        start_ray: Callable[[], None] | None = None,
        begun_in: Sequence[str] = (),
    ) -> RunReport:
        check_place(self.config.sink)
        check_outside(self.config.sink, self.config.source)
        executor = choose(self.config.executor, self._stage.pool.spec, source, self.config.plan)
        # what is overwritten is no output that goes on
        sinks = (self.config.sink, *begun_in)[self.config.overwrite :]
        stage = settled_stage(with_pool(self._stage, executor), sinks)
        self._check(source, stage.config)
        prepare_sink(
            self.config.sink,
            is_overwrite=self.config.overwrite,
            source_paths={part.path for part in source.slices},
        )
        check_order(self.config)
        stage = stage_of_cluster(stage, source.schema, start_ray)
        run = JobRun(
            config=replace(self.config, stage=stage.config),
            stage=stage,
            source=source,
            clock=clock,
            ending=ending,
            executor=executor,
            start_ray=start_ray,
        )
        if self.config.output_order == "input":
            return OrderedRun(run=run).execute(progress)
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
        executor = choose(self.config.executor, self._stage.pool.spec, source, self.config.plan)
        stage = settled_stage(with_pool(self._stage, executor), (self.config.sink,))
        self._check(source, stage.config)
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
                kv_tokens=kv_tokens,
                price_per_engine_hour=price_per_engine_hour,
                measure=measure,
            )
        )
        return replace(explanation, executor=str(executor))

    def _scan(self) -> Source:
        self.config.check_columns()
        return scan_source(
            self.config.source,
            columns=self.config.columns,
            schema_policy=self.config.schema_policy,
            skip_bad_files=self.config.skip_bad_files,
            max_row_group_bytes=self.config.max_row_group_bytes,
            max_decompressed_bytes=self.config.max_decompressed_bytes,
        )

    def _check(self, source: Source, stage: StageConfig) -> None:
        stage.output.check_collisions(source.schema, id_column=stage.id_column)
        check_inputs(source.schema, stage)
        check_names(source.schema)
        check_partitions(source.schema, self.config.partition_by)
        if template := without_columns(stage):
            logger.warning(
                "the template %a names no column, so every row asks the same; write {column} "
                "where the text of a column belongs",
                template,
            )
        if ignored := without_effect(self.config.plan):
            names = ", ".join(f"plan.{name}" for name in ignored)
            logger.warning(
                "the plan is off, so %s changes nothing; set plan.mode=auto, or leave it out", names
            )
        if self.config.plan.mode != "off":
            check_expected(source.schema, self.config.plan.expected_tokens_column)
        # the job that wrote an output looked at its rows
        if not isinstance(source, FailedRows):
            check_partition_values(source, self.config.partition_by)
            if stage.id_column is not None:
                check_unique_ids(source, stage.id_column)
        check_model(stage, source.schema)
