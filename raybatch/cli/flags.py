"""The flags of every command on a job.

Flags are short names of job options and go through `Job.from_mapping` like a job file; every
option without a flag is reached with `--set`.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, get_args

import typer
import yaml

from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.options import StageConfig

DEMO_MODEL = "demo"
PROMPT_FLAG = typer.Option(help="Template with columns, such as '{document} Q: {question}'.")
MESSAGES_FLAG = typer.Option(help="Column of OpenAI messages, instead of --prompt.")
_DEMO_NOTE = (
    "no --model given: taking the embedded demo model, which answers questions about the demo "
    "documents and nothing else"
)
# options that may be a single value, and which of their options that value is
_SHORT_FORMS = {"plan": "mode", "stage.backend": "kind"}
# every other option belongs to the stage
JOB_OPTIONS = (
    "source",
    "sink",
    "stage",
    "plan",
    "overwrite",
    "extend",
    "flush_every_s",
    "partition_by",
    "output_order",
    "limits",
    "waves",
    "columns",
    "schema_policy",
    "skip_bad_files",
    "max_row_group_bytes",
    "max_decompressed_bytes",
    "executor",
)
_STAGE_OPTIONS = frozenset({"seed", *(field.name for field in fields(StageConfig))})


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    """The flags of a job, and the file beside them.

    Args:
        job_file: YAML, or a batch file; None where there is none.
        options: of the flags, by dotted names.
        where: what they are called in messages.
    """

    job_file: str | None
    options: Mapping[str, Any]
    where: str

    @cached_property
    def mapping(self) -> dict[str, Any]:
        """Return the options of the job; raise ConfigError where nothing names a source."""
        return job_mapping(self.job_file, self.options)


def read_job_flags(
    job_file: Annotated[
        str | None,
        typer.Argument(help="YAML job file, below the options here."),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--input", help="Parquet, JSONL, Arrow: a file, folder or glob.")
    ] = None,
    sink: Annotated[str | None, typer.Option("--output", help="Folder for the output.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder, hub id or URI; demo by default.")
    ] = None,
    prompt: Annotated[str | None, PROMPT_FLAG] = None,
    messages_column: Annotated[str | None, MESSAGES_FLAG] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate a row.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column that names the rows.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines to run.")] = None,
    on_error: Annotated[str | None, typer.Option(help="row (default) or raise.")] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to read and write, such as id,document; all.")
    ] = None,
    output_order: Annotated[
        str | None, typer.Option(help="Of the rows: plan (default), or input, as they are read.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Remove an earlier output of raybatch and begin again."),
    ] = False,
    extend: Annotated[
        bool, typer.Option("--extend", help="Add files that are new in the input.")
    ] = False,
    local: Annotated[
        bool | None,
        typer.Option(
            "--local/--ray",
            help="Run on this host alone, without starting Ray, or on Ray in any case.",
            show_default="small inputs without Ray",
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other option, such as engine.max_batched_tokens=4096."),
    ] = None,
) -> dict[str, Any]:
    """Return options by dotted names; the parameters are the flags of every command on a job."""
    flags = {
        "source": source,
        "sink": sink,
        "stage.model": model,
        "stage.prompt": prompt,
        "stage.messages": messages_column,
        "stage.sampling.max_tokens": max_tokens,
        "stage.sampling.temperature": temperature,
        "stage.id_column": id_column,
        "stage.pool.replicas": replicas,
        "stage.on_error": on_error,
        "overwrite": overwrite or None,
        "columns": columns,
        "output_order": output_order,
        "extend": extend or None,
        "executor": None if local is None else "local" if local else "ray",
    }
    given = {path: value for path, value in flags.items() if value is not None}
    return {**given, **parse_settings(settings or [])}


def with_job_flags(
    *, without: Collection[str] = (), job_file_help: str | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what gives a command the flags of a job before its own.

    The command is called with what they come to.

    Args:
        without: flags of which its help says nothing, because they mean nothing to it. They are
            read all the same: a command line of `run` may ask for them, and who is told that a
            batch says it itself is told more than that there is no such flag.
        job_file_help: what its help says of the job file, where it may be another one.
    """
    flags = {
        name: _told(flag, is_hidden=name in without, help_=job_file_help)
        for name, flag in inspect.signature(read_job_flags).parameters.items()
    }

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def with_flags(**values: Any) -> None:  # noqa: ANN401
            of_job = {name: values.pop(name) for name in flags}
            job_file, options = of_job["job_file"], read_job_flags(**of_job)
            where = job_file or f"raybatch {command.__name__}"
            command(JobFlags(job_file=job_file, options=options, where=where), **values)

        taken = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*flags.values(), *own)]
        with_flags.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        with_flags.__annotations__ = {p.name: p.annotation for p in taken}
        return with_flags

    return decorate


