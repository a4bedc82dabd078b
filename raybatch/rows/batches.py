"""Row batches as Arrow tables: conversion from Ray Data's formats, sizes of rows, Python values.

Arrow loses nothing. pandas keeps what Ray's Arrow-backed columns keep. A numpy batch has lost
data before a stage sees it: integers and booleans with nulls are floats or objects, time zones are
gone, and strings that are not UTF-8 fail the job in Ray's conversion. So `LLMStage.apply` requests
Arrow.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raybatch.durable.parts import empty_table
from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import with_inner_types

# raised by texts that are not UTF-8, dates outside of Python's range, unknown time zones
UNREADABLE = (UnicodeDecodeError, ValueError, OverflowError, KeyError)
# values without one Arrow type, which Ray Data pickles
_OBJECTS = "ray.data.arrow_pickled_object"
# int32 values of one element in a view: its length, then its place
_INTS_PER_VIEW = 4


def to_table(batch: Any) -> pa.Table:  # noqa: ANN401 - any format of Ray Data
    """Return a row batch (numpy columns, pandas or pyarrow) as a table; TypeError for others."""
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, Mapping):
        return pa.table({str(name): _to_array(name, values) for name, values in batch.items()})
    if hasattr(batch, "iloc"):
        from ray.data.block import BlockAccessor  # slow to load, and not needed for Arrow

        return BlockAccessor.for_block(batch).to_arrow()
    raise TypeError(f"a row batch must be numpy columns, pandas or pyarrow, got {type(batch)}")


def _to_array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:  # noqa: ANN401
    """Convert a column; Ray's own conversion from numpy would turn lists into tensors."""
    column = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else object)
    if column.ndim == 1:
        try:
            return pa.array(column)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            if (maps := _to_maps(column)) is not None:
                return maps
    from ray.data.block import BlockAccessor  # as above

    return BlockAccessor.batch_to_arrow_block({name: values}).column(0)


def _to_maps(column: npt.NDArray[Any]) -> pa.Array | None:
    """Return lists of (key, item) pairs as an Arrow map; None for other values."""
    rows = [row for row in column if row is not None]
    if not all(isinstance(row, list) for row in rows):
        return None
    pairs = [pair for row in rows for pair in row]
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return None
    keys, items = (pa.array([pair[i] for pair in pairs]) for i in (0, 1))
    return pa.array(column, pa.map_(keys.type, items.type))


def is_any_type(kind: pa.DataType, names: str) -> bool:
    """Return whether `pa.types.is_NAME` holds for one of `names`, which blanks separate."""
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names.split())


def is_objects(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds Python objects pickled by Ray Data."""
    return getattr(kind, "extension_name", "") == _OBJECTS


def python_values(column: pa.ChunkedArray | pa.Array, **options: Any) -> list[Any]:  # noqa: ANN401
    """Return the values of a column; a value that Python cannot represent becomes an exception."""
    try:
        return column.to_pylist(**options)  # type: ignore[no-any-return]
    except UNREADABLE:
        return [_value_or_error(scalar, **options) for scalar in column]


def nested_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column, maps as dicts; a map with a repeated key as an exception."""
    return python_values(column, maps_as_pydicts="strict")


def _value_or_error(scalar: pa.Scalar, **options: Any) -> Any:  # noqa: ANN401 - any value
    try:
        return scalar.as_py(**options)
    except UNREADABLE as error:
        is_time = pa.types.is_timestamp(scalar.type)
        return ValueError(f"{scalar.type}: {error}") if is_time else error


def python_rows(table: pa.Table) -> list[dict[str, Any] | Exception]:
    """Return the rows as dicts; a row with an unreadable value becomes its exception."""
    names = table.column_names
    if not names:
        return [{} for _ in range(table.num_rows)]
    return [
        next((v for v in values if isinstance(v, Exception)), dict(zip(names, values, strict=True)))
        for values in zip(*map(python_values, table.columns), strict=True)
    ]


def large_rows(table: pa.Table, *, max_bytes: int) -> dict[int, int]:
    """Return the rows that are larger than `max_bytes`: size in bytes by position of the row.

    Complexity: O(table bytes / max_bytes) slices of the table.
    """
    # rows may share buffers, so this is an upper bound of the size of any row
    if table.nbytes <= max_bytes:
        return {}
    return dict(_large_rows(table, 0, max_bytes))


def _large_rows(rows: pa.Table, start: int, max_bytes: int) -> Iterator[tuple[int, int]]:
    num_bytes = sum(_bytes_of(chunk) for column in rows.columns for chunk in column.chunks)
    if num_bytes <= max_bytes or not rows.num_rows:
        return
    if rows.num_rows == 1:
        yield start, num_bytes
        return
    middle = rows.num_rows // 2
    yield from _large_rows(rows.slice(0, middle), start, max_bytes)
    yield from _large_rows(rows.slice(middle), start + middle, max_bytes)


def _bytes_of(values: pa.Array) -> int:
    """Return the size of values; shared data counts once per value."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _bytes_of(values.storage)
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        return _view_bytes(values)
    if pa.types.is_dictionary(kind):
        try:
            lengths = pc.binary_length(values.dictionary).take(values.indices)
        except pa.ArrowNotImplementedError:
            return int(values.indices.nbytes)  # the values are no texts, so they are small
        texts = pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0
        return int(values.indices.nbytes) + texts
    if pa.types.is_struct(kind):
        return sum(map(_bytes_of, values.flatten()))
    if pa.types.is_map(kind):
        start, stop = values.offsets[0].as_py(), values.offsets[-1].as_py()
        return sum(_bytes_of(of.slice(start, stop - start)) for of in (values.keys, values.items))
    if hasattr(values, "flatten") and not pa.types.is_union(kind):
        return _bytes_of(values.flatten())
    return int(values.nbytes)


def _view_bytes(values: pa.Array) -> int:
    views = values.buffers()[1]
    if views is None or not len(values):
        return 0
    lengths = np.frombuffer(views, np.int32).reshape(-1, _INTS_PER_VIEW)[:, 0]
    chosen = lengths[values.offset : values.offset + len(values)]
    is_valid = values.is_valid().to_numpy(zero_copy_only=False)
    return int(chosen[is_valid].sum(dtype=np.int64))


def as_movable(table: pa.Table) -> pa.Table:
    """Return the table with string and binary views as plain columns, also in nested types.

    Arrow cannot take rows of a view (pyarrow 26); Polars writes such columns.
    """
    schema = movable_schema(table.schema)
    return table if schema.equals(table.schema) else table.cast(schema)


def check_parquet_types(schema: pa.Schema) -> None:
    """Raise ConfigError if Arrow cannot select rows of a column, or write them to Parquet."""
    for field in schema:
        try:
            rows = as_movable(empty_table(pa.schema([field]))).take(pa.array([], pa.int64()))
            with pq.ParquetWriter(pa.BufferOutputStream(), rows.schema) as writer:
                writer.write_table(rows)
        except (pa.ArrowException, KeyError) as error:
            raise ConfigError(
                f"column {field.name!r} has type {field.type}, which cannot be written to Parquet "
                f"({error_text(error)}); leave it out (columns), or convert it in the source"
            ) from error


def movable_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of tables that `as_movable` returns."""
    fields = [field.with_type(_movable(field.type)) for field in schema]
    return pa.schema(fields, schema.metadata)


def _movable(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return with_inner_types(kind, _movable)
