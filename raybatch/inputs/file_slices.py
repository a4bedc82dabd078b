"""Slices of source files: listing them by row groups or batches, and reading their rows."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import fsspec
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.durable.storage import error_context
from raybatch.errors import ConfigError
from raybatch.inputs.csv_files import read_csv, scan_csv
from raybatch.inputs.file_errors import check_values, content_of, safe_text
from raybatch.inputs.ipc_files import open_ipc, read_batches
from raybatch.inputs.json_lines import read_json_lines, scan_json_lines
from raybatch.inputs.listing import Kind, ListedFile
from raybatch.inputs.parquet_files import (
    READ_BUFFER_BYTES,
    bytes_of,
    check_chunks,
    check_int96,
    check_row_groups,
    open_parquet,
)

ROWS_PER_TABLE = 1024
# files that are read ahead, and the largest size of one of them in memory
_NUM_AHEAD, _AHEAD_BYTES = 8, 1 << 20
# target size of one table, by estimated row sizes
_TABLE_BYTES = 64 << 20


class Size(NamedTuple):
    """Size of a piece of the input, or the sum or the limit of several pieces."""

    num_rows: int
    num_bytes: int
    num_pieces: int = 1


# large enough to amortize opening a file, small enough to be read again after a failure
_SLICE_LIMIT = Size(num_rows=16 << 10, num_bytes=64 << 20, num_pieces=16 << 10)


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSlice:
    """Consecutive rows of one file.

    Args:
        name: path relative to the root of the source; part of the row ids.
        row_groups: row groups of Parquet, record batches of Arrow IPC; None is a whole JSONL or CSV
            file, which may be compressed and so has no seekable positions.
        first_row: position in the file of the slice's first row.
        num_bytes: size of its rows in memory; an estimate for Parquet.
        offset: byte where the first batch of an Arrow stream begins; 0 reads from the beginning.
        schema: columns of a JSONL or CSV file to read, with their types.
        folder_columns: names and values of partition folders that the file lacks as columns.
        skip: rows of its row groups before its first row, which belong to another slice.
        rest: rows of its row groups after its last row.
    """

    path: str
    name: str
    row_groups: range | None
    first_row: int
    num_rows: int
    num_bytes: int
    offset: int = 0
    schema: pa.Schema | None = None
    kind: Kind = "parquet"
    folder_columns: tuple[tuple[str, str | None], ...] = ()
    skip: int = 0
    rest: int = 0

    def within(self, rows: range) -> "FileSlice | None":
        """Return the part of this slice at some positions in the file; None if it has none."""
        end = self.first_row + self.num_rows
        start, stop = max(self.first_row, rows.start), min(end, rows.stop)
        if start >= stop:
            return None
        return replace(
            self,
            first_row=start,
            num_rows=stop - start,
            num_bytes=self.num_bytes * (stop - start) // self.num_rows,
            skip=self.skip + start - self.first_row,
            rest=self.rest + end - stop,
        )


def scan_file(
    file: ListedFile,
    *,
    row_bytes: float,
    columns: Sequence[str] | None,
    max_row_group_bytes: int,
    max_decompressed_bytes: int | None,
) -> tuple[pa.Schema, list[FileSlice]]:
    """Return the schema and the slices of one file; adjacent small row groups share a slice.

    Partition folders become text columns after the file's own, unless the file has such a column.

    Args:
        row_bytes: minimum size of a row of a Parquet file in memory, on average. The footer only
            has the size of encoded pages, where equal values may count once.

    Raises:
        BadFileError: the content of the file cannot be read.
        ConfigError: the file cannot be opened, is not safe to read, or grows too large.
    """
    with error_context(f"source file {safe_text(file.path)} cannot be opened"):
        if file.kind in ("json", "csv"):
            scan = scan_json_lines if file.kind == "json" else scan_csv
            schema, num_rows, num_bytes = scan(
                file.path, columns=columns, max_decompressed_bytes=max_decompressed_bytes
            )
            sizes = [Size(num_rows, num_bytes)]
            slices = [replace(part, schema=schema) for part in _slices(file, [None], sizes)]
        else:
            with fsspec.open(file.path, "rb") as opened:
                if file.kind == "ipc":
                    schema, slices = _scan_ipc(opened, file, columns, max_row_group_bytes)
                else:
                    schema, slices = _scan_parquet(
                        opened, file, columns, max_row_group_bytes, row_bytes
                    )
    slices = [replace(part, kind=file.kind) for part in slices]
    names = schema.names
    added = tuple((name, text) for name, text in file.folder_columns if name not in names)
    for name, text in file.folder_columns:
        if name in names and (columns is None or name in columns):
            _check_folder(slices, schema.field(name), text)
    fields = [*schema, *(pa.field(name, pa.string()) for name, _ in added)]
    slices = [replace(part, folder_columns=added) for part in slices]
    return pa.schema(fields, schema.metadata), slices


def _check_folder(slices: Sequence[FileSlice], field: pa.Field, text: str | None) -> None:
    """Raise ConfigError if a column of a file has another value than its partition folder."""
    kind = pa.string() if isinstance(field.type, pa.BaseExtensionType) else field.type
    for part in slices:
        for table in read_slice(part, columns=[field.name]):
            column = table.column(0).cast(kind)
            try:
                named = pa.scalar(text, pa.string()).cast(kind)
                is_same = column.is_null() if text is None else pc.equal(column, named)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                is_same = pa.array([False])
            if not pc.all(is_same.fill_null(False)).as_py():
                raise ConfigError(
                    f"source file {safe_text(part.path)} has a column {field.name!r} whose values "
                    f"differ from {text!r}, the value in the name of its folder; rename the "
                    "folder, or leave the column out (columns)"
                )


def _scan_parquet(
    opened: Any,  # noqa: ANN401
    file: ListedFile,
    columns: Sequence[str] | None,
    max_bytes: int,
    row_bytes: float,
) -> tuple[pa.Schema, list[FileSlice]]:
    parquet = open_parquet(opened, file.path, columns=columns)
    footer = parquet.metadata
    check_chunks(footer, file.path)
    check_row_groups(footer, file.path, columns=columns, max_bytes=max_bytes)
    check_int96(parquet, opened, file.path, columns=columns)
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    sizes = [
        Size(g.num_rows, max(bytes_of(g, columns), round(g.num_rows * row_bytes))) for g in groups
    ]
    return parquet.schema_arrow, list(_slices(file, pack(sizes, _SLICE_LIMIT), sizes))


def _scan_ipc(
    opened: Any,  # noqa: ANN401
    file: ListedFile,
    columns: Sequence[str] | None,
    max_bytes: int,
) -> tuple[pa.Schema, list[FileSlice]]:
    ipc = open_ipc(opened, file.path, columns=columns, max_batch_bytes=max_bytes)
    sizes = [Size(batch.num_rows, batch.num_bytes) for batch in ipc.batches]
    packed = [range(len(sizes))] if ipc.is_whole else list(pack(sizes, _SLICE_LIMIT))
    slices = list(_slices(file, packed, sizes))
    if ipc.is_alone:
        starts = [ipc.batches[run.start].start for run in packed]
        slices = [replace(s, offset=at) for s, at in zip(slices, starts, strict=True)]
    return ipc.schema, slices


def _slices(
    file: ListedFile, packed: Iterable[range | None], sizes: Sequence[Size]
) -> Iterator[FileSlice]:
    """Yield a slice for each range of pieces; None stands for all of them."""
    first_row = 0
    for row_groups in packed:
        run = sizes if row_groups is None else sizes[row_groups.start : row_groups.stop]
        num_rows = sum(size.num_rows for size in run)
        yield FileSlice(
            path=file.path,
            name=file.name,
            row_groups=row_groups,
            first_row=first_row,
            num_rows=num_rows,
            num_bytes=sum(size.num_bytes for size in run),
        )
        first_row += num_rows


def pack(sizes: Sequence[Size], limit: Size) -> Iterator[range]:
    """Yield ranges of indices of `sizes` such that the sizes of a range sum to at most `limit`.

    A size above the limit is alone in its range.
    """
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
    """Join adjacent slices of one file, so that it is opened and its footer is read once."""
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
            rest=last.rest,
        )


def read_slices(
    parts: Sequence[FileSlice], *, columns: Sequence[str] | None = None
) -> Iterator[tuple[FileSlice, Iterable[pa.Table]]]:
    """Yield each slice with the tables of `read_slice`; small slices are read ahead in parallel.

    On object stores, opening a small file costs most of the time to read it.
    """
    threads = ThreadPoolExecutor(_NUM_AHEAD)

    def started(part: FileSlice) -> Callable[[], Iterable[pa.Table]]:
        read = partial(read_slice, part, columns=columns)
        if part.row_groups is None or part.num_bytes > _AHEAD_BYTES or len(parts) == 1:
            return read
        return threads.submit(lambda: list(read())).result

    ahead = deque[tuple[FileSlice, Callable[[], Iterable[pa.Table]]]]()
    try:
        for part in parts:
            ahead.append((part, started(part)))
            if len(ahead) > _NUM_AHEAD:
                first, tables = ahead.popleft()
                yield first, tables()
        for part, tables in ahead:
            yield part, tables()
    finally:
        threads.shutdown(cancel_futures=True)


def read_slice(part: FileSlice, *, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the rows of one slice in order, a small table at a time.

    Memory: of Parquet, one table and a buffer per column; of Arrow IPC, one record batch; of
    JSONL and CSV, one block of lines.

    Raises:
        ConfigError: the file has become unreadable, or its number of rows has changed.
    """
    num_rows, end = 0, part.skip + part.num_rows
    with error_context(f"source file {safe_text(part.path)} can no longer be read"):
        for rows in _tables(part, columns):
            start, num_rows = num_rows, num_rows + rows.num_rows
            # a replaced file may be endless
            if num_rows > end and not part.rest:
                break
            if start < num_rows <= part.skip:
                continue
            first = max(0, part.skip - start)
            yield rows.slice(first, max(0, min(num_rows, end) - start - first))
            if part.rest and num_rows >= end:
                return
    if num_rows != end:
        least = "at least " if num_rows > end else ""
        raise ConfigError(
            f"source file {safe_text(part.path)} changed while it was read: it has "
            f"{least}{num_rows} rows and had {end}; run the job again"
        )


