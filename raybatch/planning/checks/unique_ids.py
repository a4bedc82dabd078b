"""Looks whether the ids of a source are those of one row each, before any work."""

from collections.abc import Iterator, Sequence

import pyarrow as pa

from raybatch.errors import ConfigError
from raybatch.inputs.file_slices import FileSlice, joined, read_slice
from raybatch.inputs.schemas import in_common_schema
from raybatch.inputs.source import Source
from raybatch.planning.checks.repeated_ids import RepeatedIds, as_texts
from raybatch.planning.movable import as_movable
from raybatch.rows.batches import python_values

_SHOWN_CHARS = 40


def check_unique_ids(source: Source, column: str) -> None:
    """Raise ConfigError that names the first id that is repeated, or says that some are null.

    Memory: flat; 24 bytes a row in the folder for temporary files.
    """
    if column not in source.schema.names:
        raise ConfigError(f"id_column {column!r} is not in the source: {source.schema.names}")
    num_nulls = row = 0
    with RepeatedIds(source.num_rows) as seen:
        for ids in _ids(source, column):
            num_nulls += ids.null_count
            if not num_nulls:
                seen.add(_comparable(ids, column), first_row=row)
            row += len(ids)
        found = seen.repeated()
    if num_nulls:
        raise ConfigError(f"id_column {column!r} is null in {num_nulls} rows of the source")
    if found.first is not None:
        raise ConfigError(
            f"id_column {column!r} has {found.num_ids} ids on more than one row, for example "
            f"{_told_repeated(source, column, *found.first)}; leave id_column out to use file and "
            "position"
        )


def _ids(source: Source, column: str) -> Iterator[pa.ChunkedArray]:
    """Yield the ids of all rows, some at a time."""
    schema = pa.schema([source.schema.field(column)])
    for part in joined(source.slices):
        for table in read_slice(part, columns=[column]):
            yield in_common_schema(table, schema).column(0)


def _comparable(ids: pa.ChunkedArray, column: str) -> pa.ChunkedArray:
    try:
        return as_texts(as_movable(pa.table({column: ids})).column(0))
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"id_column {column!r} is a column of {ids.type}, which cannot be compared; take one "
            "of texts or whole numbers"
        ) from error


def _told_repeated(source: Source, column: str, first: int, second: int) -> str:
    """Return an id and the two rows that have it."""
    row, value = 0, None
    for ids in _ids(source, column):
        if row <= first < row + len(ids):
            (value,) = python_values(ids.slice(first - row, 1))
            break
        row += len(ids)
    # a repr, because a terminal obeys some of what a text may hold
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"{shown} in {_place(source.slices, first)} and {_place(source.slices, second)}"


def _place(slices: Sequence[FileSlice], row: int) -> str:
    """Return file and position of a row of the source."""
    for part in slices:
        if row < part.num_rows:
            return f"{part.name}:{part.first_row + row}"
        row -= part.num_rows
    raise IndexError(f"the source ends {row} rows before the row that is asked for")
