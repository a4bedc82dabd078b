"""The flags of every command on a job.

A flag is a short name of a job option, with the option's type and help. Flags go through
`Job.from_mapping` like a job file; `--set` reaches every option without a flag.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import yaml
from typer import Argument, CallbackParam, Option

from raybatch.config import PoolConfig
from raybatch.config.option import documented, fields_of
from raybatch.errors import ConfigError, did_you_mean, shell_path
from raybatch.job.config import JobConfig, JobYaml, read_job_file
from raybatch.records.types import Sampling
from raybatch.rows.options import StageConfig

DEMO_MODEL = "demo"
# option groups that may be written as one value, and the option that this value sets
_SHORT_FORMS = {"plan": "mode", "stage.backend": "kind"}
# every other option belongs to the stage
JOB_OPTIONS = tuple(fields_of(JobConfig))
_STAGE_OPTIONS = frozenset({"seed", *fields_of(StageConfig)})

_CLASSES: Mapping[str, type] = {
    "": JobConfig,
    "stage": StageConfig,
    "stage.sampling": Sampling,
    "stage.pool": PoolConfig,
}
# flags: parameter to option, and help if it differs from the option's
_FLAGS: Mapping[str, tuple[str, str]] = {
    "source": ("source", ""),
    "sink": ("sink", "Folder for the output."),
    "model": ("stage.model", "Checkpoint folder, hub id or URI; demo by default."),
    "prompt": ("stage.prompt", ""),
    "messages_column": ("stage.messages", "Column of OpenAI messages, instead of --prompt."),
    "max_tokens": ("stage.sampling.max_tokens", ""),
    "temperature": ("stage.sampling.temperature", ""),
    "id_column": ("stage.id_column", "Column that names the rows."),
    "replicas": ("stage.pool.replicas", "Engines to run."),
    "on_error": ("stage.on_error", "On a failed row: row (default) or raise."),
    "columns": ("columns", "Columns to read and write, such as id,document; default: all."),
    "output_order": ("output_order", "Order of output rows: plan or input."),
    "deadline_s": ("deadline_s", ""),
    "overwrite": ("overwrite", ""),
    "extend": ("extend", "Add new files of the input to a finished output."),
}
_OTHER_NAMES = {"source": "--input", "sink": "--output"}
_JOB_FILE_HELP = "YAML job file; flags override it."

AllowErrorRows = Annotated[
    bool, Option("--allow-error-rows", help="Exit with 0 instead of 2 when rows failed.")
]


def check_path(param: CallbackParam, value: str | list[str] | None) -> str | list[str] | None:
    """Return the value of a flag that names files or folders; raise ConfigError for an empty one.

    An empty name would mean the working directory.
    """
    for path in [value] if isinstance(value, str) else value or ():
        if not path.strip():
            name = param.opts[0]
            raise ConfigError(f"{name} is empty; name a file or a folder, as a path or a URI")
    return value


def check_writable(flag: str, path: str | Path | None) -> None:
    """Raise ConfigError if a flag names a folder, or a file in a folder that does not exist.

    Called before any work is done.
    """
    if path is None:
        return
    if Path(path).is_dir():
        example = shell_path(f"{path}/{'page.html' if flag == '--html' else 'results.json'}")
        raise ConfigError(f"{flag} {path} is a folder; name a file, such as {example}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: its folder does not exist; create it, or choose another")


def _option(name: str, *, is_hidden: bool = False) -> Any:  # noqa: ANN401 - typer has none
    option, help_ = _FLAGS[name]
    where, _, last = option.rpartition(".")
    text = help_ or documented(_CLASSES[where])[last]
    flag = _OTHER_NAMES.get(name, f"--{name.replace('_', '-')}")
    return Option(flag, help=text[0].upper() + text[1:], hidden=is_hidden)


@functools.cache
def _kind_of(name: str) -> Any:  # noqa: ANN401
    """Return the type of a flag, which is its option's; None means not set."""
    where, _, last = _FLAGS[name][0].rpartition(".")
    hint = get_type_hints(_CLASSES[where])[last]
    kinds = {hint, *get_args(hint)}
    kind = next((each for each in (bool, int, float) if each in kinds), str)
    return kind if kind is bool else kind | None


def _parameters(
    without: Collection[str] = (), job_file_help: str = _JOB_FILE_HELP
) -> list[inspect.Parameter]:
    where_it_runs = Option(
        "--local/--ray",
        help="Run on this host without Ray, or always on Ray.",
        show_default="small inputs without Ray",
    )
    others = Option("--set", help="Any other option, such as engine.max_batched_tokens=4096.")
    kinds: list[tuple[str, Any, Any]] = [
        ("job_file", str | None, Argument(help=job_file_help, callback=check_path)),
        *((name, _kind_of(name), _option(name, is_hidden=name in without)) for name in _FLAGS),
        ("local", bool | None, where_it_runs),
        ("settings", list[str] | None, others),
    ]
    return [
        flag(name, kind, shown, default=False if kind is bool else None)
        for name, kind, shown in kinds
    ]


