"""Reads JSON lines, compressed or not, as Arrow tables; errors name the file and the line."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

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
from raybatch.inputs.text_blocks import JSON_ARRAY, OVER_LINES, ScannedText, read_blocks

# bytes of one parse: large enough to keep its threads busy, small compared with a row batch
BLOCK_BYTES = 16 << 20
# maximum block size of Arrow
_MAX_BLOCK_BYTES = (1 << 31) - 1
_LINE = re.compile(rb"[^\r\n]+")
_BLANKS = b" \t"
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_OPENING, _CLOSING = list(b"[{"), list(b"]}")
# block of one thread of Arrow's parser
_ARROW_BLOCK_BYTES = 1 << 20
# float64 represents every whole number up to _EXACT, int64 those below _HALF
_EXACT, _HALF = 2.0**53, 1 << 63
_WHOLE = {pa.int64(): range(-_HALF, _HALF), pa.uint64(): range(2 * _HALF)}
_TYPES = {bool: pa.bool_(), int: pa.int64(), float: pa.float64(), str: pa.string()}
_WORDS: Mapping[type, str] = {
    **{bool: "true or false", int: "numbers", float: "numbers"},
    **{str: "texts", list: "lists", dict: "objects"},
}
# type of a column whose values have no common Arrow type; they are stored as JSON texts
JSON_TEXT = pa.json_(pa.string())
_MEND = "; fix or remove the line"


class _MixedError(ValueError):
    """No Arrow type represents all values exactly."""


_Failure = (
    *(pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError),
    _MixedError,
)


def scan_json_lines(
    path: str,
    *,
    columns: Sequence[str] | None = None,
    block_bytes: int = BLOCK_BYTES,
    max_decompressed_bytes: int | None = None,
) -> ScannedText:
    """Read a file once, and return the common schema of its lines and its size.

    Each line is a row; blank lines are skipped. A file without rows has no columns. The
    size is that of `columns`; None: of all. Memory: one block.

    Raises:
        BadFileError: a line is not one JSON object, a column of plain values has several types, or
            a compressed file is truncated or corrupt.
        ConfigError: a compressed file grows beyond its limit.
    """
    blocks = read_blocks(
        path, block_bytes=block_bytes, max_decompressed_bytes=max_decompressed_bytes
    )
    schema, num_lines, num_rows, num_bytes = pa.schema([]), 0, 0, 0
    is_widened = False
    for data in blocks:
        before, (table, schema) = schema, _table_of(path, data, num_lines, schema, columns=columns)
        is_widened |= any(
            field.type not in (pa.null(), schema.field(field.name).type) for field in before
        )
        num_lines += _num_lines(data)
        num_rows += table.num_rows
        num_bytes += table.nbytes
    # a whole number of a block may be none of a column that got fractions in a later one
    read = pa.schema([schema.field(name) for name in _chosen(schema.names, columns)])
    for _ in read_json_lines(path, read, block_bytes=block_bytes) if is_widened else ():
        pass
    return ScannedText(schema, num_rows, num_bytes)


def read_json_lines(
    path: str, schema: pa.Schema | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """Yield the rows of one file, block by block; texts that look like dates stay texts.

    `schema` has the columns to read with the types of the scan; None if the file is one block.
    """
    num_lines = 0
    # the scan has checked the decompressed size, and `read_slice` counts the rows
    for data in read_blocks(path, block_bytes=block_bytes, max_decompressed_bytes=sys.maxsize):
        table, _ = _table_of(path, data, num_lines, schema or pa.schema([]), is_known=bool(schema))
        num_lines += _num_lines(data)
        if table.num_rows:
            yield table


def _chosen(names: Iterable[str], columns: Sequence[str] | None) -> list[str]:
    return [name for name in names if columns is None or name in columns]


def joined_schema(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the columns of both schemas, each with a type that holds the values of both.

    Columns of lists or objects without such a type are `JSON_TEXT`.

    Raises:
        ValueError: a column of plain values has no such type; the message names the column.
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
        return pa.uint64()  # pa.unify_schemas picks the narrower one
    try:
        both = [pa.schema([(name, kind)]) for kind in (one, other)]
        return pa.unify_schemas(both, promote_options="permissive").field(0).type
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        # plain texts in a JSON_TEXT column would all get quotes
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

    `schema` is that of earlier blocks, or of the whole file if it `is_known`. Columns outside of
    `columns` are not checked and have no values.
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
            pass  # the slow path below reads it, or names the broken line
    return _table_of_rows(path, data, num_lines, schema, columns, is_known)


def _count_lines(path: str, data: bytes, num_before: int) -> int:
    """Return the number of lines that are not blank; BadFileError: a line lacks outer braces.

    If one line ends with a brace and the next begins with one, no object spans both, since JSON
    has a comma or a key between two braces. So equal numbers of lines and objects mean one object
    per line.
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
    """Return the number of lines of `bytes.splitlines` without splitting."""
    num_ends = data.count(b"\n") + data.count(b"\r") - data.count(b"\r\n")
    return num_ends + bool(data) - data.endswith((b"\n", b"\r"))


