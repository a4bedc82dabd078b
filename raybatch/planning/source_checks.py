"""Checks of source columns before any row is generated: unique ids, partition values."""

import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.durable.commit import partition_folder
from raybatch.errors import CommitError, ConfigError
from raybatch.inputs.file_slices import FileSlice, joined, read_slices
from raybatch.inputs.schemas import in_common_schema
from raybatch.inputs.source import Source
from raybatch.records.arrays import Uint64s
from raybatch.rows.batches import as_movable, is_any_type, python_values

# length of "name=value": a quoted byte needs three, numbers and dates at most 20
_SURELY_FITS = 200
_LONGEST_NUMBER = 20
_SHOWN_CHARS = 40
# 24 MiB of hashes, and a few times as much while sorting
_HASHES_AT_ONCE = 1 << 20
_NUM_EXAMPLES = 3
# of SipHash, 16 bytes each
_KEYS = ("raybatch: ids, 1", "raybatch: ids, 2")
_BYTES = "binary fixed_size_binary large_binary large_string string"


def id_hashes(ids: pa.ChunkedArray) -> Uint64s:
    """Return two hashes of each id, uint64 [R, 2]; `ids` are strings or bytes without nulls.

    Example:
        >>> id_hashes(pa.chunked_array([["a", "b", "a"]]))[:, 0].argmin() in (0, 1)
        True
    """
    from pandas.util import hash_array  # slow to load, and few jobs need it

    texts = ids.cast(pa.large_binary()).to_numpy()
    return np.stack([hash_array(texts, hash_key=key, categorize=False) for key in _KEYS], axis=1)


