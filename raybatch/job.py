"""One run over a dataset: files in, one stage, Parquet out, and a report from the output."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml
from ray.exceptions import RayTaskError

from raybatch.config import from_mapping
from raybatch.errors import ConfigError, RaybatchError, did_you_mean
from raybatch.progress import ProgressPrinter
from raybatch.report import RowTally, RunReport, installed_versions
from raybatch.stages.llm_stage import StageFeeder, build_stage
from raybatch.stages.options import StageConfig, build_stage_config
from raybatch.stages.prepare import check_local_model
from raybatch.stages.render import referenced_columns
from raybatch.stages.schema import ERROR_COLUMN, OutputSchema
from raybatch.stages.sink import PartSink, output_files, prepare_sink, write_part
from raybatch.stages.source import Source, check_unique_ids, scan_source
from raybatch.types import PoolStats

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[PoolStats, int], None]
_POLL_S = 0.25
_PROGRESS_EVERY_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobConfig:
    """What one job reads, does and writes.

    Args:
        source: Parquet or JSONL: a file, a folder or a glob.
        sink: folder for the output.
        stage: model, prompt and options.
        overwrite: replace an earlier output.
    """

    source: str
    sink: str
    stage: StageConfig
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
        overwrite: bool = False,
    ) -> None:
        if not (isinstance(stage, type) and issubclass(stage, StageFeeder)):
            raise ConfigError(f"stage must be what LLMStage(...) returned, got {stage!r}")
        self.config = JobConfig(
            source=str(source), sink=str(sink), stage=stage.config, overwrite=overwrite
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
        stage = mapping.get("stage")
        if not isinstance(stage, Mapping) or "model" not in stage:
            raise ConfigError(f"{where}: 'stage' must hold the options of the stage with a 'model'")
        options = {name: value for name, value in stage.items() if name != "model"}
        stage_config = build_stage_config(stage["model"], options, where=f"{where}: stage")
        config = from_mapping(JobConfig, {**mapping, "stage": stage_config}, where=where)
        return cls(
            config.source, config.sink, build_stage(config.stage), overwrite=config.overwrite
        )

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Build a job from a YAML file."""
        with fsspec.open(str(path), "r") as file:
            mapping = yaml.safe_load(file)
        if not isinstance(mapping, Mapping):
            raise ConfigError(f"{path}: a job file must be a mapping of options")
        return cls.from_mapping(mapping, where=path)

    def run(self, *, progress: ProgressCallback | None = None) -> RunReport:
        """Read, generate, write, and count what was written.

        Args:
            progress: called about every second with the state of the pool and the number of
                rows; None shows a panel on a terminal and log lines elsewhere.

        Returns:
            The report, which also lies below the sink.

        Raises:
            ConfigError: found before any work starts, where it can be.
            RowError: a row failed and the stage has on_error="raise".
        """
        clock = _Clock()
        source = scan_source(self.config.source)
        output = self.config.stage.output
        self._check(source, output)
        prepare_sink(
            self.config.sink,
            is_overwrite=self.config.overwrite,
            source_paths={part.path for part in source.slices},
        )
        schema = pa.schema([f for f in source.schema if f.name != output.prefix + "row_id"])
        schema = pa.schema([*schema, *output.arrow()], metadata=source.schema.metadata)
        stage, row_id_column = self._identified_stage(output)
        restarts_before = stage.stats().num_restarts
        if source.num_rows:
            sink = PartSink(self.config.sink, schema)
            with _progress(progress) as callback, _Watch(stage, source.num_rows, callback, clock):
                _execute(source.dataset(row_id_column=row_id_column), stage, sink)
        else:
            write_part(self.config.sink, "part-000000.parquet", schema.empty_table())
        stats = stage.stats()
        # an idle pool that has stopped since counts from 0 again
        restarts = max(0, stats.num_restarts - restarts_before)
        report = self._report(source, output, replace(stats, num_restarts=restarts), clock)
        report.write()
        return report

    def _check(self, source: Source, output: OutputSchema) -> None:
        stage = self.config.stage
        output.check_collisions(source.schema, id_column=stage.id_column)
        has_prompt = stage.prompt or stage.messages or stage.tokenized_prompt
        if not has_prompt and not set(stage.conventional_columns) & set(source.schema.names):
            raise ConfigError(
                "the stage has no prompt: set prompt=, messages= or tokenized_prompt=, or name a "
                f"column so; the source has {', '.join(source.schema.names)}"
            )
        for name in referenced_columns(stage):
            if name not in source.schema.names:
                known = source.schema.names
                raise ConfigError(
                    f"the stage reads a column {name!r}{did_you_mean(name, known)}; the source has "
                    f"{', '.join(known)}"
                )
        if stage.id_column is not None:
            check_unique_ids(source, stage.id_column)
        check_local_model(stage)

    def _identified_stage(self, output: OutputSchema) -> tuple[type[StageFeeder], str | None]:
        if self.config.stage.id_column is not None:
            return self._stage, None
        column = output.prefix + "row_id"
        return self._stage.with_id_column(column), column

    def _report(
        self, source: Source, output: OutputSchema, stats: PoolStats, clock: "_Clock"
    ) -> RunReport:
        files = output_files(self.config.sink)
        tally, tokens = RowTally(), _TokenTally(output)
        for path in files:
            table = _read_outputs(path, output)
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


