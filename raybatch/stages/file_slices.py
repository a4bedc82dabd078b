"""The rows of a file in slices: which ones there are, and reading them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.stages.json_lines import read_json_lines
from raybatch.stages.row_sizes import unreadable
from raybatch.stages.storage import told_as

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
ROWS_PER_TABLE = 1024
_READ_BUFFER_BYTES = 1 << 20


class Size(NamedTuple):
    """What a piece of the input holds, and how many pieces it counts for."""

    num_rows: int
    num_bytes: int
    num_pieces: int = 1


# Enough to be worth opening a file for, and little enough to be read again after a failure.
_SLICE_LIMIT = Size(num_rows=16 << 10, num_bytes=64 << 20, num_pieces=16 << 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSlice:
    """Consecutive rows of one file.

    Args:
        path: with its protocol.
        name: relative to the root of the source; part of the row ids.
        row_groups: of a Parquet file; None reads a whole JSONL file.
        first_row: position in the file of the slice's first row.
        num_rows: of the slice.
        num_bytes: about what its rows take in memory; of a Parquet file an estimate.
    """

    path: str
    name: str
    row_groups: range | None
    first_row: int
    num_rows: int
    num_bytes: int

    @property
    def size(self) -> Size:
        """Of the slice, as one piece."""
        return Size(self.num_rows, self.num_bytes)


def scan_file(path: str, name: str, *, row_bytes: float = 0.0) -> tuple[pa.Schema, list[FileSlice]]:
    """Return the schema and the slices of one file; neighbours among small row groups share one.

    Args:
        path: with its protocol.
        name: relative to the root of the source.
        row_bytes: what a row of a Parquet file takes in memory at least, on average. The footer
            tells only the size of encoded pages, where equal values may count once.

    Raises:
        ConfigError: the file cannot be read.
    """
    with told_as(unreadable(path)):
        if path.lower().endswith(JSON_SUFFIXES):
            table = read_json_lines(path)
            whole = FileSlice(
                path=path,
                name=name,
                row_groups=None,
                first_row=0,
                num_rows=table.num_rows,
                num_bytes=table.nbytes,
            )
            return table.schema, [whole]
        with fsspec.open(path, "rb") as file:
            parquet = pq.ParquetFile(file)
            slices = _parquet_slices(path, name, parquet.metadata, row_bytes)
            return parquet.schema_arrow, list(slices)


def _parquet_slices(
    path: str, name: str, footer: pq.FileMetaData, row_bytes: float
) -> Iterator[FileSlice]:
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    sizes = [
        Size(group.num_rows, max(group.total_byte_size, round(group.num_rows * row_bytes)))
        for group in groups
    ]
    first_row = 0
    for row_groups in pack(sizes, _SLICE_LIMIT):
        packed = sizes[row_groups.start : row_groups.stop]
        num_rows = sum(size.num_rows for size in packed)
        yield FileSlice(
            path=path,
            name=name,
            row_groups=row_groups,
            first_row=first_row,
            num_rows=num_rows,
            num_bytes=sum(size.num_bytes for size in packed),
        )
        first_row += num_rows


def pack(sizes: Sequence[Size], limit: Size) -> Iterator[range]:
    """Yield runs of neighbours that stay within `limit` together; what is over it stays alone."""
    start, total = 0, Size(0, 0, 0)
    for index, size in enumerate(sizes):
        total = Size(*map(sum, zip(total, size, strict=True)))
        is_over = any(a > b for a, b in zip(total, limit, strict=True))
        if is_over and index > start:
            yield range(start, index)
            start, total = index, size
    if start < len(sizes):
        yield range(start, len(sizes))


def joined(slices: Iterable[FileSlice]) -> Iterator[FileSlice]:
    """Join neighbouring slices of one file, so that it is opened and its footer is read once."""
    for _, neighbours in groupby(slices, key=lambda part: part.path):
        parts = list(neighbours)
        first, last = parts[0], parts[-1]
        if first.row_groups is None or last.row_groups is None:
            yield first  # the whole file
            continue
        yield replace(
            first,
            row_groups=range(first.row_groups.start, last.row_groups.stop),
            num_rows=sum(part.num_rows for part in parts),
            num_bytes=sum(part.num_bytes for part in parts),
        )


def read_slice(part: FileSlice, *, columns: list[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of one slice in order, a small table at a time.

    Memory: of Parquet, one table and a buffer per column; of JSONL, the whole file.
    """
    if part.row_groups is None:
        rows = read_json_lines(part.path)
        if columns is not None:
            rows = rows.select([name for name in columns if name in rows.column_names])
        for start in range(0, rows.num_rows, ROWS_PER_TABLE):
            # a table without columns does not know where it ends
            yield rows.slice(start, min(ROWS_PER_TABLE, rows.num_rows - start))
        return
    with fsspec.open(part.path, "rb") as file:
        parquet = pq.ParquetFile(file, buffer_size=_READ_BUFFER_BYTES)
        for batch in parquet.iter_batches(
            ROWS_PER_TABLE, row_groups=list(part.row_groups), columns=columns, use_threads=False
        ):
            yield pa.Table.from_batches([batch])
