"""What a row of a Parquet file takes in memory, estimated from a few rows of a few files.

A footer tells the size of encoded pages: a text that thousands of rows have in common counts once
there, in a dictionary, and thousands of times when the rows are in memory.
"""

from collections.abc import Sequence

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.stages.storage import told_as

__all__ = ["sample_row_bytes", "unreadable"]

# files that are opened once more, and rows that are decoded of each
_MAX_FILES = 8
_MAX_ROWS = 64
_READ_BUFFER_BYTES = 1 << 20
# a value takes what it has in the pages, or a page tells how many levels and nulls there are
_VERBATIM = {"PLAIN", "RLE", "BIT_PACKED"}
# what a value takes where a dictionary may hold it
_WIDTHS = {"INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}


def sample_row_bytes(paths: Sequence[str]) -> dict[str, float]:
    """Return what a row takes in memory, in bytes, for each of a few Parquet files.

    Of a file, the beginning of the first row group that has rows is decoded, and of that only the
    texts whose pages do not hold each value as it is; a file without such columns is not read.

    Args:
        paths: with their protocol; evenly spread ones are chosen where they are many.

    Raises:
        ConfigError: a file cannot be read.
    """
    num_files = min(_MAX_FILES, len(paths))
    chosen = [paths[i * len(paths) // num_files] for i in range(num_files)]
    found = {}
    for path in chosen:
        with told_as(unreadable(path)), fsspec.open(path, "rb") as file:
            found[path] = _row_bytes(pq.ParquetFile(file, buffer_size=_READ_BUFFER_BYTES))
    return found


def unreadable(path: str) -> str:
    """Return the beginning of the error for a file that cannot be read."""
    return f"source file {path} cannot be read; write it again, or leave it out"


def _row_bytes(parquet: pq.ParquetFile) -> float:
    footer = parquet.metadata
    counts: list[int] = [footer.row_group(index).num_rows for index in range(footer.num_row_groups)]
    filled = next((index for index, count in enumerate(counts) if count), None)
    if filled is None:
        return 0.0
    group = footer.row_group(filled)
    num_bytes: int = 0
    texts: list[str] = []
    for index in range(group.num_columns):
        chunk = group.column(index)
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
