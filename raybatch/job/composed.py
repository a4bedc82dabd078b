"""Exactly-once reading and writing around a Ray Data pipeline of the user.

`read_parquet` assigns every row a place in the output, `write_parquet` writes each complete commit
unit once, and the next run reads only rows of missing units. In between, rows may be mapped,
repartitioned and reordered; none may be dropped.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Datasink

from raybatch.actors.ray_errors import errors_logged_once, message_kept, own_cause
from raybatch.config import PlanConfig
from raybatch.durable.audit import Audit, audit, finish, is_finished
from raybatch.durable.commit import committed
from raybatch.durable.journal import POS, ROW, drop_journal_and_staging
from raybatch.durable.layout import PLAN
from raybatch.durable.parts import empty_table
from raybatch.durable.run_log import beating
from raybatch.durable.sink import check_place, prepare_sink
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import CommitError, ConfigError
from raybatch.inputs.file_slices import ROWS_PER_TABLE
from raybatch.inputs.source import Source, check_outside, scan_source
from raybatch.job.run import is_same
from raybatch.planning.dataset import ray_pieces
from raybatch.planning.fingerprint import input_files
from raybatch.planning.run import fit_units, store_stretches
from raybatch.planning.shards import rows_in_stretches
from raybatch.planning.store import PlanSubject, StoredPlan, read_plan
from raybatch.report.recorder import new_run_id
from raybatch.rows.batches import as_movable, check_parquet_types
from raybatch.rows.plan_columns import with_columns
from raybatch.rows.schema import ROW_ID
from raybatch.stages.ray_context import settle_context
from raybatch.stages.unit_writer import UnitWriter, plan_units, settle_schema

UNIT = "__rb_unit"
_PLACES = (UNIT, POS, ROW)


def read_parquet(
    source: str | Path,
    *,
    sink: str | Path,
    version: str = "",
    unit_rows: int = 1024,
    overwrite: bool = False,
) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows that are not in `sink` yet.

    Rows have the source columns, a `row_id` ("<file>:<position>") if there is none, and three
    columns that begin with "__rb_" and name the row's place in the output; pass these on,
    `write_parquet` removes them.

    Args:
        source: Parquet, JSONL or CSV: a file, a folder or a glob.
        sink: output folder, as for `write_parquet`.
        version: version of your pipeline; change it when an answer may change. A folder that was
            started with one version refuses another.
        unit_rows: rows of one part of the output.
        overwrite: remove the contents of the folder, and start over.

    Raises:
        ConfigError: the source cannot be read, or the sink holds the output of another job.

    Example:
        >>> rows = raybatch.read_parquet("prompts/", sink="answers/")  # doctest: +SKIP
        >>> raybatch.write_parquet(stage.apply(rows), "answers/")  # doctest: +SKIP
    """
    source, sink = str(source), str(sink)
    max_unit_rows = max(unit_rows, PlanConfig().max_unit_rows)
    plan = PlanConfig(mode="off", unit_rows=unit_rows, max_unit_rows=max_unit_rows)
    scanned = scan_source(source)
    if taken := [name for name in _PLACES if name in scanned.schema.names]:
        raise ConfigError(
            f"the source has columns named {', '.join(taken)}, which raybatch adds itself; rename "
            "them"
        )
    check_parquet_types(scanned.schema)
    check_place(sink)
    check_outside(sink, source)
    paths = {part.path for part in scanned.slices}
    prepare_sink(sink, is_overwrite=overwrite, source_paths=paths)
    stored = _open(scanned, sink, fit_units(plan, scanned), {"version": json.dumps(version)})
    if not scanned.num_rows:
        return _no_rows(scanned.schema, sink)
    units = plan_units(sink, stored)
    return _rows(scanned, units.unit_rows, ~committed(store_of(sink), units), _first_unit(stored))