def _plain_lines(data: bytes) -> int:
    """Return the number of lines if none looks blank or broken; 0 if one may be.

    Vectorized: a decompression bomb may have millions of lines in a block.
    """
    if b"\r" in data:
        return 0
    signs = np.frombuffer(data if data.endswith(b"\n") else data + b"\n", np.uint8)
    ends = np.flatnonzero(signs == ord("\n"))
    starts = np.concatenate(([0], ends[:-1] + 1))
    # a line of one byte is no object; before the end of a blank line stands the line above
    is_odd = (signs[starts] != ord("{")) | (signs[ends - 1] != ord("}"))
    if is_odd.any() or (ends - starts < 2).any():
        return 0
    opened = ((signs == _OPENING[0]) | (signs == _OPENING[1])).view(np.uint8)
    is_deep = (np.add.reduceat(opened, starts, dtype=np.int32) > MAX_DEPTH).any()
    return 0 if is_deep else len(ends)


def nesting_depth(line: bytes) -> int:
    """Return how deep the brackets of a JSON line are nested, without those in strings."""
    brackets = np.frombuffer(_TEXT.sub(b"", line), np.uint8)
    opened = np.isin(brackets, _OPENING).astype(np.int64) - np.isin(brackets, _CLOSING)
    return int(np.cumsum(opened).max(initial=0))


def _parse(data: bytes, num_rows: int, known: pa.Schema | None) -> pa.Table:
    """Parse a block with Arrow, and check the table; raise one of `_Failure`."""

    def read(schema: pa.Schema | None, block_bytes: int) -> pa.Table:
        options = paj.ReadOptions(block_size=min(block_bytes, _MAX_BLOCK_BYTES))
        others = "infer" if schema is None else "ignore"
        explicit = paj.ParseOptions(explicit_schema=schema, unexpected_field_behavior=others)
        return paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)

    # Arrow does not check that text is UTF-8
    pa.array([data], pa.large_binary()).cast(pa.large_string())
    block_bytes = _ARROW_BLOCK_BYTES
    try:
        table = read(known, block_bytes)
    except pa.ArrowInvalid:
        # a line longer than Arrow's block fails like a broken one
        block_bytes = len(data) + 1
        table = read(known, block_bytes)
    if known is None:
        schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
        # with inferred types, lists that begin with null get wrong values or none
        # (apache/arrow#51305)
        if not schema.equals(table.schema) or any(map(pa.types.is_nested, schema.types)):
            table = read(schema, block_bytes)
    if table.num_rows != num_rows:
        raise _MixedError("a line holds several JSON objects; write each into a separate line")
    check_values(table)
    if any(map(_has_large, table.columns)):
        raise _MixedError("a whole number may be too large for float64, which would change it")
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
    """Do the work of `_table_of` line by line, for blocks that Arrow's parser refuses."""
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
    """Return the index of the first value that makes `column` fail, and the reason."""
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
            raise _MixedError(
                f"column {name!r} was {before} when the source was scanned, and now holds {kind}"
            )
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
            # the type follows from other blocks and files
            raise _MixedError(
                f"column {name!r} is read as {before}, which cannot hold a number of this line; "
                "write its numbers as texts"
            ) from error
    texts = [None if value is None else _as_text(name, value) for value in values]
    return pa.array(texts, pa.string()), JSON_TEXT


def _type_of(name: str, values: Iterable[Any]) -> pa.DataType:
    """Return the type of a column of these values; pa.array would accept true as a number."""
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
            why = "is below 0 and others above 2^63 - 1" if is_negative else "has over 64 bits"
            raise _MixedError(f"column {name!r}: {value} {why}; write its numbers as texts")


def _as_float(name: str, value: float | None) -> float | None:
    try:
        if value is None or float(value) == value or value != value:
            return None if value is None else float(value)
    except OverflowError:
        pass
    raise _MixedError(
        f"column {name!r} mixes fractions and whole numbers, and float64 would change {value}; "
        "write its numbers as texts"
    )


def _as_text(name: str, value: object) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise _MixedError(
            f"column {name!r} is read as JSON texts, which cannot hold NaN or Infinity; write null "
            "instead"
        ) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("an object has a key twice")
    return named


# accepts control characters in texts, as Arrow's parser does
_DECODER = json.JSONDecoder(object_pairs_hook=_object, strict=False)


def _reason(error: ValueError) -> str:
    """Return why a line could not be decoded."""
    if isinstance(error, json.JSONDecodeError):
        message = "another value follows the object" if error.msg == "Extra data" else error.msg
        return f"not valid JSON: {message} (column {error.colno}){_MEND}"
    if isinstance(error, UnicodeDecodeError):
        byte = error.object[error.start]
        return (
            f"byte 0x{byte:02x} at column {error.start + 1} is not UTF-8; if the file is Latin-1, "
            "convert it with `iconv -f LATIN1 -t UTF-8`"
        )
    if isinstance(error, UnicodeEncodeError):
        return f"half of a surrogate pair is no valid text{_MEND}"
    is_long = str(error).startswith("Exceeds the limit")  # Python's message names a function
    return f"{'a number has thousands of digits' if is_long else error}{_MEND}"


def _broken(path: str, number: int, line: bytes, reason: str) -> BadFileError:
    text = line.decode("utf-8", "backslashreplace")
    shown = text[:80] + "..." * (len(text) > 80)
    where = f"line {number}: {reason}"
    return BadFileError(
        f"source file {safe_text(path)}, {where} (or skip the file with skip_bad_files). The line "
        f"is {shown!r}",
        where,
    )