def flag(name: str, kind: Any, shown: Any, *, default: object = None) -> inspect.Parameter:  # noqa: ANN401
    """Return a parameter for the signature of a typer command.

    `kind` is its type, and `shown` its typer `Option` or `Argument`.
    """
    annotation = Annotated[kind, shown]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


@dataclass(frozen=True, kw_only=True)
class JobFlags:
    job_file: str | None
    """YAML, or a batch file; None without one."""
    options: Mapping[str, Any]
    """Options set by flags, by dotted names."""
    where: str
    """Origin of the options in messages."""

    @cached_property
    def mapping(self) -> dict[str, Any]:
        """Return the options of the job; raise ConfigError if no source is named."""
        mapping = nested_options(self.job_file, self.options)
        if self.job_file is None and "source" not in mapping:
            raise ConfigError(
                "nothing to run: name a job file, or set --input, --output and --prompt (--limit "
                "needs no --output)"
            )
        return mapping


def read_job_flags(**values: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the job options that are set by flags, by dotted names such as "stage.model".

    The signature of this function lists the flags that every command on a job has.
    """
    given = {
        option: values[name]
        for name, (option, _) in _FLAGS.items()
        if values.get(name) is not None and values[name] is not False  # 0 is a value
    }
    if (is_local := values.get("local")) is not None:
        given["executor"] = "local" if is_local else "ray"
    return {**given, **parse_settings(values.get("settings") or [])}


read_job_flags.__signature__ = inspect.Signature(_parameters())  # type: ignore[attr-defined]
PROMPT_FLAG, MESSAGES_FLAG = _option("prompt"), _option("messages_column")


def with_job_flags(
    *, without: Collection[str] = (), job_file_help: str = _JOB_FILE_HELP
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds the flags of a job to a command and calls it with `JobFlags`.

    Flags in `without` have no effect on the command and are hidden from its help. They are still
    parsed, so that the error says why they do not apply, not that they are unknown.
    """
    flags = _parameters(without, job_file_help)

    def read(values: dict[str, Any], command: str) -> JobFlags:
        job_file = values["job_file"]
        where = job_file or f"raybatch {command}"
        return JobFlags(job_file=job_file, options=read_job_flags(**values), where=where)

    return with_flags(flags, read)


def with_flags(
    flags: Sequence[inspect.Parameter], read: Callable[[dict[str, Any], str], object]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds flags to a command.

    `read` gets the values of the flags and the name of the command; what it returns is the first
    argument of the command.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command).parameters.values())[1:]

        @functools.wraps(command)
        def with_all(**values: Any) -> None:  # noqa: ANN401
            given = {flag.name: values.pop(flag.name) for flag in flags}
            command(read(given, command.__name__), **values)

        taken = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*flags, *own)]
        with_all.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        with_all.__annotations__ = {p.name: p.annotation for p in taken}
        return with_all

    return decorate


def hint_at_setting(error: BaseException | None) -> str:
    """Return how to set a job option that was used as an unknown flag; else ""."""
    name = getattr(error, "option_name", "").lstrip("-").replace("-", "_")
    command = getattr(getattr(error, "ctx", None), "command", None)
    has_settings = any("--set" in flag.opts for flag in getattr(command, "params", ()))
    if not has_settings or (name not in JOB_OPTIONS and name not in _STAGE_OPTIONS):
        return ""
    return f"{name} is a job option: use --set {name}=..., or a line of a job file"


def nested_options(job_file: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the job file, if any, as nested dicts, updated by dotted `options`."""
    mapping = {} if job_file is None else read_job_file(job_file)
    for path, value in options.items():
        _put(mapping, path, value)
    return mapping


def with_model(mapping: dict[str, Any]) -> str:
    """Set the built-in demo model if the options name no model; return a note for users, or ""."""
    stage = mapping.setdefault("stage", {})
    if not isinstance(stage, dict) or "model" in stage:
        return ""
    stage["model"] = DEMO_MODEL
    return (
        "no --model set: using the built-in demo model, which only answers questions about the "
        "demo documents"
    )


def parse_settings(settings: list[str]) -> dict[str, Any]:
    """Return the options of `--set` flags by dotted names; values are read as YAML.

    Names that are not options of the job are options of the stage: `pool.replicas=2` is
    `stage.pool.replicas=2`.
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
            parsed[path] = yaml.load(text, Loader=JobYaml)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {setting!r}: the value is not YAML: {error}") from error
    return parsed


def _put(mapping: dict[str, Any], path: str, value: object) -> None:
    *parents, last = path.split(".")
    for depth, name in enumerate(parents):
        above, inner = ".".join(parents[: depth + 1]), mapping.get(name)
        if not isinstance(inner, dict):
            if inner is not None and above not in _SHORT_FORMS:
                raise ConfigError(f"cannot set {path}: {above!r} is not a group of options")
            inner = {} if inner is None else {_SHORT_FORMS[above]: inner}
        mapping[name] = inner
        mapping = inner
    mapping[last] = value
