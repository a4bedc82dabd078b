"""Reads the rows of a source with their stored plan, piece by piece, or a sample of them."""

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.durable import journal
from raybatch.durable.layout import PLANS, ordered_name, ordered_units
from raybatch.durable.storage import Store, store_of
from raybatch.errors import RaybatchError, error_text
from raybatch.inputs.source import Source
from raybatch.planning.planned import RunSpec
from raybatch.planning.shards import rows_in_stretches
from raybatch.planning.store import StoredPlan, read_shards, read_units
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

logger = logging.getLogger(__name__)

# shuffle blocks: a feeder holds some of them, and every pair of blocks is a Ray object
_ROWS_PER_BLOCK = 1 << 14
_BYTES_PER_BLOCK = 64 << 20
_MAX_BLOCK_PAIRS = 1 << 20
# a smaller input is sorted again within seconds
_MIN_BYTES = 256 << 20
_DIGEST_BYTES = 16
_LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")
# of samples
_SEED = 0
# slices of a sample read at once, since object stores have high latency
_THREADS = 8


def ordered_dataset(
    job: RunSpec, stored: StoredPlan, todo: Bools, prompts: Mapping[int, Any]
) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows of a plan's units, in the order of the plan.

    `todo`, bool [units], says which units. `prompts` are references to the prompts of all rows, as
    plan columns, by the first row of each; without them feeders render and tokenize the rows.
    """
    import ray  # slow to load, and a local run does without

    # one object, so that tasks get one reference in place of many
    read = _reader(job, stored, ray.put(prompts) if prompts else None)
    if not stored.is_reordered:
        return _ray_rows(job.source, read, todo)
    unit_rows = read_units(job.sink, stored).unit_rows
    kept = ordered_rows(job.sink, stored, job.plan, job.source, unit_rows)
    if kept is None:
        return _sorted_rows(job, stored, read, todo)
    files = kept.files_of(todo)
    left = todo.copy()
    for _, units in files:
        left[units] = False
    shared = ray.put(kept)

    def write_file(rows: pa.Table) -> pa.Table:
        ray.get(shared).write(rows)
        return rows

    parts = []
    if files:
        parts.append(_kept_rows(job.source, read, shared, files, len(todo)))
    if left.any():
        rows = _sorted_rows(job, stored, read, left)
        parts.append(rows.map_batches(write_file, batch_size=None, batch_format="pyarrow"))
    first, *others = parts
    return first.union(*others) if others else first


def _ray_rows(source: Source, read: Callable[..., Iterator[pa.Table]], todo: Bools) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows of units that are `todo`, in input order."""
    import ray

    wanted = ray.put(todo)
    return ray_pieces(source, lambda slices, first: read(slices, first, ray.get(wanted)))


def _kept_rows(
    source: Source,
    read: Callable[..., Iterator[pa.Table]],
    shared: Any,  # noqa: ANN401 - Ray has no types
    files: Sequence[tuple[range, Ints]],
    num_units: int,
) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows in some files, each with the units to take from it.

    Rows of a damaged file are read from the source.
    """
    import ray

    def read_files(batch: pa.Table) -> Iterator[pa.Table]:
        for file in batch.to_pylist():
            wanted = np.array(file["units"])
            rows = ray.get(shared).read(range(file["start"], file["stop"]), wanted)
            if rows is None:
                is_wanted = np.zeros(num_units, bool)
                is_wanted[wanted] = True
                pieces = (read(*piece, is_wanted) for piece in pieces_of(source))
                rows = pa.concat_tables(table for piece in pieces for table in piece).sort_by(RANK)
            yield rows

    tasks = [
        {"start": units.start, "stop": units.stop, "units": wanted.tolist()}
        for units, wanted in files
    ]
    items = ray.data.from_items(tasks, override_num_blocks=len(tasks))
    return items.map_batches(read_files, batch_size=1, batch_format="pyarrow")


def _sorted_rows(
    job: RunSpec, stored: StoredPlan, read: Callable[..., Iterator[pa.Table]], todo: Bools
) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows of units that are `todo`, sorted by rank."""
    rows = _ray_rows(job.source, read, todo)
    # shuffle blocks have whole units, and limited rows and bytes
    units, num_tasks = np.flatnonzero(todo), len(pieces_of(job.source))
    share = len(units) / max(1, stored.num_units)
    num_bytes = share * sum(part.num_bytes for part in job.source.slices)
    number = num_blocks(share * stored.num_rows, num_bytes, num_tasks, _ROWS_PER_BLOCK)
    starts = np.linspace(0, len(units), min(number, len(units)) + 1).astype(np.int64)[1:-1]
    return rows.sort(RANK, boundaries=rank_of(np.unique(units[starts])).tolist())


