"""The command line: run, explain, demo, and the commands on an output folder.

`flags` has the flags of a job.
"""

import atexit
import logging
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer import Argument, Option
from typer.core import TyperGroup

import raybatch
from raybatch.cli.flags import (
    AllowErrorRows,
    JobFlags,
    check_path,
    check_writable,
    hint_at_setting,
    with_job_flags,
    with_model,
)
from raybatch.config import log_level
from raybatch.errors import ConfigError, MissingDependency, RaybatchError, shell_path
from raybatch.inputs.tables import is_table
from raybatch.installation import LAB, OPENAI, SUBMIT, TABLES, install_command, installed_commands
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

AsJson = Annotated[bool, Option("--json", help="Print JSON instead.")]
OutputFolder = Annotated[
    str, Argument(help="Output folder of a job, local or a URI.", callback=check_path)
]

_INSTALLED_COMMANDS = installed_commands()
# raybatch and the distributions that add commands
_LOGGERS = ("raybatch", "raybatch_lab", "raybatch_openai", "raybatch_submit", "raybatch_tables")
# placeholder for the output folder of commands that write none
_NOT_WRITTEN = "not-written"
# exit code after Ctrl-C
_INTERRUPTED = 130
# exit code of a finished job with error rows
_ERROR_ROWS = 2


class TwoWords(TyperGroup):
    """A group that also finds commands of two words, such as `plan memory` next to `plan`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - those of click
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


bench = typer.Typer(cls=TwoWords, help="Measure engines on this host.", no_args_is_help=True)


@bench.command()
def gpu(
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    minutes: Annotated[float, Option(min=0.1, help="Limit; skipped parts are listed.")] = 10.0,
    engines: Annotated[str, Option(help="Engines, separated by commas.")] = "native,vllm",
    out: Annotated[
        Path | None, Option(help="File for all results; default: raybatch-bench-gpu.json.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the native engine on a GPU, and compare it with the device's limits and vLLM."""
    out = out or Path("raybatch-bench-gpu.json")
    check_writable("--out", out)
    if find_spec("torch") is None:
        raise MissingDependency(
            f"raybatch bench gpu needs torch: {install_command('gpu')}, or with vllm instead of gpu"
        )
    from rich.console import Console
    from torch import cuda

    from raybatch.bench.gpu import bench_gpu

    names = tuple(name.strip() for name in engines.split(",") if name.strip())
    if device == "auto" and not cuda.is_available():
        typer.echo("torch finds no GPU: small models run on the CPU", err=True)
    with Console(stderr=True).status("starting") as status:
        # partial results are written, in case a GPU driver kills the process
        report = bench_gpu(
            device=device,
            minutes=minutes,
            engines=names,
            tell=status.update,
            keep=lambda made: out.write_text(made.to_json() + "\n", encoding="utf-8"),
        )
    out.write_text(report.to_json() + "\n", encoding="utf-8")
    typer.echo(report.to_json() if as_json else report.to_text())
    typer.echo(f"written to {out}; please attach it to an issue", err=True)
    raise typer.Exit(0 if report.is_right else 1)


# command: what it needs, and its help; its entry point has dashes for blanks
ADDED_COMMANDS: Mapping[str, tuple[str, str]] = {
    "submit": (SUBMIT, "Run one job on a Ray cluster and follow its log; exit codes as run."),
    "manifest": (
        SUBMIT,
        "Print a manifest that runs a job file on a job system, with retries that resume.",
    ),
    "check": (
        SUBMIT,
        "Warn about services of a cluster that are open to others; exit code 1 if any are.",
    ),
    "serve": (
        OPENAI,
        "Serve OpenAI's Files and Batches API; a restarted server continues its open batches.",
    ),
    "openai": (OPENAI, "Convert a dataset to OpenAI batch files, and the answers back."),
    "publish": (TABLES, "Add the rows of a finished output to a table, once."),
    "bench calibrate": (
        LAB,
        "Fit the costs of an engine on this host, and print the error of simulations with them.",
    ),
    "bench simulate": (
        LAB,
        "Simulate pools of a calibrated engine: scheduler and queue, on a virtual clock.",
    ),
    "bench plan": (
        LAB,
        "Measure one layer of a model on this host; print how its engine runs rows, and why.",
    ),
    "bench plan memory": (
        LAB,
        "Print the GPU memory of replicas of a model, with and without shared weights.",
    ),
    "bench faults": (
        LAB,
        "Kill replicas, drivers, nodes and disks on purpose, and count the rows; lasts minutes.",
    ),
}


