"""JSON lines, compressed or not, as Arrow tables.

A broken line is an error that names the file and the line.
"""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as paj

from raybatch.inputs.file_errors import (
    MAX_DEPTH,
    BadFileError,
    check_values,
    safe_text,
    with_inner_types,
)
from raybatch.inputs.text_blocks import JSON_ARRAY, OVER_LINES, read_blocks

# what one parse takes: large enough that its threads have work, small beside a row batch
BLOCK_BYTES = 16 << 20
# what Arrow takes at most as one block
_MAX_BLOCK_BYTES = (1 << 31) - 1
_LINE = re.compile(rb"[^\r\n]+")
_BLANKS = b" \t"
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_OPENING, _CLOSING = list(b"[{"), list(b"]}")
# what one parse of Arrow's takes; it has its threads of it
_ARROW_BLOCK_BYTES = 1 << 20
# float64 has every whole number up to here, int64 all up to there
_EXACT, _HALF = 2.0**53, 1 << 63
_WHOLE = {pa.int64(): range(-_HALF, _HALF), pa.uint64(): range(2 * _HALF)}
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_WORDS: Mapping[type, str] = {
    **{bool: "true or false", int: "numbers", float: "numbers"},
    **{str: "texts", list: "lists", dict: "objects"},
}
# a column for whose values Arrow has no type: a table has them as JSON texts
JSON_TEXT = pa.json_(pa.string())
_MEND = "; mend or remove the line"


class _MixedError(ValueError):
    """No column of Arrow holds some values exactly."""


_Failure = (
    *(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError),
    _MixedError,
)


class JsonFile(NamedTuple):
    """What reading through a file tells; the bytes are those of the chosen columns in memory."""

    schema: pa.Schema
    num_rows: int
    num_bytes: int
    num_blocks: int


def scan_json_lines(
    path: str,
    *,
    columns: Sequence[str] | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_decompressed_bytes: int | None = None,
) -> JsonFile:
    """Read through a file, and return what its lines have in common.

    A line is a row, except that blank lines are none. A file without a row has no columns. The size
    is that of `columns`; None takes all. Memory: a block.

    Raises:
        BadFileError: a line is not one JSON object, a column of plain values has several types, or
            a compressed file is cut or broken.
        ConfigError: a compressed file grows beyond its limit.
    """
    blocks = read_blocks(
        path, block_bytes=block_bytes, max_decompressed_bytes=max_decompressed_bytes
    )
    schema, num_lines, num_rows, num_bytes, num_blocks = pa.schema([]), 0, 0, 0, 0
    is_widened = False
    for data in blocks:
        before, (table, schema) = schema, _table_of(path, data, num_lines, schema, columns=columns)
        is_widened |= any(
            field.type not in (pa.null(), schema.field(field.name).type) for field in before
        )
        num_lines += _num_lines(data)
        num_rows += table.num_rows
        num_bytes += table.nbytes
        num_blocks += 1
    # a whole number of a block may be none of a column that got fractions in a later one
    read = pa.schema([schema.field(name) for name in _chosen(schema.names, columns)])
    for _ in read_json_lines(path, read, block_bytes=block_bytes) if is_widened else ():
        pass
    return JsonFile(schema, num_rows, num_bytes, num_blocks)


