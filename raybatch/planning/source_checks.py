"""Checks of source columns before any row is generated: unique ids, partition values."""

from collections.abc import Iterator, Sequence
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from raybatch.durable.commit import partition_folder
from raybatch.errors import CommitError, ConfigError
from raybatch.inputs.file_slices import FileSlice, joined, read_slices
from raybatch.inputs.schemas import in_common_schema
from raybatch.inputs.source import Source
from raybatch.planning.repeated_ids import RepeatedIds, as_texts
from raybatch.rows.batches import as_movable, python_values

# length of "name=value": a quoted byte needs three, numbers and dates at most 20
_SURELY_FITS = 200
_LONGEST_NUMBER = 20
_SHOWN_CHARS = 40


def check_partition_values(source: Source, columns: Sequence[str]) -> None:
    """Raise ConfigError for the first row with a value in these columns that no folder can have.

    Columns have types that `check_partitions` accepts. Memory: one table of a source file.
    """
    schema = pa.schema([source.schema.field(name) for name in columns])
    doubtful = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if is_text or len(quote(field.name, safe="")) + 1 + _LONGEST_NUMBER > _SURELY_FITS:
            doubtful.append(field.name)
    if not doubtful:
        return
    schema = pa.schema([schema.field(name) for name in doubtful])
    for part, tables in read_slices(list(joined(source.slices)), columns=doubtful):
        first_row = part.first_row
        for rows in tables:
            _check_table(in_common_schema(rows, schema), part, first_row)
            first_row += rows.num_rows


def _check_table(table: pa.Table, part: FileSlice, first_row: int) -> None:
    for name in table.column_names:
        column = table.column(name).unify_dictionaries()
        for value in python_values(pc.unique(column)):
            if (reason := _wrong_with(name, value)) is not None:
                # a slow search, but this error ends the job
                row = next(
                    i for i, one in enumerate(python_values(column)) if _wrong_with(name, one)
                )
                raise ConfigError(f"partition_by: {part.name}:{first_row + row}: {reason}")


def _wrong_with(name: str, value: object) -> str | None:
    """Return why a value of a column cannot be a folder name; None if it can."""
    if isinstance(value, Exception):
        return f"column {name!r} has text that is not UTF-8; fix it, or use another column"
    try:
        partition_folder([name], [value])
    except CommitError as error:
        return str(error)
    return None


def check_unique_ids(source: Source, column: str) -> None:
    """Raise ConfigError for the first repeated id, or for null ids.

    Memory: constant; 24 bytes per row in the folder for temporary files.
    """
    if column not in source.schema.names:
        raise ConfigError(
            f"id_column {column!r} is not in the source, whose columns are {source.schema.names}"
        )
    num_nulls = row = first_null = 0
    with RepeatedIds(source.num_rows) as seen:
        for ids in _ids(source, column):
            if ids.null_count and not num_nulls:
                first_null = row + ids.is_null().index(True).as_py()
            num_nulls += ids.null_count
            if not num_nulls:
                seen.add(_comparable(ids, column), first_row=row)
            row += len(ids)
        repeated = seen.repeated()
    if num_nulls:
        raise ConfigError(
            f"id_column {column!r} is null in {num_nulls} rows of the source, for example in "
            f"{_place(source.slices, first_null)}; fill it in, or leave id_column out to use file "
            "and position"
        )
    if repeated.first is not None:
        raise ConfigError(
            f"id_column {column!r} has {repeated.num_ids} ids on more than one row, for example "
            f"{_show_repeated(source, column, *repeated.first)}; make ids unique, or leave "
            "id_column out to use file and position"
        )


def _ids(source: Source, column: str) -> Iterator[pa.ChunkedArray]:
    schema = pa.schema([source.schema.field(column)])
    for _, tables in read_slices(list(joined(source.slices)), columns=[column]):
        for table in tables:
            yield in_common_schema(table, schema).column(0)


def _comparable(ids: pa.ChunkedArray, column: str) -> pa.ChunkedArray:
    try:
        return as_texts(as_movable(pa.table({column: ids})).column(0))
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"id_column {column!r} has type {ids.type}, which cannot be compared; use a column of "
            "texts or whole numbers"
        ) from error


def _show_repeated(source: Source, column: str, first: int, second: int) -> str:
    row, value = 0, None
    for ids in _ids(source, column):
        if row <= first < row + len(ids):
            (value,) = python_values(ids.slice(first - row, 1))
            break
        row += len(ids)
    # repr() escapes terminal control characters
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"{shown} in {_place(source.slices, first)} and {_place(source.slices, second)}"


def _place(slices: Sequence[FileSlice], row: int) -> str:
    for part in slices:
        if row < part.num_rows:
            return f"{part.name}:{part.first_row + row}"
        row -= part.num_rows
    raise IndexError(f"the source ends {row} rows before the requested row")
