"""What a row of a Parquet file takes in memory, estimated from a few rows of a few files.

A footer tells the size of encoded pages: a text that thousands of rows have in common counts once
there, in a dictionary, and thousands of times when the rows are in memory.
"""

from collections.abc import Sequence
from typing import TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.storage import told_as
from raybatch.errors import error_text
from raybatch.inputs.file_errors import safe_text, unreadable
from raybatch.inputs.parquet_files import check_chunks, chunks_of, open_parquet

_File = TypeVar("_File")

# files that are opened once more, and rows that are decoded of each
_MAX_FILES = 8
_MAX_ROWS = 64
_READ_BUFFER_BYTES = 1 << 20
# a value takes what it has in the pages, or a page tells how many levels and nulls there are
_VERBATIM = {"PLAIN", "RLE", "BIT_PACKED"}
# what a value takes where a dictionary may hold it
_WIDTHS = {"INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


def sampled(files: Sequence[_File]) -> list[_File]:
    """Return a few of many files, evenly spread."""
    num_files = min(_MAX_FILES, len(files))
    return [files[i * len(files) // num_files] for i in range(num_files)]


def row_bytes_of(path: str, *, columns: Sequence[str] | None = None) -> float:
    """Return what a row of a Parquet file takes in memory, in bytes.

    The beginning of the first row group that has rows is decoded, and of that only the texts whose
    pages do not hold each value as it is.

    Args:
        path: with its protocol.
        columns: that will be read; None reads all.

    Raises:
        BadFileError: what the file holds cannot be read.
        ConfigError: the file cannot be opened, or is not safe to read.
    """
    with (
        told_as(f"source file {safe_text(path)} cannot be opened"),
        fsspec.open(path, "rb") as file,
    ):
        try:
            parquet = open_parquet(file, path, buffer_size=_READ_BUFFER_BYTES)
            check_chunks(parquet.metadata, path)
            return _row_bytes(parquet, columns)
        except (pa.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # of the file system, not of the decoder
            raise unreadable(path, error_text(error)) from error


def _row_bytes(parquet: pq.ParquetFile, columns: Sequence[str] | None) -> float:
    footer = parquet.metadata
    counts: list[int] = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    filled = next((index for index, count in enumerate(counts) if count), None)
    if filled is None:
        return 0.0
    num_bytes: int = 0
    texts: list[str] = []
    for chunk in chunks_of(footer.row_group(filled), columns):
        width = _WIDTHS.get(chunk.physical_type, 0)
        if chunk.physical_type == "BYTE_ARRAY" and not _VERBATIM.issuperset(chunk.encodings):
            texts.append(chunk.path_in_schema)
        else:
            num_bytes += max(chunk.total_uncompressed_size, chunk.num_values * width)
    return num_bytes / counts[filled] + _decoded_row_bytes(parquet, filled, texts)


def _decoded_row_bytes(parquet: pq.ParquetFile, row_group: int, columns: list[str]) -> float:
    if not columns:
        return 0.0
    batches = parquet.iter_batches(
        _MAX_ROWS, row_groups=[row_group], columns=columns, use_threads=False
    )
    rows = pa.Table.from_batches([next(batches)])
    num_rows: int = rows.num_rows
    return sum(map(_num_bytes, rows.columns)) / max(1, num_rows)


def _num_bytes(column: pa.ChunkedArray) -> int:
    # prompts are made of the texts, not of the dictionary
    is_dictionary = pa.types.is_dictionary(column.type)
    values = column.cast(column.type.value_type) if is_dictionary else column
    num_bytes: int = values.nbytes
    return num_bytes
