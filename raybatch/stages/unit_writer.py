"""Writes finished rows below the sink of a job, each commit unit exactly once, with receipts."""

import asyncio
import os
import socket
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.actors.wire.columns import CHECKPOINTED_SCHEMA, CheckpointedTokens, crash_error
from raybatch.actors.wire.records import RowCrashes
from raybatch.durable.commit import commit_unit, is_of_units, receipt_of
from raybatch.durable.journal import (
    PLACE,
    POS,
    ROW,
    CrashCounts,
    journal_schema,
    read_crash_counts,
    read_fragments,
    read_token_checkpoints,
    write_crash_counts,
    write_fragment,
    write_token_checkpoint,
)
from raybatch.durable.layout import SCHEMA
from raybatch.durable.parts import encode_part
from raybatch.durable.storage import Store, error_context
from raybatch.durable.units import CommitUnit, Receipt, UnitCounts, UnitPlan
from raybatch.planning.store import StoredPlan, read_units
from raybatch.planning.tally import pipeline_statuses, unit_counts
from raybatch.records.types import TokenCounts, token_counts
from raybatch.rows.batches import movable_schema
from raybatch.rows.schema import OutputSchema

# column of finished rows: special tokens in their texts, counted and not written
SPECIAL = "__rb_special"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReceipt(TokenCounts):
    """The receipt of a written unit, as sent to the driver.

    Args:
        won: this attempt wrote it; False if another one had.
        started: when its rows were submitted, in seconds since 1970.
    """

    unit: int
    num_rows: int
    won: bool
    num_errors: int
    started: float
    ended: float
    host: str
    pid: int

    @classmethod
    def of(cls, receipt: Receipt, *, started: float) -> "UnitReceipt":
        """Return the receipt of a unit that this process has written, or found written."""
        counts = receipt.counts
        return cls(
            unit=receipt.unit,
            num_rows=receipt.num_rows,
            won=receipt.won,
            num_errors=sum(error.num_rows for error in counts.errors.values()),
            **token_counts(counts),
            started=started,
            ended=time.time(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )


_TYPES: dict[Any, Any] = {bool: pa.bool_(), float: pa.float64(), int: pa.int64(), str: pa.string()}
# receipts as Arrow columns
RECEIPT_SCHEMA = pa.schema([(field.name, _TYPES[field.type]) for field in fields(UnitReceipt)])


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitWriter:
    """Writes commit units and their journals: `deliver` a complete unit, `flush` finished rows.

    Args:
        store: the sink, whose abilities the driver has probed once.
        output: the columns of the stage; None if unknown.
        attempt: display name of the run.
    """

    sink: str
    store: Store
    stored: StoredPlan
    schema: pa.Schema
    output: OutputSchema | None
    attempt: str

    def receipt_of(self, unit: int) -> Receipt | None:
        """Return the receipt of a unit; None if it is not written."""
        is_partitioned = plan_units(self.sink, self.stored).is_partitioned
        return receipt_of(*self.target(unit), self.stored.hash, is_partitioned=is_partitioned)

    def journal_of(self, unit: int) -> pa.Table:
        """Return the journaled rows of a unit from earlier attempts."""
        plan_hash = self.stored.hash
        return read_fragments(*self.target(unit), self._row_schema, plan_hash=plan_hash)

    def keep_crash_counts(self, unit: int, crash_counts: CrashCounts) -> None:
        """Store crash counts of rows of a unit, for later attempts."""
        with error_context(self._error_context):
            write_crash_counts(*self.target(unit), crash_counts, plan_hash=self.stored.hash)

    def keep_begun(self, unit: int, tokens: pa.RecordBatch) -> None:
        """Store the tokens generated so far for unfinished rows, by position in the unit."""
        with error_context(self._error_context):
            write_token_checkpoint(*self.target(unit), tokens, **self._of_attempt())

    def joined(self, finished: Sequence[pa.Table]) -> pa.Table:
        """Join tables of finished rows, in the schema of the journal."""
        schema = journal_schema(self._row_schema)
        return pa.concat_tables([in_schema(self._counted(t), schema) for t in finished])

    def flush(self, unit: int, finished: pa.Table) -> None:
        """Journal finished rows of an incomplete unit."""
        with error_context(self._error_context):
            write_fragment(*self.target(unit), finished, **self._of_attempt())

    def deliver(self, unit: int, finished: pa.Table) -> Receipt | None:
        """Write a unit and return its receipt; journal rows and return None if some are missing."""
        num_rows = self.target(unit)[1].num_rows
        with error_context(self._error_context):
            if finished.num_rows < num_rows:
                self.flush(unit, finished)
                finished = self.journal_of(unit)
                if finished.num_rows < num_rows:
                    return None
            return self._commit(unit, finished)

    def _commit(self, unit: int, finished: pa.Table) -> Receipt:
        by, is_joined = self.stored.partition_by, is_of_units(self.store)
        return commit_unit(
            *self.target(unit),
            finished.drop_columns([POS, ROW]),
            by=() if is_joined else by,
            joined_by=by if is_joined else (),
            pos=finished.column(POS).to_numpy(),
            row=finished.column(ROW).to_numpy(),
            count=self._counts,
            unwritten=[] if self.output is None else [SPECIAL],
            plan_hash=self.stored.hash,
            attempt=self.attempt,
            encode=self._encode,
        )

    def _encode(self, table: pa.Table, footer: str) -> bytes:
        # folders of a partitioned output replace some columns
        fields = [self.schema.field(name) for name in table.column_names]
        schema = pa.schema(fields, self.schema.metadata)
        return encode_part(in_schema(table, schema), footer)

    def _counts(self, rows: pa.Table) -> UnitCounts:
        if self.output is None:
            return UnitCounts(num_rows=rows.num_rows, statuses=pipeline_statuses(rows))
        special = rows.column(SPECIAL).to_numpy()
        return replace(
            unit_counts(rows, self.output),
            special_rows=int(np.count_nonzero(special)),
            special_tokens=int(special.sum()),
        )

    def _counted(self, finished: pa.Table) -> pa.Table:
        """Return finished rows with their count of special tokens; 0 if not counted."""
        if self.output is None or SPECIAL in finished.column_names:
            return finished
        return finished.append_column(SPECIAL, pa.array(np.zeros(finished.num_rows, np.int64)))

    def _of_attempt(self) -> dict[str, Any]:
        """Return the plan hash, and an attempt name that is unique among all runs."""
        attempt = f"{self.attempt}-{uuid.uuid4().hex[:8]}"
        return {"plan_hash": self.stored.hash, "attempt": attempt}

    def target(self, unit: int) -> tuple[Store, CommitUnit]:
        """Return (store, commit unit) for the unit of the plan with this number."""
        return self.store, plan_units(self.sink, self.stored).unit(unit)

    @property
    def _row_schema(self) -> pa.Schema:
        # rows are sorted later; a part has the types of the output
        schema = movable_schema(self.schema)
        if self.output is None:
            return schema
        return schema.append(pa.field(SPECIAL, pa.int64(), nullable=False))

    @property
    def _error_context(self) -> str:
        return f"ending the job: sink {self.sink!r} cannot be written"


def in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table in exactly `schema`; a missing column or another type raises."""
    return table.select(schema.names).cast(schema)


def settle_schema(store: Store, schema: pa.Schema) -> pa.Schema:
    """Store the schema of all parts, unless one is stored; return the stored one."""
    store.create(SCHEMA, schema.serialize().to_pybytes())
    return pa.ipc.read_schema(pa.BufferReader(store.read(SCHEMA)))


# caches the current plan only, as workers go on to other jobs
@lru_cache(maxsize=1)
def plan_units(sink: str, stored: StoredPlan) -> UnitPlan:
    """Read the units of a plan, which never change; a process reads them once."""
    return read_units(sink, stored)


class UnitWatch:
    """Crash counts and checkpointed tokens of a unit's rows, by position, over all runs."""

    def __init__(self, writer: UnitWriter, unit: int) -> None:
        self.writer = writer
        self.unit = unit
        target, plan_hash = writer.target(unit), writer.stored.hash
        self.crash_counts = read_crash_counts(*target, plan_hash=plan_hash)
        self.checkpointed = CheckpointedTokens()
        for tokens in read_token_checkpoints(*target, CHECKPOINTED_SCHEMA, plan_hash=plan_hash):
            self.checkpointed.add(tokens)
        self.checkpointed.take_new()

    def at(self, positions: npt.NDArray[np.int64]) -> "PlacedWatch":
        """Return the watch of some rows of the unit."""
        return PlacedWatch(unit=self, positions=positions)

    async def flush(self) -> None:
        """Store the new tokens since the last flush."""
        tokens = self.checkpointed.take_new()
        if tokens is not None:
            await asyncio.to_thread(self.writer.keep_begun, self.unit, tokens)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlacedWatch:
    """The `RowWatch` of some rows of a unit, given by positions in the unit, int64 [rows]."""

    unit: UnitWatch
    positions: npt.NDArray[np.int64]

    def take(self, rows: Sequence[int]) -> "PlacedWatch":
        """Return the watch of some of these rows."""
        return self.unit.at(self.positions[np.asarray(rows, np.intp)])

    def given_up(self) -> dict[int, str]:
        """Return the rows given up because they crashed engines, each with its error."""
        known = self.unit.crash_counts
        places = enumerate(self.positions.tolist())
        return {row: crash_error(known.crashes[p]) for row, p in places if p in known.given_up}

    @property
    def crashes(self) -> npt.NDArray[np.int16]:
        known = self.unit.crash_counts.crashes
        return np.array([known.get(pos, 0) for pos in self.positions.tolist()], np.int16)

    @property
    def checkpointed(self) -> pa.RecordBatch | None:
        row_at = {pos: row for row, pos in enumerate(self.positions.tolist())}
        known = self.unit.checkpointed.of(row_at.keys())
        if known is None:
            return None
        return _with_rows(known, [row_at[pos] for pos in known.column(PLACE).to_pylist()])

    async def note_crashes(self, crashes: Sequence[RowCrashes]) -> None:
        places = {int(self.positions[one.row]): one for one in crashes}
        given_up = frozenset(pos for pos, one in places.items() if one.is_given_up)
        counts = {pos: one.num_crashes for pos, one in places.items()}
        crash_counts = CrashCounts(crashes=counts, given_up=given_up)
        self.unit.crash_counts |= crash_counts
        await asyncio.to_thread(self.unit.writer.keep_crash_counts, self.unit.unit, crash_counts)

    def note_checkpointed(self, checkpointed: pa.RecordBatch) -> None:
        self.unit.checkpointed.add(
            _with_rows(checkpointed, self.positions[checkpointed.column(PLACE).to_numpy()])
        )


def _with_rows(batch: pa.RecordBatch, rows: npt.ArrayLike) -> pa.RecordBatch:
    place = batch.schema.get_field_index(PLACE)
    return batch.set_column(
        place, batch.schema.field(place), pa.array(np.asarray(rows), pa.int32())
    )