def _execute(dataset: Any, stage: type[StageFeeder], sink: PartSink) -> None:  # noqa: ANN401
    # Engines load their weights while Ray starts feeders and reads the first rows.
    stage.pool.start()
    # A run of long outputs may finish no block for half an hour, and progress is shown here.
    dataset.context.execution_no_progress_timeout_s = -1
    dataset.context.enable_progress_bars = False
    # Ray's detectors take feeders that wait for engines for hanging or greedy tasks.
    dataset.context.issue_detectors_config.detectors = []
    # Ray's wrapper of an exception loses the cause on its way to the driver.
    dataset.context.raise_original_map_exception = True
    try:
        stage.apply(dataset).write_datasink(sink)
    except Exception as error:
        raise _own_cause(error) or error from None


class _Clock:
    """The moments of one run, in seconds since its start."""

    def __init__(self) -> None:
        self._origin_s = time.monotonic()
        self.started_s: float | None = None
        self.ended_s: float | None = None

    def elapsed_s(self) -> float:
        return time.monotonic() - self._origin_s


class _Watch:
    """Polls the pool in a thread while the dataset runs; owns the clock's two moments."""

    def __init__(
        self, stage: type[StageFeeder], num_rows: int, callback: ProgressCallback, clock: _Clock
    ) -> None:
        self._stage = stage
        self._num_rows = num_rows
        self._callback = callback
        self._clock = clock
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="raybatch-progress", daemon=True)

    def __enter__(self) -> Self:
        self._before = self._stage.stats()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        if kind is None:
            self._callback(self._stage.stats(), self._num_rows)

    def _poll(self) -> None:
        next_callback_s = 0.0
        while not self._is_done.wait(_POLL_S):
            try:
                stats = self._stage.stats()
            except Exception:  # the run itself reports what is wrong with the pool
                logger.debug("the pool's state could not be read", exc_info=True)
                continue
            now_s = self._clock.elapsed_s()
            self._note(stats, now_s)
            if now_s >= next_callback_s:
                self._callback(stats, self._num_rows)
                next_callback_s = now_s + _PROGRESS_EVERY_S

    def _note(self, stats: PoolStats, now_s: float) -> None:
        is_working = stats.num_ready > 0 and stats.rows_received > self._before.rows_received
        if is_working and self._clock.started_s is None:
            self._clock.started_s = now_s
        if stats.rows_done < stats.rows_received:
            self._clock.ended_s = None
        elif is_working and self._clock.ended_s is None:
            self._clock.ended_s = now_s


class _TokenTally:
    """Sums of tokens over output tables."""

    def __init__(self, output: OutputSchema) -> None:
        self._is_list = output.num_samples > 1
        self.prompt = self.cached = self.generated = 0

    def add(self, table: pa.Table) -> None:
        asked = table.filter(pc.greater(table.column("attempts"), 0))
        generated = table.column("num_generated_tokens")
        self.prompt += _sum(asked.column("num_input_tokens"))
        self.cached += _sum(asked.column("num_cached_tokens"))
        self.generated += _sum(pc.list_flatten(generated) if self._is_list else generated)


def _sum(column: pa.ChunkedArray) -> int:
    return int(pc.sum(column).as_py() or 0)


def _read_outputs(path: str, output: OutputSchema) -> pa.Table:
    """Return the counted columns of one part under their plain names, one reason per row."""
    names = (
        "row_id",
        "finish_reason",
        ERROR_COLUMN,
        "num_input_tokens",
        "num_cached_tokens",
        "num_generated_tokens",
        "attempts",
    )
    with fsspec.open(path, "rb") as file:
        table = pq.read_table(file, columns=[output.prefix + name for name in names])
    table = table.select([output.prefix + name for name in names]).rename_columns(list(names))
    if output.num_samples > 1:
        reasons = pc.list_element(table.column("finish_reason"), 0)
        table = table.set_column(1, "finish_reason", reasons)
    return table


@contextmanager
def _progress(callback: ProgressCallback | None) -> Iterator[ProgressCallback]:
    if callback is not None:
        yield callback
        return
    with ProgressPrinter() as printer:
        yield printer.update


def _own_cause(error: BaseException) -> RaybatchError | None:
    """Return the exception of this library that Ray has wrapped; None if there is none."""
    seen: BaseException | None = error
    while seen is not None:
        # Ray's wrapper is an instance of the cause's class as well, with a traceback for a message
        if isinstance(seen, RayTaskError):
            seen = seen.cause
        elif isinstance(seen, RaybatchError):
            return seen
        else:
            seen = getattr(seen, "cause", None) or seen.__cause__
    return None
