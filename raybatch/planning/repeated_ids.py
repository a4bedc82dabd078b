"""Finds row ids that occur more than once, in constant memory.

Two independent 64-bit hashes and the row number of every id are written to files by their first
bits; one file at a time is then sorted. Different ids share both hashes with a probability of
2**-128.
"""

import tempfile
import threading
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import pyarrow as pa

from raybatch.records.arrays import Uint64s
from raybatch.rows.batches import is_any_type

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
    """Finds ids that are on several rows: `add` all ids, then call `repeated`.

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