def _told(flag: inspect.Parameter, *, is_hidden: bool, help_: str | None) -> inspect.Parameter:
    """Return a flag as the help of one command shows it."""
    kind, shown = get_args(flag.annotation)
    shown = copy.copy(shown)
    if is_hidden:
        shown.hidden = True
    if flag.name == "job_file" and help_ is not None:
        shown.help = help_
    return flag.replace(annotation=Annotated[kind, shown])


def job_mapping(job_file: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a job: those of the file, with the dotted `options` put over them.

    Raises:
        ConfigError: the file cannot be read, or nothing names a source.
    """
    mapping = nested_options(job_file, options)
    if job_file is None and "source" not in mapping:
        raise ConfigError("nothing to run: give a job file, or --input, --output and --prompt")
    return mapping


def nested_options(job_file: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `job_mapping` does, for commands that name their files in other ways.

    Raises:
        ConfigError: the file cannot be read.
    """
    mapping: dict[str, Any] = {}
    if job_file is not None:
        from raybatch.job.config import read_job_file  # slow to load

        mapping = read_job_file(job_file)
    for path, value in options.items():
        _put(mapping, path, value)
    return mapping


def with_model(mapping: dict[str, Any]) -> str:
    """Put the embedded model into options that name none, and return what to tell of it, or ""."""
    stage = mapping.setdefault("stage", {})
    if not isinstance(stage, dict) or "model" in stage:
        return ""
    stage["model"] = DEMO_MODEL
    return _DEMO_NOTE


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Return dotted option names to values; a value is read as YAML.

    Names that are not options of the job are those of the stage: `pool.replicas=2` is
    `stage.pool.replicas=2`.

    Raises:
        ConfigError: a setting is not of the form option=value.
    """
    parsed: dict[str, Any] = {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not equals or not all(part.strip() for part in name.split(".")):
            raise ConfigError(f"--set {setting!r}: expected option=value, such as seed=7")
        first = name.split(".")[0].strip()
        is_of_job = first in JOB_OPTIONS
        hint = did_you_mean(first, JOB_OPTIONS)
        if hint and not is_of_job and first not in _STAGE_OPTIONS:
            raise ConfigError(f"--set {setting!r}: unknown option {first!r}{hint}")
        path = name.strip() if is_of_job else f"stage.{name.strip()}"
        try:
            parsed[path] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: the value is not YAML: {error}") from error
    return parsed


def _put(mapping: dict[str, Any], path: str, value: object) -> None:
    """Set the dotted option `path`, making the mappings on the way."""
    *parents, last = path.split(".")
    for depth, name in enumerate(parents):
        above, inner = ".".join(parents[: depth + 1]), mapping.get(name)
        if not isinstance(inner, dict):
            if name in mapping and above not in _SHORT_FORMS:
                raise ConfigError(f"option {above!r} holds no options: {path}")
            inner = {} if inner is None else {_SHORT_FORMS[above]: inner}
        mapping[name] = inner
        mapping = inner
    mapping[last] = value
