"""Which line of a batch file had a custom_id first, with 24 bytes of memory a line."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.planning.repeated_ids import id_hashes

Uint64s = npt.NDArray[np.uint64]


class SeenIds:
    """Takes ids in the order of their lines, some at a time.

    Sorted runs of hashes are merged with those that are no longer than they are, so that there are
    few of them and each id is moved a few times alone.
    """

    def __init__(self) -> None:
        self._runs: list[Uint64s] = []

    def add(self, ids: Sequence[str], lines: Sequence[int]) -> list[int | None]:
        """Take ids; return per id the line that had it first, None where this one has.

        Complexity: O(log R) per id and run, R being the ids so far.
        """
        if not ids:
            return []
        hashes = id_hashes(pa.chunked_array([pa.array(ids, pa.string())]))
        rows = np.column_stack([hashes, np.asarray(lines, np.uint64)])
        first = np.zeros(len(rows), np.uint64)
        for run in self._runs:
            first = np.maximum(first, _lines_in(run, rows))
        order = np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))
        rows_sorted = rows[order]
        is_same = np.zeros(len(rows), np.bool_)
        is_same[1:] = (rows_sorted[1:, :2] == rows_sorted[:-1, :2]).all(axis=1)
        starts = np.maximum.accumulate(np.where(is_same, 0, np.arange(len(rows))))
        own_first = np.zeros(len(rows), np.uint64)
        own_first[order] = np.where(is_same, rows_sorted[starts, 2], 0)
        first = np.where(first > 0, first, own_first)
        new = rows_sorted[~is_same & (first[order] == 0)]
        if len(new):
            self._keep(new)
        return [int(line) or None for line in first]

    def _keep(self, run: Uint64s) -> None:
        while self._runs and len(self._runs[-1]) <= len(run):
            both = np.concatenate([self._runs.pop(), run])
            run = both[np.lexsort((both[:, 1], both[:, 0]))]
        self._runs.append(run)


def _lines_in(run: Uint64s, rows: Uint64s) -> Uint64s:
    """Return the line of each row whose hashes are in a sorted run, 0 for the others.

    Hashes that agree in their first half alone are looked through one by one; there are next to
    none.
    """
    begin = np.searchsorted(run[:, 0], rows[:, 0], side="left")
    end = np.searchsorted(run[:, 0], rows[:, 0], side="right")
    found = np.zeros(len(rows), np.uint64)
    for row in np.flatnonzero(end > begin).tolist():
        for place in range(int(begin[row]), int(end[row])):
            if run[place, 1] == rows[row, 1]:
                found[row] = run[place, 2]
    return found
