"""The options of a job as a frozen, validated record, and how they are read."""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import fsspec
import yaml
from annotated_types import Gt
from pydantic.dataclasses import dataclass

from raybatch.backends.registry import type_of
from raybatch.config import LimitConfig, PlanConfig, WaveConfig, from_mapping
from raybatch.config.option import (
    CHECKED,
    Answers,
    Place,
    Positive,
    Speed,
    fields_of,
    is_default,
    options,
)
from raybatch.errors import ConfigError, error_text
from raybatch.inputs.listing import IPC_SUFFIXES, JSON_SUFFIXES, PARQUET_SUFFIXES
from raybatch.inputs.schemas import SchemaPolicy
from raybatch.inputs.source import MAX_ROW_GROUP_BYTES
from raybatch.policy.executor import ExecutorName
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import referenced_columns

_T = TypeVar("_T")
OutputOrder = Literal["plan", "input"]

# suffixes of datasets, which are no job files; JSON is YAML
_DATASETS = tuple({*PARQUET_SUFFIXES, *IPC_SUFFIXES, *JSON_SUFFIXES} - {".json"})
# plan options that have an effect with plan.mode=off too: on units, and on memory of `explain`
_WITHOUT_A_PLAN = ("mode", "unit_rows", "max_unit_rows", "max_driver_bytes")


@options("")
@dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
class JobConfig:
    """Options of one job."""

    source: Place[str]
    """Parquet, JSONL, CSV or Arrow IPC: a file, folder or glob; a path or URI. Or a table:
    delta:PATH, iceberg:CATALOG.NAMESPACE.TABLE or lance:PATH, at the end ?version=N if wanted."""
    sink: Place[str]
    """Output folder: a path or URI. A started output of the same job is resumed; other files or
    another job's output are refused."""
    stage: StageConfig
    """Model, prompt and options."""
    plan: PlanConfig = field(default_factory=PlanConfig)
    """How rows are grouped and ordered; "off" runs them in input order."""
    overwrite: Place[bool] = False
    """Remove the output of an earlier run and start over."""
    extend: Place[bool] = False
    """Add new source files to the output, under their own plan; earlier files must be unchanged."""
    flush_every_s: Speed[Annotated[float, Gt(0)]] = 5.0
    """Seconds between saves of finished rows of unfinished units; a crash loses no more."""
    partition_by: Answers[tuple[str, ...]] = ()
    """Source columns that become folders of the output, as in data/lang=en/part-000000.parquet;
    files do not repeat them."""
    output_order: Place[OutputOrder] = "plan"
    """"plan" keeps the order in which rows ran and costs nothing; "input" sorts a second copy into
    source order at the end."""
    output_file_bytes: Place[Positive | Literal["auto"] | None] = "auto"
    """Size of the output's files: parts of units are joined while the job runs. None keeps a file
    per unit. "auto": 256 MiB if there are more than 64 units."""
    publish: Place[str | None] = None
    """Table to which the rows of the finished output are added, once: delta:PATH,
    iceberg:CATALOG.NAMESPACE.TABLE, lance:PATH or hub:ORG/NAME; needs raybatch-tables."""
    limits: LimitConfig = field(default_factory=LimitConfig)
    """Limits that end a run early; the same job resumes later."""
    deadline_s: Speed[Annotated[float, Gt(0)] | None] = None
    """Deadline of the run in seconds; units that would miss it are not started."""
    waves: Answers[tuple[WaveConfig, ...]] = ()
    """Rules that retry rows of some status before they are written, in this order, such as [{"on":
    "truncated", "sampling": {"max_tokens": 2048}}]."""
    columns: Answers[tuple[str, ...] | None] = None
    """Source columns to read and write, in order; None: all."""
    schema_policy: Answers[SchemaPolicy] = "strict"
    """If schemas of files differ: "strict" refuses them, "cast" widens types without loss."""
    skip_bad_files: Answers[bool] = False
    """Skip unreadable files (empty, truncated, of another format) instead of failing."""
    max_row_group_bytes: Place[Positive] = MAX_ROW_GROUP_BYTES
    """Largest row group or record batch, in bytes of memory."""
    max_decompressed_bytes: Place[Positive | None] = None
    """Largest decompressed size of a JSONL or CSV file; None allows 1 GiB or a hundred times its
    size, whichever is more."""
    executor: Place[ExecutorName] = "auto"
    """"ray" runs engines on a cluster, "local" as processes of this host without Ray; "auto" uses
    a connected cluster, else "local" for small inputs and Ray for others."""

    def __post_init__(self) -> None:
        if self.overwrite and self.extend:
            raise ConfigError("overwrite removes the output and extend keeps it; set only one")
        has_price = self.limits.price_per_engine_hour is not None
        if self.limits.max_cost is not None and not (
            has_price or type_of(self.stage.backend).cost(self.stage.backend)
        ):
            raise ConfigError(
                "limits.max_cost needs limits.price_per_engine_hour, or the prices of an endpoint "
                "in backend.options"
            )
        of_tokens = {
            "waves": self.waves,
            "plan.lengths": self.plan.lengths == "probe",
            "plan.expected_tokens_column": self.plan.expected_tokens_column is not None,
        }
        if self.stage.task != "generate" and any(of_tokens.values()):
            name = next(name for name, is_set in of_tokens.items() if is_set)
            raise ConfigError(
                f"{name} has no effect: task {self.stage.task!r} generates no tokens; leave it out"
            )
        for wave in self.waves:
            try:
                replace(self.stage.sampling, **wave.sampling)
            except ConfigError as error:
                raise ConfigError(
                    f"waves: a rule is invalid with the stage's sampling options: {error}"
                ) from error
        if len(set(self.partition_by)) < len(self.partition_by):
            raise ConfigError(
                f"partition_by must name each column once, got {list(self.partition_by)!r}"
            )
        if self.columns is not None and not (
            self.columns and len(set(self.columns)) == len(self.columns)
        ):
            raise ConfigError(
                f"columns must name each column once, and at least one, got "
                f"{list(self.columns)!r}; leave it out for all"
            )

    def check_columns(self) -> None:
        """Raise ConfigError if `columns` leaves out a column that an option names."""
        needed = [*referenced_columns(self.stage), *self.partition_by]
        if self.plan.mode != "off" and self.plan.expected_tokens_column is not None:
            needed.append(self.plan.expected_tokens_column)
        for name in needed:
            if self.columns is not None and name not in self.columns:
                raise ConfigError(
                    f"columns leaves out {name!r}, which the job reads; add it, as in columns: "
                    f"[{', '.join([*self.columns, name])}]"
                )


