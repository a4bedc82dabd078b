"""Copies a finished output with its rows in input order.

Units of an output follow the order in which engines run, and outputs are never modified. The copy
is a separate output whose units are stretches of the input: each is written once, also with
concurrent writers; an interrupted copy can be resumed, and `verify` checks it like any output.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.actors.ray_errors import errors_logged_once, message_kept, own_cause
from raybatch.config import PlanConfig
from raybatch.durable.audit import Audit, audit, finish, is_finished
from raybatch.durable.commit import committed
from raybatch.durable.journal import POS, ROW, drop_journal_and_staging
from raybatch.durable.layout import PLAN, part_name, plan_name
from raybatch.durable.parts import empty_table, read_rows
from raybatch.durable.sink import begin_copy, check_place, is_marked, prepare_sink
from raybatch.durable.storage import error_context, is_below, store_of
from raybatch.durable.units import UnitPlan
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import output_columns
from raybatch.planning.shards import MAX_UNIT_BYTES, stretches
from raybatch.planning.store import (
    PlanSubject,
    StoredPlan,
    read_all_units,
    read_plan,
    read_plans,
    read_shards,
    read_units,
    write_plan,
)
from raybatch.records.arrays import Ints
from raybatch.rows.batches import as_movable
from raybatch.rows.plan_columns import RANK, places, rank_of
from raybatch.stages.unit_writer import UnitWriter

logger = logging.getLogger(__name__)

# smaller outputs are sorted in this process, because a Ray shuffle needs seconds
_MAX_DRIVER_BYTES = 256 << 20
# target size of a shuffle block, which holds whole units
_BLOCK_ROWS, _BLOCK_BYTES = 1 << 14, 64 << 20
# every pair of a block before and one after a sort is a Ray object
_MAX_BLOCKS = 1 << 10
# rows whose places are read at once if the plan has no shards
_ROWS_PER_READ = 1 << 20
# names of parts sort like their numbers up to a million parts
_MAX_PARTS = 500_000
_PARTITIONED = (
    "its files lack the rows' places in the input; run the job with output_order=input from the "
    "start"
)
_PLACES = pa.schema([(RANK, pa.int64()), (ROW, pa.int64())])


@dataclass(frozen=True, kw_only=True, eq=False)
class OrderedCopy:
    """A copy, in input order, of the rows of one plan of an output; sent to Ray tasks.

    `target` is the plan of the copy: its units are consecutive rows of the input. `unit_rows`
    (int64 [U]) are the numbers of rows of its units, `is_todo` (bool [U]) says which are not
    written yet. A row has about `row_bytes` in memory.
    """

    source: str
    sink: str
    stored: StoredPlan
    target: StoredPlan
    unit_rows: Ints
    is_todo: npt.NDArray[np.bool_]
    schema: pa.Schema
    row_bytes: float

    @cached_property
    def ends(self) -> Ints:
        return np.cumsum(self.unit_rows)

    def reads(self) -> list[tuple[int, int]]:
        """Return the (first, stop) ranges of rows for `places`: one for each shard of the plan."""
        by_size = range(0, self.stored.num_rows, _ROWS_PER_READ)
        firsts = [first for _, first in self.stored.shards] or list(by_size)
        return list(pairwise([*firsts, self.stored.num_rows]))

    def places(self, first: int, stop: int) -> pa.Table:
        """Return which of the input rows [first, stop) to copy, and where they are in the output.

        The columns are the rank in the order of the output, and the number of the row.
        """
        row = np.arange(first, stop)
        row = row[self.is_todo[np.searchsorted(self.ends, row, side="right")]]
        if not len(row):
            return _PLACES.empty_table()
        shards = read_shards(self.source, self.stored, first, stop)
        rank = rank_of(shards.column("unit").to_numpy()) + shards.column("pos").to_numpy()
        return pa.table([rank[row - first], row], schema=_PLACES)

    def rows_at(self, where: pa.Table) -> pa.Table:
        empty = as_movable(empty_table(self.schema))
        tables = [empty.append_column(ROW, pa.array([], pa.int64()))]
        unit, position = places(where)
        store = store_of(self.source)
        for start, stop in _runs(unit):
            name = part_name(self.stored.first_unit + int(unit[start]))
            with error_context(f"{store.uri}/{name} cannot be read"):
                data = store.read(name)
            part = as_movable(read_rows(data, f"{store.uri}/{name}", self.schema))
            part = part.take(position[start:stop])
            tables.append(part.append_column(ROW, where.column(ROW).slice(start, stop - start)))
        return pa.concat_tables(tables)

    def write(self, rows: pa.Table) -> pa.Table:
        unit = np.searchsorted(self.ends, rows.column(ROW).to_numpy(), side="right")
        for start, stop in _runs(unit):
            self.deliver(int(unit[start]), rows.slice(start, stop - start))
        return pa.table({"unit": pa.array(np.unique(unit), pa.int64())})

    def deliver(self, unit: int, rows: pa.Table) -> None:
        """Write a unit of the copy unless it exists; `rows` are all its rows, in input order."""
        writer = UnitWriter(
            sink=self.sink,
            store=store_of(self.sink),
            stored=self.target,
            schema=self.schema,
            output=output_columns(self.target.fingerprint),
            attempt="ordered",
        )
        if writer.receipt_of(unit) is None:
            first = self.ends[unit] - self.unit_rows[unit]
            pos = pa.array(rows.column(ROW).to_numpy() - first)
            writer.deliver(unit, writer.joined([rows.append_column(POS, pos)]))


def copy_rows(copy: OrderedCopy, start_ray: Callable[[], None] | None) -> None:
    """Write the missing units of a copy, in this process or, if there are many rows, by Ray.

    `start_ray` is called before Ray is used; None lets Ray start by itself.
    """
    num_rows = int(copy.unit_rows[copy.is_todo].sum())
    logger.info("sorting %d rows into input order, writing to %s", num_rows, copy.sink)
    if not num_rows:
        copy.deliver(0, copy.rows_at(_PLACES.empty_table()))
    elif num_rows * copy.row_bytes <= _MAX_DRIVER_BYTES:
        where = pa.concat_tables(copy.places(*rows) for rows in copy.reads())
        copy.write(copy.rows_at(where.sort_by(RANK)).sort_by(ROW))
    else:
        if start_ray is not None:
            start_ray()
        _run_tasks(copy)


def _run_tasks(copy: OrderedCopy) -> None:
    """Sort twice with Ray: places by unit, so that each part is read once, then rows by number."""
    # slow to load, and small outputs do not need it
    import ray

    from raybatch.stages.ray_context import settle_context

    shared = ray.put(copy)

    def read_places(batch: pa.Table) -> Iterator[pa.Table]:
        for task in batch.to_pylist():
            yield ray.get(shared).places(task["first"], task["stop"])

    def read_rows(where: pa.Table) -> pa.Table:
        with message_kept():
            where = where.sort_by(RANK) if where.num_rows else _PLACES.empty_table()
            return ray.get(shared).rows_at(where)

    def write(rows: pa.Table) -> pa.Table:
        if not rows.num_rows:
            return pa.table({"unit": pa.array([], pa.int64())})
        with message_kept():
            return ray.get(shared).write(rows.sort_by(ROW))

    reads = [{"first": first, "stop": stop} for first, stop in copy.reads()]
    numbers = ray.data.from_items(reads, override_num_blocks=len(reads))
    where = numbers.map_batches(read_places, batch_size=1, batch_format="pyarrow")
    old_starts = rank_of(_block_starts(copy, read_units(copy.source, copy.stored).unit_rows))
    rows = where.sort(RANK, boundaries=old_starts.tolist())
    rows = rows.map_batches(read_rows, batch_size=None, batch_format="pyarrow")
    starts = (copy.ends - copy.unit_rows)[_block_starts(copy, copy.unit_rows)]
    rows = rows.sort(ROW, boundaries=starts.tolist())
    written = rows.map_batches(write, batch_size=None, batch_format="pyarrow")
    settle_context(written)
    written.context.enable_progress_bars = False
    try:
        with errors_logged_once():
            for _ in written.iter_batches(batch_size=None, batch_format="pyarrow"):
                pass
    except Exception as error:
        raise own_cause(error) or error from None


def _block_starts(copy: OrderedCopy, unit_rows: Ints) -> Ints:
    """Return the units at which shuffle blocks begin, without the first."""
    size = max(1, min(_BLOCK_ROWS, int(_BLOCK_BYTES / max(1.0, copy.row_bytes))))
    size = max(size, -(-copy.stored.num_rows // _MAX_BLOCKS))
    block = (np.cumsum(unit_rows) - unit_rows) // size
    return np.flatnonzero(np.diff(block, prepend=block[:1]))


def _runs(unit: Ints) -> list[tuple[int, int]]:
    starts = np.flatnonzero(np.diff(unit, prepend=-1)).tolist()
    return list(pairwise([*starts, len(unit)]))


def ordered(sink: str, into: str, *, start_ray: Callable[[], None] | None = None) -> Audit:
    """Copy a finished output into another folder with its rows in input order.

    A second call resumes the first. `start_ray` is called before Ray is used; small outputs do not
    use it.

    Raises:
        ConfigError: the output is not finished, already in input order, or partitioned; or the
            folder cannot be used.
    """
    plans, _ = read_finished(sink, partitioned=_PARTITIONED)
    if not any(stored.is_reordered for stored in plans):
        raise ConfigError(f"the rows in {sink} are already in input order; no copy is needed")
    prepare_copy(sink, into, "ordered")
    return restore_order(sink, into, start_ray=start_ray)


def prepare_copy(sink: str, into: str, command: str) -> None:
    """Prepare the folder for a copy of an output, made by `raybatch <command>`.

    Raises:
        ConfigError: it is the output, or inside one, or has rows of something else.
    """
    check_place(into)
    if is_below(into, sink):
        raise ConfigError(
            f"{into} is the output to copy, whose readers would see every row twice; choose "
            "another folder"
        )
    source = store_of(sink).uri
    prepare_sink(into, is_overwrite=False, source_paths=[f"{source}/{PLAN}"])
    begin_copy(store_of(into), source, command)


def finish_copy(into: str) -> Audit:
    """Mark a copy as complete, and return its audit.

    Raises:
        CommitError: the copy does not have every row once.
    """
    store, units = store_of(into), read_all_units(into, read_plans(into))
    result = audit(store, units)
    finish(store, units, result)
    drop_journal_and_staging(store)
    return result


def restore_order(
    sink: str,
    into: str,
    *,
    subject: PlanSubject | None = None,
    file_bytes: int | None = None,
    start_ray: Callable[[], None] | None = None,
) -> Audit:
    """Write the rows of a finished output in input order, each once; return the audit of the copy.

    Rows of a later plan follow those of earlier plans. Memory: some blocks of rows; larger outputs
    are sorted by Ray, which spills to disk.

    Args:
        into: folder for the copy, already prepared.
        subject: fingerprint and partition columns of the copy; None: those of the output.
        file_bytes: size in memory of the rows of a file; None: a file has the rows of a unit.
        start_ray: called before Ray is used; None lets Ray start by itself.

    Raises:
        ConfigError: the output is not finished, or the folder has the copy of another one.
        CommitError: the copy does not have every row once.
    """
    first_unit = 0
    for stored in read_finished(sink, partitioned=_PARTITIONED)[0]:
        wanted = replace(stored, first_unit=first_unit)
        if subject is not None:
            wanted = replace(
                wanted,
                fingerprint=subject.fingerprint,
                partition_by=subject.partition_by,
                partition_types=subject.partition_types,
            )
        copy = _open(sink, into, stored, wanted, file_bytes)
        first_unit += copy.target.num_units
        if copy.is_todo.any():
            copy_rows(copy, start_ray)
    return finish_copy(into)


def _open(
    sink: str, into: str, stored: StoredPlan, wanted: StoredPlan, file_bytes: int | None
) -> OrderedCopy:
    """Write the plan of the copy of `stored`, and return the copy to make."""
    first = pq.ParquetFile(pa.BufferReader(store_of(sink).read(part_name(stored.first_unit))))
    table = first.read(use_threads=False)
    row_bytes = table.nbytes / max(1, table.num_rows)
    about = json.dumps([stored.hash, wanted.partition_by]).encode()
    name = hashlib.blake2b(about, digest_size=8, person=b"input order").hexdigest()
    if store_of(into).size(plan_name(stored.number)) is None:
        # units must fit memory but not be too many
        most = max(1, int((file_bytes or MAX_UNIT_BYTES) / max(1.0, row_bytes)))
        if file_bytes is None:
            most = min(most, int(stored.options.get("unit_rows", PlanConfig().unit_rows)))
        size = max(most, -(-stored.num_rows // _MAX_PARTS), 1)
        full, rest = divmod(stored.num_rows, size)
        sizes = [size] * full + [rest] * (rest > 0 or not full)
        units = stretches(name, np.array(sizes, np.int64))
        target = replace(
            wanted, hash=name, num_units=units.num_units, is_reordered=False, shards=()
        )
        target = write_plan(into, target, units)
    else:
        target = read_plan(into, stored.number)
    if target.hash != name:
        raise ConfigError(
            f"{into} holds the copy of another output than {sink}; choose another folder"
        )
    done = committed(store_of(into), read_all_units(into, read_plans(into)))
    return OrderedCopy(
        source=sink,
        sink=into,
        stored=stored,
        target=target,
        unit_rows=read_units(into, target).unit_rows,
        is_todo=~done[target.first_unit : target.first_unit + target.num_units],
        schema=first.schema_arrow,
        row_bytes=row_bytes,
    )


def read_finished(
    sink: str, then: str = "", *, partitioned: str = ""
) -> tuple[tuple[StoredPlan, ...], UnitPlan]:
    """Return the plans of an output and their units, joined.

    Raises:
        ConfigError: it is not the output of a job, or not finished; the message ends with `then`.
            With `partitioned`, which is the reason, also if it is partitioned.
    """
    store = store_of(sink)
    with error_context(f"output {sink!r} cannot be read"):
        if store.size(PLAN) is None and not is_marked(store):
            raise ConfigError(f"{sink} is not the output of a raybatch job")
        plans = read_plans(sink)
        # finishing the job first would not help
        if partitioned and plans and plans[0].partition_by:
            raise ConfigError(f"the output in {sink} is partitioned, and {partitioned}")
        units = read_all_units(sink, plans) if plans else None
        if units is None or not is_finished(store, units):
            raise ConfigError(
                f"the output in {sink} is not finished; run the job again to the end{then}"
            )
    return plans, units
