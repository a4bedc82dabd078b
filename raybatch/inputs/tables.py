"""Tables of Delta Lake, Iceberg and Lance, by the distribution raybatch-tables.

A job names one by an address such as delta:s3://bucket/table, as its source or for its rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from raybatch.errors import MissingDependency
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


def tables(what: str) -> TableLibrary:
    """Return raybatch-tables; MissingDependency: it is not installed, but `what` needs it."""
    library: TableLibrary | None = table_library()
    if library is None:
        raise MissingDependency(f"{what} needs {TABLES}")
    return library
