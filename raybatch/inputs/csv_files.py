"""Reads CSV files, compressed or not, as Arrow tables, block by block, with Arrow's parser."""

import codecs
import csv as python_csv
import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from raybatch.errors import RaybatchError, error_text
from raybatch.inputs.file_errors import check_values, unreadable
from raybatch.inputs.text_blocks import ScannedText, text_chunks

# bytes of one parse; a longer row is refused
BLOCK_BYTES = 16 << 20
_NUMBERS = (pa.int64(), pa.float64())
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_TOO_LONG = "a row has more than 16 MiB, or a quote that opens a value is never closed"


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
    kinds: dict[str, set[pa.DataType]] = {}
    has_values, num_rows, num_bytes = set[str](), 0, 0
    for table in _texts(path, None, max_decompressed_bytes):
        kinds = kinds or {name: set(_NUMBERS) for name in table.column_names}
        for name in kinds if columns is None else kinds.keys() & set(columns):
            values = table.column(name)
            values = values.filter(pc.not_equal(values, ""))
            has_values |= {name} if len(values) else set()
            kinds[name] -= {kind for kind in kinds[name] if not _is_written_as(values, kind)}
            num_bytes += table.column(name).nbytes
        num_rows += table.num_rows
    fields = {
        name: next((kind for kind in _NUMBERS if kind in left and name in has_values), pa.string())
        for name, left in kinds.items()
    }
    return ScannedText(pa.schema(fields), num_rows, num_bytes)


def read_csv(path: str, schema: pa.Schema) -> Iterator[pa.Table]:
    """Yield the rows of a scanned file; `schema` has the columns to read, with their types."""
    # the scan has checked the decompressed size, and `read_slice` counts the rows
    for table in _texts(path, schema, sys.maxsize):
        fields = [schema.field(name) for name in table.column_names]
        columns = [
            texts if field.type == pa.string() else _numbers(texts, field.type)
            for texts, field in zip(table.columns, fields, strict=True)
        ]
        yield pa.Table.from_arrays(columns, schema=pa.schema(fields))


def joined_columns(one: pa.Schema, other: pa.Schema) -> pa.Schema:
    """Return the columns of two files; text where a column has two types."""
    kinds = {field.name: field.type for field in one}
    for field in other:
        kind = kinds.setdefault(field.name, field.type)
        kinds[field.name] = kind if kind == field.type else pa.string()
    return pa.schema(kinds.items())


def _numbers(texts: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
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


def _texts(path: str, schema: pa.Schema | None, max_bytes: int | None) -> Iterator[pa.Table]:
    """Yield the values of a file as text, block by block; `schema` has the columns, None: all.

    The first table has no rows.
    """
    chunks = text_chunks(path, BLOCK_BYTES, max_bytes)
    first = next(chunks, b"")
    if first.startswith(_UTF16) or b"\0" in first[:4]:
        raise unreadable(path, "it is UTF-16 or UTF-32; convert it with `iconv -f UTF-16 -t UTF-8`")
    if not first:
        raise unreadable(path, "it is empty (0 bytes)")
    plain_name = path.lower().removesuffix(".gz").removesuffix(".zst")
    separator = "\t" if plain_name.endswith(".tsv") else ","
    names = _names(first, separator)
    if twice := [name for name, number in Counter(names).items() if number > 1]:
        raise unreadable(path, f"several columns have the name {twice[0]!r}")
    try:
        reader = csv.open_csv(
            _Chunks(first, chunks),
            csv.ReadOptions(block_size=BLOCK_BYTES, use_threads=False),
            csv.ParseOptions(delimiter=separator, newlines_in_values=True),
            csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                include_columns=[n for n in names if schema is None or n in schema.names],
            ),
        )
        yield reader.schema.empty_table()
        for batch in reader:
            check_values(batch)
            yield pa.Table.from_batches([batch])
    except RaybatchError:
        raise
    except pa.ArrowInvalid as error:
        text = error_text(error)
        raise unreadable(path, _TOO_LONG if "straddling" in text else text) from error


def _names(first: bytes, separator: str) -> list[str]:
    """Return the names of the columns, which Arrow only tells with types that it has guessed."""
    text = first[:BLOCK_BYTES].decode("utf-8-sig", errors="replace")
    rows = python_csv.reader(io.StringIO(text, newline=""), delimiter=separator)
    return next(filter(None, rows), [])


class _Chunks:
    """The file that Arrow reads, from chunks of its content."""

    closed = False

    def __init__(self, first: bytes, others: Iterator[bytes]) -> None:
        self._left, self._others = first, others

    def read(self, size: int = -1) -> bytes:
        while not self._left:
            following = next(self._others, None)
            if following is None:
                return b""
            self._left = following
        size = len(self._left) if size < 0 else size
        data, self._left = self._left[:size], self._left[size:]
        return data
