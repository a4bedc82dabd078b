"""JSON lines as Arrow tables; a broken line is an error that names the file and the line."""

import codecs
import re
from collections.abc import Sequence
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.json as paj

from raybatch.stages.arrow_types import MAX_DEPTH
from raybatch.stages.file_errors import BadFileError, safe_text

# what Arrow takes at most as one block
_MAX_BLOCK_BYTES = (1 << 31) - 1
_LINE = re.compile(rb"[^\r\n]+")
_BLANKS = b" \t"
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_OPENING, _CLOSING = list(b"[{"), list(b"]}")


class _SeveralObjectsError(ValueError):
    """Some line holds more than one object."""


_Failure = (pa.ArrowInvalid, pa.ArrowNotImplementedError, _SeveralObjectsError)


def read_json_lines(path: str) -> pa.Table:
    """Return the rows of one file; a text that looks like a date stays the text that it is.

    A line is a row, except that blank lines are none. A file without a row is a table without
    columns.

    Args:
        path: with its protocol.

    Raises:
        BadFileError: a line is not one JSON object, or its values do not fit those of the lines
            before.

    Memory: the whole file.
    """
    with fsspec.open(path, "rb") as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
    num_rows = _count_lines(path, data)
    if not num_rows:
        return pa.table({})
    try:
        return _parse(data, num_rows)
    except _Failure as error:
        cause = error
    # a line that is longer than a block of Arrow's fails like a broken one
    try:
        return _parse(data, num_rows, block_bytes=len(data))
    except _Failure as error:
        cause = error
    raise _explained(path, data.splitlines(), cause)


def _count_lines(path: str, data: bytes) -> int:
    """Return the number of lines that are not blank, each of which has the braces of an object.

    Where one line ends in a brace and the next one begins with one, no object spans both: JSON has
    something between two braces inside of one. So that many objects are one object per line.

    Raises:
        BadFileError: a line does not begin and end with the braces of an object.
    """
    num_lines = 0
    for match in _LINE.finditer(data):
        line = match.group().strip(_BLANKS)
        if not line:
            continue
        if not (line.startswith(b"{") and line.endswith(b"}")):
            number = len(data[: match.start()].splitlines()) + 1
            raise _broken(path, number, match.group(), "no JSON object")
        if line.count(b"[") + line.count(b"{") > MAX_DEPTH and nesting_depth(line) > MAX_DEPTH:
            number = len(data[: match.start()].splitlines()) + 1
            reason = f"nested deeper than {MAX_DEPTH} levels"
            raise _broken(path, number, match.group(), reason)
        num_lines += 1
    return num_lines


def nesting_depth(line: bytes) -> int:
    """Return how deep the brackets outside of texts are nested."""
    brackets = np.frombuffer(_TEXT.sub(b"", line), np.uint8)
    opened = np.isin(brackets, _OPENING).astype(np.int64) - np.isin(brackets, _CLOSING)
    return int(np.cumsum(opened).max(initial=0))


def _parse(data: bytes, num_rows: int, *, block_bytes: int | None = None) -> pa.Table:
    options = None
    if block_bytes is not None:
        options = paj.ReadOptions(block_size=min(block_bytes + 1, _MAX_BLOCK_BYTES))
    table = paj.read_json(pa.BufferReader(data), read_options=options)
    if table.num_rows != num_rows:
        raise _SeveralObjectsError("several JSON objects")
    schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
    if schema.equals(table.schema):
        return table
    explicit = paj.ParseOptions(explicit_schema=schema)
    return paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)


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
    cause: Any,  # noqa: ANN401 - of Arrow
) -> BadFileError:
    """Name the last line of the shortest beginning of the file that does not parse."""
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        found = _failure_of(lines[:middle])
        if found is None:
            good = middle
        else:
            bad, cause = middle, found
    # the number of a row that Arrow names is that of a block
    reason = str(cause).splitlines()[0].partition(" in row ")[0]
    return _broken(path, bad, lines[bad - 1], reason)


def _failure_of(lines: Sequence[bytes]) -> Exception | None:
    data = b"\n".join(lines)
    num_rows = sum(1 for line in lines if line.strip(_BLANKS))
    try:
        if num_rows:
            _parse(data, num_rows, block_bytes=len(data))
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
