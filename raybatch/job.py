"""One run over a dataset: files in, one stage, Parquet out, and a report from the output."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import fsspec
import pyarrow as pa
import ray
import yaml

from raybatch.config import PlanConfig, from_mapping
from raybatch.errors import ConfigError
from raybatch.explanation.explain import Question, explain_source
from raybatch.explanation.record import Explanation
from raybatch.progress import ProgressPrinter, shown
from raybatch.report import RunReport, installed_versions
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.inputs import check_inputs
from raybatch.stages.llm_stage import build_stage
from raybatch.stages.options import StageConfig, build_stage_config
from raybatch.stages.plan_columns import check_names
from raybatch.stages.planned import PlannedRun
from raybatch.stages.planner import run_planned
from raybatch.stages.pool_watch import PoolWatch, ProgressCallback, RunClock
from raybatch.stages.prepare import check_model
from raybatch.stages.ray_errors import errors_told_once, own_cause
from raybatch.stages.schema import OutputSchema
from raybatch.stages.sink import PartSink, output_files, prepare_sink, write_part
from raybatch.stages.source import Source, check_outside, check_unique_ids, scan_source
from raybatch.stages.storage import told_as
from raybatch.stages.tally import RowTally, TokenTally, read_outputs
from raybatch.types import PoolStats

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What one job reads, does and writes.

    Args:
        source: Parquet or JSONL: a file, a folder or a glob.
        sink: folder for the output.
        stage: model, prompt and options.
        plan: of the whole input, made before anything is generated.
        overwrite: replace an earlier output.
    """

    source: str
    sink: str
    stage: StageConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    overwrite: bool = False


