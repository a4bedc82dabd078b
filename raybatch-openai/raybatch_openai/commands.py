"""The commands that raybatch-openai adds to raybatch, see its entry points."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from raybatch.cli.flags import (
    MESSAGES_FLAG,
    PROMPT_FLAG,
    JobFlags,
    check_path,
    nested_options,
    parse_settings,
    with_job_flags,
    with_model,
)
from raybatch.config import secret_of
from raybatch.errors import ConfigError, MissingDependency, error_text, shell_path
from raybatch.installation import OPENAI

if TYPE_CHECKING:
    from raybatch_openai.batch.writing import BatchCounts

# flags of a job that a batch file or its requests set
_SET_BY_BATCHES = (
    *("source", "sink", "prompt", "messages_column", "id_column"),
    *("columns", "output_order", "overwrite", "extend"),
)

batches = typer.Typer(no_args_is_help=True)


@batches.command()
def to_batch(
    source: Annotated[
        str, Argument(help="Parquet, JSONL, Arrow: a file, folder or glob.", callback=check_path)
    ],
    out: Annotated[str, Option("--out", "-o", help="Batch file to write.", callback=check_path)],
    model: Annotated[str, Option(help="Model name to put into requests.")],
    prompt: Annotated[str | None, PROMPT_FLAG] = None,
    messages_column: Annotated[str | None, MESSAGES_FLAG] = None,
    system: Annotated[str | None, Option(help="System message for rows without one.")] = None,
    endpoint: Annotated[str, Option(help="chat, completions or embeddings.")] = "chat",
    id_column: Annotated[
        str | None, Option(help="Column of the custom_ids; default: file and position.")
    ] = None,
    settings: Annotated[
        list[str] | None, Option("--set", help="Option of every request, such as max_tokens=100.")
    ] = None,
) -> None:
    """Convert a dataset to batch files, of at most 50,000 requests and 200 MB each."""
    from raybatch_openai.batch.export import Export, export_rows  # slow to load

    options = parse_settings([f"sampling.{setting}" for setting in settings or []])
    sampling = {name.removeprefix("stage.sampling."): value for name, value in options.items()}
    exported = export_rows(
        Export(
            source=source,
            output=out,
            model=model,
            prompt=prompt,
            messages=messages_column,
            system=system,
            endpoint=endpoint,
            id_column=id_column,
            sampling=sampling,
        )
    )
    typer.echo(f"{exported.num_requests} requests: {' '.join(map(shell_path, exported.files))}")
    if exported.num_left_out:
        first = f"the first: {exported.first_error}"
        typer.echo(f"rows left out: {exported.num_left_out}, {first}", err=True)
    raise typer.Exit(2 if exported.num_left_out else 0)


@batches.command()
def from_batch(
    files: Annotated[
        list[str], Argument(help="Files of answers and of errors.", callback=check_path)
    ],
    source: Annotated[
        str, Option(help="Dataset that the batch was made from.", callback=check_path)
    ],
    out: Annotated[str, Option("--out", "-o", help="New folder for Parquet.", callback=check_path)],
    id_column: Annotated[
        str | None, Option(help="Column of the custom_ids, as given to to-batch.")
    ] = None,
) -> None:
    """Join answers to the rows of their dataset; exit code 2 if some rows have no answer."""
    from raybatch_openai.batch.collect import collect_answers

    collected = collect_answers(files, source=source, sink=out, id_column=id_column)
    counts = f"{collected.num_answered} answered, {collected.num_failed} failed"
    typer.echo(f"{collected.num_rows} rows: {counts}: {shell_path(out)}")
    if collected.num_unknown:
        typer.echo(f"{collected.num_unknown} lines match no row of {source}", err=True)
    if collected.num_repeated:
        typer.echo(
            f"{collected.num_repeated} lines repeat a custom_id: the first one counts", err=True
        )
    raise typer.Exit(2 if collected.num_failed else 0)


@with_job_flags(without=_SET_BY_BATCHES)
def serve(
    flags: JobFlags,
    folder: Annotated[
        str, Option(help="Folder for files, batches and outputs.", callback=check_path)
    ],
    model_name: Annotated[
        list[str] | None, Option(help="Another name for the model in requests.")
    ] = None,
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.")] = 8000,
    key_variable: Annotated[
        str, Option(help="Environment variable with the API key.")
    ] = "RAYBATCH_API_KEY",
    no_key: Annotated[bool, Option("--no-key", help="Require no API key.")] = False,
    max_file_mb: Annotated[int, Option(min=1, help="Largest upload, in MiB.")] = 200,
    max_requests: Annotated[int, Option(min=1, help="Maximum requests of one batch.")] = 50_000,
) -> None:
    """Serve the Files and Batches API; `raybatch.cli.app` has the help."""
    from raybatch.stages.ray_context import start_ray

    try:
        from raybatch_openai.serving.server import ServeOptions, serve_batches  # slow to load
    except ImportError as error:
        raise MissingDependency(f"raybatch serve needs {OPENAI} ({error_text(error)})") from error

    mapping = nested_options(flags.job_file, flags.options)
    if note := with_model(mapping):
        typer.echo(note, err=True)
    key = "" if no_key else secret_of(key_variable)
    if not key and not no_key:
        raise ConfigError(
            f"no API key: set the environment variable {key_variable}, or --no-key to require none"
        )
    options = ServeOptions(
        folder=folder,
        job=mapping,
        names=tuple(model_name or ()),
        host=host,
        port=port,
        key=key,
        max_file_bytes=max_file_mb << 20,
        max_requests=max_requests,
    )
    serve_batches(options, start_ray=start_ray)


def run_batch_file(
    flags: JobFlags,
    out: str | None,
    errors: str | None,
    names: tuple[str, ...],
    *,
    start_ray: Callable[[], None],
) -> "BatchCounts":
    """Answer a batch file, print the counts, and return them; for `raybatch run --openai`.

    Args:
        flags: the batch file and options of its jobs.
        out: file of answers.
        errors: file of errors; None for `out` with the ending ".errors.jsonl".
        names: further names of the model in requests.
    """
    from raybatch.job.progress import ProgressPrinter
    from raybatch_openai.batch.run import BatchOptions, BatchRun  # slow to load
    from raybatch_openai.batch.writing import BatchFiles

    if flags.job_file is None:
        raise ConfigError("no batch file: name it, as in `run in.jsonl --openai`")
    if out is None:
        raise ConfigError("--out is missing; name the file for the answers, as in -o out.jsonl")
    files = (flags.job_file, out, errors or f"{out.removesuffix('.jsonl')}.errors.jsonl")
    if len(set(files)) < 3:
        raise ConfigError(
            f"input, answers and errors must be different files, got {', '.join(files)}"
        )
    mapping = nested_options(None, flags.options)
    note = with_model(mapping)
    is_overwrite = bool(mapping.pop("overwrite", False))
    options = BatchOptions(job=mapping, names=names, where="raybatch run --openai")
    run = BatchRun(files=BatchFiles(*files, f"{out}.raybatch"), options=options)
    counts = run.run(
        progress=ProgressPrinter(note=note), start_ray=start_ray, overwrite=is_overwrite
    )
    typer.echo(counts.to_text())
    if counts.stopped:
        typer.echo("run the same command again to resume", err=True)
    else:
        typer.echo(f"answers: {shell_path(out)}\nerrors: {shell_path(files[2])}", err=True)
    return counts
