"""The rows of a large source in the order of a plan that lies below the sink."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray

from raybatch.stages.plan.movable import as_movable
from raybatch.stages.plan.planned import PlannedRun
from raybatch.stages.plan.store import StoredPlan, read_shards
from raybatch.stages.plan_columns import RANK, plan_columns
from raybatch.stages.source import Source

__all__ = ["ordered_dataset", "pieces_of", "without_groups"]

# blocks of the shuffle: what is in one is written together, and every pair of blocks is an object
_ROWS_PER_BLOCK = 1 << 14
_MAX_BLOCK_PAIRS = 1 << 16
_UNIT_BITS = 32


def ordered_dataset(job: PlannedRun, stored: StoredPlan, first_unit: int) -> Any:  # noqa: ANN401
    """Return a Ray dataset of the rows in the order of a plan that lies below the sink.

    Args:
        job: to run.
        stored: what `plan.json` says.
        first_unit: the units before are left out.
    """
    source, sink, row_id_column = job.source, job.sink, job.row_id_column

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        for task in batch.to_pylist():
            slices, first_row = range(task["start"], task["stop"]), task["first_row"]
            num_rows = sum(part.num_rows for part in source.slices[slices.start : slices.stop])
            shard, place = read_shards(sink, stored, first_row, first_row + num_rows), 0
            for table in source.read(slices, row_id_column=row_id_column):
                planned = _with_plan(as_movable(table), shard.slice(place, table.num_rows))
                place += table.num_rows
                yield planned.filter(pc.field(RANK) >= first_unit << _UNIT_BITS)

    tasks = [
        {"start": slices.start, "stop": slices.stop, "first_row": first_row}
        for slices, first_row in pieces_of(source)
    ]
    items = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    rows = items.map_batches(read, batch_size=1, batch_format="pyarrow")
    if not stored.is_reordered:
        return rows
    num_blocks = min(-(-stored.num_rows // _ROWS_PER_BLOCK), _MAX_BLOCK_PAIRS // len(tasks))
    starts = np.linspace(0, stored.num_units, max(1, num_blocks) + 1).astype(np.int64)[1:-1]
    return rows.sort(RANK, boundaries=(np.unique(starts) << _UNIT_BITS).tolist())


def without_groups(table: pa.Table) -> pa.Table:
    """Return the table with the columns of a plan that says nothing of its rows yet."""
    nothing = np.zeros(table.num_rows, np.int32)
    alone, unknown = np.full(table.num_rows, -1), np.full(table.num_rows, np.nan)
    for name, column in plan_columns(alone, nothing, unknown).items():
        table = table.append_column(name, column)
    return table


def _with_plan(table: pa.Table, shard: pa.Table) -> pa.Table:
    rank = shard.column("unit").to_numpy().astype(np.int64) << _UNIT_BITS
    expected = pc.cast(shard.column("expected_len"), pa.float64()).to_numpy()
    columns = {
        RANK: pa.array(rank + shard.column("pos").to_numpy()),
        **plan_columns(
            shard.column("group_id").fill_null(-1).to_numpy(),
            shard.column("prefix_len").to_numpy(),
            expected,
        ),
    }
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def pieces_of(source: Source) -> list[tuple[range, int]]:
    """Return the slices of each piece of the source, and the number of its first row."""
    pieces, first_row = [], 0
    for slices in source.tasks():
        pieces.append((slices, first_row))
        first_row += sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    return pieces
