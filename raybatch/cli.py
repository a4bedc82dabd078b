"""The command line: run, demo, report.

Flags are short names of job options and go through `Job.from_mapping` like a job file; every
option without a flag is reached with `--set`.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

import raybatch
from raybatch.errors import ConfigError, RaybatchError

DEMO_MODEL = "demo"
_DEMO_NOTE = (
    "no --model given: taking the embedded demo model, which answers questions about the demo "
    "documents and nothing else"
)
# every other option belongs to the stage
JOB_OPTIONS = ("source", "sink", "stage", "plan", "overwrite")

app = typer.Typer(
    help="Run an LLM over a whole dataset on Ray: Parquet in, Parquet out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; an error of raybatch is one line and exit code 1."""
    try:
        app()
    except RaybatchError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(1) from None


def _show_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"raybatch {raybatch.__version__}")
        raise typer.Exit


@app.callback()
def _set_up(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("raybatch").setLevel(logging.INFO)


@app.command()
def run(
    job_file: Annotated[
        str | None, typer.Argument(help="YAML job file; the options below win over it.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--input", help="Parquet or JSONL: a file, a folder or a glob.")
    ] = None,
    sink: Annotated[str | None, typer.Option("--output", help="Folder for the output.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder, hub id or URI; demo by default.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Template with columns, such as '{document} Q: {question}'.")
    ] = None,
    messages_column: Annotated[
        str | None, typer.Option(help="Column of OpenAI messages, instead of --prompt.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Most tokens to generate a row.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    id_column: Annotated[str | None, typer.Option(help="Column that names the rows.")] = None,
    replicas: Annotated[int | None, typer.Option(help="Engines to run.")] = None,
    on_error: Annotated[str | None, typer.Option(help="row (default) or raise.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier output of raybatch.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Any other option, such as engine.max_batched_tokens=4096."),
    ] = None,
    allow_error_rows: Annotated[
        bool, typer.Option("--allow-error-rows", help="Exit with 0, not 2, when rows failed.")
    ] = False,
) -> None:
    """Run one job; exit code 0: finished, 2: finished with error rows, 1: not finished."""
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
    }
    given = {path: value for path, value in flags.items() if value is not None}
    mapping = job_mapping(job_file, {**given, **parse_settings(settings or [])})
    note = with_model(mapping)
    job = raybatch.Job.from_mapping(mapping, where=job_file or "raybatch run")
    from raybatch.progress import ProgressPrinter  # slow to load, and a wrong option needs none

    _start_ray()
    result = job.run(progress=ProgressPrinter(note=note))
    typer.echo(result.to_text())
    code = result.exit_code()
    raise typer.Exit(0 if code == 2 and allow_error_rows else code)


@app.command()
def demo(
    rows: Annotated[int, typer.Option(min=1, help="Questions to answer.")] = 4096,
    out: Annotated[Path, typer.Option(help="Folder for prompts and answers.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Of the dataset.")] = 0,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engines to run.")] = None,
) -> None:
    """Answer a generated dataset with the embedded model and score the answers."""
    from raybatch.demo.run import run_demo  # pyarrow is slow to load, and --help does without

    _start_ray()
    result = run_demo(out, rows=rows, seed=seed, replicas=replicas)
    typer.echo(result.to_text())
    # the dataset has bad rows on purpose; only lost or repeated ones are a failure
    raise typer.Exit(1 if result.report.exit_code() == 1 else 0)


@app.command()
def report(
    folder: Annotated[str, typer.Argument(help="Output folder of a job.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead.")] = False,
) -> None:
    """Print the report of a finished job."""
    from raybatch.report import read_report  # pyarrow again

    found = read_report(folder)
    typer.echo(found.to_json() if as_json else found.to_text())


def _start_ray() -> None:
    """Start or join Ray and keep what it says in its log files.

    What Ray and Ray Data say about every execution would drown the progress of the job; an error
    that ends the job is told once, by `main`.
    """
    import ray.data  # slow to load, and --help does without

    if not ray.is_initialized():
        ray.init(logging_level=logging.ERROR)
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler) and not isinstance(
            handler, logging.FileHandler
        ):
            handler.setLevel(logging.CRITICAL)


def job_mapping(job_file: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a job: those of the file, with the dotted `options` put over them.

    Raises:
        ConfigError: the file cannot be read, or nothing names a source.
    """
    mapping: dict[str, Any] = {}
    if job_file is not None:
        from raybatch.job import read_job_file  # slow to load

        mapping = read_job_file(job_file)
    for path, value in options.items():
        _put(mapping, path, value)
    if job_file is None and "source" not in mapping:
        raise ConfigError("nothing to run: give a job file, or --input, --output and --prompt")
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
        is_of_job = name.split(".")[0].strip() in JOB_OPTIONS
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
        mapping = mapping.setdefault(name, {})
        if not isinstance(mapping, dict):
            raise ConfigError(f"option {'.'.join(parents[: depth + 1])!r} holds no options: {path}")
    mapping[last] = value
