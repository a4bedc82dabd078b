"""Reads CSV files, compressed or not, as Arrow tables, block by block, with Arrow's parser."""

import csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import dropwhile
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as pac

from raybatch.errors import RaybatchError, error_text
from raybatch.inputs.file_errors import check_values, unreadable
from raybatch.inputs.text_blocks import ScannedText, text_chunks

# bytes of one parse; a longer row is refused
BLOCK_BYTES = 16 << 20
_NUMBERS = (pa.int64(), pa.float64())
_CONVERT = "convert it to UTF-8, as with `iconv -f UTF-16 -t UTF-8` or `-f LATIN1`"
_TOO_LONG = "a row has more than 16 MiB"


def scan_csv(
    path: str, *, columns: Sequence[str] | None = None, max_decompressed_bytes: int | None = None
) -> ScannedText:
    """Read a file once, and return its schema and size.

    A column has numbers, int64 or float64, if each of its values is a number that is written like
    this, or is empty; all others have text. The size is that of `columns`; None: of all.

    Raises:
        BadFileError: rows have different numbers of values, or a compressed file is truncated.
        ConfigError: a compressed file grows beyond its limit.
    """
    names, num_rows = _checked(path, max_decompressed_bytes)
    chosen = [name for name in names if columns is None or name in columns]
    kinds = {name: set(_NUMBERS) for name in chosen}
    has_values, num_read, num_bytes = set[str](), 0, 0
    for table in _texts(path, names, chosen, max_decompressed_bytes) if num_rows else ():
        for name in chosen:
            values = table.column(name)
            values = values.filter(pc.not_equal(values, ""))
            has_values |= {name} if len(values) else set()
            kinds[name] -= {kind for kind in kinds[name] if not _is_written_as(values, kind)}
            num_bytes += table.column(name).nbytes
        num_read += table.num_rows
    if num_read != num_rows:
        raise unreadable(path, f"Arrow reads {num_read} rows, and Python {num_rows}")
    fields = {
        # without a value it has any type
        name: next((kind for kind in _NUMBERS if kind in kinds.get(name, ())), pa.string())
        if name in has_values or name not in kinds
        else pa.null()
        for name in names
    }
    return ScannedText(pa.schema(fields), num_rows, num_bytes)


def _checked(path: str, max_bytes: int | None) -> tuple[list[str], int]:
    """Return the names of the columns and the number of rows, by Python's parser.

    Unlike Arrow's it refuses text after a closing quote, and a quote that is never closed.
    """
    try:
        rows = _rows(path, max_bytes)
        if (names := next(rows, None)) is None:
            raise unreadable(path, "it is empty, without names of columns")
        if any("\0" in name for name in names):
            raise unreadable(path, f"it is no text in UTF-8; {_CONVERT}")
        if twice := [name for name, number in Counter(names).items() if number > 1]:
            raise unreadable(path, f"several columns have the name {twice[0]!r}")
        # Arrow takes a blank line for a value only if there is one column
        return names, sum(1 for row in rows if row or len(names) == 1)
    except UnicodeDecodeError as error:
        raise unreadable(path, f"{error_text(error)}; {_CONVERT}") from error
    except csv.Error as error:
        raise unreadable(path, f"{error_text(error)} (quotes in values are doubled)") from error


def _rows(path: str, max_bytes: int | None) -> Iterator[list[str]]:
    """Return the rows of a file as Python reads them, from that of the names on."""
    # of the process, since readers have none: longer values than 128 KiB are usual
    csv.field_size_limit(max(csv.field_size_limit(), BLOCK_BYTES))
    chunks = io.BufferedReader(_Chunks(text_chunks(path, BLOCK_BYTES, max_bytes)))
    lines = io.TextIOWrapper(chunks, encoding="utf-8-sig", newline="")
    rows = csv.reader(lines, delimiter=_separator(path), strict=True)
    return dropwhile(lambda row: not row, rows)


def _separator(path: str) -> str:
    name = path.lower().removesuffix(".gz").removesuffix(".zst")
    return "\t" if name.endswith(".tsv") else ","


def read_csv(path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of a scanned file; `schema` has the columns to read, with their types."""
    # the scan has checked the decompressed size, and `read_slice` counts the rows
    names = next(_rows(path, sys.maxsize), [])
    # files of one source need not have all of its columns
    chosen = [name for name in names if name in schema.names]
    for table in _texts(path, names, chosen, sys.maxsize):
        for place, name in enumerate(chosen):
            if (kind := schema.field(name).type) != pa.string():
                numbers = _numbers(path, table.column(place), kind)
                table = table.set_column(place, name, numbers)
        yield table


def joined_columns(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the columns of two files; text where a column has two types."""
    kinds = {field.name: field.type for field in one}
    for field in other:
        found = {kinds.get(field.name, field.type), field.type} - {pa.null()}
        kinds[field.name] = pa.string() if len(found) > 1 else next(iter(found), pa.null())
    return pa.schema(kinds.items())


def _numbers(path: str, texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if not _is_written_as(texts.filter(pc.not_equal(texts, "")), kind):
        raise unreadable(path, "it has changed since it was scanned")
    return pc.if_else(pc.equal(texts, ""), pa.scalar(None, pa.string()), texts).cast(kind)


def _is_written_as(texts: pa.ChunkedArray, kind: pa.DataType) -> bool:
    """Return whether texts are numbers of a type that Python writes exactly like this."""
    try:
        numbers = texts.cast(kind)
    except pa.ArrowInvalid:
        return False
    if kind == pa.int64():
        return bool(numbers.cast(pa.string()).equals(texts))
    return bool(list(map(str, numbers.to_pylist())) == texts.to_pylist())


def _texts(
    path: str, names: list[str], chosen: list[str], max_bytes: int | None
) -> Iterator[pa.Table]:
    """Yield the values of the `chosen` of all columns as text, block by block."""
    try:
        reader = pac.open_csv(
            _Chunks(text_chunks(path, BLOCK_BYTES, max_bytes)),
            pac.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
            pac.ParseOptions(
                delimiter=_separator(path),
                newlines_in_values=True,
                ignore_empty_lines=len(names) > 1,
            ),
            pac.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=chosen or names[:1],  # none stands for all
            ),
        )
        for batch in reader:
            check_values(batch)
            yield pa.Table.from_batches([batch]).select(chosen)
    except RaybatchError:
        raise
    except pa.ArrowInvalid as error:
        text = error_text(error)
        raise unreadable(path, _TOO_LONG if "straddling" in text else text) from error


class _Chunks(io.RawIOBase):
    """A file of which the pieces are given."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks, self._left = chunks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401
        while not self._left:
            following = next(self._chunks, None)
            if following is None:
                return 0
            self._left = memoryview(following)
        size = min(len(buffer), len(self._left))
        buffer[:size], self._left = self._left[:size], self._left[size:]
        return size