def _tables(part: FileSlice, columns: Sequence[str] | None) -> Iterator[pa.Table]:
    max_rows = min(ROWS_PER_TABLE, max(1, _TABLE_BYTES * part.num_rows // (part.num_bytes + 1)))
    of_folders = dict(part.folder_columns)
    names = None if columns is None else [name for name in columns if name not in of_folders]
    for rows in _tables_of_file(part, names, max_rows):
        for name, text in part.folder_columns:
            if columns is None or name in columns:
                rows = rows.append_column(name, pa.repeat(pa.scalar(text, pa.string()), len(rows)))
        yield rows


def _tables_of_file(
    part: FileSlice, columns: list[str] | None, max_rows: int
) -> Iterator[pa.Table]:
    if part.row_groups is None:
        fields = list(part.schema or ())
        names = [f.name for f in fields if columns is None or f.name in columns]
        kept = set(names) - dict(part.folder_columns).keys()
        schema = pa.schema([field for field in fields if field.name in kept])
        read = read_json_lines if part.kind == "json" else read_csv
        for rows in read(part.path, schema):
            if columns is not None:
                rows = rows.select([name for name in columns if name in rows.column_names])
            yield from _cut(rows, max_rows)
        return
    with fsspec.open(part.path, "rb") as file:
        groups = part.row_groups
        if part.kind == "ipc":
            for batch in read_batches(file, part.path, groups, offset=part.offset, columns=columns):
                yield from _cut(pa.Table.from_batches([batch]), max_rows)
            return
        parquet = open_parquet(file, part.path, columns=columns, buffer_size=READ_BUFFER_BYTES)
        for batch in parquet.iter_batches(
            max_rows, row_groups=list(groups), columns=columns, use_threads=False
        ):
            with content_of(part.path):
                check_values(batch)
            yield pa.Table.from_batches([batch])


def _cut(rows: pa.Table, max_rows: int) -> Iterator[pa.Table]:
    for start in range(0, rows.num_rows, max_rows):
        # slicing a table without columns past its end is not clipped
        yield rows.slice(start, min(max_rows, rows.num_rows - start))