def job_config(given: Mapping[str, Any], *, where: str = "Job") -> JobConfig:
    """Return the options of a job, converted from the forms that users may write.

    The value of "stage" is a `StageConfig`. Messages begin with `where`, unless that is "Job", as
    for a call in Python. ConfigError: an option is unknown, missing or wrong.
    """
    at = "" if where == "Job" else f"{where}: "
    if "limit" in given:
        raise ConfigError(
            f"{at}limit is not an option of a job, which runs all rows; for a few rows call "
            "job.preview(20), or raybatch run --limit 20"
        )
    values = {
        name: _FORMS[name](value, f"{at}{name}") if name in _FORMS else value
        for name, value in given.items()
    }
    return from_mapping(JobConfig, values, where=where)


def _path(path: object, where: str) -> str:
    if not isinstance(path, str | Path) or not str(path):
        raise ConfigError(
            f"{where} must be a path or a URI, got {path!r}; name several files by a folder or a "
            "glob"
        )
    return str(path)


def _column_names(columns: object, where: str) -> tuple[str, ...] | None:
    if columns is None:
        return None
    names = columns
    if isinstance(columns, str):
        names = [name.strip() for name in columns.split(",")]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where} must be a list of names, got {columns!r}")
    if "" in names:
        raise ConfigError(f"{where} holds an empty name, got {columns!r}; remove it")
    return tuple(names)


def _built(cls: type[_T], value: object, where: str, allowed: str) -> _T:
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must {allowed}, got {value!r}")
    return from_mapping(cls, value, where=where)


def _limit_config(limits: object, where: str) -> LimitConfig:
    return _built(
        LimitConfig, {} if limits is None else limits, where, "be limits such as max_tokens"
    )


def _wave_configs(waves: object, where: str) -> tuple[WaveConfig, ...]:
    if not isinstance(waves, list | tuple | None):
        raise ConfigError(f"{where} must be a list of rules, got {waves!r}")
    built = []
    for number, wave in enumerate(waves or ()):
        if isinstance(wave, Mapping):
            on = wave.get("on", ())
            wave = {**wave, "on": tuple(on) if isinstance(on, list | tuple) else (on,)}
        at = f"{where}: rule {number}"
        built.append(_built(WaveConfig, wave, at, "have 'on' and 'sampling'"))
    return tuple(built)


def _plan_config(plan: object, where: str) -> PlanConfig:
    if plan is None or isinstance(plan, bool) or plan in ("auto", "off"):
        plan = {"mode": "auto" if plan is None else plan}
    if isinstance(plan, Mapping) and isinstance(plan.get("mode"), bool):
        # YAML reads a bare `off` as false
        plan = {**plan, "mode": "auto" if plan["mode"] else "off"}
    return _built(PlanConfig, plan, where, "be 'auto', 'off' or options of the plan")


_FORMS: Mapping[str, Callable[[Any, str], object]] = {
    "source": _path,
    "sink": _path,
    "plan": _plan_config,
    "limits": _limit_config,
    "waves": _wave_configs,
    "columns": _column_names,
    "partition_by": lambda columns, where: _column_names(columns, where) or (),
}


def without_effect(plan: PlanConfig) -> list[str]:
    """Return the plan options that are set but have no effect because the plan is off."""
    names = fields_of(PlanConfig) if plan.mode == "off" else ()
    return [name for name in names if name not in _WITHOUT_A_PLAN and not is_default(plan, name)]


class JobYaml(yaml.SafeLoader):
    """Load a job file: names are texts, and duplicate names are errors (YAML keeps the last)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if key.tag == "tag:yaml.org,2002:bool":
                key.tag = "tag:yaml.org,2002:str"  # an option is named `on`
        names = [key.value for key in keys]
        for name in names:
            if name != "<<" and names.count(name) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the option {name!r} is set twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_job_file(path: str | Path) -> dict[str, Any]:
    """Return the options in a YAML file; ConfigError: it cannot be read, or holds no options."""
    if str(path).endswith(_DATASETS):
        raise ConfigError(
            f"{path} looks like a dataset, not a job file; for a dataset use --input, for a batch "
            "file of the OpenAI API --openai"
        )
    try:
        with fsspec.open(str(path), "r", encoding="utf-8") as file:
            mapping = yaml.load(file, Loader=JobYaml)
    except FileNotFoundError:
        raise ConfigError(f"{path}: job file not found") from None
    except IsADirectoryError:
        raise ConfigError(
            f"{path} is a folder, not a job file; for a dataset use --input"
        ) from None
    except Exception as error:  # each file system raises its own errors
        raise ConfigError(f"{path}: cannot be read as YAML: {error_text(error)}") from error
    if not isinstance(mapping, dict):
        raise ConfigError(f"{path}: a job file must hold options, such as source: prompts/")
    return mapping
