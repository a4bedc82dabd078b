"""What a kind of table has to do; one module for each kind follows this protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """A version of a table that added rows; what its log does not tell any more is None."""

    version: str | None
    num_rows: int | None
    checksum: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Addition:
    """The rows to add to a table in one commit.

    Args:
        id: of the commit; the rows of one plan have the same id in every run.
        checksum: of the rows.
        schema: of the rows, with the types of the table.
        rows: all of them; may be read once.
        about: facts for people, such as the model.
    """

    id: str
    checksum: str
    schema: pa.Schema
    rows: pa.RecordBatchReader
    about: Mapping[str, Any]


class Table(Protocol):
    """A table, which may not exist yet. Methods raise errors of the table's own library."""

    def schema(self) -> pa.Schema | None:
        """Return the columns of the newest version; None if there is no table."""

    def create(self, schema: pa.Schema) -> None:
        """Create the table without rows, unless another process does."""

    def commits(self, addition_id: str) -> list[Commit]:
        """Return the versions that added the rows of an addition, oldest first."""

    def append(self, addition: Addition) -> None:
        """Add rows in one commit, unless the newest version has that addition.

        Two processes that append one addition at once add its rows once.
        """

    def open(self, version: str | None) -> tuple[str, pa.RecordBatchReader]:
        """Return a version, None for the newest, and its rows."""
