"""Rows of a job's output in the order of the requests, also of a job that has ended early."""

import posixpath
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.layout import PLAN, PLAN_ORDER, part_name
from raybatch.durable.sink import output_files
from raybatch.durable.storage import store_of
from raybatch.openai_batch.files import parquet_rows
from raybatch.planning.fingerprint import output_columns
from raybatch.planning.store import read_plans
from raybatch.stages.unit_writer import UnitWriter

_ROWS_AT_ONCE = 8192
_KEY = ["line", "place"]


def finished_rows(sink: str, columns: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of an output that is complete and in the order of the input.

    Args:
        sink: of the job.
        columns: to read, as far as they are there.
    """
    for path in output_files(sink):
        yield from parquet_rows(path, columns)


def rows_so_far(sink: str, columns: Sequence[str], *, asked: pa.Schema) -> Iterator[dict[str, Any]]:
    """Yield the finished rows of a job with `output_order="input"` that is not complete, in order.

    Memory: one unit and some thousand rows, and 24 bytes for every finished row.

    Args:
        sink: of the job.
        columns: to read, as far as they are there.
        asked: schema of the rows that were asked.
    """
    folder = posixpath.join(sink, PLAN_ORDER)
    if store_of(folder).size(PLAN) is None:
        return
    units = _Units(folder, asked)
    keys = [units.keys(unit) for unit in range(units.num_units)]
    unit = np.repeat(np.arange(len(keys)), [len(key) for key in keys])
    row = np.concatenate([np.arange(len(key)) for key in keys])
    line_and_place = np.concatenate(keys)
    order = np.lexsort((line_and_place[:, 1], line_and_place[:, 0]))
    for first in range(0, len(order), _ROWS_AT_ONCE):
        chosen = order[first : first + _ROWS_AT_ONCE]
        tables = [
            units.rows(int(number), columns).take(row[chosen[unit[chosen] == number]])
            for number in np.unique(unit[chosen])
        ]
        table = pa.concat_tables(tables).sort_by([(name, "ascending") for name in _KEY])
        for batch in table.to_batches(max_chunksize=256):
            yield from batch.to_pylist()


class _Units:
    """The units of an output: those that are written, and finished rows of those that are not."""

    def __init__(self, folder: str, asked: pa.Schema) -> None:
        self._store = store_of(folder)
        stored, *_ = read_plans(folder)
        self.num_units = stored.num_units
        output = output_columns(stored.fingerprint)
        assert output is not None, "a job on rows of a batch has a stage"
        self._writer = UnitWriter(
            sink=folder,
            store=self._store,
            stored=stored,
            schema=pa.schema([*asked, *output.arrow()], metadata=asked.metadata),
            output=output,
            attempt="reading",
        )
        self._table = lru_cache(maxsize=1)(self._read)

    def keys(self, unit: int) -> Any:  # noqa: ANN401 - int64 [R, 2]
        """Return line and place of each finished row of a unit."""
        table = self.rows(unit, _KEY)
        return np.stack([table.column(name).to_numpy().astype(np.int64) for name in _KEY], axis=1)

    def rows(self, unit: int, columns: Sequence[str]) -> pa.Table:
        """Return the finished rows of a unit."""
        return self._table(unit, tuple(columns))

    def _read(self, unit: int, columns: Sequence[str]) -> pa.Table:
        if self._writer.receipt_of(unit) is None:
            table = self._writer.journal_of(unit)
            return table.select([name for name in columns if name in table.column_names])
        file = pq.ParquetFile(pa.BufferReader(self._store.read(part_name(unit))))
        known = file.schema_arrow.names
        return file.read([name for name in columns if name in known], use_threads=False)
