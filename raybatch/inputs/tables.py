"""Tables of Delta Lake, Iceberg and Lance, by the distribution raybatch-tables.

A job names one by an address such as delta:s3://bucket/table, as its source or for its rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from raybatch.durable.storage import is_below
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import TABLES, table_library

if TYPE_CHECKING:
    import pyarrow as pa  # slow to load, and --help does not need it

TABLE_KINDS = ("delta", "iceberg", "lance", "hub")


class TableRows:
    """The rows of a table as an Arrow stream, which may be read once.

    Attributes:
        table: address of the table, without a version.
        pinned_version: the version that the user named; None for the newest one.
    """

    table: str
    pinned_version: str | None

    @property
    def version(self) -> str:
        """Return the version whose rows these are."""
        raise NotImplementedError

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        raise NotImplementedError


class TableLibrary(Protocol):
    """What raybatch-tables does for a job.

    Every method raises ConfigError about the table, or MissingDependency.
    """

    def open(self, table: str) -> TableRows:
        """Return the rows of a table."""

    def prepare(self, table: str, schema: "pa.Schema") -> None:
        """Create a table if it is missing, and check that it takes rows of a schema."""

    def publish(self, sink: str, table: str) -> None:
        """Add the rows of a finished output to a table, once."""

    def check_output(self, sink: str) -> tuple[Sequence[str], Sequence[str]]:
        """Return what is wrong with the tables to which an output was added, and what is right."""


def is_table(address: str) -> bool:
    return address.startswith(tuple(f"{kind}:" for kind in TABLE_KINDS))


def file_place(address: str) -> str:
    """Return the path or URI that an address names, or the address itself; "" for a name."""
    kind, _, place = address.partition(":")
    if not is_table(address):
        return address
    return place.partition("?version=")[0] if kind in ("delta", "lance") else ""


def check_apart(table: str, *folders: str) -> None:
    """Raise ConfigError if the files of a table would be in one of some folders, or around it."""
    place = file_place(table)
    for folder in filter(None, map(file_place, folders)):
        is_glob = any(sign in folder for sign in "*?[")
        if place and not is_glob and (is_below(place, folder) or is_below(folder, place)):
            raise ConfigError(
                f"the table {table!r} and the folder {folder!r} are one inside the other; choose "
                "another place for the table"
            )


def tables(what: str) -> TableLibrary:
    """Return raybatch-tables; MissingDependency: it is not installed, but `what` needs it."""
    library: TableLibrary | None = table_library()
    if library is None:
        raise MissingDependency(f"{what} needs {TABLES}")
    return library
