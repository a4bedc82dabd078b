"""Sampling of rows across a source, reading little more than these rows."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa

from raybatch.inputs.source import Source
from raybatch.records.arrays import Ints
from raybatch.rows.batches import as_movable

_SEED = 0
# slices read at once, since object stores have high latency
_THREADS = 8


def spread_rows(num_rows: int, limit: int) -> Ints:
    """Return ascending row numbers: a random one of each of `limit` equal stretches.

    Deterministic; all rows if there are no more than `limit`.
    """
    if num_rows <= limit:
        return np.arange(num_rows)
    bounds = np.arange(limit + 1) * num_rows // limit
    # random, because inputs may be periodic
    return np.random.default_rng(_SEED).integers(bounds[:-1], bounds[1:])


def taken(tables: Iterable[pa.Table], rows: Ints, first_row: int = 0) -> Iterator[pa.Table]:
    """Yield from each table the rows whose numbers are in `rows`, which are ascending.

    The first table begins with row `first_row`. A table without chosen rows gives an empty table;
    tables after the last chosen row are not read.
    """
    for table in tables:
        begin, end = np.searchsorted(rows, [first_row, first_row + table.num_rows])
        yield as_movable(table).take(rows[begin:end] - first_row)
        first_row += table.num_rows
        if end == len(rows):
            return


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSource(Source):
    """A sample of the rows of a source, with their original ids.

    `chosen` has the positions of the sampled rows in each slice, `whole` the slices with all rows.
    """

    whole: Source
    chosen: tuple[Ints, ...]

    @classmethod
    def of(cls, source: Source, limit: int) -> Self:
        """Sample at most `limit` rows spread over a source, from the row counts of its slices."""
        rows, first_row = spread_rows(source.num_rows, limit), 0
        wholes, slices, chosen = [], [], []
        for part in source.slices:
            begin, end = np.searchsorted(rows, [first_row, first_row + part.num_rows])
            if number := int(end - begin):
                num_bytes = part.num_bytes * number // part.num_rows
                wholes.append(part)
                slices.append(replace(part, num_rows=number, num_bytes=num_bytes))
                chosen.append(rows[begin:end] - first_row)
            first_row += part.num_rows
        return cls(
            schema=source.schema,
            slices=tuple(slices),
            num_rows=len(rows),
            is_projected=source.is_projected,
            whole=replace(source, slices=tuple(wholes)),
            chosen=tuple(chosen),
        )

    def read(self, task: range, *, row_id_column: str | None = None) -> Iterator[pa.Table]:
        """Yield a table with the sampled rows of each slice in `task`, a range of slices."""

        def read_one(index: int) -> pa.Table:
            tables = self.whole.read(range(index, index + 1), row_id_column=row_id_column)
            return pa.concat_tables(taken(tables, self.chosen[index]))

        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(read_one, task)
