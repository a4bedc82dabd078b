"""Outputs as jobs write them, without engines."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.audit import audit, finish
from raybatch.durable.commit import commit_unit
from raybatch.durable.layout import part_name
from raybatch.durable.parts import Footer, encode_part
from raybatch.durable.sink import prepare_sink
from raybatch.durable.storage import open_store
from raybatch.durable.units import UnitPlan
from raybatch.inputs.source import scan_source
from raybatch.planning.fingerprint import input_files, output_schema
from raybatch.planning.shards import rows_in_stretches, stretches
from raybatch.planning.store import StoredPlan, write_plan, write_shard
from raybatch.planning.tally import unit_counts
from raybatch.rows.options import StageConfig
from raybatch.rows.schema import OutputSchema

UNIT_ROWS = 4
NUM_UNITS = 3
OUTPUT = OutputSchema()
USER = pa.schema([("text", pa.string())])
SCHEMA = output_schema(USER, StageConfig(model="m", prompt="{text}"))
ERRORS = {1: "ReplicaCrash: worker died 3 times", 6: "InvalidPrompt: null"}


def write_input(folder: Path, num_rows: int = NUM_UNITS * UNIT_ROWS) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": [f"t{i}" for i in range(num_rows)]}), folder / "a.parquet")
    return folder


def finished_rows(rows: range, **changed: list[Any]) -> pa.Table:
    """Return rows as a stage answers them; those in `ERRORS` failed."""
    errors = [ERRORS.get(row, "") for row in rows]
    columns: dict[str, list[Any]] = {
        "text": [f"t{row}" for row in rows],
        "row_id": [f"a.parquet:{row}" for row in rows],
        "generated_text": [None if error else "yes" for error in errors],
        "generated_tokens": [[] if error else [7, 8] for error in errors],
        "num_input_tokens": [5] * len(rows),
        "num_generated_tokens": [0 if error else 2 for error in errors],
        "num_cached_tokens": [1] * len(rows),
        "finish_reason": ["error" if error else "stop" for error in errors],
        "group_id": [None] * len(rows),
        "attempts": [1] * len(rows),
        "__inference_error__": errors,
    }
    return pa.table({**columns, **changed}, schema=SCHEMA)


def make_sink(sink: str, source: Path | None = None, *, has_shards: bool = False) -> UnitPlan:
    """Write mark and plan of a job; nothing of it is done yet."""
    prepare_sink(sink, is_overwrite=False)
    files, root = (), ""
    if source is not None:
        scanned = scan_source(str(source))
        files, root = input_files(scanned), scanned.root
    units = stretches("plan-a", np.full(NUM_UNITS, UNIT_ROWS))
    shards: tuple[tuple[str, int], ...] = ()
    if has_shards:
        bounds = [(0, 5), (5, units.num_rows)]
        rows = [
            (first, rows_in_stretches(units.unit_rows, np.arange(first, e))) for first, e in bounds
        ]
        shards = tuple(
            (write_shard(sink, units.hash, first, shard), first) for first, shard in rows
        )
    stored = StoredPlan(
        hash=units.hash,
        num_rows=units.num_rows,
        num_units=units.num_units,
        num_groups=0,
        is_reordered=False,
        logical_tokens=0,
        computed_tokens=0,
        block_size=8,
        options={},
        files=files,
        shards=shards,
        fingerprint={"sampling.n": "1", "sampling.logprobs": "null", "output_prefix": '""'},
        source=root,
        model="some/model",
    )
    write_plan(sink, stored, units)
    return units


def write_unit(sink: str, plan: UnitPlan, number: int, table: pa.Table | None = None) -> None:
    rows = range(number * UNIT_ROWS, (number + 1) * UNIT_ROWS)
    table = finished_rows(rows) if table is None else table
    commit_unit(
        open_store(sink),
        plan.unit(number),
        table,
        pos=np.arange(UNIT_ROWS),
        row=np.array(rows),
        count=lambda table: unit_counts(table, OUTPUT),
        plan_hash=plan.hash,
        attempt="test",
    )


def forge_unit(sink: str, plan: UnitPlan, number: int, table: pa.Table, counted: pa.Table) -> None:
    """Replace the part of a unit; its footer has the counts of the table `counted`."""
    footer = Footer(
        unit=plan.unit(number),
        plan=plan.hash,
        attempt="forged",
        counts=unit_counts(counted, OUTPUT),
    )
    open_store(sink).replace(part_name(number), encode_part(table, footer.to_text()))


def make_complete(sink: str, source: Path | None = None) -> UnitPlan:
    plan = make_sink(sink, source)
    for number in range(NUM_UNITS):
        write_unit(sink, plan, number)
    finish(open_store(sink), plan, audit(open_store(sink), plan))
    return plan


def contents(folder: Path) -> dict[str, str]:
    """Return a digest of every file below a folder."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
