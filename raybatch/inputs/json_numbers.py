"""Whole numbers of JSON that a column of fractions would change."""

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# float64 has every whole number up to here
_EXACT = 2.0**53


def changed_number(table: pa.Table, data: bytes) -> int | None:
    """Return a whole number that is another one in its column, None where there is none.

    Arrow makes one column of float64 of whole numbers and fractions. Lines are looked at only where
    a value is beyond the whole numbers that float64 has all of.

    Args:
        table: that Arrow made.
        data: the lines that it made it of.
    """
    kinds = {f.name: f.type for f in table.schema if _has_large(table.column(f.name))}
    if not kinds:
        return None
    for line in data.splitlines():
        row = _row(line)
        for name, kind in kinds.items():
            if (found := _changed(row.get(name), kind)) is not None:
                return found
    return None


def _row(line: bytes) -> dict[str, Any]:
    try:
        row: dict[str, Any] = json.loads(line.decode("utf-8", "replace"), strict=False)
    except ValueError:
        # blank, or what Arrow alone takes for JSON
        return {}
    return row


def _has_large(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if pa.types.is_floating(kind):
        values = column.drop_null().to_numpy()
        return bool((np.abs(values) >= _EXACT).any())
    if pa.types.is_list(kind):
        return _has_large(pc.list_flatten(column))
    if pa.types.is_struct(kind):
        return any(_has_large(pc.struct_field(column, [i])) for i in range(kind.num_fields))
    return False


def _changed(value: Any, kind: pa.DataType) -> int | None:  # noqa: ANN401 - of JSON
    inner: list[int | None] = []
    if pa.types.is_floating(kind):
        return value if isinstance(value, int) and not _is_exact(value) else None
    if pa.types.is_list(kind) and value is not None:
        inner = [_changed(item, kind.value_type) for item in value]
    elif pa.types.is_struct(kind) and value is not None:
        inner = [_changed(value.get(field.name), field.type) for field in kind]
    return next((found for found in inner if found is not None), None)


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False
