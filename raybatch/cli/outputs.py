"""The commands of the command line on an output that lies there: verify, clean."""

from typing import Annotated

import typer

_FOLDER = typer.Argument(help="Output folder of a job, local or a URI.")


def add_output_commands(app: typer.Typer) -> None:
    """Give the command line its commands on outputs."""
    for command in (verify, clean):
        app.command()(command)


def verify(
    folder: Annotated[str, _FOLDER],
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every value, not names and footers alone.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON instead.")] = False,
) -> None:
    """Prove that every row is there exactly once; exit code 0: it is, 1: not, or not yet."""
    from raybatch.outputs.verify import verify as look  # pyarrow is slow to load

    found = look(folder, deep=deep)
    typer.echo(found.to_json() if as_json else str(found))
    raise typer.Exit(found.exit_code())


def clean(
    folder: Annotated[str, _FOLDER],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")
    ] = False,
    older_than: Annotated[
        str, typer.Option(help="Age from which files are taken that a run may need: 30m, 12h, 7d.")
    ] = "7d",
) -> None:
    """Remove what runs have left beside the data; parts, plan and _SUCCESS are never touched."""
    from raybatch.outputs.cleaning import clean as tidy_up
    from raybatch.outputs.cleaning import parse_age

    found = tidy_up(folder, older_than_s=parse_age(older_than), is_dry_run=dry_run)
    typer.echo(str(found))
