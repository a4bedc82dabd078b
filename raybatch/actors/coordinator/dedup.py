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

# bounds of the latest results, and of results that a later row has used
_MAX_LAST_BYTES = 32 << 20
_MAX_TAKEN_BYTES = 32 << 20
# rows of a chunk of the latest results, and batches until they are joined
_CHUNK_ROWS, _MAX_BATCHES = 1024, 16

_Rows = npt.NDArray[np.intp]
# client and key
_Key = tuple[str, bytes]
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
        self, batch_id: int, of: Submission, rows: Iterable[int], results: pa.RecordBatch
    ) -> list[tuple[int, int, pa.RecordBatch]]:
        """Note results of rows; return (batch id, row, results) of rows that waited for them."""
        if not of.dedup_keys:
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

    def _keep(self, keys: dict[int, _Key], results: pa.RecordBatch) -> None:
        failed = set(to_numpy(results.column("row"), np.int32)[has_error(results)].tolist())
        keys = {row: key for row, key in keys.items() if row not in failed}
        if not keys:
            return
        if not self._last or len(next(reversed(self._last.values())).keys) >= _CHUNK_ROWS:
            self._num_chunks += 1
            self._last[self._num_chunks] = _Chunk()
        chunk = self._last[self._num_chunks]
        self._last_bytes -= chunk.num_bytes
        places = chunk.add(results, list(keys))
        self._last_bytes += chunk.num_bytes
        self._place |= {
            key: (self._num_chunks, place) for key, place in zip(keys.values(), places, strict=True)
        }
        chunk.keys += keys.values()
        while self._last_bytes > _MAX_LAST_BYTES:
            number, oldest = self._last.popitem(last=False)
            self._last_bytes -= oldest.num_bytes
            for key in oldest.keys:
                if self._place[key][0] == number:
                    del self._place[key]


@dataclass(slots=True)
class _Chunk:
    """Results of some rows, renumbered; copies, because the originals keep messages in memory."""

    keys: list[_Key] = field(default_factory=list)
    num_bytes: int = 0
    _batches: list[pa.RecordBatch] = field(default_factory=list)

    def add(self, results: pa.RecordBatch, rows: list[int]) -> range:
        """Copy the results of these rows, which ascend, and return their new numbers."""
        row = to_numpy(results.column("row"), np.int32)
        numbers = range(len(self.keys), len(self.keys) + len(rows))
        places = np.searchsorted(rows, row, side="right") - 1
        chosen = np.flatnonzero((places >= 0) & (np.array(rows)[places] == row))
        copied = results.take(chosen)
        renumbered = pa.array((numbers.start + places[chosen]).astype(np.int32))
        place = copied.schema.get_field_index("row")
        self._batches.append(copied.set_column(place, copied.schema.field(place), renumbered))
        if len(self._batches) > _MAX_BATCHES:  # each has objects for each of its columns
            self._batches = [pa.concat_batches(self._batches)]
            self.num_bytes = 0
        self.num_bytes += self._batches[-1].get_total_buffer_size()
        return numbers

    def of_row(self, number: int) -> pa.RecordBatch:
        found = (_of_row(batch, number) for batch in self._batches)
        return next(batch for batch in found if len(batch))


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


def _keys(of: Submission, rows: Iterable[int] | None = None) -> Iterable[tuple[int, _Key]]:
    """Yield rows that may have duplicates, with their keys."""
    if not of.dedup_keys:
        return
    keys, size = of.dedup_keys, DEDUP_KEY_BYTES
    no_key = bytes(size)
    for row in range(len(of.prompt_tokens)) if rows is None else rows:
        if (key := keys[row * size : (row + 1) * size]) != no_key:
            yield row, (of.client, key)


def _of_row(results: pa.RecordBatch, row: int) -> pa.RecordBatch:
    """Return a copy of all samples of a row, which keeps no others in memory."""
    return results.take(pa.array(np.flatnonzero(to_numpy(results.column("row"), np.int32) == row)))