class Job:
    """A dataset through one stage, from files to files.

    Every row of the source has one row in the sink, with text or with an error. The `row_id` is
    the value of the stage's `id_column`, else "<file>:<position>" with the file's path below the
    source; it does not depend on blocks, order or cluster size.

    Args:
        source: Parquet or JSONL: a file, a folder or a glob, local or with a protocol.
        sink: folder for the output; one that holds files is refused.
        stage: what `LLMStage(...)` returned.
        plan: options of the plan; "off" runs the rows in input order.
        overwrite: replace the output of an earlier run.

    Example:
        >>> stage = LLMStage("demo", prompt="{document}")  # doctest: +SKIP
        >>> print(Job("prompts/", "answers/", stage).run().to_text())  # doctest: +SKIP
    """

    def __init__(
        self,
        source: str | Path,
        sink: str | Path,
        stage: type[StageFeeder],
        *,
        plan: PlanConfig | Mapping[str, Any] | str | None = None,
        overwrite: bool = False,
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
            plan=_plan_config(plan, where="plan"),
            overwrite=overwrite,
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
        plan = _plan_config(mapping.get("plan"), where=f"{where}: plan")
        nested = {**mapping, "stage": stage_config, "plan": plan}
        config = from_mapping(JobConfig, nested, where=where)
        return cls(
            config.source,
            config.sink,
            build_stage(config.stage),
            plan=config.plan,
            overwrite=config.overwrite,
        )

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Build a job from a YAML file.

        Raises:
            ConfigError: the file cannot be read, or an option is unknown, missing or wrong.
        """
        return cls.from_mapping(read_job_file(path), where=path)

    def run(self, *, progress: ProgressCallback | ProgressPrinter | None = None) -> RunReport:
        """Read, generate, write, and count what was written.

        Args:
            progress: called about every second with the state of the pool and the number of
                rows; None, or a printer of one's own, shows a panel on a terminal and log lines
                elsewhere.

        Returns:
            The report, which also lies below the sink.

        Raises:
            ConfigError: found before any work starts, where it can be.
            RowError: a row failed and the stage has on_error="raise".
        """
        clock = RunClock()
        source = scan_source(self.config.source)
        output = self.config.stage.output
        self._check(source, output)
        check_outside(self.config.sink, self.config.source)
        prepare_sink(
            self.config.sink,
            is_overwrite=self.config.overwrite,
            source_paths={part.path for part in source.slices},
        )
        schema = pa.schema([f for f in source.schema if f.name != output.prefix + "row_id"])
        schema = pa.schema([*schema, *output.arrow()], metadata=source.schema.metadata)
        restarts_before = self._stage.stats().num_restarts
        if source.num_rows:
            self._execute(source, PartSink(self.config.sink, schema), progress, clock)
        else:
            write_part(self.config.sink, "part-000000.parquet", schema.empty_table())
        stats = self._stage.stats()
        # an idle pool that has stopped since counts from 0 again
        restarts = max(0, stats.num_restarts - restarts_before)
        report = self._report(source, output, replace(stats, num_restarts=restarts), clock)
        with told_as(f"the report cannot be written below {self.config.sink!r}"):
            report.write()
        return report

    def explain(
        self,
        *,
        kv_tokens: int | None = None,
        price_per_engine_hour: float | None = None,
        measure: bool = True,
    ) -> Explanation:
        """Plan the job without running it, and say what it shares, saves, takes and costs.

        The first time, an engine is started for some seconds to measure its speed.

        Args:
            kv_tokens: KV cache of one engine, for which orders are compared; None takes that of
                the measured engine.
            price_per_engine_hour: of one replica, in any currency.
            measure: False starts no engine; there is a time then only if one was measured before.

        Raises:
            ConfigError: found before any work starts, where it can be.
        """
        source = scan_source(self.config.source)
        self._check(source, self.config.stage.output)
        return explain_source(
            Question(
                job=self._planned_run(source, self.config.stage, run=_run_nothing),
                spec=self._stage.pool.spec,
                name=self.config.source,
                kv_tokens=kv_tokens,
                price_per_engine_hour=price_per_engine_hour,
                measure=measure,
            )
        )

    def _check(self, source: Source, output: OutputSchema) -> None:
        stage = self.config.stage
        output.check_collisions(source.schema, id_column=stage.id_column)
        check_inputs(source.schema, stage)
        check_names(source.schema)
        if stage.id_column is not None:
            check_unique_ids(source, stage.id_column)
        check_model(stage, is_one_host=ray.is_initialized() and len(ray.nodes()) == 1)

    def _row_id_column(self, output: OutputSchema) -> str | None:
        """Return the column to make for the ids; None where the user has one."""
        return None if self.config.stage.id_column is not None else output.prefix + "row_id"

    def _execute(
        self,
        source: Source,
        sink: PartSink,
        progress: ProgressCallback | ProgressPrinter | None,
        clock: RunClock,
    ) -> None:
        row_id_column = self._row_id_column(self.config.stage.output)
        stage = self._stage.of_run(id_column=row_id_column)
        watch_with = partial(PoolWatch, stage.stats, source.num_rows, clock=clock)
        watch: PoolWatch | None = None
        try:
            with shown(progress) as callback, watch_with(callback=callback) as watch:
                # engines load their weights while the plan is made and Ray starts feeders
                stage.pool.start()
                if self.config.plan.mode == "off":
                    _map(source.dataset(row_id_column=row_id_column), stage, sink)
                else:
                    self._run_plan(source, stage, sink)
        except KeyboardInterrupt:
            self._tell_interrupted(0 if watch is None else watch.rows_done, source.num_rows)
            raise

    def _run_plan(self, source: Source, stage: type[StageFeeder], sink: PartSink) -> None:
        def run(dataset: Any, **options: Any) -> None:  # noqa: ANN401
            _map(dataset, stage, sink.after(output_files(self.config.sink)), **options)

        run_planned(self._planned_run(source, stage.config, run=run))

    def _planned_run(
        self, source: Source, config: StageConfig, *, run: Callable[..., None]
    ) -> PlannedRun:
        row_id_column = self._row_id_column(self.config.stage.output)
        return PlannedRun(
            source=source,
            config=config if row_id_column is None else replace(config, id_column=row_id_column),
            plan=self.config.plan,
            sink=self.config.sink,
            row_id_column=row_id_column,
            run=run,
        )

    def _tell_interrupted(self, rows_done: int, num_rows: int) -> None:
        logger.warning(
            "interrupted: %d of %d rows were done, and the output in %s is not complete; start the "
            "job again with overwrite=True (--overwrite in a shell), or into another folder",
            rows_done,
            num_rows,
            self.config.sink,
        )

    def _report(
        self, source: Source, output: OutputSchema, stats: PoolStats, clock: RunClock
    ) -> RunReport:
        tally, tokens = RowTally(), TokenTally(output)
        with told_as(f"sink {self.config.sink!r} cannot be read back"):
            files = output_files(self.config.sink)
            for path in files:
                table = read_outputs(path, output)
                tally.add(table)
                tokens.add(table)
        distinct = tally.rows_distinct()
        total_s = clock.elapsed_s()
        started_s = clock.started_s if clock.started_s is not None else total_s
        ended_s = max(started_s, clock.ended_s if clock.ended_s is not None else total_s)
        return RunReport(
            source=self.config.source,
            sink=self.config.sink,
            model=self.config.stage.model,
            rows_in=source.num_rows,
            rows_out=tally.rows_out,
            rows_lost=source.num_rows - distinct,
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
            replicas=stats.num_replicas,
            restarts=stats.num_restarts,
            versions=installed_versions(),
            output_files=tuple(path.rpartition("/")[2] for path in files),
        )


def read_job_file(path: str | Path) -> dict[str, Any]:
    """Return the options in a YAML file.

    Raises:
        ConfigError: there is no such file, or it holds no options.
    """
    try:
        with fsspec.open(str(path), "r", encoding="utf-8") as file:
            mapping = yaml.safe_load(file)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such job file") from None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a job file holds options, such as source: prompts/")
    return mapping


def _run_nothing(*_: object, **__: object) -> None:
    raise AssertionError("an explanation generates nothing")


def _plan_config(plan: object, *, where: str) -> PlanConfig:
    if isinstance(plan, PlanConfig):
        return plan
    # YAML reads a bare `off` as false
    if plan is None or plan is True or plan == "auto":
        return PlanConfig()
    if plan is False or plan == "off":
        return PlanConfig(mode="off")
    if not isinstance(plan, Mapping):
        raise ConfigError(f"{where} must be 'auto', 'off' or options of the plan, got {plan!r}")
    values = dict(plan)
    if values.get("mode") is False:
        values["mode"] = "off"
    return from_mapping(PlanConfig, values, where=where)


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
