"""The rows of a finished output, plan by plan, and what names them."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from raybatch.durable.audit import is_finished
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, PLAN
from raybatch.durable.storage import Store, error_context, store_of
from raybatch.durable.units import UnitPlan
from raybatch.errors import ConfigError
from raybatch.inputs.file_slices import joined
from raybatch.inputs.source import Source, scan_source
from raybatch.outputs.verify import files_of
from raybatch.planning.store import read_all_units, read_plans
from raybatch.planning.stored import StoredPlan
from raybatch.rows.batches import as_movable

_BATCH_ROWS = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedOutput:
    """A finished output: its plans, its units and the files of its parts."""

    store: Store
    plans: tuple[StoredPlan, ...]
    units: UnitPlan
    parts: Source

    @classmethod
    def of(cls, sink: str) -> "FinishedOutput":
        """Read the plans of an output and the footers of its parts.

        Raises:
            ConfigError: it is not the output of a job, or not finished.
        """
        store = store_of(sink)
        with error_context(f"output {sink!r} cannot be read"):
            if store.size(PLAN) is None:
                raise ConfigError(f"{sink} is not the finished output of a raybatch job")
            plans = read_plans(sink)
            units = read_all_units(sink, plans)
            if not is_finished(store, units):
                raise ConfigError(
                    f"the output in {sink} is not finished; run the job again to the end"
                )
        return cls(store=store, plans=plans, units=units, parts=scan_source(f"{store.uri}/{DATA}"))

    @property
    def schema(self) -> pa.Schema:
        """Return the columns of the rows, those that partition the output with their types."""
        schema, first = self.parts.schema.remove_metadata(), self.plans[0]
        for name, kind in zip(first.partition_by, first.partition_types, strict=True):
            place = schema.get_field_index(name)
            schema = schema.set(place, pa.field(name, pa.type_for_alias(kind)))
        return schema

    def rows(self, stored: StoredPlan, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a plan, in the order of their files, with the types of `schema`."""
        number_of = {f"{DATA}/{one.name}": i for i, one in enumerate(joined(self.parts.slices))}
        source = Source(
            schema=self.parts.schema,
            slices=tuple(joined(self.parts.slices)),
            num_rows=self.parts.num_rows,
        )
        units = range(stored.first_unit, stored.first_unit + stored.num_units)
        for name in (name for unit in units for name in files_of(self.store, self.units, unit)):
            if (number := number_of.get(name)) is None:  # a file without rows has no slice
                continue
            for table in source.read(range(number, number + 1)):
                rows = as_movable(table).cast(schema).combine_chunks()
                yield from rows.to_batches(max_chunksize=_BATCH_ROWS)
                reach("in_table")


def addition_id(stored: StoredPlan) -> str:
    """Return what names the rows of a plan: their files, the job's options and the order of plans.

    It is the same for copies of an output, and for another run of the same job.
    """
    about = [list(stored.files), dict(stored.fingerprint), stored.number]
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=8).hexdigest()


def signed(kind: pa.DataType) -> pa.DataType:
    """Return a type that Delta Lake and Iceberg have and that holds the values of `kind`.

    They have no unsigned and no half numbers. A uint64 becomes an int64, and a value that does not
    fit is an error when it is cast.
    """
    if pa.types.is_dictionary(kind):
        return signed(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(signed(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(signed(field.type)) for field in kind])
    known = {
        pa.uint8(): pa.int16(),
        pa.uint16(): pa.int32(),
        pa.uint32(): pa.int64(),
        pa.uint64(): pa.int64(),
        pa.float16(): pa.float32(),
    }
    return known.get(kind, kind)
