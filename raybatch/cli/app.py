"""The command line: run, explain, demo, and the commands on an output.

`flags` has the flags of a job, `cluster` the commands on a cluster, `bench` those that measure,
`batch` those on batch files.
"""

import atexit
import logging
import shutil
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn

import typer
from typer import Argument, Option

import raybatch
from raybatch.cli.batch import batches, run_batch_file, serve
from raybatch.cli.bench import add_lab_commands, bench
from raybatch.cli.cluster import AllowErrorRows, check, manifest, submit
from raybatch.cli.flags import (
    JobFlags,
    check_path,
    check_writable,
    hint_at_setting,
    with_job_flags,
    with_model,
)
from raybatch.config import log_level
from raybatch.errors import ConfigError, RaybatchError, shell_path
from raybatch.redaction import DiscreetFormatter, redacted
from raybatch.stages.quiet_ray import StderrHandler, quiet_stderr, skip_noise_of_workers

if TYPE_CHECKING:
    from raybatch.job.progress import ProgressPrinter
    from raybatch.report import RunReport

app = typer.Typer(
    help="Run an LLM over a whole dataset on Ray: Parquet in, Parquet out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, Option("--json", help="Print the JSON instead.")]
OutputFolder = Annotated[
    str, Argument(help="Output folder of a job, local or a URI.", callback=check_path)
]

# stands for an output folder where a command has none
_NOT_WRITTEN = "not-written"
# the exit code of a command that Ctrl-C has ended
_INTERRUPTED = 130
# of one that has finished a job in which rows failed
_ERROR_ROWS = 2


class _Terminated(SystemExit):
    """SIGTERM has ended the command where nothing else handles it."""


def main() -> None:
    """Run the command line; an error of raybatch is one line and exit code 1."""
    skip_noise_of_workers()
    quiet = ExitStack()
    quiet.enter_context(quiet_stderr())
    # Ray registers its own end later, so it ends in silence before this
    atexit.register(quiet.close)
    # imports, the start of Ray and reading the input take seconds, before a run handles signals
    before = signal.signal(signal.SIGTERM, _terminate) or signal.SIG_DFL
    try:
        app()
    except SystemExit as end:
        # Ray has a handler of its own while it starts, which exits with the number of the signal
        if isinstance(end, _Terminated) or end.code == signal.SIGTERM:
            typer.echo("error: SIGTERM ended the command; give it again", err=True)
            raise SystemExit(1) from None
        if end.code == _INTERRUPTED:
            typer.echo("interrupted", err=True)
        if hint := hint_at_setting(end.__context__):
            typer.echo(hint, err=True)
        # typer ends with 2 on a wrong flag, which would say that a job is done but for error rows
        if end.code == _ERROR_ROWS and not isinstance(end.__context__, typer.Exit):
            raise SystemExit(1) from None
        raise
    except RaybatchError as error:
        typer.echo(redacted(f"error: {error}"), err=True)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        # commands without engines do not load what makes them
        if (pool := sys.modules.get("raybatch.actors.pool")) is not None:
            pool.end_local_engines()


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise _Terminated(1)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(f"raybatch {raybatch.__version__}")
        raise typer.Exit


@app.callback()
def _set_up(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    handler = StderrHandler()
    handler.setFormatter(DiscreetFormatter())
    logging.basicConfig(handlers=[handler])
    logging.getLogger("raybatch").setLevel(log_level() or logging.INFO)


@app.command()
@with_job_flags(
    job_file_help="YAML job file; options here win over it. With --openai the batch file."
)
def run(
    flags: JobFlags,
    allow_error_rows: AllowErrorRows = False,
    openai: Annotated[bool, Option("--openai", help="The file is an OpenAI batch file.")] = False,
    out: Annotated[
        str | None,
        Option("--out", "-o", help="With --openai: file for the answers.", callback=check_path),
    ] = None,
    errors: Annotated[
        str | None,
        Option(help="With --openai: file for the errors; OUT.errors.jsonl.", callback=check_path),
    ] = None,
    model_name: Annotated[
        list[str] | None, Option(help="With --openai: another name for the model.")
    ] = None,
    limit: Annotated[
        int | None,
        Option(metavar="N", help="Show N rows, taken over all of the input, with their answers."),
    ] = None,
) -> None:
    """Run one job; exit code 0: finished, 2: finished with error rows, 1: not finished."""
    if openai:
        if limit is not None:
            raise ConfigError("--limit shows rows of a dataset, not of --openai; leave it out")
        names = tuple(model_name or ())
        code = run_batch_file(flags, out, errors, names, start_ray=_start_ray).exit_code()
        raise typer.Exit(0 if code == _ERROR_ROWS and allow_error_rows else code)
    if out is not None or errors is not None or model_name:
        raise ConfigError("--out, --errors and --model-name belong to --openai; a job has --output")
    if limit is not None:
        _show_some(flags, limit, allow_error_rows)
    job, progress = _job_of(flags)
    _end_with(job.run(progress=progress, start_ray=_start_ray), allow_error_rows)


@app.command()
# which rows there are, and of what columns, the output says
@with_job_flags(without=("columns",))
def retry_errors(
    flags: JobFlags,
    into: Annotated[str, Option(help="Folder for the new answers.", callback=check_path)],
    statuses: Annotated[
        str | None, Option(help="Such as error,crashed; default: all errors.")
    ] = None,
    allow_error_rows: AllowErrorRows = False,
) -> None:
    """Run the error rows of a finished job again, into a folder of their own; exit codes as run."""
    if "columns" in flags.options:
        raise ConfigError("--columns: a retry has the columns of the output, so leave it out")
    job, progress = _job_of(flags)
    chosen = {} if statuses is None else {"statuses": [s.strip() for s in statuses.split(",")]}
    report = job.retry_errors(into, progress=progress, start_ray=_start_ray, **chosen)
    _end_with(report, allow_error_rows)


@app.command()
# about what is written
@with_job_flags(without=("sink", "output_order", "overwrite", "extend", "on_error"))
def explain(
    flags: JobFlags,
    html: Annotated[
        str | None,
        Option(help="Write a page with the prefix tree drawn to this file.", callback=check_path),
    ] = None,
    as_json: AsJson = False,
    kv_tokens: Annotated[
        int | None,
        Option(min=1, help="KV cache tokens of one engine; default: of this host's engine."),
    ] = None,
    price_per_engine_hour: Annotated[
        float | None, Option(min=0, help="Price of one replica and hour, in any currency.")
    ] = None,
    no_measure: Annotated[
        bool, Option("--no-measure", help="Do not start an engine to measure its speed.")
    ] = False,
) -> None:
    """Say what a job would share, save, take and cost, without running it."""
    check_writable("--html", html)
    note = with_model(flags.mapping)
    # nothing is written, so nobody has to say where
    flags.mapping.setdefault("sink", _NOT_WRITTEN)
    job = raybatch.Job.from_mapping(flags.mapping, where=flags.where)
    if note:
        typer.echo(note, err=True)
    explanation = job.explain(
        kv_tokens=kv_tokens,
        price_per_engine_hour=price_per_engine_hour,
        measure=not no_measure,
        start_ray=_start_ray,
    )
    typer.echo(explanation.to_json() if as_json else str(explanation))
    if html is not None:
        _write_page(html, explanation.to_html())


@app.command()
def demo(
    rows: Annotated[int, Option(min=1, help="Questions to answer.")] = 4096,
    out: Annotated[Path, Option(help="Folder for prompts and answers.")] = Path("demo-out"),
    seed: Annotated[int, Option(help="Seed of the dataset.")] = 0,
    replicas: Annotated[int | None, Option(min=1, help="Engines to run.")] = None,
) -> None:
    """Answer a generated dataset with the embedded model and score the answers."""
    from raybatch.demo.run import run_demo  # pyarrow is slow to load, and --help does without

    result = run_demo(out, rows=rows, seed=seed, replicas=replicas, start_ray=_start_ray)
    typer.echo(result.to_text())
    # the dataset has bad rows on purpose; only lost or repeated ones are a failure
    raise typer.Exit(1 if result.report.exit_code() == 1 else 0)


@app.command()
def report(
    folder: Annotated[str, Argument(help="Output folder of a job.", callback=check_path)],
    as_json: AsJson = False,
    html: Annotated[
        str | None,
        Option(help="Write a page with plan and actual to this file.", callback=check_path),
    ] = None,
) -> None:
    """Print the report of a job, or of what is there so far; verify tells by its exit code."""
    from raybatch.report.rebuild import current_report  # pyarrow again

    result = current_report(folder)
    typer.echo(result.to_json() if as_json else result.to_text())
    if html is not None:
        _write_page(html, result.to_html())


@app.command()
def ordered(
    folder: Annotated[str, Argument(help="Finished output folder of a job.", callback=check_path)],
    into: Annotated[str, Argument(help="Folder for the copy.", callback=check_path)],
) -> None:
    """Copy a finished output, its rows in the order of the input."""
    from raybatch.outputs.ordered import ordered as copy_in_order

    copied = copy_in_order(folder, into, start_ray=_start_ray)
    typer.echo(f"{copied.written_rows} rows in {copied.num_units} parts: {shell_path(into)}")


# commands have the order in which they are added
for command in (submit, manifest, check):
    app.command()(command)
add_lab_commands(bench)
app.add_typer(bench, name="bench")


@app.command()
def verify(
    folder: OutputFolder,
    deep: Annotated[
        bool, Option("--deep", help="Read every value, not only file names and footers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Prove that every row is there exactly once; exit code 0: it is, 1: not, or not yet."""
    from raybatch.outputs.verify import verify as look  # pyarrow is slow to load

    result = look(folder, deep=deep)
    typer.echo(result.to_json() if as_json else str(result))
    raise typer.Exit(result.exit_code())


@app.command()
def clean(
    folder: OutputFolder,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List what would be removed, and remove nothing.")
    ] = False,
    older_than: Annotated[
        str, Option(help="Also files this old that a run may need: 30m, 12h, 7d.")
    ] = "7d",
) -> None:
    """Remove what runs have left beside the data; parts, plan and _SUCCESS are never touched."""
    from raybatch.outputs.cleaning import clean as tidy_up
    from raybatch.outputs.cleaning import parse_age

    cleaned = tidy_up(folder, older_than_s=parse_age(older_than), is_dry_run=dry_run)
    typer.echo(str(cleaned))


@app.command()
def fetch(
    model: Annotated[str, Argument(help="Hub id, also org/name@revision, or URI.")],
    only: Annotated[
        Literal["tokenizer"] | None, Option(help="Config and tokenizer, without weights.")
    ] = None,
    to: Annotated[
        str | None,
        Option(callback=check_path, help="Folder, such as of a volume; default: the host's cache."),
    ] = None,
    on_every_host: Annotated[
        bool, Option("--on-every-host", help="Of the Ray cluster, all at once.")
    ] = False,
) -> None:
    """Bring a model to this host before a job wants it; what is there is not fetched again."""
    from raybatch.models.prefetch import prefetch  # the clients of stores are slow to load

    folder, with_weights = None if to is None else Path(to), only is None
    if not on_every_host:
        typer.echo(str(prefetch(model, with_weights=with_weights, to=folder)))
        return
    _start_ray()
    from raybatch.actors.executors.ray_hosts import prefetch_on_every_host

    results = prefetch_on_every_host(model, with_weights=with_weights, to=folder)
    for result in results:
        typer.echo(str(result), err=isinstance(result, str))
    raise typer.Exit(1 if any(isinstance(result, str) for result in results) else 0)


app.command()(serve)
app.add_typer(batches, name="openai")


def _show_some(flags: JobFlags, limit: int, allow_error_rows: bool) -> NoReturn:
    # nothing is written, so nobody has to say where
    flags.mapping.setdefault("sink", _NOT_WRITTEN)
    job, progress = _job_of(flags)
    preview = job.preview(limit, progress=progress, start_ray=_start_ray)
    is_terminal = sys.stdout.isatty()
    typer.echo(preview.to_text(shutil.get_terminal_size().columns) if is_terminal else preview)
    raise typer.Exit(0 if allow_error_rows else preview.exit_code())


def _job_of(flags: JobFlags) -> "tuple[raybatch.Job, ProgressPrinter]":
    note = with_model(flags.mapping)
    job = raybatch.Job.from_mapping(flags.mapping, where=flags.where)
    from raybatch.job.progress import ProgressPrinter  # slow to load, and a wrong option needs none

    return job, ProgressPrinter(note=note)


def _end_with(result: "RunReport", allow_error_rows: bool) -> NoReturn:
    typer.echo(result.to_text())
    if result.stopped:
        typer.echo(f"stopped by {result.stopped}; run the same command again to go on")
    elif result.rows_todo:
        typer.echo(
            f"stopped with {result.rows_todo} rows to do; the same command goes on there", err=True
        )
    code = result.exit_code()
    raise typer.Exit(0 if code == _ERROR_ROWS and allow_error_rows else code)


def _write_page(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--html {path}: the page cannot be written: {error}") from error
    typer.echo(f"page: {shell_path(path)}", err=True)


def _start_ray() -> None:
    from raybatch.stages.ray_context import start_ray  # slow to load, and --help does without

    handler = signal.getsignal(signal.SIGTERM)
    start_ray()
    # Ray puts a handler of its own in the place of ours
    if handler is _terminate:
        signal.signal(signal.SIGTERM, _terminate)
