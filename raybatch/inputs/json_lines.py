"""JSON lines as Arrow tables; a broken line is an error that names the file and the line."""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as paj

from raybatch.inputs.arrow_types import MAX_DEPTH
from raybatch.inputs.file_errors import BadFileError, safe_text
from raybatch.inputs.json_bytes import BLOCK_BYTES, read_blocks

# what Arrow takes at most as one block
_MAX_BLOCK_BYTES = (1 << 31) - 1
_LINE = re.compile(rb"[^\r\n]+")
_BLANKS = b" \t"
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_OPENING, _CLOSING = list(b"[{"), list(b"]}")
# float64 has every whole number up to here
_EXACT = 2.0**53


class _SeveralObjectsError(ValueError):
    """Some line holds more than one object."""


class _ChangedNumberError(ValueError):
    """A whole number would be another one in the column that Arrow makes."""


_Failure = (
    pa.ArrowInvalid,
    pa.ArrowTypeError,
    pa.ArrowNotImplementedError,
    _SeveralObjectsError,
    _ChangedNumberError,
)


class JsonFile(NamedTuple):
    """What reading through a file tells.

    Args:
        num_bytes: of the rows in memory, of the chosen columns.
    """

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

    A line is a row, except that blank lines are none. A file without a row has no columns.

    Args:
        columns: whose size is asked for; None takes all.

    Raises:
        BadFileError: a line is not one JSON object, its values do not fit those of the lines
            before, or a compressed file is cut or broken.
        ConfigError: a compressed file grows beyond its limit.

    Memory: a block.
    """
    blocks = read_blocks(
        path, block_bytes=block_bytes, max_decompressed_bytes=max_decompressed_bytes
    )
    file, num_lines = JsonFile(pa.schema([]), 0, 0, 0), 0
    for data in blocks:
        table = _table_of(path, data, num_lines, file.schema)
        num_lines += _num_lines(data)
        chosen = [n for n in table.column_names if columns is None or n in columns]
        file = JsonFile(
            _both(file.schema, table.schema),
            file.num_rows + table.num_rows,
            file.num_bytes + table.select(chosen).nbytes,
            file.num_blocks + 1,
        )
    return file


def read_json_lines(
    path: str, schema: pa.Schema | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """Yield the rows of one file; a text that looks like a date stays the text that it is.

    Args:
        schema: of the scan; None where the file is one block.

    Raises:
        BadFileError: the file is not what it was when it was scanned.

    Memory: a block.
    """
    num_lines = 0
    # the scan has checked how far a file grows, and `read_slice` counts the rows
    for data in read_blocks(path, block_bytes=block_bytes, max_decompressed_bytes=sys.maxsize):
        table = _table_of(path, data, num_lines, schema or pa.schema([]), is_known=bool(schema))
        num_lines += _num_lines(data)
        if table.num_rows:
            yield table


def _table_of(
    path: str, data: bytes, num_lines: int, schema: pa.Schema, *, is_known: bool = False
) -> pa.Table:
    """Return the rows of a block.

    Args:
        schema: of the blocks before, or of the whole file.
        is_known: it is of the whole file, and no type is left to find.
    """
    num_rows = _count_lines(path, data, num_lines)
    if not num_rows:
        return pa.table({})
    known = schema if is_known else None
    # a line that is longer than a block of Arrow's fails like a broken one
    for block_bytes in (None, len(data)):
        try:
            table = _parse(data, num_rows, block_bytes=block_bytes, schema=known)
            _both(schema, table.schema)
        except _Failure as error:
            cause = error
        else:
            return table
    raise _explained(path, data.splitlines(), num_lines, schema, cause)


def _both(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    return pa.unify_schemas([one, other], promote_options="permissive")


def _count_lines(path: str, data: bytes, num_before: int) -> int:
    """Return the number of lines that are not blank, each of which has the braces of an object.

    Where one line ends in a brace and the next one begins with one, no object spans both: JSON has
    something between two braces inside of one. So that many objects are one object per line.

    Raises:
        BadFileError: a line does not begin and end with the braces of an object.
    """
    if num_lines := _plain_lines(data):
        return num_lines
    for match in _LINE.finditer(data):
        line = match.group().strip(_BLANKS)
        if not line:
            continue
        reason = None
        if not (line.startswith(b"{") and line.endswith(b"}")):
            reason = "no JSON object"
        elif line.count(b"[") + line.count(b"{") > MAX_DEPTH and nesting_depth(line) > MAX_DEPTH:
            reason = f"nested deeper than {MAX_DEPTH} levels"
        if reason is not None:
            number = num_before + _num_lines(data[: match.start()]) + 1
            raise _broken(path, number, match.group(), reason)
        num_lines += 1
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
    if (ends - starts < 2).any() or (signs[starts] != ord("{")).any():
        return 0
    if (signs[ends - 1] != ord("}")).any():
        return 0
    opened = ((signs == _OPENING[0]) | (signs == _OPENING[1])).view(np.uint8)
    is_deep = (np.add.reduceat(opened, starts, dtype=np.int32) > MAX_DEPTH).any()
    return 0 if is_deep else len(ends)


def nesting_depth(line: bytes) -> int:
    """Return how deep the brackets outside of texts are nested."""
    brackets = np.frombuffer(_TEXT.sub(b"", line), np.uint8)
    opened = np.isin(brackets, _OPENING).astype(np.int64) - np.isin(brackets, _CLOSING)
    return int(np.cumsum(opened).max(initial=0))


def _parse(
    data: bytes, num_rows: int, *, block_bytes: int | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    options, explicit = None, paj.ParseOptions(explicit_schema=schema)
    if block_bytes is not None:
        options = paj.ReadOptions(block_size=min(block_bytes + 1, _MAX_BLOCK_BYTES))
    table = paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)
    if table.num_rows != num_rows:
        raise _SeveralObjectsError("several JSON objects")
    schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
    if not schema.equals(table.schema):
        explicit = paj.ParseOptions(explicit_schema=schema)
        table = paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)
    if (number := changed_number(table, data)) is not None:
        raise _ChangedNumberError(
            f"the whole number {number} stands beside fractions, or is beyond 64 bits, and a "
            "column of float64 would change it"
        )
    return table


def _without_dates(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_without_dates(f.type)) for f in kind])
    return kind


def _explained(
    path: str,
    lines: Sequence[bytes],
    num_before: int,
    schema: pa.Schema,
    cause: Any,  # noqa: ANN401 - of Arrow
) -> BadFileError:
    """Name the last line of the shortest beginning of a block that does not parse."""
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        failure = _failure_of(lines[:middle], schema)
        if failure is None:
            good = middle
        else:
            bad, cause = middle, failure
    # the number of a row that Arrow names is that of a block
    reason = str(cause).splitlines()[0].partition(" in row ")[0]
    return _broken(path, num_before + bad, lines[bad - 1], reason)


def _failure_of(lines: Sequence[bytes], schema: pa.Schema) -> Exception | None:
    data = b"\n".join(lines)
    num_rows = sum(1 for line in lines if line.strip(_BLANKS))
    try:
        if num_rows:
            _both(schema, _parse(data, num_rows, block_bytes=len(data)).schema)
    except _Failure as error:
        return error
    return None


def _broken(path: str, number: int, line: bytes, reason: str) -> BadFileError:
    text = line.decode("utf-8", "backslashreplace")
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    where = f"line {number}: {reason}"
    return BadFileError(
        f"source file {safe_text(path)}, {where}: {shown!r}; every line must be one JSON object "
        "whose values have the types of the lines before: mend or remove the line",
        where,
    )


def changed_number(table: pa.Table, data: bytes) -> int | None:
    """Return a whole number that its column holds as another one; None where none is.

    Arrow makes one column of float64 of whole numbers and fractions. Lines are looked at only where
    a value is beyond the whole numbers that float64 has all of.

    Args:
        data: the lines that it made it of.
    """
    kinds = {f.name: f.type for f in table.schema if _has_large(table.column(f.name))}
    if not kinds:
        return None
    for line in data.splitlines():
        try:
            row: dict[str, Any] = json.loads(line.decode("utf-8", "replace"), strict=False)
        except ValueError:  # blank, or what Arrow alone takes for JSON
            continue
        for name, kind in kinds.items():
            if (number := _changed(row.get(name), kind)) is not None:
                return number
    return None


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
    return next((number for number in inner if number is not None), None)


def _is_exact(number: int) -> bool:
    try:
        return int(float(number)) == number
    except OverflowError:
        return False