def add_commands(
    app: typer.Typer, bench: typer.Typer, installed: Mapping[str, Any], of: Collection[str]
) -> None:
    """Add the commands of other distributions to the command line and to its group `bench`.

    Args:
        installed: commands and groups by entry point, see `installed_commands`.
        of: the distributions, by what their commands need.
    """
    for path, (needs, help_text) in ADDED_COMMANDS.items():
        if needs not in of:
            continue
        group = bench if path.startswith("bench ") else app
        name = path.removeprefix("bench ")
        command = installed.get(path.replace(" ", "-"))
        if isinstance(command, typer.Typer):
            group.add_typer(command, name=name, help=help_text)
        elif command is not None:
            group.command(name, help=help_text)(command)
        else:
            group.command(
                name,
                help=f"{help_text}\n\nNeeds {needs}",
                context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
            )(_refuse(path, needs))


def _refuse(path: str, needs: str) -> Callable[[], None]:
    def refuse() -> None:
        raise MissingDependency(f"raybatch {path} needs {needs}")

    return refuse


class _Terminated(SystemExit):
    """SIGTERM arrived while no run handles it."""


def main() -> None:
    """Run the command line; an error of raybatch is one line and exit code 1."""
    skip_noise_of_workers()
    quiet = ExitStack()
    quiet.enter_context(quiet_stderr())
    # Ray registers its exit handler later, so that runs first, while stderr is still quiet
    atexit.register(quiet.close)
    # imports, the start of Ray and reading the input last seconds; only then a run handles signals
    before = signal.signal(signal.SIGTERM, _terminate) or signal.SIG_DFL
    try:
        app()
    except SystemExit as end:
        # while Ray starts, its own handler exits with the signal's number
        if isinstance(end, _Terminated) or end.code == signal.SIGTERM:
            typer.echo("error: SIGTERM ended the command; run it again", err=True)
            raise SystemExit(1) from None
        if end.code == _INTERRUPTED:
            typer.echo("interrupted", err=True)
        if hint := hint_at_setting(end.__context__):
            typer.echo(hint, err=True)
        # typer exits with 2 on a wrong flag, but 2 means that a job finished with error rows
        if end.code == _ERROR_ROWS and not isinstance(end.__context__, typer.Exit):
            raise SystemExit(1) from None
        raise
    except RaybatchError as error:
        typer.echo(redacted(f"error: {error}"), err=True)
        raise SystemExit(1) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        # commands without engines do not load this module
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
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(log_level() or logging.INFO)


@app.command()
@with_job_flags(job_file_help="YAML job file; flags override it. With --openai: the batch file.")
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
        Option(
            help="With --openai: file for the errors; default: OUT.errors.jsonl.",
            callback=check_path,
        ),
    ] = None,
    model_name: Annotated[
        list[str] | None, Option(help="With --openai: another name for the model.")
    ] = None,
    limit: Annotated[
        int | None,
        Option(metavar="N", help="Show N rows, sampled across the input, with their answers."),
    ] = None,
) -> None:
    """Run one job; exit code 0: finished, 2: finished with error rows, 1: not finished."""
    if openai:
        if limit is not None:
            raise ConfigError(
                "--limit shows rows of a dataset and does not work with --openai; leave it out"
            )
        run_batch_file = _INSTALLED_COMMANDS.get("run-openai")
        if run_batch_file is None:
            raise MissingDependency(f"raybatch run --openai needs {OPENAI}")
        names = tuple(model_name or ())
        code = run_batch_file(flags, out, errors, names, start_ray=_start_ray).exit_code()
        raise typer.Exit(0 if code == _ERROR_ROWS and allow_error_rows else code)
    if out is not None or errors is not None or model_name:
        raise ConfigError(
            "--out, --errors and --model-name need --openai; for the output of a job set --output"
        )
    if limit is not None:
        _show_some(flags, limit, allow_error_rows)
    job, progress = _job_of(flags)
    _end_with(job.run(progress=progress, start_ray=_start_ray), allow_error_rows)


