"""Row batches as Ray Data hands them over, turned into Arrow tables and into Python values.

Arrow loses nothing. pandas keeps everything that Ray's Arrow-backed columns keep. A numpy batch has
lost some things before a stage sees it: integers and booleans with nulls have become floats or
objects, time zones are gone, and strings that are not UTF-8 stop the job in Ray's own conversion.
`LLMStage.apply` asks for Arrow, therefore.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.errors import ConfigError

# texts that are not UTF-8, dates that Python cannot hold, time zones that nobody knows
UNREADABLE = (UnicodeDecodeError, ValueError, OverflowError, KeyError)


def to_table(batch: Any) -> pa.Table:  # noqa: ANN401 - whatever Ray Data hands over
    """Return a row batch (numpy columns, pandas or pyarrow) as a table.

    Raises:
        TypeError: the batch is of another kind.
    """
    if isinstance(batch, pa.Table):
        return batch
    if isinstance(batch, Mapping):
        return pa.table({str(name): _to_array(name, values) for name, values in batch.items()})
    if hasattr(batch, "iloc"):
        return _block_accessor().for_block(batch).to_arrow()
    raise TypeError(f"a row batch must be numpy columns, pandas or pyarrow, got {type(batch)}")


def _to_array(name: str, values: Any) -> pa.Array | pa.ChunkedArray:  # noqa: ANN401
    """Keep lists lists: Ray's own way back from numpy would make tensors of them."""
    column = np.asarray(values, dtype=None if isinstance(values, np.ndarray) else object)
    if column.ndim == 1:
        try:
            return pa.array(column)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError):
            if (maps := _to_maps(column)) is not None:
                return maps
    return _block_accessor().batch_to_arrow_block({name: values}).column(0)


def _block_accessor() -> Any:  # noqa: ANN401 - Ray has no types
    from ray.data.block import BlockAccessor  # slow to load, and Arrow does without

    return BlockAccessor


def _to_maps(column: npt.NDArray[Any]) -> pa.Array | None:
    """Return lists of (key, item) pairs as an Arrow map; None where the values are others."""
    rows = [row for row in column if row is not None]
    is_map = all(isinstance(row, list) for row in rows) and all(
        isinstance(pair, tuple) and len(pair) == 2 for row in rows for pair in row
    )
    if not is_map:
        return None
    keys = pa.array([key for row in rows for key, _ in row])
    items = pa.array([item for row in rows for _, item in row])
    return pa.array(column, pa.map_(keys.type, items.type))


def json_value(value: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return what a cell of JSON text, or of values, says; None for null and for an empty text.

    Args:
        value: as `python_values` returns it.

    Raises:
        ValueError: the text is no JSON, or the value could not be read.
    """
    if isinstance(value, Exception):
        raise ConfigError(f"the value cannot be read: {value}")
    if isinstance(value, str | bytes):
        try:
            return json.loads(value) if value else None
        except RecursionError as error:
            raise ConfigError("the JSON is nested too deeply") from error
    return value


def python_values(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """Return the values of a column; a value that Python cannot hold becomes its exception."""
    try:
        return column.to_pylist()  # type: ignore[no-any-return]
    except UNREADABLE:
        return [_value_or_error(scalar) for scalar in column]


def _value_or_error(scalar: pa.Scalar) -> Any:  # noqa: ANN401 - any value
    try:
        return scalar.as_py()
    except UNREADABLE as error:
        if pa.types.is_timestamp(scalar.type):
            return ValueError(f"{scalar.type}: {error}")
        return error


def python_rows(table: pa.Table) -> list[dict[str, Any] | Exception]:
    """Return the rows as dicts; a row with a value that Python cannot hold is that exception."""
    names = table.column_names
    columns = [python_values(table.column(name)) for name in names]
    rows: list[dict[str, Any] | Exception] = []
    for values in zip(*columns, strict=True):
        bad = next((v for v in values if isinstance(v, Exception)), None)
        rows.append(bad if bad is not None else dict(zip(names, values, strict=True)))
    return rows if names else [{} for _ in range(table.num_rows)]
