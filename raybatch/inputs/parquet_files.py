"""Parquet files: checks of the footer before anything is decoded, and the memory size of rows.

A footer has the size of encoded pages: a text that thousands of rows share counts once in a
dictionary page, and thousands of times in memory. So a few rows of a few files are decoded.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError, error_text
from raybatch.inputs.file_errors import (
    HARMLESS_BYTES,
    check_num_rows,
    check_size,
    check_types,
    content_of,
    inert,
    safe_text,
    size_of,
    unreadable,
    without_refused,
)

_MAGIC = b"PAR1"
_SCHEMA_KEY = b"ARROW:schema"
_HIDDEN_KEY = b"ARROW-schema"
_TAIL_BYTES = 8
_END_BYTES = 64 << 10
_File = TypeVar("_File")

# files that are sampled, and rows decoded of each
_MAX_FILES = 8
_MAX_ROWS = 64
READ_BUFFER_BYTES = 1 << 20
_INT96_ROWS = 64 << 10
# encodings whose pages hold each value (or levels and nulls) as it is
_VERBATIM = {"PLAIN", "RLE", "BIT_PACKED"}
# bytes in memory of a value that a dictionary may hold
_WIDTHS = {"INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


def open_parquet(
    file: Any,  # noqa: ANN401
    path: str,
    *,
    columns: Sequence[str] | None,
    buffer_size: int = 0,
) -> pq.ParquetFile:
    """Open a file after checking its footer and the types of `columns`.

    INT96 timestamps are read in microseconds. `buffer_size` is per column.

    Raises:
        BadFileError: it is empty, truncated, or no Parquet file.
        ConfigError: a column has an extension type that is not allowed.
    """
    size, end = size_of(file, path), b""
    if size >= _TAIL_BYTES + len(_MAGIC):
        # one request reads both the length and a footer of usual size
        file.seek(max(0, size - _END_BYTES))
        end = bytes(file.read(min(size, _END_BYTES)))
    tail = end[-_TAIL_BYTES:]
    if tail[4:] == b"PARE":
        raise unreadable(path, "its footer is encrypted")
    num_bytes = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
    if tail[4:] != _MAGIC or num_bytes > size - len(_MAGIC):
        raise unreadable(path, "it does not end like a Parquet file: truncated, or another format")
    if num_bytes > len(end):
        file.seek(size - num_bytes)
        end = bytes(file.read(num_bytes))
    # including the length and the magic after it
    footer = end[-num_bytes:]
    with content_of(path):
        if footer.count(_SCHEMA_KEY) > 1:
            raise unreadable(path, "its footer has two Arrow schemas; one may be hidden")
        hidden = pq.read_metadata(
            pa.BufferReader(_MAGIC + footer.replace(_SCHEMA_KEY, _HIDDEN_KEY))
        )
        stored = (hidden.metadata or {}).get(_HIDDEN_KEY)
        if stored is not None:
            plain = base64.b64decode(stored)
            if check_types(_schema_of(inert(plain)), path, columns=columns):
                # keeps the length
                plain = without_refused(plain, _schema_of)
                footer = footer.replace(stored, base64.b64encode(plain))
        metadata = pq.read_metadata(pa.BufferReader(_MAGIC + footer))
    parquet = _opened(file, metadata, buffer_size=buffer_size)
    check_types(parquet.schema_arrow, path, columns=columns)
    return parquet


def _schema_of(serialized: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(serialized))


def _opened(
    file: Any,  # noqa: ANN401
    metadata: pq.FileMetaData,
    *,
    unit: str = "us",
    buffer_size: int = 0,
) -> pq.ParquetFile:
    return pq.ParquetFile(
        file, metadata=metadata, buffer_size=buffer_size, coerce_int96_timestamp_unit=unit
    )


def check_int96(
    parquet: pq.ParquetFile,
    file: Any,  # noqa: ANN401
    path: str,
    *,
    columns: Sequence[str] | None,
) -> None:
    """Raise ConfigError if an INT96 timestamp is no whole number of microseconds in 64 bits.

    Values are read, since INT96 has no statistics. Arrow wraps modulo 2**64 in every unit, so
    comparing two units reveals a loss.
    """
    chosen = [
        column.path
        for column in map(parquet.schema.column, range(len(parquet.schema)))
        if column.physical_type == "INT96"
        and (columns is None or column.path.partition(".")[0] in columns)
    ]
    if not chosen:
        return
    readers = [_opened(file, parquet.metadata, unit=unit) for unit in ("us", "ns", "s")]
    batches = [
        reader.iter_batches(_INT96_ROWS, columns=chosen, use_threads=False) for reader in readers
    ]
    for rows in zip(*batches, strict=True):
        for name, *arrays in zip(rows[0].schema.names, *rows, strict=True):
            for stamps in zip(*map(_stamps, arrays), strict=True):
                micros, nanos, seconds = (s.cast(pa.int64()).drop_null().to_numpy() for s in stamps)
                if (nanos != micros * 1000).any() or (micros // 1_000_000 != seconds).any():
                    raise ConfigError(
                        f"source file {safe_text(path)}: column {name!r} has an INT96 timestamp "
                        "with fractions of a microsecond, or beyond the year 294246; rewrite it "
                        "as INT64, or leave the column out (columns)"
                    )


def _stamps(array: pa.Array) -> Iterator[pa.Array]:
    kind = array.type
    if pa.types.is_timestamp(kind):
        yield array
    elif pa.types.is_struct(kind):
        for child in array.flatten():
            yield from _stamps(child)
    elif pa.types.is_map(kind):
        yield from _stamps(array.keys)
        yield from _stamps(array.items)
    elif pa.types.is_nested(kind):
        yield from _stamps(pc.list_flatten(array))


class _NoData(io.RawIOBase):
    """A file that fails every read and records whether one was tried."""

    is_tried = False
    _place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        # large enough for any offset in a footer
        self._place = offset + (1 << 60 if whence == io.SEEK_END else 0)
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        self.is_tried = True
        raise OSError("there is no data")


def check_chunks(footer: pq.FileMetaData, path: str) -> None:
    """Raise BadFileError if the footer has corrupt metadata of a column of a row group.

    `RowGroupMetaData.column` would crash the process (pyarrow 26); a reader checks every column
    before it reads the first byte, and raises.
    """
    source = _NoData()
    try:
        rows = pq.ParquetFile(source, metadata=footer, pre_buffer=True).iter_batches(1)
        next(rows, None)
    except (pa.ArrowException, OSError, ValueError) as error:
        if not source.is_tried:
            raise unreadable(path, error_text(error)) from error


def check_row_groups(
    footer: pq.FileMetaData, path: str, *, columns: Sequence[str] | None, max_bytes: int
) -> None:
    """Raise ConfigError if decoding `columns` of a row group would use too much memory."""
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        where = f"source file {safe_text(path)}: row group {index}"
        check_num_rows(group.num_rows, where)
        num_bytes, stored = bytes_of(group, columns), None
        if num_bytes > HARMLESS_BYTES:
            stored = sum(chunk.total_compressed_size for chunk in chunks_of(group, columns))
        check_size(num_bytes, stored, where, max_bytes=max_bytes)


def bytes_of(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> int:
    if columns is None:
        return int(group.total_byte_size)
    return sum(chunk.total_uncompressed_size for chunk in chunks_of(group, columns))


def chunks_of(
    group: pq.RowGroupMetaData, columns: Sequence[str] | None
) -> Iterator[pq.ColumnChunkMetaData]:
    # a name with a dot is that of a column, or of a field in one
    roots = None if columns is None else {name.partition(".")[0] for name in columns}
    for index in range(group.num_columns):
        chunk = group.column(index)
        if roots is None or chunk.path_in_schema.partition(".")[0] in roots:
            yield chunk


def sampled(files: Sequence[_File]) -> list[_File]:
    num_files = min(_MAX_FILES, len(files))
    return [files[i * len(files) // num_files] for i in range(num_files)]


def row_bytes_of(path: str, *, columns: Sequence[str] | None) -> float:
    """Return the average bytes of a row of a Parquet file in memory; raises as `scan_file`.

    The size of most columns is in the footer. Only columns of texts whose encoding may store equal
    values once are decoded: the first rows of the first row group that has any.
    """
    with (
        error_context(f"source file {safe_text(path)} cannot be opened"),
        fsspec.open(path, "rb") as file,
    ):
        try:
            parquet = open_parquet(file, path, columns=columns, buffer_size=READ_BUFFER_BYTES)
            check_chunks(parquet.metadata, path)
            return _row_bytes(parquet, columns)
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # raised by the file system, not by the decoder
            raise unreadable(path, error_text(error)) from error


def _row_bytes(parquet: pq.ParquetFile, columns: Sequence[str] | None) -> float:
    footer = parquet.metadata
    counts: list[int] = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    filled = next((index for index, count in enumerate(counts) if count), None)
    if filled is None:
        return 0.0
    num_bytes, texts = 0, list[str]()
    for chunk in chunks_of(footer.row_group(filled), columns):
        width = _WIDTHS.get(chunk.physical_type, 0)
        if chunk.physical_type == "BYTE_ARRAY" and not _VERBATIM.issuperset(chunk.encodings):
            texts.append(chunk.path_in_schema)
        else:
            num_bytes += max(chunk.total_uncompressed_size, chunk.num_values * width)
    row_bytes: float = num_bytes / counts[filled]
    if not texts:
        return row_bytes
    batches = parquet.iter_batches(_MAX_ROWS, row_groups=[filled], columns=texts, use_threads=False)
    rows = next(batches)
    for column in rows.columns:
        # prompts hold the texts, not dictionary indices
        is_dictionary = pa.types.is_dictionary(column.type)
        values = column.cast(column.type.value_type) if is_dictionary else column
        row_bytes += values.nbytes / max(1, rows.num_rows)
    return row_bytes