@app.command()
# the output determines rows and columns
@with_job_flags(without=("columns",))
def retry_errors(
    flags: JobFlags,
    into: Annotated[str, Option(help="Folder for the new answers.", callback=check_path)],
    statuses: Annotated[
        str | None, Option(help="Such as error,crashed; default: all errors.")
    ] = None,
    allow_error_rows: AllowErrorRows = False,
) -> None:
    """Run the error rows of a finished job again, into another folder; exit codes as run."""
    if "columns" in flags.options:
        raise ConfigError("--columns: a retry uses the columns of the output; leave it out")
    job, progress = _job_of(flags)
    chosen = {} if statuses is None else {"statuses": [s.strip() for s in statuses.split(",")]}
    report = job.retry_errors(into, progress=progress, start_ray=_start_ray, **chosen)
    _end_with(report, allow_error_rows)


@app.command()
# nothing is written, so flags of the output have no effect
@with_job_flags(without=("sink", "output_order", "overwrite", "extend", "on_error"))
def explain(
    flags: JobFlags,
    html: Annotated[
        str | None,
        Option(help="Write an HTML page with the prefix tree to this file.", callback=check_path),
    ] = None,
    as_json: AsJson = False,
    kv_tokens: Annotated[
        int | None,
        Option(min=1, help="KV cache tokens of one engine; default: this host's engine."),
    ] = None,
    price_per_engine_hour: Annotated[
        float | None, Option(min=0, help="Price of one replica per hour, in any currency.")
    ] = None,
    no_measure: Annotated[
        bool, Option("--no-measure", help="Do not start an engine to measure its speed.")
    ] = False,
) -> None:
    """Estimate prefix sharing, run time and cost of a job without running it."""
    check_writable("--html", html)
    note = with_model(flags.mapping)
    _without_output(flags)
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
    from raybatch.demo.run import run_demo  # pyarrow is slow to load, and --help does not need it

    result = run_demo(out, rows=rows, seed=seed, replicas=replicas, start_ray=_start_ray)
    typer.echo(result.to_text())
    # the dataset has bad rows on purpose; only lost or repeated rows are a failure
    raise typer.Exit(1 if result.report.exit_code() == 1 else 0)


@app.command()
def report(
    folder: Annotated[str, Argument(help="Output folder of a job.", callback=check_path)],
    as_json: AsJson = False,
    html: Annotated[
        str | None,
        Option(help="Write an HTML page of plan and actual to this file.", callback=check_path),
    ] = None,
) -> None:
    """Print the report of a job, also of an unfinished one; for exit codes use `verify`."""
    from raybatch.report import current_report  # pyarrow is slow to load

    result = current_report(folder)
    typer.echo(result.to_json() if as_json else result.to_text())
    if html is not None:
        _write_page(html, result.to_html())


@app.command()
def ordered(
    folder: Annotated[str, Argument(help="Finished output folder of a job.", callback=check_path)],
    into: Annotated[str, Argument(help="Folder for the copy.", callback=check_path)],
) -> None:
    """Copy a finished output with its rows in input order."""
    from raybatch.outputs.ordered import ordered as copy_in_order

    copied = copy_in_order(folder, into, start_ray=_start_ray)
    typer.echo(f"{copied.written_rows} rows in {copied.num_units} parts: {shell_path(into)}")


@app.command()
def compact(
    folder: Annotated[str, Argument(help="Finished output folder of a job.", callback=check_path)],
    into: Annotated[str, Argument(help="Folder for the copy.", callback=check_path)],
    file_bytes: Annotated[
        int | None, Option(min=1, help="Size of a file in bytes; 256 MiB by default.")
    ] = None,
) -> None:
    """Copy a finished output into fewer, larger files."""
    from raybatch.durable.sink import output_files
    from raybatch.outputs.joined import compact as join_files

    copied = join_files(folder, into, file_bytes=file_bytes)
    files = output_files(into)
    typer.echo(f"{copied.written_rows} rows in {len(files)} files: {shell_path(into)}")


