"""Finished rows of units that are not complete, and tokens of others, kept for the next attempt.

A journal holds each row at least once and is never taken for a commit; what cannot be read of it
is generated again.
"""

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import begun_name, fragment_folder, fragment_name, is_begun
from raybatch.durable.stores.protocols import Store
from raybatch.durable.units import Unit
from raybatch.errors import CommitError, error_text

logger = logging.getLogger(__name__)

Ints = npt.NDArray[np.int64]

POS = "__rb_pos"
ROW = "__rb_row"
# position in its unit of a row that is not finished
PLACE = "row"
_KEY = b"raybatch"


def journal_schema(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a journal of rows of `schema`: theirs, position in the unit, row."""
    for name in (POS, ROW):
        schema = schema.append(pa.field(name, pa.int64(), nullable=False))
    return schema


def write_fragment(
    store: Store, unit: Unit, table: pa.Table, *, plan_hash: str, attempt: str
) -> None:
    """Keep finished rows of a unit; the same rows may be kept again.

    Args:
        table: rows in the schema of the journal, at least one.
        attempt: who writes, a word unlike that of every other attempt at the unit.

    Raises:
        CommitError: a row has no place in the unit, or there are none.
    """
    pos = table.column(POS).to_numpy()
    if not len(pos) or pos.min() < 0 or pos.max() >= unit.num_rows:
        raise CommitError(f"unit {unit.number} has {unit.num_rows} rows; cannot keep {pos[:3]}")
    name = fragment_name(unit.number, int(pos.min()), len(pos), attempt)
    reach("before_fragment", unit=unit.number)
    store.create(name, _encoded(table, unit, plan_hash))
    reach("after_fragment", unit=unit.number)


def write_begun(
    store: Store, unit: Unit, tokens: pa.RecordBatch, *, plan_hash: str, attempt: str
) -> None:
    """Keep tokens of rows that are not finished.

    Args:
        tokens: with the position in the unit in its column `PLACE`.
        attempt: as in `write_fragment`.
    """
    data = _encoded(pa.Table.from_batches([tokens]), unit, plan_hash)
    store.create(begun_name(unit.number, attempt), data)


def read_begun(
    store: Store, unit: Unit, schema: pa.Schema, *, plan_hash: str
) -> Iterator[pa.RecordBatch]:
    """Yield what earlier attempts have kept of rows that they did not finish, in any order.

    Args:
        schema: of what was kept; a fragment with another one is left out.
    """
    names = [name for name in store.names(fragment_folder(unit.number)) if is_begun(name)]
    check = partial(_check_places, PLACE, unit=unit)
    for table in _tables(store, names, unit, schema, plan_hash, check):
        yield from table.combine_chunks().to_batches()


def read_fragments(
    store: Store, unit: Unit, schema: pa.Schema, *, plan_hash: str, expected_row: Ints | None = None
) -> pa.Table:
    """Return the rows of a unit that earlier attempts have finished, each once, by position.

    A fragment that is torn, of another schema, unit or plan, or that holds a row in the place of
    another, is left out with a line in the log.

    Args:
        expected_row: int64 [R], number in the whole input of the row at each position, where the
            caller knows it.

    Returns:
        A table in `journal_schema(schema)`; of rows that were kept twice, the first by name.
    """
    wanted = journal_schema(schema)
    names = [name for name in store.names(fragment_folder(unit.number)) if not is_begun(name)]
    check = partial(_check_places, POS, unit=unit, expected_row=expected_row)
    fragments = _tables(store, names, unit, wanted, plan_hash, check)
    table = pa.concat_tables([wanted.empty_table(), *fragments])
    _, firsts = np.unique(table.column(POS).to_numpy(), return_index=True)
    return table.take(firsts)


def drop_fragments(store: Store, unit: int) -> None:
    """Remove the journal of a unit; only when the output is complete, or when the user cleans."""
    for name in store.names(fragment_folder(unit)):
        store.remove(name)


def _tables(
    store: Store,
    names: Iterable[str],
    unit: Unit,
    wanted: pa.Schema,
    plan_hash: str,
    check: Callable[[pa.Table], None],
) -> Iterator[pa.Table]:
    """Yield fragments; those that are not what they should be are left out with a line."""
    for name in names:
        try:
            data = store.read(name)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        try:
            table = _decoded(data, unit, wanted, plan_hash)
            check(table)
        except (ValueError, KeyError, OSError) as error:
            logger.warning("%s/%s is left out: %s", store.uri, name, error_text(error))
            continue
        yield table


def _encoded(table: pa.Table, unit: Unit, plan_hash: str) -> bytes:
    owner = json.dumps({"plan": plan_hash, "unit": unit.number}).encode()
    marked = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: owner})
    buffer = pa.BufferOutputStream()
    # rows that were read apart bring dictionaries of their own, and a file has one for each column
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_file(buffer, marked.schema, options=options) as out:
        out.write_table(marked)
    return bytes(buffer.getvalue())


def _decoded(data: bytes, unit: Unit, wanted: pa.Schema, plan_hash: str) -> pa.Table:
    reader = pa.ipc.open_file(pa.BufferReader(data))
    owner = json.loads((reader.schema.metadata or {})[_KEY])
    if owner != {"plan": plan_hash, "unit": unit.number}:
        raise ValueError(f"it belongs to {owner}")
    # types first: values of an unknown type are never touched
    if not reader.schema.equals(wanted):
        raise ValueError("it has another schema")
    table = reader.read_all()
    table.validate(full=True)
    return table.replace_schema_metadata(wanted.metadata)


def _check_places(
    column: str, table: pa.Table, unit: Unit, expected_row: Ints | None = None
) -> None:
    pos = table.column(column).to_numpy()
    if len(pos) and (pos.min() < 0 or pos.max() >= unit.num_rows):
        raise ValueError("a row has no place in the unit")
    if expected_row is not None and np.any(expected_row[pos] != table.column(ROW).to_numpy()):
        raise ValueError("a row is in the place of another")
