"""The rows of a source with a plan that lies below the sink, read piece by piece."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.durable import journal
from raybatch.inputs.source import Source
from raybatch.planning.planned import PlannedRun
from raybatch.planning.shards import rows_in_stretches
from raybatch.planning.store import read_shards, read_units
from raybatch.planning.stored import StoredPlan
from raybatch.records.arrays import Bools, Ints
from raybatch.rows.batches import as_movable
from raybatch.rows.plan_columns import (
    RANK,
    place_columns,
    places,
    plan_columns,
    rank_of,
    with_columns,
)

# blocks of the shuffle: a feeder holds some of them, and every pair of blocks is an object
_ROWS_PER_BLOCK = 1 << 14
_BYTES_PER_BLOCK = 64 << 20
_MAX_BLOCK_PAIRS = 1 << 20


def ordered_dataset(job: PlannedRun, stored: StoredPlan, todo: Bools) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows of units that are `todo`, in the order of their plan."""
    import ray  # slow to load, and a local run does without

    read, wanted = _reader(job, stored), ray.put(todo)
    rows = ray_pieces(job.source, lambda slices, first: read(slices, first, ray.get(wanted)))
    if not stored.is_reordered:
        return rows
    # blocks of the shuffle hold a bounded number of rows and of bytes, and whole units each
    units, num_tasks = np.flatnonzero(todo), len(pieces_of(job.source))
    num_bytes = sum(part.num_bytes for part in job.source.slices)
    least = max(stored.num_rows / _ROWS_PER_BLOCK, num_bytes / _BYTES_PER_BLOCK)
    least *= len(units) / max(1, stored.num_units)
    num_blocks = max(1, min(int(np.ceil(least)), _MAX_BLOCK_PAIRS // num_tasks, len(units)))
    starts = np.linspace(0, len(units), num_blocks + 1).astype(np.int64)[1:-1]
    return rows.sort(RANK, boundaries=rank_of(np.unique(units[starts])).tolist())


def ray_pieces(source: Source, read: Callable[[range, int], Iterator[pa.Table]]) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of what is read of each piece of a source with at least one row.

    `read` takes the slices of a piece and the number of its first row; it is called in tasks.
    """
    import ray  # slow to load, and a local run does without

    def read_tasks(batch: pa.Table) -> Iterator[pa.Table]:
        for task in batch.to_pylist():
            yield from read(range(task["start"], task["stop"]), task["first_row"])

    tasks = [
        {"start": slices.start, "stop": slices.stop, "first_row": first_row}
        for slices, first_row in pieces_of(source)
    ]
    items = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    return items.map_batches(read_tasks, batch_size=1, batch_format="pyarrow")


def planned_tables(job: PlannedRun, stored: StoredPlan, todo: Bools) -> Iterator[pa.Table]:
    """Yield the rows of a plan in tables of whole units, read as they are asked for.

    A plan in another order than that of the input is held in memory as a whole.
    """
    read = _reader(job, stored)
    pieces = (read(slices, first_row, todo) for slices, first_row in pieces_of(job.source))
    if stored.is_reordered:
        yield pa.concat_tables(table for piece in pieces for table in piece).sort_by(RANK)
        return
    # no unit lies in two pieces
    for piece in pieces:
        yield from _whole_units(piece)


def _reader(job: PlannedRun, stored: StoredPlan) -> Callable[..., Iterator[pa.Table]]:
    """Return `_read_piece` with what it needs of a run, small enough to travel to tasks."""
    return partial(_read_piece, job.source, job.sink, job.row_id_column, stored)


def _read_piece(
    source: Source,
    sink: str,
    row_id_column: str | None,
    stored: StoredPlan,
    slices: range,
    first_row: int,
    is_todo: Bools,
) -> Iterator[pa.Table]:
    """Yield rows of some slices, from `first_row` of the source on, with columns of their plan."""
    num_rows = sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    shard = read_shards(sink, stored, first_row, first_row + num_rows)
    is_wanted, place = is_todo[shard.column("unit").to_numpy()], 0
    if not is_wanted.any():
        return
    for table in source.read(slices, row_id_column=row_id_column):
        stop = place + table.num_rows
        rows = np.arange(first_row + place, first_row + stop)
        planned = with_plan(as_movable(table), shard.slice(place, table.num_rows), rows)
        yield planned.filter(is_wanted[place:stop])
        place = stop


def _whole_units(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield rows whose units follow each other so that no unit lies in two tables."""
    rest: list[pa.Table] = []
    for table in tables:
        if not table.num_rows:
            continue
        table = pa.concat_tables([*rest, table])
        units, _ = places(table)
        start = int(np.searchsorted(units, units[-1]))
        if start:
            yield table.slice(0, start)
        rest = [table.slice(start)]
    yield from rest


def with_places(sink: str, stored: StoredPlan, finished: pa.Table) -> tuple[Ints, pa.Table]:
    """Return the units of finished rows in a plan that was made later, and the rows placed."""
    finished = finished.sort_by(journal.ROW)
    rows = finished.column(journal.ROW).to_numpy()
    if stored.shards:
        firsts = [first for _, first in stored.shards]
        bounds = np.searchsorted(rows, [*firsts, stored.num_rows]).tolist()
        planned = pa.concat_tables(
            read_shards(sink, stored, first, end).take(rows[start:stop] - first)
            for first, end, start, stop in zip(
                firsts, [*firsts[1:], stored.num_rows], bounds[:-1], bounds[1:], strict=True
            )
            if start < stop
        )
    else:
        planned = rows_in_stretches(read_units(sink, stored).unit_rows, rows)
    positions = planned.column("pos").cast(pa.int64())
    place = finished.column_names.index(journal.POS)
    units = planned.column("unit").to_numpy().astype(np.int64)
    return units, finished.set_column(place, journal.POS, positions)


def without_groups(table: pa.Table) -> pa.Table:
    """Return rows that know their numbers with the columns of an empty plan."""
    zeros = pa.array(np.zeros(table.num_rows, np.int32))
    alone, unknown = (pa.nulls(table.num_rows, kind) for kind in (pa.int64(), pa.int32()))
    rank = {RANK: zeros.cast(pa.int64())}
    return with_columns(table, rank | plan_columns(alone, zeros, unknown))


def with_plan(table: pa.Table, shard: pa.Table, rows: Ints) -> pa.Table:
    """Return rows with the columns of a plan; the shard is about these rows, by number."""
    unit, pos = (shard.column(name).to_numpy() for name in ("unit", "pos"))
    of_plan = (shard.column(name) for name in ("group_id", "prefix_len", "expected_len"))
    return with_columns(table, place_columns(unit, pos, rows) | plan_columns(*of_plan))


def pieces_of(source: Source) -> list[tuple[range, int]]:
    """Return the slices of each piece of the source, and the number of its first row."""
    pieces, first_row = [], 0
    for slices in source.tasks():
        pieces.append((slices, first_row))
        first_row += sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    return pieces
