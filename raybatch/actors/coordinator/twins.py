"""Rows of different batches with equal results: one of them runs, and the others take its result.

    first row of a key ------> runs ------> finished -> its result goes to all that wait for it,
    others of the key -------> wait ---------^          and to those that come later
                                 `-- runs in its place where the batch of the first is dropped

A row batch itself has each key once; copies inside it are its feeder's. Results are kept within a
bound: the last ones, and those that were asked for again, longest. An error is a result for the
rows that wait for it, and is not kept: whoever comes later is tried again.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.columns import RESULT_SCHEMA, has_error, to_numpy
from raybatch.actors.wire.records import TWIN_KEY_BYTES, Submission

# of the last results, and of those that some later row has taken
_MAX_LAST_BYTES = 32 << 20
_MAX_TAKEN_BYTES = 32 << 20

_Rows = npt.NDArray[np.intp]
# client and key
_Key = tuple[str, bytes]
# row batch and row
_Place = tuple[int, int]


@dataclass(slots=True)
class Twins:
    """Which row runs for each key, which ones wait for it, and what was answered last."""

    _running: dict[_Key, _Place] = field(default_factory=dict)
    _waiting: defaultdict[_Key, list[_Place]] = field(default_factory=lambda: defaultdict(list))
    # result batches by a number of theirs, the oldest first, and where in them a key is
    _last: OrderedDict[int, tuple[pa.RecordBatch, list[_Key]]] = field(default_factory=OrderedDict)
    _place: dict[_Key, tuple[int, int]] = field(default_factory=dict)
    _num_kept: int = 0
    _last_bytes: int = 0
    # the one that was not asked for the longest comes first
    _taken: OrderedDict[_Key, pa.RecordBatch] = field(default_factory=OrderedDict)
    _taken_bytes: int = 0

    def join(self, batch_id: int, of: Submission) -> tuple[_Rows, list[tuple[int, pa.RecordBatch]]]:
        """Return the rows of a new batch that are to wait, and those answered with their results.

        Rows with which engines have died run by themselves.
        """
        waiting: list[int] = []
        answered: list[tuple[int, pa.RecordBatch]] = []
        for row, key in _keys(of):
            if of.crashes is not None and of.crashes[row]:
                continue
            if (results := self._known(key)) is not None:
                answered.append((row, results))
            elif key in self._running:
                self._waiting[key].append((batch_id, row))
                waiting.append(row)
            else:
                self._running[key] = batch_id, row
        return np.array(waiting, np.intp), answered

    def finish(
        self, batch_id: int, of: Submission, rows: Iterable[int], results: pa.RecordBatch
    ) -> list[tuple[int, int, pa.RecordBatch]]:
        """Note results of some rows; return batch and row of those that waited, with theirs."""
        if not of.twin_keys:
            return []
        keys = dict(_keys(of, rows))
        keys = {row: key for row, key in keys.items() if self._running.get(key) == (batch_id, row)}
        served = []
        for row, key in keys.items():
            del self._running[key]
            if key in self._waiting:
                of_row = _of_row(results, row)
                served += [(*place, of_row) for place in self._waiting.pop(key)]
        self._keep(keys, results)
        return served

    def drop(self, batch_id: int, of: Submission, rows: Iterable[int]) -> list[_Place]:
        """Forget unfinished rows of a batch; return those of others that run in their place."""
        heirs = []
        for row, key in _keys(of, rows):
            others = [place for place in self._waiting.pop(key, ()) if place != (batch_id, row)]
            if self._running.get(key) == (batch_id, row):
                del self._running[key]
                if others:
                    self._running[key] = others.pop(0)
                    heirs.append(self._running[key])
            if others:
                self._waiting[key] = others
        return heirs

    def forget_results(self) -> None:
        """Keep no results for rows that come later."""
        self._last.clear()
        self._place.clear()
        self._taken.clear()
        self._last_bytes = self._taken_bytes = 0

    def _known(self, key: _Key) -> pa.RecordBatch | None:
        if key in self._taken:
            self._taken.move_to_end(key)
            return self._taken[key]
        if key not in self._place:
            return None
        number, row = self._place[key]
        results = self._taken[key] = _of_row(self._last[number][0], row)
        self._taken_bytes += results.nbytes
        while self._taken_bytes > _MAX_TAKEN_BYTES and len(self._taken) > 1:
            _, oldest = self._taken.popitem(last=False)
            self._taken_bytes -= oldest.nbytes
        return results

    def _keep(self, keys: dict[int, _Key], results: pa.RecordBatch) -> None:
        failed = set(to_numpy(results.column("row"), np.int32)[has_error(results)].tolist())
        keys = {row: key for row, key in keys.items() if row not in failed}
        if not keys:
            return
        self._num_kept += 1
        self._last[self._num_kept] = results, list(keys.values())
        self._place |= {key: (self._num_kept, row) for row, key in keys.items()}
        self._last_bytes += results.nbytes
        while self._last_bytes > _MAX_LAST_BYTES:
            number, (oldest, old_keys) = self._last.popitem(last=False)
            self._last_bytes -= oldest.nbytes
            for key in old_keys:
                if self._place[key][0] == number:
                    del self._place[key]


def copied_results(results: pa.RecordBatch, row: int, prompt_tokens: int) -> pa.RecordBatch:
    """Return the results of a row as those of another; all of its prompt counts as cached.

    Nothing was computed or paid for it.
    """
    size = len(results)
    counted = results.column("num_input_tokens")[0].as_py()
    values = {
        "row": np.full(size, row, np.int32),
        "num_cached_tokens": np.full(size, prompt_tokens if counted is None else counted, np.int32),
        "cost": pa.nulls(size, pa.float64()),
    }
    columns = [
        pa.array(values[name]) if name in values else results.column(name)
        for name in RESULT_SCHEMA.names
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RESULT_SCHEMA)


def _keys(of: Submission, rows: Iterable[int] | None = None) -> Iterable[tuple[int, _Key]]:
    """Yield rows that have twins, perhaps, with their keys."""
    if not of.twin_keys:
        return
    for row in range(len(of.prompt_tokens)) if rows is None else rows:
        key = of.twin_keys[row * TWIN_KEY_BYTES : (row + 1) * TWIN_KEY_BYTES]
        if any(key):
            yield row, (of.client, key)


def _of_row(results: pa.RecordBatch, row: int) -> pa.RecordBatch:
    """Return all samples of a row, copied, so that they keep no others in memory."""
    return results.take(pa.array(np.flatnonzero(to_numpy(results.column("row"), np.int32) == row)))
