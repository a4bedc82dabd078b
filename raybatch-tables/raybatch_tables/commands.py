"""The command that raybatch-tables adds to raybatch, see its entry points."""

from typing import Annotated

import typer
from typer import Argument

from raybatch.cli.flags import check_path


def publish(
    folder: Annotated[str, Argument(help="Finished output folder of a job.", callback=check_path)],
    table: Annotated[
        str,
        Argument(
            help="delta:PATH, iceberg:CATALOG.NAMESPACE.TABLE, lance:PATH or hub:ORG/NAME.",
            callback=check_path,
        ),
    ],
) -> None:
    """Add the rows of a finished output to a table, once; `raybatch.cli.app` has the help."""
    from raybatch_tables.publishing import publish as add_rows  # pyarrow is slow to load

    typer.echo(str(add_rows(folder, table)))
