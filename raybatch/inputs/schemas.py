"""The common schema of the files of a source, and lossless casts of tables to it."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa

from raybatch.errors import ConfigError, did_you_mean
from raybatch.inputs.csv_files import joined_columns
from raybatch.inputs.file_errors import safe_text, with_inner_types
from raybatch.inputs.json_lines import JSON_TEXT, joined_schema
from raybatch.inputs.listing import Kind

SchemaPolicy = Literal["strict", "cast"]

_MAX_FILES_SHOWN = 5
# narrowest first, integers before floats
_NUMBERS = (
    *(pa.uint8(), pa.int8(), pa.uint16(), pa.int16(), pa.uint32(), pa.int32(), pa.uint64()),
    *(pa.int64(), pa.float16(), pa.float32(), pa.float64()),
)
_TEXTS = (pa.string(), pa.string_view(), pa.large_string())
# files whose schemas are widened to a common one, by kind
_JOINS = {"json": joined_schema, "csv": joined_columns}
_BYTES = (pa.binary(), pa.binary_view(), pa.large_binary())


class FileSchema(NamedTuple):
    path: str
    schema: pa.Schema
    kind: Kind = "parquet"


def with_common_text(
    files: Sequence[FileSchema], columns: Sequence[str] | None
) -> tuple[list[FileSchema], dict[str, pa.Schema]]:
    """Return the files, JSONL and CSV files with common schemas, and the schemas to read them with.

    The latter, by kind of file, have only the columns to read. A column of type `JSON_TEXT` in it
    is a text column in the schema of the files.

    Raises:
        ConfigError: a column of plain values has no common type.
    """
    read = dict.fromkeys(_JOINS, pa.schema([]))
    for file in files:
        if file.kind in read:
            try:
                fields = [f for f in file.schema if columns is None or f.name in columns]
                read[file.kind] = _JOINS[file.kind](read[file.kind], pa.schema(fields))
            except ValueError as error:
                raise ConfigError(
                    f"source file {safe_text(file.path)} does not match the JSON files before it: "
                    f"{error}"
                ) from error
    read = {
        kind: pa.schema([field.with_type(_settled(field.type)) for field in schema])
        for kind, schema in read.items()
    }
    texts_of_csv = [f.with_type(pa.string()) if f.type == pa.null() else f for f in read["csv"]]
    read["csv"] = pa.schema(texts_of_csv)

    def common(file: FileSchema) -> FileSchema:
        schema = read[file.kind]
        known = [f.with_type(pa.string()) if f.type == JSON_TEXT else f for f in schema]
        others = [field for field in file.schema if field.name not in schema.names]
        return file._replace(schema=pa.schema([*known, *others]))

    return [common(file) if file.kind in read else file for file in files], read


def _settled(kind: pa.DataType) -> pa.DataType:
    """Return a type whose rows can be selected and written.

    Arrow makes invalid arrays of lists of nulls; lists of text hold the same values.
    """
    if _has_no_fields(kind):
        return JSON_TEXT
    if pa.types.is_list(kind) and pa.types.is_null(kind.value_type):
        return pa.list_(pa.string())
    return with_inner_types(kind, _settled)


def _has_no_fields(kind: pa.DataType) -> bool:
    """Return whether a type contains structs without fields, which Parquet does not support."""
    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_has_no_fields(field.type) for field in kind)
    return pa.types.is_list(kind) and _has_no_fields(kind.value_type)


def common_schema(
    files: Sequence[FileSchema], *, columns: Sequence[str] | None, policy: SchemaPolicy
) -> pa.Schema:
    """Return the schema of a source.

    Args:
        columns: columns to read, in this order; None for all.
        policy: "strict" requires one schema in all files, JSON aside; "cast" uses for each column
            the narrowest type that holds the values of all files exactly.

    Raises:
        ConfigError: a column is missing or ambiguous, or the schemas are incompatible.
    """
    for path, schema, _ in files:
        where = f"source file {safe_text(path)}"
        if twice := [name for name, number in Counter(schema.names).items() if number > 1]:
            raise ConfigError(
                f"{where} has several columns named {', '.join(map(repr, sorted(twice)))}; "
                "rename them"
            )
        if odd := [name for name in schema.names if "\0" in name]:
            raise ConfigError(
                f"{where} has a column {odd[0]!r} with a NUL character in its name; rename it"
            )
    if columns is None:
        return _merged(files, policy)
    chosen = []
    for file in files:
        fields = [field for field in file.schema if field.name in columns]
        chosen.append(file._replace(schema=pa.schema(fields, file.schema.metadata)))
    schema = _merged(chosen, policy)
    for name in columns:
        if name not in schema.names:
            known = list(dict.fromkeys(n for file in files for n in file.schema.names))
            raise ConfigError(
                f"columns: the source has no column {name!r}{did_you_mean(name, known)}; it has "
                f"{', '.join(known) or 'none'}"
            )
    return pa.schema([schema.field(name) for name in columns], schema.metadata)


def in_common_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Order and cast the columns to `schema`; missing columns are null.

    Raises:
        pa.ArrowInvalid: a value would change.
    """
    if table.schema.equals(schema):
        return table
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.nulls(table.num_rows, field.type)
        for field in schema
    ]
    if not columns:
        return table.select([])
    return pa.table(columns, schema=schema)