def num_blocks(num_rows: float, num_bytes: float, num_pieces: int, rows_per_block: int) -> int:
    """Return the number of blocks into which a shuffle of `num_pieces` pieces writes its rows.

    A block has at most about `rows_per_block` rows and a limited size.
    """
    least = max(num_rows / rows_per_block, num_bytes / _BYTES_PER_BLOCK)
    return max(1, min(int(np.ceil(least)), _MAX_BLOCK_PAIRS // num_pieces))


def ray_pieces(source: Source, read: Callable[[range, int], Iterator[pa.Table]]) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the tables that `read` yields, called in tasks for each piece.

    A piece is some adjacent slices of the source, which must not be empty. `read` gets the range of
    their indices and the number of the first row.
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


def planned_tables(job: RunSpec, stored: StoredPlan, todo: Bools) -> Iterator[pa.Table]:
    """Yield the rows of a plan's units in order of the plan; a table holds whole units.

    `todo`, bool [units], says which units. Tables are read lazily, but rows of a plan in another
    order than the input are loaded into memory at once.
    """
    read = _reader(job, stored)
    pieces = (read(slices, first_row, todo) for slices, first_row in pieces_of(job.source))
    if stored.is_reordered:
        yield pa.concat_tables(table for piece in pieces for table in piece).sort_by(RANK)
        return
    # no unit spans two pieces
    for piece in pieces:
        yield from _whole_units(piece)


def _reader(
    job: RunSpec,
    stored: StoredPlan,
    prompts: Any = None,  # noqa: ANN401 - Ray has no types
) -> Callable[..., Iterator[pa.Table]]:
    """Return `_read_piece` bound to the run, small enough to send to tasks."""
    return partial(_read_piece, job.source, job.sink, job.row_id_column, stored, prompts)


def _read_piece(
    source: Source,
    sink: str,
    row_id_column: str | None,
    stored: StoredPlan,
    prompts: Any,  # noqa: ANN401 - Ray has no types
    slices: range,
    first_row: int,
    is_todo: Bools,
) -> Iterator[pa.Table]:
    """Yield rows of some slices, from `first_row` of the source on, with plan columns.

    `prompts` refers to references to prompts by the first row of each; None if they are not known.
    """
    num_rows = sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    shard = read_shards(sink, stored, first_row, first_row + num_rows)
    is_wanted, place = is_todo[shard.column("unit").to_numpy()], 0
    if not is_wanted.any():
        return
    of_rows = None
    if prompts is not None:
        import ray  # slow to load, and a local run does without

        known, end = ray.get(prompts), first_row + num_rows
        some = [known[first] for first in sorted(known) if first_row <= first < end]
        of_rows = pa.concat_tables(ray.get(some))
    for table in source.read(slices, row_id_column=row_id_column):
        stop = place + table.num_rows
        rows = np.arange(first_row + place, first_row + stop)
        planned = with_plan(as_movable(table), shard.slice(place, table.num_rows), rows)
        if of_rows is not None:
            columns = of_rows.slice(place, table.num_rows).columns
            named = dict(zip(of_rows.column_names, columns, strict=True))
            planned = with_columns(planned, named)
        yield planned.filter(is_wanted[place:stop])
        place = stop


def _whole_units(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Yield rows, ordered by unit, in tables such that no unit spans two tables."""
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
    """Return the units, in a plan that was made later, of rows that finished before.

    Also returns `finished`, sorted by row number, with the positions in these units.
    """
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
    """Return rows with plan columns that say: input order, no prefix group, unknown length."""
    zeros = pa.array(np.zeros(table.num_rows, np.int32))
    alone, unknown = (pa.nulls(table.num_rows, kind) for kind in (pa.int64(), pa.int32()))
    rank = {RANK: zeros.cast(pa.int64())}
    return with_columns(table, rank | plan_columns(alone, zeros, unknown))


def with_plan(table: pa.Table, shard: pa.Table, rows: Ints) -> pa.Table:
    """Return rows, whose numbers are `rows`, with the plan columns of their shard."""
    unit, pos = (shard.column(name).to_numpy() for name in ("unit", "pos"))
    of_plan = (shard.column(name) for name in ("group_id", "prefix_len", "expected_len"))
    return with_columns(table, place_columns(unit, pos, rows) | plan_columns(*of_plan))


def pieces_of(source: Source) -> list[tuple[range, int]]:
    """Return (range of slice indices, number of the first row) of each piece of the source."""
    pieces, first_row = [], 0
    for slices in source.tasks():
        pieces.append((slices, first_row))
        first_row += sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    return pieces


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class OrderedRows:
    """Reads and writes files of rows in the order of a plan, for later runs; sent to tasks.

    Without them each run reads the whole source and sorts it. A file has all rows of some adjacent
    units; units that were committed when it was written may be missing, since no later run needs
    them. The files only save work: a file that is missing, torn or not written costs another sort.

    Args:
        store: where the files are.
        plan_hash: hash of the plan.
        unit_rows: int64 [U], rows of each unit of the plan.
    """

    store: Store
    plan_hash: str
    unit_rows: Ints

    def files_of(self, todo: Bools) -> list[tuple[range, Ints]]:
        """Return the files to read for the units of `todo`, each with the units to take from it."""
        left, files = todo.copy(), []
        for name in self.store.names(f"{PLANS}/{self.plan_hash}"):
            units = ordered_units(name)
            if units is None or units.stop > len(todo):
                continue
            wanted = units.start + np.flatnonzero(left[units.start : units.stop])
            if len(wanted):
                left[wanted] = False
                files.append((units, wanted))
        return files

    def write(self, rows: pa.Table) -> None:
        """Write a file of rows, sorted by rank, unless it exists; errors are only logged."""
        if not self._are_whole(rows):
            return
        unit, _ = places(rows)
        name = ordered_name(self.plan_hash, range(int(unit[0]), int(unit[-1]) + 1))
        buffer = pa.BufferOutputStream()
        with pa.ipc.new_file(buffer, rows.schema, options=_LZ4) as out:
            out.write_table(rows)
        data = bytes(buffer.getvalue())
        try:
            self.store.create(name, data + _digest(data))
        except (OSError, RaybatchError) as error:
            logger.warning(
                "could not write %s/%s, so the next run of the job sorts these rows again: %s",
                self.store.uri,
                name,
                error_text(error),
            )

    def read(self, units: range, wanted: Ints) -> pa.Table | None:
        """Return the rows of some units of a file; None, with a warning, if it is damaged."""
        name = ordered_name(self.plan_hash, units)
        try:
            data = self.store.read(name)
            content, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
            if _digest(content) != digest:
                raise ValueError("the file is damaged")
            table = pa.ipc.open_file(pa.py_buffer(content)).read_all()
            unit, _ = places(table)
            rows = table.filter(pa.array(np.isin(unit, wanted)))
            if rows.num_rows != self.unit_rows[wanted].sum():
                raise ValueError("rows are missing")
        except (OSError, ValueError, KeyError, RaybatchError) as error:
            logger.warning(
                "reading rows of the source again instead of %s/%s: %s",
                self.store.uri,
                name,
                error_text(error),
            )
            return None
        return rows

    def _are_whole(self, rows: pa.Table) -> bool:
        """Return whether these are one or more rows, and all rows of their units."""
        if not rows.num_rows:
            return False
        unit, _ = places(rows)
        units, counts = np.unique(unit, return_counts=True)
        return bool((self.unit_rows[units] == counts).all())


def ordered_rows(
    sink: str, stored: StoredPlan, plan: PlanConfig, source: Source, unit_rows: Ints
) -> OrderedRows | None:
    """Return the files of a plan; None if the job wants none."""
    num_bytes = sum(part.num_bytes for part in source.slices)
    if plan.shards is None or (plan.shards == "auto" and num_bytes <= _MIN_BYTES):
        return None
    store = store_of(_place_of(sink, plan))
    return OrderedRows(store=store, plan_hash=stored.hash, unit_rows=unit_rows)


def remove_ordered_rows(sink: str, plans: tuple[StoredPlan, ...], plan: PlanConfig) -> None:
    """Remove the files of the plans of a complete output; those of a live run cost another sort."""
    for folder in {sink, _place_of(sink, plan)}:
        store = store_of(folder)
        for stored in plans:
            for name in store.names(f"{PLANS}/{stored.hash}"):
                if ordered_units(name) is not None:
                    store.remove(name)


def _place_of(sink: str, plan: PlanConfig) -> str:
    return sink if plan.shards in ("auto", None) else str(plan.shards)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


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
