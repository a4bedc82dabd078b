"""Finds row ids that occur more than once among any number, with memory that stays flat.

Of every id two independent 64-bit hashes are kept, in files by their first bits; one file at a time
is then sorted. Different ids share both hashes by chance once in 2**128 pairs.
"""

import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.hashing import GOLDEN, mix64

__all__ = ["RepeatedIds", "id_hashes"]

Uint64s = npt.NDArray[np.uint64]

# 16 MiB of hashes, and a few times that while they are sorted
_HASHES_AT_ONCE = 1 << 20
_SALTS = (np.uint64(0), GOLDEN)


def id_hashes(ids: pa.ChunkedArray) -> Uint64s:
    """Return two hashes of each id.

    Args:
        ids: [R], strings without nulls.

    Returns:
        uint64 [R, 2].

    Example:
        >>> id_hashes(pa.chunked_array([["a", "b", "a"]]))[:, 0].argmin() in (0, 1)
        True
    """
    found = [np.empty((0, 2), np.uint64)]
    for chunk in ids.cast(pa.large_binary()).chunks:
        _, offsets, data = chunk.buffers()
        ends = np.frombuffer(offsets, np.int64)[chunk.offset : chunk.offset + len(chunk) + 1]
        letters = np.frombuffer(data or b"", np.uint8)[ends[0] : ends[-1]].astype(np.uint64)
        starts, lengths = ends[:-1] - ends[0], np.diff(ends)
        places = np.arange(len(letters)) - np.repeat(starts, lengths)
        letters |= (places.astype(np.uint64) + np.uint64(1)) << np.uint64(8)
        sums = [_sums(mix64(letters * GOLDEN + salt), starts, lengths) for salt in _SALTS]
        found.append(np.stack(sums, axis=1))
    return np.concatenate(found)


def _sums(words: Uint64s, starts: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> Uint64s:
    """Return the scrambled sum, modulo 2**64, of each stretch of words."""
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(words, dtype=np.uint64)])
    return mix64(totals[starts + lengths] - totals[starts] + lengths.astype(np.uint64))


class RepeatedIds:
    """Takes ids in any order and from many threads; a context that owns a temporary folder.

    Args:
        num_rows: about as many ids as will come; a guess that is too low costs memory.
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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._folder.cleanup()

    def add(self, ids: pa.ChunkedArray) -> None:
        """Take ids, strings without nulls."""
        hashes = id_hashes(ids)
        with self._lock:
            self._waiting.append(hashes)
            self._num_waiting += len(hashes)
            if self._num_waiting >= self._hashes_at_once:
                self._spill()

    def repeated(self, *, num_examples: int = 3) -> tuple[int, Uint64s]:
        """Return how many ids there are beyond the first of each, and hashes of some of them.

        Returns:
            A number, and uint64 [up to `num_examples`, 2].
        """
        with self._lock:
            self._spill()
        num_repeated, examples = 0, np.empty((0, 2), np.uint64)
        for number in range(self._num_files):
            path = self._path(number)
            if not path.exists():
                continue
            hashes = np.fromfile(path, np.uint64).reshape(-1, 2)
            hashes = hashes[np.lexsort((hashes[:, 1], hashes[:, 0]))]
            is_repeated = (hashes[1:] == hashes[:-1]).all(axis=1)
            num_repeated += int(is_repeated.sum())
            some = np.unique(hashes[1:][is_repeated], axis=0)
            examples = np.concatenate([examples, some[: num_examples - len(examples)]])
        return num_repeated, examples

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
