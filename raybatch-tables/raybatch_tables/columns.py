"""Columns of outputs and of tables: which types hold the values of others."""

from collections.abc import Mapping

import pyarrow as pa

from raybatch.errors import ConfigError

_TEXTS = (pa.string(), pa.large_string(), pa.string_view())
_BYTES = (pa.binary(), pa.large_binary(), pa.binary_view())
# types that tables of SQL lack
_SQL_TYPES: Mapping[pa.DataType, pa.DataType] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.int64(),
    pa.float16(): pa.float32(),
}


def sql_type(kind: pa.DataType) -> pa.DataType:
    """Return a type that Delta Lake and Iceberg have and that holds the values of `kind`.

    They have no unsigned and no half numbers, and times in microseconds, without a zone or of UTC.
    A value that does not fit, such as a large uint64 or nanoseconds, is an error when it is cast.
    """
    if pa.types.is_dictionary(kind):
        return sql_type(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(sql_type(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(sql_type(field.type)) for field in kind])
    if pa.types.is_timestamp(kind):
        unit = "us" if kind.unit == "ns" else kind.unit
        return pa.timestamp(unit, None if kind.tz is None else "UTC")
    return _SQL_TYPES.get(kind, kind)


def fitted(rows: pa.Schema, table: pa.Schema, name: str) -> pa.Schema:
    """Return the schema of rows that are added to a table: that of the table.

    Raises:
        ConfigError: the table lacks a column, has another one that may not be null, or a type that
            does not hold the values.
    """
    lacking = [column for column in rows.names if column not in table.names]
    needed = [f.name for f in table if f.name not in rows.names and not f.nullable]
    others = [
        f"{field.name} ({field.type}, and {table.field(field.name).type} in the table)"
        for field in rows
        if field.name in table.names and not _holds(table.field(field.name).type, field.type)
    ]
    problems = {
        "it lacks the columns": lacking,
        "it also needs the columns": needed,
        "it has other types of": others,
    }
    what = [f"{problem} {', '.join(names)}" for problem, names in problems.items() if names]
    if what:
        raise ConfigError(
            f"the rows of this job do not fit {name}: {'; '.join(what)}; choose another table, or "
            "change its columns"
        )
    return pa.schema(list(table))


def _holds(table: pa.DataType, rows: pa.DataType) -> bool:
    """Return whether a column of a table holds the values of rows, or an error tells one that not.

    An int64 may have to hold a uint64, since tables of SQL have nothing larger.
    """
    if table == rows or sql_type(rows) == table:
        return True
    if pa.types.is_dictionary(rows):
        return _holds(table, rows.value_type)
    if any(table in family and rows in family for family in (_TEXTS, _BYTES)):
        return True
    for is_kind in (pa.types.is_signed_integer, pa.types.is_floating):
        if is_kind(table) and is_kind(sql_type(rows)):
            return bool(table.bit_width >= sql_type(rows).bit_width)
    if pa.types.is_struct(table) and pa.types.is_struct(rows):
        pairs = zip(table, rows, strict=False)
        is_like = [field.name for field in table] == [field.name for field in rows]
        return is_like and all(_holds(one.type, other.type) for one, other in pairs)
    if _is_list(table) and _is_list(rows):
        return _holds(table.value_type, rows.value_type)
    if pa.types.is_timestamp(table) and pa.types.is_timestamp(rows):
        return (table.tz is None) == (rows.tz is None)
    return False


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))
