"""Looks whether the values of a source can be names of folders, before any row is generated."""

from collections.abc import Sequence
from urllib.parse import quote

import pyarrow as pa
import pyarrow.compute as pc

from raybatch.durable.partitioned import partition_folder
from raybatch.errors import CommitError, ConfigError
from raybatch.inputs.file_slices import FileSlice, joined, read_slice
from raybatch.inputs.schemas import in_common_schema
from raybatch.inputs.source import Source
from raybatch.rows.batches import python_values

# of "name=value": a byte takes three where it is quoted, and numbers and dates take 20 at most
_SURELY_FITS = 200
_LONGEST_NUMBER = 20


def check_partition_values(source: Source, columns: Sequence[str]) -> None:
    """Raise ConfigError that names the first row that no folder can hold.

    Memory: a table of a source file at a time.

    Args:
        source: every row of it is looked at.
        columns: by which the output is laid out, each of a type that `check_partitions` takes.
    """
    schema = pa.schema([source.schema.field(name) for name in columns])
    doubtful = [field.name for field in schema if _may_be_long(field)]
    if not doubtful:
        return
    schema = pa.schema([schema.field(name) for name in doubtful])
    for part in joined(source.slices):
        first_row = part.first_row
        for rows in read_slice(part, columns=doubtful):
            _check_table(in_common_schema(rows, schema), part, first_row)
            first_row += rows.num_rows


def _may_be_long(field: pa.Field) -> bool:
    kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return is_text or len(quote(field.name, safe="")) + 1 + _LONGEST_NUMBER > _SURELY_FITS


def _check_table(table: pa.Table, part: FileSlice, first_row: int) -> None:
    for name in table.column_names:
        column = table.column(name).unify_dictionaries()
        for value in python_values(pc.unique(column)):
            if (said := _wrong_with(name, value)) is not None:
                # where it is, is asked for once, of an error that ends the job
                row = next(
                    i for i, one in enumerate(python_values(column)) if _wrong_with(name, one)
                )
                raise ConfigError(f"partition_by: {part.name}:{first_row + row}: {said}")


def _wrong_with(name: str, value: object) -> str | None:
    """Return what is wrong with a value of a column; None where it can be a folder."""
    if isinstance(value, Exception):
        return f"column {name!r} holds text that is not UTF-8; mend it, or take another column"
    try:
        partition_folder([name], [value])
    except CommitError as error:
        return str(error)
    return None
