"""The commands of the command line on an output that lies there: verify."""

from typing import Annotated

import typer

__all__ = ["add_output_commands"]

_FOLDER = typer.Argument(help="Output folder of a job, local or a URI.")


def add_output_commands(app: typer.Typer) -> None:
    """Give the command line its commands on outputs."""
    app.command()(verify)


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
