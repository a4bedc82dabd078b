"""JSON lines, compressed or not, as Arrow tables.

A broken line is an error that names the file and the line.
"""

import codecs
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as paj

from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import MAX_DEPTH, BadFileError, safe_text, size_of, unreadable

# what one parse takes: large enough that its threads have work, small beside a row batch
BLOCK_BYTES = 16 << 20
# of a compressed file; a row may have far less by default (`max_row_bytes`)
MAX_LINE_BYTES = 256 << 20
# what every compressed file may grow to, and how many times its size a larger one may
LEAST_ALLOWED_BYTES = 1 << 30
MAX_GROWTH = 100

_CODECS = {".gz": "gzip", ".zst": "zstd"}
_MAGIC = {b"\x1f\x8b": ".gz", b"\x28\xb5\x2f\xfd": ".zst"}
# what Arrow takes at most as one block
_MAX_BLOCK_BYTES = (1 << 31) - 1
_LINE = re.compile(rb"[^\r\n]+")
_BLANKS = b" \t"
_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_OPENING, _CLOSING = list(b"[{"), list(b"]}")
# float64 has every whole number up to here
_EXACT = 2.0**53


class _WrongRowsError(ValueError):
    """A line holds several objects, or a whole number would be another one in Arrow's column."""


_both = partial(pa.unify_schemas, promote_options="permissive")
_Failure = (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, _WrongRowsError)


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
        BadFileError: a line is not one JSON object, its values do not fit those of the lines
            before, or a compressed file is cut or broken.
        ConfigError: a compressed file grows beyond its limit.
    """
    blocks = read_blocks(
        path, block_bytes=block_bytes, max_decompressed_bytes=max_decompressed_bytes
    )
    schema, num_lines, num_rows, num_bytes, num_blocks = pa.schema([]), 0, 0, 0, 0
    for data in blocks:
        table = _table_of(path, data, num_lines, schema)
        schema = _both([schema, table.schema])
        chosen = [n for n in table.column_names if columns is None or n in columns]
        num_lines += _num_lines(data)
        num_rows += table.num_rows
        num_bytes += table.select(chosen).nbytes
        num_blocks += 1
    return JsonFile(schema, num_rows, num_bytes, num_blocks)


def read_json_lines(
    path: str, schema: pa.Schema | None = None, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.Table]:
    """Yield the rows of one file, block by block; a text that looks like a date stays a text.

    `schema` is that of the scan; None where the file is one block.
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

    `schema` is of the blocks before, or, where it `is_known`, of the whole file.
    """
    if not (num_rows := _count_lines(path, data, num_lines)):
        return pa.table({})
    known = schema if is_known else None
    # a line that is longer than a block of Arrow's fails like a broken one
    for block_bytes in (None, len(data)):
        try:
            table = _parse(data, num_rows, block_bytes=block_bytes, schema=known)
            _both([schema, table.schema])
            return table
        except _Failure as error:
            cause: Exception = error
    raise _explained(path, data.splitlines(), num_lines, schema, cause)


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
            reason = "no JSON object"
        elif line.count(b"[") + line.count(b"{") > MAX_DEPTH and nesting_depth(line) > MAX_DEPTH:
            reason = f"nested deeper than {MAX_DEPTH} levels"
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


def _parse(
    data: bytes, num_rows: int, *, block_bytes: int | None = None, schema: pa.Schema | None = None
) -> pa.Table:
    options, explicit = None, paj.ParseOptions(explicit_schema=schema)
    if block_bytes is not None:
        options = paj.ReadOptions(block_size=min(block_bytes + 1, _MAX_BLOCK_BYTES))
    table = paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)
    if table.num_rows != num_rows:
        raise _WrongRowsError("several JSON objects")
    schema = pa.schema([f.with_type(_without_dates(f.type)) for f in table.schema])
    if not schema.equals(table.schema):
        explicit = paj.ParseOptions(explicit_schema=schema)
        table = paj.read_json(pa.BufferReader(data), read_options=options, parse_options=explicit)
    if (number := _changed_number(table, data)) is not None:
        raise _WrongRowsError(
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
    path: str, lines: Sequence[bytes], num_before: int, schema: pa.Schema, cause: Exception
) -> BadFileError:
    """Name the last line of the shortest beginning of a block that does not parse."""
    good, bad = 0, len(lines)
    while bad - good > 1:
        middle = (good + bad) // 2
        num_rows = sum(1 for line in lines[:middle] if line.strip(_BLANKS))
        data = b"\n".join(lines[:middle])
        try:
            if num_rows:
                _both([schema, _parse(data, num_rows, block_bytes=len(data)).schema])
            good = middle
        except _Failure as error:
            bad, cause = middle, error
    # the number of a row that Arrow names is that of a block
    reason = str(cause).splitlines()[0].partition(" in row ")[0]
    return _broken(path, num_before + bad, lines[bad - 1], reason)


def _broken(path: str, number: int, line: bytes, reason: str) -> BadFileError:
    text = line.decode("utf-8", "backslashreplace")
    shown = text[:80] + "..." * (len(text) > 80)
    where = f"line {number}: {reason}"
    return BadFileError(
        f"source file {safe_text(path)}, {where}: {shown!r}; every line must be one JSON object "
        "whose values have the types of the lines before: mend or remove the line (skip_bad_files "
        "leaves out the file)",
        where,
    )


def _changed_number(table: pa.Table, data: bytes) -> int | None:
    """Return a whole number of the lines that its column holds as another one; None where none is.

    Arrow makes one column of float64 of whole numbers and fractions. Lines are looked at only where
    a value is beyond the whole numbers that float64 has all of.
    """
    kinds = {f.name: f.type for f in table.schema if _has_large(table.column(f.name))}
    for line in data.splitlines() if kinds else ():
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
        return bool((np.abs(column.drop_null().to_numpy()) >= _EXACT).any())
    if pa.types.is_list(kind):
        return _has_large(pc.list_flatten(column))
    if pa.types.is_struct(kind):
        return any(_has_large(pc.struct_field(column, [i])) for i in range(kind.num_fields))
    return False


def _changed(value: Any, kind: pa.DataType) -> int | None:  # noqa: ANN401 - of JSON
    inner: list[int | None] = []
    if pa.types.is_floating(kind) and isinstance(value, int):
        try:
            return None if int(float(value)) == value else value
        except OverflowError:
            return value
    if pa.types.is_list(kind) and value is not None:
        inner = [_changed(item, kind.value_type) for item in value]
    elif pa.types.is_struct(kind) and value is not None:
        inner = [_changed(value.get(field.name), field.type) for field in kind]
    return next((number for number in inner if number is not None), None)


def read_blocks(
    path: str,
    *,
    block_bytes: int,
    max_line_bytes: int = MAX_LINE_BYTES,
    max_decompressed_bytes: int | None = None,
) -> Iterator[bytes]:
    """Yield the content of one file in order, decompressed as its name says, in whole lines.

    Memory: one block, and of a file that is not compressed its longest line. The limits are those
    of a compressed file; None allows it to grow to 1 GiB, and larger files a hundred times their
    size.

    Raises:
        BadFileError: a compressed file is cut or broken, or compressed in another way.
        ConfigError: a compressed file, or a line of it, grows beyond its limit.
    """
    left = b""
    codec = next((codec for end, codec in _CODECS.items() if path.lower().endswith(end)), None)
    for index, data in enumerate(_chunks(path, codec, block_bytes, max_decompressed_bytes)):
        if not index:
            for magic, suffix in _MAGIC.items():
                if data.startswith(magic):
                    twice = "compressed twice: decompress it once"
                    problem = "compressed" if codec is None else twice
                    raise unreadable(path, f"it is {problem}, and let its name end in {suffix}")
            data = data.removeprefix(codecs.BOM_UTF8)
        # cut where more follows, so that a last line without an end is no block of its own; the
        # end of a line may be two bytes, of which the second one comes with what follows
        end = left.rfind(b"\n") + 1 or left.rfind(b"\r", 0, -1) + 1
        if end:
            yield left[:end]
        left = left[end:] + data
        if len(left) > max_line_bytes + block_bytes and codec is not None:
            raise ConfigError(
                f"source file {safe_text(path)} has a line of more than {max_line_bytes:,} bytes "
                "when it is decompressed; write it again with shorter lines, or decompress it"
            )
    if left:
        yield left


def _chunks(
    path: str, codec: str | None, block_bytes: int, max_bytes: int | None
) -> Iterator[bytes]:
    with fsspec.open(path, "rb") as file:
        if codec is None:
            yield from iter(partial(file.read, block_bytes), b"")
            return
        stream = _Decompressed(file, codec, path, max_bytes)
        data = stream.read(block_bytes)
        # a file made to fill the memory is refused before its many rows are parsed
        if len(data) > MAX_GROWTH * file.tell():
            while stream.read(block_bytes):
                pass
            stream = _Decompressed(file, codec, path, max_bytes)
        else:
            yield data
        yield from iter(partial(stream.read, block_bytes), b"")


class _Watched(io.RawIOBase):
    """A file that knows whether reading it has failed, which is no fault of its content."""

    error: Exception | None = None

    def __init__(self, file: Any) -> None:  # noqa: ANN401
        self._file = file

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:
            self.error = error
            raise


class _Decompressed:
    """The decompressed bytes of a file, from its beginning; no more of them than are allowed."""

    def __init__(self, file: Any, codec: str, path: str, max_bytes: int | None) -> None:  # noqa: ANN401
        self._path, self._max_bytes = path, max_bytes
        self._num_stored, self._num_bytes = size_of(file, path), 0
        file.seek(0)
        self._file = _Watched(file)
        self._stream = pa.CompressedInputStream(pa.PythonFile(self._file, mode="r"), codec)

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes, none at the end; see `read_blocks` for what it raises."""
        try:
            data: bytes = self._stream.read(size)
        except (OSError, pa.ArrowException) as error:
            if self._file.error is not None:
                raise self._file.error from error
            raise unreadable(self._path, error_text(error)) from error
        self._num_bytes += len(data)
        limit = self._max_bytes or max(LEAST_ALLOWED_BYTES, MAX_GROWTH * self._num_stored)
        if self._num_bytes > limit:
            rule = f"{LEAST_ALLOWED_BYTES:,} bytes, or {MAX_GROWTH} times its size if that is more"
            by_default = f" by default ({rule})" if self._max_bytes is None else ""
            raise ConfigError(
                f"source file {safe_text(self._path)} has {self._num_stored:,} bytes and grows to "
                f"more than {limit:,} when it is decompressed, which is what "
                f"max_decompressed_bytes allows{by_default}; leave it out, or, if you know where "
                "it comes from, raise max_decompressed_bytes or decompress it"
            )
        return data