def _open(
    source: Source, sink: str, plan: PlanConfig, fingerprint: Mapping[str, str]
) -> StoredPlan:
    files = input_files(source)
    if store_of(sink).size(PLAN) is not None:
        stored = read_plan(sink)
        if is_same(sink, [stored], lambda _: [fingerprint], files, can_extend=False):
            return stored
    subject = PlanSubject(
        options=asdict(plan), files=files, fingerprint=fingerprint, source=source.root
    )
    return store_stretches(source, sink, subject, plan)


def _first_unit(stored: StoredPlan) -> int:
    """Return the number of a plan's first unit in a pipeline, different for every plan.

    Rows that were read before an output was overwritten are recognized by it.
    """
    return int(stored.hash, 16) % (1 << 31) << 32


def _rows(source: Source, unit_rows: Any, todo: Any, first_unit: int) -> Any:  # noqa: ANN401
    row_id_column = None if ROW_ID in source.schema.names else ROW_ID
    units, wanted = ray.put(unit_rows), ray.put(todo)

    def read(slices: range, first_row: int) -> Iterator[pa.Table]:
        sizes, is_todo = ray.get(units), ray.get(wanted)
        for table in source.read(slices, row_id_column=row_id_column):
            rows = np.arange(first_row, first_row + table.num_rows)
            first_row += table.num_rows
            planned = rows_in_stretches(sizes, rows)
            unit = planned.column("unit").to_numpy()
            columns = {
                UNIT: pa.array(unit.astype(np.int64) + first_unit),
                POS: planned.column("pos").cast(pa.int64()),
                ROW: pa.array(rows),
            }
            yield with_columns(as_movable(table), columns).filter(pa.array(is_todo[unit]))

    return ray_pieces(source, read).repartition(target_num_rows_per_block=ROWS_PER_TABLE)


def _no_rows(schema: pa.Schema, sink: str) -> Any:  # noqa: ANN401
    """Return a dataset with the columns of `_rows` and no rows."""
    table = as_movable(empty_table(schema))
    if ROW_ID not in schema.names:
        table = table.add_column(0, ROW_ID, pa.array([], pa.string()))
    with error_context(f"sink {sink!r} cannot be used"):
        # Ray reports no columns for a pipeline without rows
        settle_schema(store_of(sink), table.schema)
    places = dict.fromkeys(_PLACES, pa.array([], pa.int64()))
    return ray.data.from_arrow(with_columns(table, places))


def write_parquet(dataset: Any, sink: str | Path, *, schema: pa.Schema | None = None) -> Audit:  # noqa: ANN401
    """Write the processed rows of `read_parquet`, each unit once, and return the audit.

    Run the same pipeline again to resume an interrupted run.

    Args:
        dataset: the processed rows, with the columns that begin with "__rb_".
        sink: the same folder as for `read_parquet`.
        schema: schema of every part; None uses that of the first rows written, or of a source
            without rows. Needed if a column is null in all of the first rows. It cannot change
            while the output is written.

    Raises:
        ConfigError: the "__rb_" columns are missing, types differ, or the sink cannot be written.
        CommitError: rows are missing at the end, because the pipeline dropped or repeated some.
    """
    sink = str(sink)
    if store_of(sink).size(PLAN) is None:
        raise ConfigError(
            f"nothing was read for {sink!r}: start the pipeline with raybatch.read_parquet(source, "
            f"sink={sink!r})"
        )
    stored = read_plan(sink)
    plan, store = plan_units(sink, stored), store_of(sink)
    if is_finished(store, plan):
        return audit(store, plan)
    if schema is not None and plan.num_rows:
        schema = _settled(sink, schema)
    # the heartbeat stops an overwrite from removing files of a running pipeline
    with beating(store, new_run_id(time.time()), time.time):
        if plan.num_rows:
            settle_context(dataset)
            try:
                with errors_logged_once():
                    dataset.write_datasink(UnitSink(sink, stored, schema))
            except Exception as error:
                raise own_cause(error) or error from None
        else:
            # an input without rows gets one empty part, so that readers find the columns
            writer = _writer(sink, stored, schema, pa.schema([]), attempt="no rows")
            writer.deliver(0, writer.journal_of(0))
        result = audit(store, plan)
        if not result.is_clean:
            raise CommitError(
                f"{result}. Every row that was read must be written once: return one row for each, "
                "and mark rows in a column instead of dropping them"
            )
        finish(store, plan, result)
        drop_journal_and_staging(store)
    return result