# --help lists commands in the order in which they are added
add_commands(app, bench, _INSTALLED_COMMANDS, (SUBMIT,))
app.add_typer(bench, name="bench")


@app.command()
def verify(
    folder: OutputFolder,
    deep: Annotated[
        bool, Option("--deep", help="Read every value, not only file names and footers.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that the output has every row exactly once; exit code 0: yes, 1: no or not yet."""
    from raybatch.outputs.verify import verify as verify_output  # pyarrow is slow to load

    result = verify_output(folder, deep=deep)
    typer.echo(result.to_json() if as_json else str(result))
    raise typer.Exit(result.exit_code())


@app.command()
def clean(
    folder: OutputFolder,
    dry_run: Annotated[
        bool, Option("--dry-run", help="List what would be removed, and remove nothing.")
    ] = False,
    older_than: Annotated[
        str, Option(help="Also files that a run may need if this old: 30m, 12h, 7d.")
    ] = "7d",
) -> None:
    """Remove temporary files of runs; parts, plan and _SUCCESS are never touched."""
    from raybatch.outputs.cleaning import clean as tidy_up
    from raybatch.outputs.cleaning import parse_age

    cleaned = tidy_up(folder, older_than_s=parse_age(older_than), is_dry_run=dry_run)
    typer.echo(str(cleaned))


@app.command()
def fetch(
    model: Annotated[str, Argument(help="Hub id, also org/name@revision, or URI.")],
    only: Annotated[
        Literal["tokenizer"] | None, Option(help="Fetch config and tokenizer, no weights.")
    ] = None,
    to: Annotated[
        str | None,
        Option(callback=check_path, help="Folder, such as a volume; default: the host's cache."),
    ] = None,
    on_every_host: Annotated[
        bool, Option("--on-every-host", help="On all hosts of the Ray cluster at once.")
    ] = False,
) -> None:
    """Download a model to this host before a job needs it; present files are not fetched again."""
    from raybatch.models.prefetch import prefetch  # object store clients are slow to load

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


add_commands(app, bench, _INSTALLED_COMMANDS, (OPENAI, TABLES, LAB))


def _show_some(flags: JobFlags, limit: int, allow_error_rows: bool) -> NoReturn:
    _without_output(flags)
    job, progress = _job_of(flags)
    preview = job.preview(limit, progress=progress, start_ray=_start_ray)
    is_terminal = sys.stdout.isatty()
    typer.echo(preview.to_text(shutil.get_terminal_size().columns) if is_terminal else preview)
    raise typer.Exit(0 if allow_error_rows else preview.exit_code())


def _without_output(flags: JobFlags) -> None:
    """Let a command that writes no answers run without an output folder."""
    if "sink" not in flags.mapping and is_table(str(flags.mapping.get("source", ""))):
        raise ConfigError("a table is read once, into the output folder: set --output")
    flags.mapping.setdefault("sink", _NOT_WRITTEN)


def _job_of(flags: JobFlags) -> "tuple[raybatch.Job, ProgressPrinter]":
    note = with_model(flags.mapping)
    job = raybatch.Job.from_mapping(flags.mapping, where=flags.where)
    from raybatch.job.progress import ProgressPrinter  # slow to load: options are checked first

    return job, ProgressPrinter(note=note)


def _end_with(result: "RunReport", allow_error_rows: bool) -> NoReturn:
    typer.echo(result.to_text())
    if result.stopped:
        typer.echo(f"stopped by {result.stopped}; run the same command again to resume")
    elif result.rows_todo:
        typer.echo(
            f"stopped with {result.rows_todo} rows to do; run the same command again to resume",
            err=True,
        )
    code = result.exit_code()
    raise typer.Exit(0 if code == _ERROR_ROWS and allow_error_rows else code)


def _write_page(path: str, page: str) -> None:
    try:
        Path(path).write_text(page, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ConfigError(f"--html {path}: cannot write the page: {error}") from error
    typer.echo(f"page: {shell_path(path)}", err=True)


def _start_ray() -> None:
    from raybatch.stages.ray_context import start_ray  # slow to load, and --help does not need it

    handler = signal.getsignal(signal.SIGTERM)
    start_ray()
    # Ray replaces our handler
    if handler is _terminate:
        signal.signal(signal.SIGTERM, _terminate)
