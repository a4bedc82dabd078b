"""Exactly-once reading and writing around a pipeline of the user's own.

`read_parquet` gives every row a place in the output, `write_parquet` writes the units that are
complete, each once, and the next run reads only the rows whose units are missing. In between, rows
may be mapped, split into other blocks and brought into another order; none may be dropped.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.data import Datasink

from raybatch.config import PlanConfig
from raybatch.durable.audit import Audit, audit, finish, is_finished
from raybatch.durable.commit import committed
from raybatch.durable.journal import POS, ROW
from raybatch.durable.layout import PLAN
from raybatch.errors import CommitError, ConfigError
from raybatch.stages.file_slices import ROWS_PER_TABLE
from raybatch.stages.fingerprint import check_same, input_files
from raybatch.stages.plan.dataset import pieces_of
from raybatch.stages.plan.movable import as_movable
from raybatch.stages.plan.run import fit_units, store_stretches
from raybatch.stages.plan.shards import rows_in_stretches
from raybatch.stages.plan.store import PlanSubject, StoredPlan, read_plan
from raybatch.stages.plan_columns import with_columns
from raybatch.stages.ray_context import settle_context
from raybatch.stages.ray_errors import errors_told_once, message_kept, own_cause
from raybatch.stages.sink import prepare_sink
from raybatch.stages.source import Source, check_outside, scan_source
from raybatch.stages.storage import store_of, told_as
from raybatch.stages.unit_writer import UnitWriter, plan_units, settle_schema

__all__ = ["read_parquet", "write_parquet"]

UNIT = "__rb_unit"
_PLACES = (UNIT, POS, ROW)
_ROW_ID = "row_id"


def read_parquet(
    source: str | Path,
    *,
    sink: str | Path,
    version: str = "",
    unit_rows: int = 1024,
    overwrite: bool = False,
) -> Any:  # noqa: ANN401 - Ray has no types
    """Return a Ray dataset of the rows that `sink` does not hold yet.

    Rows come with their columns, a `row_id` ("<file>:<position>") where they have none, and three
    columns beginning with "__rb_" that say where a row belongs; pass these on, `write_parquet`
    takes them off.

    Args:
        source: Parquet or JSONL: a file, a folder or a glob.
        sink: folder that `write_parquet` will be given.
        version: of your pipeline; change it when an answer may change. Another version is refused
            in a folder that was begun with this one.
        unit_rows: rows of one part of the output.
        overwrite: remove what lies in the folder, and begin again.

    Raises:
        ConfigError: the source cannot be read, or the sink holds the output of something else.

    Example:
        >>> rows = raybatch.read_parquet("prompts/", sink="answers/")  # doctest: +SKIP
        >>> raybatch.write_parquet(stage.apply(rows), "answers/")  # doctest: +SKIP
    """
    source, sink = str(source), str(sink)
    plan = PlanConfig(mode="off", unit_rows=unit_rows, max_unit_rows=max(unit_rows, 4096))
    scanned = scan_source(source)
    _check_names(scanned.schema)
    check_outside(sink, source)
    paths = {part.path for part in scanned.slices}
    prepare_sink(sink, is_overwrite=overwrite, source_paths=paths)
    stored = _open(scanned, sink, fit_units(plan, scanned), {"pipeline": version})
    todo = ~committed(store_of(sink), plan_units(sink, stored))
    return _rows(scanned, stored, plan_units(sink, stored).unit_rows, todo)


def _check_names(schema: pa.Schema) -> None:
    taken = [name for name in _PLACES if name in schema.names]
    if taken:
        raise ConfigError(f"the source has columns named {', '.join(taken)}; rename them")


def _open(source: Source, sink: str, plan: PlanConfig, said: Mapping[str, str]) -> StoredPlan:
    files = input_files(source)
    if store_of(sink).size(PLAN) is None:
        subject = PlanSubject(options=plan, files=files, fingerprint=said, source=source.root)
        return store_stretches(source, sink, subject)
    stored = read_plan(sink)
    check_same(sink, stored=stored.fingerprint, stored_files=stored.files, now=said, files=files)
    return stored


def _rows(source: Source, stored: StoredPlan, unit_rows: Any, todo: Any) -> Any:  # noqa: ANN401
    row_id_column = None if _ROW_ID in source.schema.names else _ROW_ID
    units, wanted = ray.put(unit_rows), ray.put(todo)

    def read(batch: pa.Table) -> Iterator[pa.Table]:
        sizes, is_todo = ray.get(units), ray.get(wanted)
        for task in batch.to_pylist():
            slices, row = range(task["start"], task["stop"]), task["first_row"]
            for table in source.read(slices, row_id_column=row_id_column):
                said = rows_in_stretches(sizes, np.arange(row, row + table.num_rows))
                unit = said.column("unit").to_numpy()
                columns = {
                    UNIT: pa.array(unit, pa.int64()),
                    POS: said.column("pos").cast(pa.int64()),
                    ROW: pa.array(np.arange(row, row + table.num_rows)),
                }
                row += table.num_rows
                yield with_columns(as_movable(table), columns).filter(pa.array(is_todo[unit]))

    tasks = [
        {"start": slices.start, "stop": slices.stop, "first_row": first_row}
        for slices, first_row in pieces_of(source)
    ]
    items = ray.data.from_items(tasks, override_num_blocks=max(1, len(tasks)))
    blocks = items.map_batches(read, batch_size=1, batch_format="pyarrow")
    return blocks.repartition(target_num_rows_per_block=ROWS_PER_TABLE)


def write_parquet(dataset: Any, sink: str | Path, *, schema: pa.Schema | None = None) -> Audit:  # noqa: ANN401
    """Write what came of the rows of `read_parquet`, each unit once, and return the audit.

    Where the run stops half way, the same pipeline run again does what is missing.

    Args:
        dataset: what became of the rows, with the columns beginning with "__rb_".
        sink: as `read_parquet` was given it.
        schema: of every part; None takes that of the first rows that are written. Needed where a
            column of these rows is null throughout.

    Raises:
        ConfigError: the columns of places are missing, types differ, or the sink cannot be written.
        CommitError: rows are missing at the end, because the pipeline dropped or repeated some.
    """
    sink = str(sink)
    stored = read_plan(sink)
    plan, store = plan_units(sink, stored), store_of(sink)
    if is_finished(store, plan):
        return audit(store, plan)
    settle_context(dataset)
    try:
        with errors_told_once():
            dataset.write_datasink(UnitSink(sink, stored, schema))
    except Exception as error:
        raise own_cause(error) or error from None
    found = audit(store, plan)
    if not found.is_clean:
        raise CommitError(
            f"{found}. Every row that was read has to be written once: mark rows in a column "
            "instead of dropping them, and give one row back for each"
        )
    finish(store, plan, found)
    return found


class UnitSink(Datasink):  # type: ignore[misc]
    """Writes rows that know their places, unit by unit; rows of open units go to the journal.

    Args:
        sink: of the pipeline.
        stored: the plan that holds.
        schema: of every part; None takes that of the first rows.
    """

    def __init__(self, sink: str, stored: StoredPlan, schema: pa.Schema | None) -> None:
        self._sink = sink
        self._stored = stored
        self._schema = schema

    def write(self, blocks: Iterable[Any], ctx: Any) -> int:  # noqa: ANN401
        with message_kept():
            tables = [_as_arrow(block) for block in blocks]
            table = pa.concat_tables([t for t in tables if t.num_rows] or tables[:1])
            if not table.num_rows:
                return 0
            missing = [name for name in _PLACES if name not in table.column_names]
            if missing:
                raise ConfigError(
                    f"the rows have lost {', '.join(missing)}; a function of the pipeline has to "
                    "pass on the columns beginning with '__rb_'"
                )
            self._deliver(table, attempt=f"task-{ctx.task_idx}")
            return int(table.num_rows)

    def _deliver(self, table: pa.Table, *, attempt: str) -> None:
        store = store_of(self._sink)
        unit = table.column(UNIT).to_numpy()
        rows = table.drop_columns([UNIT])
        own = pa.schema([f for f in rows.schema if f.name not in _PLACES])
        writer = UnitWriter(
            sink=self._sink,
            store=store,
            stored=self._stored,
            schema=self._schema or settle_schema(store, own),
            output=None,
            attempt=attempt,
        )
        with told_as(f"the rows do not fit the columns of the output in {self._sink!r}"):
            rows = as_movable(rows)
            for number in np.unique(unit).tolist():
                if writer.receipt_of(number) is None:
                    chosen = rows.filter(pa.array(unit == number))
                    writer.deliver(number, writer.joined([chosen]))


def _as_arrow(block: Any) -> pa.Table:  # noqa: ANN401 - whatever Ray Data has
    return ray.data.block.BlockAccessor.for_block(block).to_arrow()