def _settled(sink: str, schema: pa.Schema) -> pa.Schema:
    """Return `schema` if the parts have it; ConfigError: they have another one."""
    with error_context(f"sink {sink!r} cannot be used"):
        settled = settle_schema(store_of(sink), schema)
    if settled.equals(schema):
        return settled
    place, (there, here) = next(
        (place, pair)
        for place, pair in enumerate(zip_longest(settled, schema))
        if pair[0] is None or pair[1] is None or not pair[0].equals(pair[1])
    )
    raise ConfigError(
        f"schema: column {place} (from 0) is {_field_text(here)}, but {_field_text(there)} in the "
        f"rows that {sink} already holds; leave schema out, or start over with read_parquet(..., "
        "overwrite=True)"
    )


def _field_text(field: pa.Field | None) -> str:
    if field is None:
        return "none"
    return repr(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}")


def _writer(
    sink: str, stored: StoredPlan, schema: pa.Schema | None, given: pa.Schema, *, attempt: str
) -> UnitWriter:
    """Return a writer of units; without `schema` it uses that of the output, else `given`."""
    with error_context(f"sink {sink!r} cannot be used"):
        schema = schema or settle_schema(store_of(sink), given)
    return UnitWriter(
        sink=sink, store=store_of(sink), stored=stored, schema=schema, output=None, attempt=attempt
    )


class UnitSink(Datasink):  # type: ignore[misc]
    """Ray datasink that writes rows to the output units that their "__rb_" columns name.

    Rows of units that are not complete yet are kept in the journal.
    """

    def __init__(self, sink: str, stored: StoredPlan, schema: pa.Schema | None) -> None:
        self._sink, self._stored, self._schema = sink, stored, schema

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:  # noqa: ANN401
        with message_kept():
            tables = [ray.data.block.BlockAccessor.for_block(b).to_arrow() for b in blocks]
            table = pa.concat_tables([t for t in tables if t.num_rows] or tables[:1])
            if not table.num_rows:
                return 0
            missing = [name for name in _PLACES if name not in table.column_names]
            if missing:
                raise ConfigError(
                    f"the rows lack {', '.join(missing)}; functions of the pipeline must pass on "
                    "the columns that begin with '__rb_'"
                )
            self._deliver(table, attempt=f"task-{ctx.task_idx}")
            return int(table.num_rows)

    def _deliver(self, table: pa.Table, *, attempt: str) -> None:
        unit = table.column(UNIT).to_numpy() - _first_unit(self._stored)
        if unit.min() < 0 or unit.max() >= self._stored.num_units:
            raise ConfigError(
                f"the output in {self._sink} was overwritten, with another version or input, after "
                "these rows were read; read them again, or use one folder per pipeline"
            )
        rows = table.drop_columns([UNIT])
        user_schema = pa.schema([f for f in rows.schema if f.name not in _PLACES])
        rows = as_movable(rows)
        writer = _writer(self._sink, self._stored, self._schema, user_schema, attempt=attempt)
        for number in np.unique(unit).tolist():
            with error_context(f"sink {self._sink!r} cannot be read"):
                if writer.receipt_of(number) is not None:
                    continue
            with error_context(f"the rows do not fit the columns of the output in {self._sink!r}"):
                finished = writer.joined([rows.filter(pa.array(unit == number))])
            writer.deliver(number, finished)
