"""Some rows of a source that stand for all of it; little more than these rows is read."""

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
# slices that are read at once: a store takes its time to open each
_THREADS = 8


def spread_rows(num_rows: int, limit: int) -> Ints:
    """Return numbers of rows, rising: one at random of each of `limit` equal stretches.

    The same for the same arguments; all rows where there are no more than the limit.
    """
    if num_rows <= limit:
        return np.arange(num_rows)
    bounds = np.arange(limit + 1) * num_rows // limit
    # at random, because inputs repeat themselves every so many rows
    return np.random.default_rng(_SEED).integers(bounds[:-1], bounds[1:])


def taken(tables: Iterable[pa.Table], rows: Ints, first_row: int = 0) -> Iterator[pa.Table]:
    """Yield the rows with some numbers, rising, of tables that begin with row `first_row`.

    What lies behind the last of them is not read; of a table without any comes one without rows.
    """
    for table in tables:
        begin, end = np.searchsorted(rows, [first_row, first_row + table.num_rows])
        yield as_movable(table).take(rows[begin:end] - first_row)
        first_row += table.num_rows
        if end == len(rows):
            return


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledSource(Source):
    """Some rows of a source, with the ids that they have there.

    `chosen` are positions in each of the slices, which `whole` has with all of their rows.
    """

    whole: Source
    chosen: tuple[Ints, ...]

    @classmethod
    def of(cls, source: Source, limit: int) -> Self:
        """Choose `limit` rows over a whole source, by what the footers of its files tell."""
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
        """Yield the chosen rows of some neighbouring slices."""

        def read_one(index: int) -> pa.Table:
            tables = self.whole.read(range(index, index + 1), row_id_column=row_id_column)
            return pa.concat_tables(taken(tables, self.chosen[index]))

        with ThreadPoolExecutor(_THREADS) as threads:
            yield from threads.map(read_one, task)