def read_json_lines(
    path: str, schema: pa.Schema | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """Yield the rows of one file, block by block; a text that looks like a date stays a text.

    `schema` has the columns to read, of the types of the scan; None where the file is one block.
    """
    num_lines = 0
    # the scan has checked how far a file grows, and `read_slice` counts the rows
    for data in read_blocks(path, block_bytes=block_bytes, max_decompressed_bytes=sys.maxsize):
        table, _ = _table_of(path, data, num_lines, schema or pa.schema([]), is_known=bool(schema))
        num_lines += _num_lines(data)
        if table.num_rows:
            yield table


def _chosen(names: Iterable[str], columns: Sequence[str] | None) -> list[str]:
    return [name for name in names if columns is None or name in columns]


def joined_schema(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the columns of both, each of the type that holds what both have.

    A column that has lists or objects is `JSON_TEXT` where there is no such type.

    Raises:
        ValueError: there is none for a column of plain values; it names the column.
    """
    if one.equals(other):
        return one
    kinds = {field.name: field.type for field in one}
    for name, kind in zip(other.names, other.types, strict=True):
        kinds[name] = _joined(name, kinds.get(name, pa.null()), kind)
    return pa.schema(kinds.items())


def _joined(name: str, one: pa.DataType, other: pa.DataType) -> pa.DataType:
    kinds = [JSON_TEXT if pa.types.is_nested(kind) else kind for kind in (one, other)]
    if JSON_TEXT in (one, other) and set(kinds) <= {JSON_TEXT, pa.null()}:
        return JSON_TEXT
    if {one, other} == {pa.int64(), pa.uint64()}:
        return pa.uint64()  # pa.unify_schemas takes the narrower one
    try:
        both = [pa.schema([(name, kind)]) for kind in (one, other)]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        # a plain text among lists would get quotes, and so would all texts beside it
        if set(kinds) == {JSON_TEXT}:
            return JSON_TEXT
        raise _MixedError(
            f"column {name!r} holds both {one} and {other}; make them one type, or leave the "
            "column out (columns)"
        ) from error


def _table_of(
    path: str,
    data: bytes,
    num_lines: int,
    schema: pa.Schema,
    *,
    columns: Sequence[str] | None = None,
    is_known: bool = False,
) -> tuple[pa.Table, pa.Schema]:
    """Return the rows of a block, and the schema of all blocks so far.

    `schema` is of the blocks before, or, where it `is_known`, of the whole file. Other columns than
    `columns` have no values and do not matter.
    """
    if not (num_rows := _count_lines(path, data, num_lines)):
        return pa.table({}), schema
    if JSON_TEXT not in schema.types:
        try:
            table = _parse(data, num_rows, schema if is_known else None)
            if is_known:
                return table, schema
            names = _chosen(table.column_names, columns)
            others = {name: pa.null() for name in table.column_names if name not in names}
            table = table.select(names)
            return table, joined_schema(schema, pa.schema([*table.schema, *others.items()]))
        except _Failure:
            pass  # read another way, which names the line where there is none
    return _table_of_rows(path, data, num_lines, schema, columns, is_known)


def _count_lines(path: str, data: bytes, num_before: int) -> int:
    """Return the number of lines that are not blank; BadFileError where one has no braces at ends.

    Where one line ends in a brace and the next one begins with one, no object spans both: JSON has
    something between two braces inside of one. So that many objects are one object per line.
    """
    if num_lines := _plain_lines(data):
        return num_lines
    for match in _LINE.finditer(data):
        line, reason = match.group().strip(_BLANKS), None
        if line and not (line.startswith(b"{") and line.endswith(b"}")):
            reason = f"not a complete JSON object, which every line must be{_MEND}"
            following = data[match.end() :].lstrip()[:1]
            if line.startswith(b"[") and not num_before + num_lines:
                reason = JSON_ARRAY
            elif line.startswith(b"{") and following not in (b"{", b""):
                reason = OVER_LINES
        elif line.count(b"[") + line.count(b"{") > MAX_DEPTH and nesting_depth(line) > MAX_DEPTH:
            reason = f"nested deeper than {MAX_DEPTH} levels{_MEND}"
        if reason is not None:
            number = num_before + _num_lines(data[: match.start()]) + 1
            raise _broken(path, number, match.group(), reason)
        num_lines += bool(line)
    return num_lines


def _num_lines(data: bytes) -> int:
    """Return how many lines `bytes.splitlines` makes, without making them."""
    num_ends = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return num_ends + bool(data) - data.endswith((b"\n", b"\r"))


def _plain_lines(data: bytes) -> int:
    """Return the number of lines if none is blank or wrong at first sight; 0 if one may be.

    A file made to fill the memory may have millions of lines in a block.
    """
    if b"\r" in data:
        return 0
    signs = np.frombuffer(data if data.endswith(b"\n") else data + b"\n", np.uint8)
    ends = np.flatnonzero(signs == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1))
    # a line of one sign is no object, and of a blank one the sign before is that of another
    is_odd = (signs[starts] != ord("{")) | (signs[ends - 1] != ord("}"))
    if is_odd.any() or (ends - starts < 2).any():
        return 0
    opened = ((signs == _OPENING[0]) | (signs == _OPENING[1])).view(np.uint8)
    is_deep = (np.add.reduceat(opened, starts, dtype=np.int32) > MAX_DEPTH).any()
    return 0 if is_deep else len(ends)


def nesting_depth(line: bytes) -> int:
    """Return how deep the brackets outside of texts are nested."""
    brackets = np.frombuffer(_TEXT.sub(b"", line), np.uint8)
    opened = np.isin(brackets, _OPENING).astype(np.int64) - np.isin(brackets, _CLOSING)
    return int(np.cumsum(opened).max(initial=0))


def _parse(data: bytes, num_rows: int, known: pa.Schema | None) -> pa.Table:
    """Return what Arrow's parser makes of a block, checked; raise one of `_Failure`."""

    def read(schema: pa.Schema | None, block_bytes: int) -> pa.Table:
        options = paj.ReadOptions(block_size=min(block_bytes, _MAX_BLOCK_BYTES))
        others = "infer" if schema is None else "ignore"
        explicit = paj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
        return paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)

    # Arrow takes any bytes for text
    pa.array([data], pa.large_binary()).cast(pa.large_string())
    block_bytes = _ARROW_BLOCK_BYTES
    try:
        table = read(known, block_bytes)
    except pa.ArrowInvalid:
        # a line that is longer than a block of Arrow's fails like a broken one
        block_bytes = len(data) + 1
        table = read(known, block_bytes)
    if known is None:
        schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
        # where Arrow infers types, lists that begin with null have other values than the lines
        # (apache/arrow#51305), or none
        if not schema.equals(table.schema) or any(map(pa.types.is_nested, schema.types)):
            table = read(schema, block_bytes)
    if table.num_rows != num_rows:
        raise _MixedError("several JSON objects in a line")
    check_values(table)
    if any(map(_has_large, table.columns)):
        raise _MixedError("a whole number may be another one in a column of float64")
    return table


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    return with_inner_types(kind, _without_dates)


def _has_large(column: pa.ChunkedArray) -> bool:
    kind = column.type
    if pa.types.is_floating(kind):
        return bool((np.abs(column.drop_null().to_numpy()) >= _EXACT).any())
    if pa.types.is_list(kind):
        return _has_large(pc.list_flatten(column))
    if pa.types.is_struct(kind):
        return any(_has_large(pc.struct_field(column, [i])) for i in range(kind.num_fields))
    return False


def _table_of_rows(
    path: str,
    data: bytes,
    num_before: int,
    schema: pa.Schema,
    columns: Sequence[str] | None,
    is_known: bool,
) -> tuple[pa.Table, pa.Schema]:
    """Do what `_table_of` does line by line, for what Arrow's parser does not take."""
    rows: dict[int, dict[str, Any]] = {}
    lines = data.splitlines()
    for number, line in enumerate(lines):
        if line.strip(_BLANKS):
            try:
                rows[number] = row = _DECODER.decode(line.decode())
                if b"\\u" in line:
                    json.dumps(row, ensure_ascii=False).encode()
            except ValueError as error:
                raise _broken(path, num_before + number + 1, line, _reason(error)) from error
    names = dict.fromkeys(schema.names)
    if not is_known:
        names |= dict.fromkeys(name for row in rows.values() for name in row)
    arrays: dict[str, pa.Array] = {}
    kinds = dict.fromkeys(names, pa.null())
    for name in _chosen(names, columns):
        values = [row.get(name) for row in rows.values()]
        before = schema.field(name).type if name in schema.names else pa.null()
        column = partial(_column, name, before, is_known)
        try:
            arrays[name], kinds[name] = column(values)
        except _Failure:
            index, reason = _first_failure(column, values)
            number = list(rows)[index]
            raise _broken(path, num_before + number + 1, lines[number], reason) from None
    return pa.table(arrays), pa.schema(kinds.items())


def _first_failure(column: Callable[[list[Any]], object], values: list[Any]) -> tuple[int, str]:
    """Return the last place of the shortest beginning that makes no column, and the reason."""
    good, bad, reason = 0, len(values) - 1, ""
    while good <= bad:
        middle = (good + bad) // 2
        try:
            column(values[: middle + 1])
            good = middle + 1
        except _Failure as error:
            bad, reason = middle - 1, str(error)
    return good, reason


def _column(
    name: str, before: pa.DataType, is_known: bool, values: Sequence[Any]
) -> tuple[pa.Array, pa.DataType]:
    """Return values as an array, and the type of the column so far; raise one of `_Failure`."""
    is_nested = all(value is None or isinstance(value, list | dict) for value in values)
    try:
        is_text = before == JSON_TEXT and is_nested
        made = pa.null() if is_text else _type_of(name, values)
        if made == pa.int64() and max(n for n in values if n is not None) >= _HALF:
            made = pa.uint64()
        kind = _joined(name, before, made)
        if is_known and kind != before:
            raise _MixedError(f"column {name!r} was {before} and is {kind}")
        if kind == pa.float64():
            values = [_as_float(name, value) for value in values]
        if kind in _WHOLE:
            _check_whole(name, kind, values)
        if kind != JSON_TEXT:
            return pa.array(values, kind), kind
    except _Failure as error:
        is_plain = not (before in (JSON_TEXT, pa.null()) or pa.types.is_nested(before))
        if is_plain or not is_nested:
            raise
        if is_known:
            # what other blocks and files hold is known by now, and has made the type
            raise _MixedError(
                f"column {name!r} is {before}, which changes a number here; write its numbers "
                "as texts"
            ) from error
    texts = [None if value is None else _as_text(name, value) for value in values]
    return pa.array(texts, pa.string()), JSON_TEXT


def _type_of(name: str, values: Iterable[Any]) -> pa.DataType:
    """Return the type of a column of these values; pa.array takes true for a number in some."""
    values = [value for value in values if value is not None]
    kinds = {type(value) for value in values}
    if kinds == {list}:
        return pa.list_(_type_of(name, chain.from_iterable(values)))
    if kinds == {dict}:
        fields: dict[str, list[Any]] = {}
        for value in values:
            for key, item in value.items():
                fields.setdefault(key, []).append(item)
        return pa.struct([(key, _type_of(name, items)) for key, items in fields.items()])
    if kinds == {int, float}:
        return pa.float64()
    if len(kinds) > 1:
        words = sorted(_WORDS[kind] for kind in kinds)
        raise _MixedError(
            f"column {name!r} holds {' and '.join(dict.fromkeys(words))}; make them one type, or "
            "leave the column out (columns)"
        )
    return _TYPES[kinds.pop()] if kinds else pa.null()


def _check_whole(name: str, kind: pa.DataType, values: Iterable[int | None]) -> None:
    for value in values:
        if value is not None and value not in _WHOLE[kind]:
            is_negative = -_HALF <= value < 0
            why = "is below 0 beside others above 2^63 - 1" if is_negative else "has over 64 bits"
            raise _MixedError(f"column {name!r}: {value} {why}; write its numbers as texts")


def _as_float(name: str, value: float | None) -> float | None:
    try:
        if value is None or float(value) == value or value != value:
            return None if value is None else float(value)
    except OverflowError:
        pass
    raise _MixedError(
        f"column {name!r} has fractions beside whole numbers, and float64 would change "
        f"{value}; write them as texts"
    )


def _as_text(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise _MixedError(
            f"column {name!r} is read as JSON texts, which have neither NaN nor Infinity; write "
            "null in their place"
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("a key is there twice in one object")
    return named


# control characters in texts are what Arrow's parser takes as well
_DECODER = json.JSONDecoder(object_pairs_hook=_object, strict=False)


def _reason(error: ValueError) -> str:
    """Return what is wrong with a line that could not be decoded."""
    if isinstance(error, json.JSONDecodeError):
        told = "another value follows the object" if error.msg == "Extra data" else error.msg
        return f"not valid JSON: {told} (column {error.colno}){_MEND}"
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return (
            f"byte 0x{byte:02x} at column {error.start + 1} is not UTF-8; if the file is Latin-1, "
            "`iconv -f LATIN1 -t UTF-8` writes it as UTF-8"
        )
    if isinstance(error, UnicodeEncodeError):
        return f"half of a surrogate pair, which is no text{_MEND}"
    is_long = str(error).startswith("Exceeds the limit")  # names a function of Python
    return f"{'a number has thousands of digits' if is_long else error}{_MEND}"


def _broken(path: str, number: int, line: bytes, reason: str) -> BadFileError:
    text = line.decode("utf-8", "backslashreplace")
    shown = text[:80] + "..." * (len(text) > 80)
    where = f"line {number}: {reason}"
    return BadFileError(
        f"source file {safe_text(path)}, {where} (skip_bad_files leaves out the file). The line "
        f"is {shown!r}",
        where,
    )