def _merged(files: Sequence[FileSchema], policy: SchemaPolicy) -> pa.Schema:
    if policy == "cast":
        return _widened_schema(files)
    first = files[0]
    others = [file for file in files if not file.schema.equals(first.schema)]
    if not others:
        return first.schema
    differences = []
    for file in others[:_MAX_FILES_SHOWN]:
        unlike = {*map(_field_text, first.schema)} ^ {*map(_field_text, file.schema)}
        differences.append(
            f"{safe_text(file.path)} has another schema than {safe_text(first.path)}: "
            f"{', '.join(sorted(unlike)) or 'the columns are in another order'}"
        )
    if len(others) > len(differences):
        differences.append(f"and {len(others) - len(differences)} more files")
    raise ConfigError(
        f"{'; '.join(differences)}. Set schema_policy: cast if types differ only in width or "
        "columns are missing, select columns (columns), or rewrite the files"
    )


def _field_text(field: pa.Field) -> str:
    return f"{field.name}: {field.type}{'' if field.nullable else ' not null'}"


def _widened_schema(files: Sequence[FileSchema]) -> pa.Schema:
    # column name to its merged field and the first file that has it
    merged: dict[str, tuple[pa.Field, str]] = {}
    for file in files:
        for field in file.schema:
            known, path = merged.setdefault(field.name, (field, file.path))
            both = _widened_field(known, field)
            if both is None:
                raise ConfigError(
                    f"column {field.name!r} is {known.type} in {safe_text(path)} and {field.type} "
                    f"in {safe_text(file.path)}, and no type holds both exactly; rewrite one of "
                    "the files, or leave the column out (columns)"
                )
            merged[field.name] = both, path
    fields = [
        field if all(name in file.schema.names for file in files) else field.with_nullable(True)
        for name, (field, _) in merged.items()
    ]
    return pa.schema(fields, files[0].schema.metadata)


def widened(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """Return the narrowest type that holds every value of both types exactly, None if none does.

    Example:
        >>> widened(pa.int32(), pa.uint32())
        DataType(int64)
    """
    if one.equals(other):
        return one
    for kind, another in ((one, other), (other, one)):
        if pa.types.is_null(kind):
            return another
        if pa.types.is_dictionary(kind):
            value = another.value_type if pa.types.is_dictionary(another) else another
            return widened(kind.value_type, value)
    for family in (_TEXTS, _BYTES):
        if one in family and other in family:
            return family[-1]
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return _widened_struct(one, other)
    if all(pa.types.is_list(kind) or pa.types.is_large_list(kind) for kind in (one, other)):
        item = _widened_field(one.value_field, other.value_field)
        is_large = pa.types.is_large_list(one) or pa.types.is_large_list(other)
        list_of = pa.large_list if is_large else pa.list_
        return None if item is None else list_of(item)
    return next((kind for kind in _NUMBERS if _holds(kind, one) and _holds(kind, other)), None)


def _holds(kind: pa.DataType, other: pa.DataType) -> bool:
    if other not in _NUMBERS:
        return False
    # NumPy considers int64 to float64 safe, but that is inexact beyond 2**53
    is_inexact = other.bit_width == 64 and pa.types.is_integer(other) and pa.types.is_floating(kind)
    is_safe = np.can_cast(other.to_pandas_dtype(), kind.to_pandas_dtype(), "safe")
    return bool(is_safe and not is_inexact)


def _widened_field(one: pa.Field, other: pa.Field) -> pa.Field | None:
    kind = widened(one.type, other.type)
    is_nullable = one.nullable or other.nullable
    return None if kind is None else one.with_type(kind).with_nullable(is_nullable)


def _widened_struct(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    ours, theirs = ({field.name: field for field in kind} for kind in (one, other))
    if len(ours) < one.num_fields or len(theirs) < other.num_fields:
        return None
    # a field that only one of them has is nullable
    fields = [
        _widened_field(ours[name], theirs[name])
        if name in ours and name in theirs
        else (ours | theirs)[name].with_nullable(True)
        for name in ours | theirs
    ]
    return None if any(field is None for field in fields) else pa.struct(fields)