def as_texts(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return ids as large strings or binaries; different ids stay different.

    Raises:
        ArrowNotImplementedError: ids have a type that cannot be cast to text.
    """
    kind = ids.type
    if isinstance(kind, pa.BaseExtensionType):
        ids = pa.chunked_array([chunk.storage for chunk in ids.chunks], kind.storage_type)
    elif pa.types.is_dictionary(kind):
        ids = ids.cast(kind.value_type)
    if is_any_type(ids.type, _BYTES):
        return ids.cast(pa.large_binary())
    return ids.cast(pa.large_string())


class Repeated(NamedTuple):
    num_rows: int  # rows that have the id of an earlier row
    num_ids: int
    examples: Uint64s  # [E, 2], hashes of some of these ids
    first: tuple[int, int] | None  # the first row with a repeated id, and its repetition


class RepeatedIds:
    """Finds ids that are on several rows, in constant memory: `add` all ids, then call `repeated`.

    Two independent 64-bit hashes and the row number of every id are written to files by their first
    bits; one file at a time is then sorted. Different ids share both hashes with a probability of
    2**-128.

    Use as a context manager, which owns a temporary folder. Ids may be added in any order, from
    many threads. `num_rows` is the approximate number of ids; a low guess costs memory.
    """

    def __init__(self, num_rows: int, *, hashes_at_once: int = _HASHES_AT_ONCE) -> None:
        self._num_files = -(-max(1, num_rows) // hashes_at_once)
        self._hashes_at_once = hashes_at_once
        self._waiting: list[Uint64s] = []
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="raybatch-ids-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def add(self, ids: pa.ChunkedArray, *, first_row: int = 0) -> None:
        """Add ids, strings without nulls, of consecutive rows from `first_row` on."""
        rows = np.arange(first_row, first_row + len(ids), dtype=np.uint64)
        hashes = np.column_stack([id_hashes(ids), rows])
        with self._lock:
            self._waiting.append(hashes)
            self._num_waiting += len(hashes)
            if self._num_waiting >= self._hashes_at_once:
                self._spill()

    def repeated(self) -> Repeated:
        with self._lock:
            self._spill()
        num_rows = num_ids = 0
        examples, firsts = np.empty((0, 2), np.uint64), list[tuple[int, int]]()
        for number in range(self._num_files):
            path = self._path(number)
            if not path.exists():
                continue
            hashes = np.fromfile(path, np.uint64).reshape(-1, 3)
            hashes = hashes[np.lexsort((hashes[:, 2], hashes[:, 1], hashes[:, 0]))]
            is_next_same = (hashes[1:, :2] == hashes[:-1, :2]).all(axis=1)
            starts = np.flatnonzero(is_next_same & ~np.append(False, is_next_same[:-1]))
            num_rows += int(is_next_same.sum())
            num_ids += len(starts)
            examples = np.concatenate([examples, hashes[starts, :2]])[:_NUM_EXAMPLES]
            if len(starts):
                first = starts[np.argmin(hashes[starts, 2])]
                firsts.append((int(hashes[first, 2]), int(hashes[first + 1, 2])))
        return Repeated(num_rows, num_ids, examples, min(firsts, default=None))

    def _spill(self) -> None:
        if not self._waiting:
            return
        hashes = np.concatenate(self._waiting)
        self._waiting, self._num_waiting = [], 0
        number = ((hashes[:, 0] >> np.uint64(32)) * np.uint64(self._num_files)) >> np.uint64(32)
        order = np.argsort(number, kind="stable")
        bounds = np.searchsorted(number[order], np.arange(self._num_files + 1))
        for index in np.flatnonzero(np.diff(bounds)).tolist():
            with self._path(index).open("ab") as file:
                hashes[order[bounds[index] : bounds[index + 1]]].tofile(file)

    def _path(self, number: int) -> Path:
        return Path(self._folder.name) / f"{number}.hashes"


def check_partition_values(source: Source, columns: Sequence[str]) -> None:
    """Raise ConfigError for the first row with a value in these columns that no folder can have.

    Columns have types that `check_partitions` accepts. Memory: one table of a source file.
    """
    schema = pa.schema([source.schema.field(name) for name in columns])
    doubtful = []
    for field in schema:
        kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        if is_text or len(quote(field.name, safe="")) + 1 + _LONGEST_NUMBER > _SURELY_FITS:
            doubtful.append(field.name)
    if not doubtful:
        return
    schema = pa.schema([schema.field(name) for name in doubtful])
    for part, tables in read_slices(list(joined(source.slices)), columns=doubtful):
        first_row = part.first_row
        for rows in tables:
            _check_table(in_common_schema(rows, schema), part, first_row)
            first_row += rows.num_rows


def _check_table(table: pa.Table, part: FileSlice, first_row: int) -> None:
    for name in table.column_names:
        column = table.column(name).unify_dictionaries()
        for value in python_values(pc.unique(column)):
            if (reason := _wrong_with(name, value)) is not None:
                # a slow search, but this error ends the job
                row = next(
                    i for i, one in enumerate(python_values(column)) if _wrong_with(name, one)
                )
                raise ConfigError(f"partition_by: {part.name}:{first_row + row}: {reason}")


def _wrong_with(name: str, value: object) -> str | None:
    """Return why a value of a column cannot be a folder name; None if it can."""
    if isinstance(value, Exception):
        return f"column {name!r} has text that is not UTF-8; fix it, or use another column"
    try:
        partition_folder([name], [value])
    except CommitError as error:
        return str(error)
    return None


def check_unique_ids(source: Source, column: str) -> None:
    """Raise ConfigError for the first repeated id, or for null ids.

    Memory: constant; 24 bytes per row in the folder for temporary files.
    """
    if column not in source.schema.names:
        raise ConfigError(
            f"id_column {column!r} is not in the source, whose columns are {source.schema.names}"
        )
    num_nulls = row = first_null = 0
    with RepeatedIds(source.num_rows) as seen:
        for ids in _ids(source, column):
            if ids.null_count and not num_nulls:
                first_null = row + ids.is_null().index(True).as_py()
            num_nulls += ids.null_count
            if not num_nulls:
                seen.add(_comparable(ids, column), first_row=row)
            row += len(ids)
        repeated = seen.repeated()
    if num_nulls:
        raise ConfigError(
            f"id_column {column!r} is null in {num_nulls} rows of the source, for example in "
            f"{_place(source.slices, first_null)}; fill it in, or leave id_column out to use file "
            "and position"
        )
    if repeated.first is not None:
        raise ConfigError(
            f"id_column {column!r} has {repeated.num_ids} ids on more than one row, for example "
            f"{_show_repeated(source, column, *repeated.first)}; make ids unique, or leave "
            "id_column out to use file and position"
        )


def _ids(source: Source, column: str) -> Iterator[pa.ChunkedArray]:
    schema = pa.schema([source.schema.field(column)])
    for _, tables in read_slices(list(joined(source.slices)), columns=[column]):
        for table in tables:
            yield in_common_schema(table, schema).column(0)


def _comparable(ids: pa.ChunkedArray, column: str) -> pa.ChunkedArray:
    try:
        return as_texts(as_movable(pa.table({column: ids})).column(0))
    except pa.ArrowNotImplementedError as error:
        raise ConfigError(
            f"id_column {column!r} has type {ids.type}, which cannot be compared; use a column of "
            "texts or whole numbers"
        ) from error


def _show_repeated(source: Source, column: str, first: int, second: int) -> str:
    row, value = 0, None
    for ids in _ids(source, column):
        if row <= first < row + len(ids):
            (value,) = python_values(ids.slice(first - row, 1))
            break
        row += len(ids)
    # repr() escapes terminal control characters
    text = repr(value)
    shown = text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."
    return f"{shown} in {_place(source.slices, first)} and {_place(source.slices, second)}"


def _place(slices: Sequence[FileSlice], row: int) -> str:
    for part in slices:
        if row < part.num_rows:
            return f"{part.name}:{part.first_row + row}"
        row -= part.num_rows
    raise IndexError(f"the source ends {row} rows before the requested row")
