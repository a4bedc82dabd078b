"""Parquet files: what a footer tells, checked before anything in the file is decoded."""

import io
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.errors import error_text
from raybatch.inputs.arrow_types import check_types, inert_schema
from raybatch.inputs.file_errors import content_of, safe_text, unreadable
from raybatch.inputs.size_limits import HARMLESS_BYTES, check_num_rows, check_size, size_of

_MAGIC = b"PAR1"
_SCHEMA_KEY = b"ARROW:schema"
_HIDDEN_KEY = b"ARROW-schema"
_TAIL_BYTES = 8


def open_parquet(file: Any, path: str, *, buffer_size: int = 0) -> pq.ParquetFile:  # noqa: ANN401
    """Open a file whose footer is whole and whose types are allowed.

    Args:
        file: open for reading bytes.
        path: for messages.
        buffer_size: of a column, in bytes.

    Raises:
        BadFileError: it is empty, cut, or no Parquet file.
        ConfigError: a column has an extension type that is not allowed.
    """
    footer = _footer(file, path)
    with content_of(path):
        if footer.count(_SCHEMA_KEY) > 1:
            raise unreadable(path, "its footer has two Arrow schemas, of which one may be hidden")
        hidden = _parse(footer.replace(_SCHEMA_KEY, _HIDDEN_KEY)).metadata
        stored = (hidden.metadata or {}).get(_HIDDEN_KEY)
        if stored is not None:
            check_types(inert_schema(stored), path)
        metadata = _parse(footer).metadata
    parquet = pq.ParquetFile(file, metadata=metadata, buffer_size=buffer_size)
    check_types(parquet.schema_arrow, path)
    return parquet


def _footer(file: Any, path: str) -> bytes:  # noqa: ANN401
    """Return the footer with the length and the magic that follow it."""
    size = size_of(file, path)
    tail = b""
    if size >= _TAIL_BYTES + len(_MAGIC):
        file.seek(size - _TAIL_BYTES)
        tail = file.read(_TAIL_BYTES)
    if tail[4:] == b"PARE":
        raise unreadable(path, "its footer is encrypted")
    num_bytes = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
    if tail[4:] != _MAGIC or num_bytes > size - len(_MAGIC):
        raise unreadable(path, "it does not end like a Parquet file: it is cut, or of another kind")
    file.seek(size - num_bytes)
    footer: bytes = file.read(num_bytes)
    return footer


def _parse(footer: bytes) -> pq.ParquetFile:
    return pq.ParquetFile(pa.BufferReader(_MAGIC + footer))


class _NoData(io.RawIOBase):
    """A file from which nothing can be read, and that knows whether somebody tried."""

    is_tried = False
    _place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        # large enough for whatever a footer names
        self._place = offset + (1 << 60 if whence == io.SEEK_END else 0)
        return self._place

    def tell(self) -> int:
        return self._place

    def read(self, size: int = -1) -> bytes:
        self.is_tried = True
        raise OSError("there is no data")


def check_chunks(footer: pq.FileMetaData, path: str) -> None:
    """Raise BadFileError where the footer is broken in what it says of a column of a row group.

    `RowGroupMetaData.column` ends the process there (pyarrow 26), while a reader, which looks at
    every column before it reads the first byte, raises.
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
    """Raise ConfigError where decoding a row group would take more memory than is allowed.

    Args:
        footer: of the file.
        path: for messages.
        columns: that are read; None reads all.
        max_bytes: of what is read of one row group, decompressed.
    """
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        where = f"source file {safe_text(path)}: row group {index}"
        check_num_rows(group.num_rows, where)
        num_bytes, stored = bytes_of(group, columns), None
        if num_bytes > HARMLESS_BYTES:
            stored = sum(chunk.total_compressed_size for chunk in chunks_of(group, columns))
        check_size(num_bytes, stored, where, max_bytes=max_bytes)


def bytes_of(group: pq.RowGroupMetaData, columns: Sequence[str] | None) -> int:
    """Return the size of the pages of some columns of a row group, decompressed."""
    if columns is None:
        return int(group.total_byte_size)
    return sum(chunk.total_uncompressed_size for chunk in chunks_of(group, columns))


def chunks_of(
    group: pq.RowGroupMetaData, columns: Sequence[str] | None
) -> Iterator[pq.ColumnChunkMetaData]:
    """Yield what the footer says of some columns of a row group; None takes all."""
    # a name with a dot is that of a column, or leads into one
    roots = None if columns is None else {name.partition(".")[0] for name in columns}
    for index in range(group.num_columns):
        chunk = group.column(index)
        if roots is None or chunk.path_in_schema.partition(".")[0] in roots:
            yield chunk
