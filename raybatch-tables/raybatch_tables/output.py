"""The rows of a finished output, plan by plan, and what names them."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from raybatch.durable.commit import files_of
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA
from raybatch.durable.storage import Store, store_of
from raybatch.durable.units import UnitPlan
from raybatch.errors import ConfigError
from raybatch.inputs.file_slices import FileSlice, joined
from raybatch.inputs.source import Source, scan_source
from raybatch.outputs.ordered import read_finished
from raybatch.planning.store import StoredPlan, covered_files
from raybatch.records.arrays import mix64
from raybatch.rows.batches import as_movable

_BATCH_ROWS = 4096
_TEXTS = ("string", "large_string")


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedOutput:
    """A finished output: its plans, its units and its parts.

    `slices` are the parts by name, without those that have no rows.
    """

    store: Store
    plans: tuple[StoredPlan, ...]
    units: UnitPlan
    schema: pa.Schema
    parts: Source
    slices: Mapping[str, FileSlice]

    @classmethod
    def of(cls, sink: str) -> "FinishedOutput":
        """Read the plans of an output and the footers of its parts.

        Raises:
            ConfigError: it is not the output of a job, or not finished.
        """
        store, (plans, units) = store_of(sink), read_finished(sink)
        parts = scan_source(f"{store.uri}/{DATA}")
        schema = parts.schema.remove_metadata()
        for name, kind in zip(plans[0].partition_by, plans[0].partition_types, strict=True):
            place = schema.get_field_index(name)
            schema = schema.set(place, pa.field(name, pa.type_for_alias(kind)))
        slices = {f"{DATA}/{part.name}": part for part in joined(parts.slices)}
        return cls(
            store=store,
            plans=_with_heads(plans),
            units=units,
            schema=schema,
            parts=parts,
            slices=slices,
        )

    def tables(
        self, stored: StoredPlan, columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """Yield the rows of a plan, in the order of their files.

        Raises:
            ConfigError: rows are missing.
        """
        names = self.schema.names if columns is None else list(columns)
        schema = pa.schema([self.schema.field(name) for name in names])
        of_files = pa.schema([self.parts.schema.field(name) for name in names])
        num_rows, units = 0, range(stored.first_unit, stored.first_unit + stored.num_units)
        files_in = partial(files_of, self.store, is_partitioned=self.units.is_partitioned)
        for name in chain.from_iterable(map(files_in, units)):
            if (part := self.slices.get(name)) is None:
                continue  # it has no rows, or is missing
            source = Source(
                schema=of_files, slices=(part,), num_rows=part.num_rows, is_projected=True
            )
            for table in source.read(range(1)):
                num_rows += table.num_rows
                yield as_movable(table).cast(schema)
        if num_rows != stored.num_rows:
            raise ConfigError(
                f"{self.store.uri} has {num_rows} of {stored.num_rows} rows of a plan; "
                "`raybatch verify` tells which are missing"
            )

    def batches(self, stored: StoredPlan, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a plan with the columns of a table; those that they lack are null.

        Raises:
            ConfigError: rows are missing.
            ArrowInvalid: a column of the table cannot hold a value.
        """
        for table in self.tables(stored):
            columns = [
                table.column(field.name).cast(field.type)
                if field.name in table.column_names
                else pa.nulls(table.num_rows, field.type)
                for field in schema
            ]
            rows = pa.table(columns, schema).combine_chunks()
            yield from rows.to_batches(max_chunksize=_BATCH_ROWS)
            reach("in_table")

    def checksum(self, stored: StoredPlan) -> str:
        """Return a checksum of the texts of a plan's rows, in any order, answers included."""
        from pandas.util import hash_array  # slow to load

        names = [field.name for field in self.schema if str(field.type) in _TEXTS]
        total = 0
        for table in self.tables(stored, names):
            of_rows = np.zeros(table.num_rows, np.uint64)
            for column in table.columns:
                texts = pc.fill_null(column.cast(pa.large_string()), "\0")
                hashes = hash_array(texts.to_numpy(), categorize=False)
                of_rows = mix64(of_rows + hashes)
            total += int(of_rows.sum(dtype=np.uint64))
        return f"{total % 2**64:016x}"


def _with_heads(plans: Iterable[StoredPlan]) -> tuple[StoredPlan, ...]:
    """Return the plans of a complete output, each head joined to the plan of its other rows."""
    whole: list[StoredPlan] = []
    for stored in plans:
        if not whole or not whole[-1].files_left:
            whole.append(replace(stored, number=len(whole) + 1))
            continue
        head = whole[-1]
        whole[-1] = replace(
            stored,
            number=head.number,
            hash=f"{head.hash}+{stored.hash}",
            files=tuple(covered_files([head, stored])),
            first_unit=head.first_unit,
            num_units=head.num_units + stored.num_units,
            num_rows=head.num_rows + stored.num_rows,
        )
    return tuple(whole)


def addition_id(stored: StoredPlan) -> str:
    """Return what names the rows of a plan: their files, the job's options and the order of plans.

    It is the same for copies of an output, and for another run of the same job.
    """
    about = [list(stored.files), dict(stored.fingerprint), stored.number]
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()
