"""Writes finished rows below the sink of a job, unit by unit, each exactly once; and receipts."""

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.actors.wire.begun import BEGUN_SCHEMA, Begun
from raybatch.durable.commit import commit_unit, receipt_of
from raybatch.durable.journal import (
    POS,
    ROW,
    Strikes,
    journal_schema,
    read_begun,
    read_fragments,
    read_strikes,
    write_begun,
    write_fragment,
    write_strikes,
)
from raybatch.durable.layout import SCHEMA
from raybatch.durable.partitioned import commit_partitioned, partitioned_receipt_of
from raybatch.durable.parts import PARQUET
from raybatch.durable.storage import error_context
from raybatch.durable.stores import Store
from raybatch.durable.units import Receipt, UnitCounts, UnitPlan
from raybatch.planning.store import read_units
from raybatch.planning.stored import StoredPlan
from raybatch.planning.tally import unit_counts
from raybatch.records.counts import TokenCounts, token_counts
from raybatch.rows.batches import movable_schema
from raybatch.rows.schema import OutputSchema

# of finished rows: special tokens in their texts, which are counted and not written
SPECIAL = "__rb_special"


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReceipt(TokenCounts):
    """A unit that is written, as its receipt travels to the driver.

    Args:
        won: this attempt wrote it; False where another one had.
        started: when its rows were handed to the engines, in seconds since 1970.
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
    def of(cls, receipt: Receipt, *, started: float, ended: float) -> "UnitReceipt":
        """Return the receipt of a unit that this process has written, or found written."""
        counts = receipt.counts
        return cls(
            unit=receipt.unit,
            num_rows=receipt.num_rows,
            won=receipt.won,
            num_errors=sum(error.num_rows for error in counts.errors.values()),
            **token_counts(counts),
            started=started,
            ended=ended,
            host=socket.gethostname(),
            pid=os.getpid(),
        )


_ARROW_TYPES: Mapping[Any, pa.DataType] = {
    bool: pa.bool_(),
    float: pa.float64(),
    int: pa.int64(),
    str: pa.string(),
}
# receipts as Ray carries them
RECEIPT_SCHEMA = pa.schema(
    [(field.name, _ARROW_TYPES[field.type]) for field in fields(UnitReceipt)]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitWriter:
    """What a feeder needs to write units; travels to it.

    Args:
        store: of the sink, probed once, where the run began.
        output: the columns of the stage; None where nothing is known of the columns.
        attempt: name of the run, for people alone.
    """

    sink: str
    store: Store
    stored: StoredPlan
    schema: pa.Schema
    output: OutputSchema | None
    attempt: str

    def receipt_of(self, unit: int) -> Receipt | None:
        """Return the receipt of a unit that is written already; None where it is not."""
        of = partitioned_receipt_of if self.stored.partition_by else receipt_of
        return of(self.store, self._plan.unit(unit), self.stored.hash)

    def journal_of(self, unit: int) -> pa.Table:
        """Return finished rows of a unit that an earlier attempt left, as the journal has them."""
        return read_fragments(
            self.store, self._plan.unit(unit), self._row_schema, plan_hash=self.stored.hash
        )

    def strikes_of(self, unit: int) -> Strikes:
        """Return the rows of a unit that engines have died with in earlier attempts."""
        return read_strikes(self.store, self._plan.unit(unit), plan_hash=self.stored.hash)

    def keep_strikes(self, unit: int, strikes: Strikes) -> None:
        """Keep rows of a unit that engines have died with, for later attempts."""
        with error_context(self._error_context):
            write_strikes(self.store, self._plan.unit(unit), strikes, plan_hash=self.stored.hash)

    def begun_of(self, unit: int) -> Begun:
        """Return the tokens that earlier attempts have of rows that they did not finish."""
        known = Begun()
        place = self._plan.unit(unit)
        for tokens in read_begun(self.store, place, BEGUN_SCHEMA, plan_hash=self.stored.hash):
            known.add(tokens)
        return known

    def keep_begun(self, unit: int, tokens: pa.RecordBatch) -> None:
        """Keep tokens of rows that are not finished, by position in the unit."""
        with error_context(self._error_context):
            write_begun(
                self.store,
                self._plan.unit(unit),
                tokens,
                plan_hash=self.stored.hash,
                attempt=self._unique_attempt(),
            )

    def joined(self, finished: Sequence[pa.Table]) -> pa.Table:
        """Return finished rows as the journal has them."""
        schema = journal_schema(self._row_schema)
        return pa.concat_tables([in_schema(self._counted(t), schema) for t in finished])

    def flush(self, unit: int, finished: pa.Table) -> None:
        """Keep finished rows of a unit that is not complete."""
        with error_context(self._error_context):
            write_fragment(
                self.store,
                self._plan.unit(unit),
                finished,
                plan_hash=self.stored.hash,
                attempt=self._unique_attempt(),
            )

    def deliver(self, unit: int, finished: pa.Table) -> Receipt | None:
        """Write a unit, or where rows are missing keep these until the others come.

        Args:
            finished: rows of it as the journal has them; those in the journal may be among them.

        Returns:
            The receipt; None where rows are missing.
        """
        num_rows = int(self._plan.unit_rows[unit])
        with error_context(self._error_context):
            if finished.num_rows < num_rows:
                self.flush(unit, finished)
                finished = self.journal_of(unit)
                if finished.num_rows < num_rows:
                    return None
            return self._commit(unit, finished)

    def _commit(self, unit: int, finished: pa.Table) -> Receipt:
        rows = finished.drop_columns([POS, ROW])
        options: dict[str, Any] = {
            "pos": finished.column(POS).to_numpy(),
            "row": finished.column(ROW).to_numpy(),
            "plan_hash": self.stored.hash,
            "attempt": self.attempt,
            "part_format": replace(PARQUET, encode=self._encode),
        }
        target = self.store, self._plan.unit(unit)
        unwritten = [] if self.output is None else [SPECIAL]
        if by := self.stored.partition_by:
            options |= {"by": by, "count": self._counts, "unwritten": unwritten}
            return commit_partitioned(*target, rows, **options)
        counts = self._counts(rows)
        return commit_unit(*target, rows.drop_columns(unwritten), counts=counts, **options)

    def _encode(self, table: pa.Table, footer: str) -> bytes:
        # folders of a partitioned output stand for some columns
        fields = [self.schema.field(name) for name in table.column_names]
        schema = pa.schema(fields, self.schema.metadata)
        return PARQUET.encode(in_schema(table, schema), footer)

    def _counts(self, rows: pa.Table) -> UnitCounts:
        if self.output is None:
            return UnitCounts(num_rows=rows.num_rows, statuses={"ok": rows.num_rows})
        special = rows.column(SPECIAL).to_numpy()
        return replace(
            unit_counts(rows, self.output),
            special_rows=int(np.count_nonzero(special)),
            special_tokens=int(special.sum()),
        )

    def _counted(self, finished: pa.Table) -> pa.Table:
        """Return finished rows with their count of special tokens; 0 where nobody counted."""
        if self.output is None or SPECIAL in finished.column_names:
            return finished
        return finished.append_column(SPECIAL, pa.array(np.zeros(finished.num_rows, np.int64)))

    def _unique_attempt(self) -> str:
        """Return a name that no other attempt has, of this run or another."""
        return f"{self.attempt}-{uuid.uuid4().hex[:8]}"

    @property
    def _plan(self) -> UnitPlan:
        return plan_units(self.sink, self.stored)

    @property
    def _row_schema(self) -> pa.Schema:
        # rows are still to be brought into order; a part has the types of the output
        schema = movable_schema(self.schema)
        if self.output is None:
            return schema
        return schema.append(pa.field(SPECIAL, pa.int64(), nullable=False))

    @property
    def _error_context(self) -> str:
        return f"sink {self.sink!r} cannot be written any more, so the job ends"


def in_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the table in exactly `schema`; a missing column or another type raises."""
    return table.select(schema.names).cast(schema)


def settle_schema(store: Store, schema: pa.Schema) -> pa.Schema:
    """Return the schema of every part: that of the first caller."""
    store.create(SCHEMA, schema.serialize().to_pybytes())
    return pa.ipc.read_schema(pa.BufferReader(store.read(SCHEMA)))


# of the plan that runs: workers go on to other jobs, and an earlier plan's units go
@lru_cache(maxsize=1)
def plan_units(sink: str, stored: StoredPlan) -> UnitPlan:
    """Return the units of a plan, which never change; a process reads them once."""
    return read_units(sink, stored)
