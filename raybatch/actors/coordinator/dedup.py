"""In-flight dedup: of rows with equal keys one runs, and the others get its result.

    first row of a key ------> runs ------> finished -> its result goes to the waiting rows,
    others of the key -------> wait ---------^          and to rows that arrive later
                                 `-- the next one runs if the batch of the first is dropped

A row batch has each key once; its feeder handles duplicates inside it. A bounded cache keeps the
latest results, and those used again for longer. An error is a result for the rows that wait for
it, and is not kept: a later row is tried again.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.columns import RESULT_SCHEMA, has_error, to_numpy
from raybatch.actors.wire.records import DEDUP_KEY_BYTES, Submission
from raybatch.records.arrays import Int32s, Ints

# bounds of the latest results, and of results that a later row has used
_MAX_LAST_BYTES = 32 << 20
_MAX_TAKEN_BYTES = 32 << 20
# rows of a chunk of the latest results, and batches that are copied together
_CHUNK_ROWS, _MAX_BATCHES = 1024, 16

_Rows = npt.NDArray[np.intp]
# client and key, in one object since there may be millions
_Key = bytes
# row batch and row
_Place = tuple[int, int]


@dataclass(slots=True)
class InFlightDedup:
    """Runs one of several identical rows: call `join` with a new batch, `finish` with results.

    Rows are identical if they have the same client and dedup key. The others wait for the results
    of the one that runs.
    """

    _running: dict[_Key, _Place] = field(default_factory=dict)
    _waiting: defaultdict[_Key, list[_Place]] = field(default_factory=lambda: defaultdict(list))
    # oldest first; and the chunk and row of each key
    _last: OrderedDict[int, "_Chunk"] = field(default_factory=OrderedDict)
    _place: dict[_Key, tuple[int, int]] = field(default_factory=dict)
    _num_chunks: int = 0
    _last_bytes: int = 0
    # least recently used first
    _taken: OrderedDict[_Key, pa.RecordBatch] = field(default_factory=OrderedDict)
    _taken_bytes: int = 0

    def join(self, batch_id: int, of: Submission) -> tuple[_Rows, list[tuple[int, pa.RecordBatch]]]:
        """Add a new batch; return its rows that must wait, and (row, results) of answered rows.

        The other rows are to run. Rows with crashes always run.
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
        self, batch_id: int, of: Submission, rows: Int32s, results: pa.RecordBatch
    ) -> list[tuple[int, int, pa.RecordBatch]]:
        """Note results of rows; return (batch id, row, results) of rows that waited for them."""
        if not of.dedup_keys:
            return []
        keys, served = {}, []
        for row, key in _keys(of, rows):
            if self._running.get(key) != (batch_id, row):
                continue
            keys[row] = key
            del self._running[key]
            if key in self._waiting:
                of_row = _of_row(results, row)
                served += [(*place, of_row) for place in self._waiting.pop(key)]
        self._keep(keys, results, len(rows))
        return served

    def drop(self, batch_id: int, of: Submission, rows: _Rows) -> list[_Place]:
        """Forget unfinished rows of a batch; return (batch id, row) of rows to run instead."""
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
        """Clear the cache of results."""
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
        results = self._taken[key] = self._last[number].of_row(row)
        self._taken_bytes += results.get_total_buffer_size()
        while self._taken_bytes > _MAX_TAKEN_BYTES and len(self._taken) > 1:
            _, oldest = self._taken.popitem(last=False)
            self._taken_bytes -= oldest.get_total_buffer_size()
        return results

    def _keep(self, keys: dict[int, _Key], results: pa.RecordBatch, num_rows: int) -> None:
        rows = to_numpy(results.column("row"), np.int32)
        failed = set(rows[has_error(results)].tolist())
        keys = {row: key for row, key in keys.items() if row not in failed}
        if not keys:
            return
        if len(keys) < num_rows:
            results = results.filter(pa.array(np.isin(rows, list(keys))))
        if not self._last or len(self._last[self._num_chunks].keys) >= _CHUNK_ROWS:
            self._num_chunks += 1
            self._last[self._num_chunks] = _Chunk()
        chunk = self._last[self._num_chunks]
        self._last_bytes -= chunk.num_bytes
        first = chunk.add(results)
        self._last_bytes += chunk.num_bytes
        self._place |= {key: (self._num_chunks, first + row) for row, key in keys.items()}
        chunk.keys += keys.values()
        if len(chunk.keys) >= _CHUNK_ROWS:
            chunk.copy()
        while self._last_bytes > _MAX_LAST_BYTES:
            number, oldest = self._last.popitem(last=False)
            self._last_bytes -= oldest.num_bytes
            for key in oldest.keys:
                if self._place[key][0] == number:
                    del self._place[key]


@dataclass(slots=True)
class _Chunk:
    """Numbered results of some rows, soon as copies, because originals keep messages in memory.

    Small batches are copied together, since each copy costs the same whatever its rows.
    """

    keys: list[_Key] = field(default_factory=list)
    num_bytes: int = 0
    _next: int = 0
    _copied: list[tuple[pa.RecordBatch, Ints]] = field(default_factory=list)
    _new: list[tuple[pa.RecordBatch, Ints]] = field(default_factory=list)

    def add(self, results: pa.RecordBatch) -> int:
        """Keep results; return the number of row 0, which those of other rows follow."""
        rows = to_numpy(results.column("row"), np.int64)
        first, self._next = self._next, self._next + int(rows.max()) + 1
        self._new.append((results, first + rows))
        self.num_bytes += results.nbytes
        if len(self._new) == _MAX_BATCHES:
            self.copy()
        return first

    def of_row(self, number: int) -> pa.RecordBatch:
        kept = (*self._copied, *self._new)
        found = ((batch, np.flatnonzero(numbers == number)) for batch, numbers in kept)
        return next(batch.take(pa.array(places)) for batch, places in found if len(places))

    def copy(self) -> None:
        """Copy the batches that are not yet."""
        if self._new:
            batches, numbers = zip(*self._new, strict=True)
            joined = pa.concat_batches(batches)  # copies nothing of a single batch
            copied = joined.take(pa.array(np.arange(len(joined))))
            self._copied.append((copied, np.concatenate(numbers)))
            self._new = []


def copied_results(results: pa.RecordBatch, row: int, prompt_tokens: int) -> pa.RecordBatch:
    """Return the results of an identical row as those of row `row`.

    Its whole prompt counts as cached, and its cost is null, since nothing was computed for it.
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


def _keys(of: Submission, rows: _Rows | Int32s | None = None) -> Iterable[tuple[int, _Key]]:
    """Return the rows that may have duplicates, with their keys."""
    if not of.dedup_keys:
        return ()
    words = np.frombuffer(of.dedup_keys, np.uint64).reshape(-1, DEDUP_KEY_BYTES // 8)
    chosen = np.arange(len(words)) if rows is None else rows
    chosen, client = chosen[words[chosen].any(axis=1)], of.client.encode()
    keys = words[chosen].view(f"V{DEDUP_KEY_BYTES}").ravel().tolist()
    return zip(chosen.tolist(), (client + key for key in keys), strict=True)


def _of_row(results: pa.RecordBatch, row: int) -> pa.RecordBatch:
    """Return a copy of all samples of a row, which keeps no others in memory."""
    return results.take(pa.array(np.flatnonzero(to_numpy(results.column("row"), np.int32) == row)))
