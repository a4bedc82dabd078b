"""What runs leave beside the parts, and what of it may go: nothing here is ever counted as data.

A journal keeps finished rows of units that are not complete, and tokens of others, for the next
attempt. It holds each row at least once and is never taken for a commit; what cannot be read of it
is generated again. Markers keep which rows of a unit engines have died with. Each has all that its
writer knew, so the rows of many are joined by the largest count. What cannot be read of a marker is
left out: then a bad row costs a few deaths more.
"""

import json
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Set
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import (
    ATTEMPTS,
    FRAGMENTS,
    PLANS,
    STAGING,
    attempt_folder,
    attempt_name,
    attempt_unit,
    begun_name,
    begun_unit,
    fragment_folder,
    fragment_name,
    fragment_unit,
    plan_of_shard,
    probe_token,
)
from raybatch.durable.parts import empty_table
from raybatch.durable.storage import Store
from raybatch.durable.units import Unit
from raybatch.errors import CommitError, error_text
from raybatch.records.arrays import Ints

logger = logging.getLogger(__name__)


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
    """Keep tokens of rows that are not finished; `tokens` has their positions in column `PLACE`."""
    data = _encoded(pa.Table.from_batches([tokens]), unit, plan_hash)
    store.create(begun_name(unit.number, attempt), data)


def read_begun(
    store: Store, unit: Unit, schema: pa.Schema, *, plan_hash: str
) -> Iterator[pa.RecordBatch]:
    """Yield what earlier attempts have kept of rows that they did not finish, in any order.

    A fragment with another schema is left out.
    """
    for table in _fragments(store, unit, schema, plan_hash, PLACE):
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
    fragments = _fragments(store, unit, wanted, plan_hash, POS, expected_row)
    table = pa.concat_tables([empty_table(wanted), *fragments])
    _, firsts = np.unique(table.column(POS).to_numpy(), return_index=True)
    return table.take(firsts)


def _fragments(
    store: Store,
    unit: Unit,
    wanted: pa.Schema,
    plan_hash: str,
    place: str,
    expected_row: Ints | None = None,
) -> Iterator[pa.Table]:
    """Yield fragments of one kind, by the column `place` of the position in the unit.

    Those that are not what they should be are left out.
    """
    for name in store.names(fragment_folder(unit.number)):
        if (begun_unit(name) is not None) != (place == PLACE):
            continue
        try:
            data = store.read(name)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        try:
            table = _decoded(data, unit, wanted, plan_hash)
            _check_places(table, place, unit, expected_row)
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


def _check_places(table: pa.Table, column: str, unit: Unit, expected_row: Ints | None) -> None:
    pos = table.column(column).to_numpy()
    if len(pos) and (pos.min() < 0 or pos.max() >= unit.num_rows):
        raise ValueError("a row has no place in the unit")
    if expected_row is not None and np.any(expected_row[pos] != table.column(ROW).to_numpy()):
        raise ValueError("a row is in the place of another")


@dataclass(frozen=True, kw_only=True, slots=True)
class Strikes:
    """Rows of a unit, by position, that engines have died with, and how often."""

    crashes: Mapping[int, int] = field(default_factory=dict)
    # ran alone when the last engine died; they are error rows
    given_up: Set[int] = frozenset()

    def __or__(self, other: "Strikes") -> "Strikes":
        """Return the union; both may have seen the same deaths."""
        more = {pos: max(n, self.crashes.get(pos, 0)) for pos, n in other.crashes.items()}
        return Strikes(crashes={**self.crashes, **more}, given_up=self.given_up | other.given_up)


def write_strikes(store: Store, unit: Unit, strikes: Strikes, *, plan_hash: str) -> None:
    """Write a marker under the next number that nobody has.

    CommitError where a row has no place in the unit, or there are none.
    """
    places = sorted(strikes.crashes)
    if not places or places[0] < 0 or places[-1] >= unit.num_rows:
        raise CommitError(f"unit {unit.number} has {unit.num_rows} rows; no strikes at {places}")
    record = {
        "plan": plan_hash,
        "unit": unit.number,
        "crashes": {str(pos): strikes.crashes[pos] for pos in places},
        "given_up": sorted(strikes.given_up),
    }
    data = json.dumps(record, sort_keys=True).encode()
    number = len(_markers(store, unit))
    while not store.create(attempt_name(unit.number, number), data):
        number += 1


def read_strikes(store: Store, unit: Unit, *, plan_hash: str) -> Strikes:
    """Return the strikes of all markers of a unit; one listing where there are none."""
    known = Strikes()
    for name in _markers(store, unit):
        try:
            known |= _strikes(store.read(name), unit, plan_hash)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s/%s is left out: %s", store.uri, name, error_text(error))
    return known


def _markers(store: Store, unit: Unit) -> list[str]:
    names = store.names(attempt_folder(unit.number))
    return [name for name in names if attempt_unit(name) == unit.number]


def _strikes(data: bytes, unit: Unit, plan_hash: str) -> Strikes:
    record = json.loads(data)
    if (record["plan"], record["unit"]) != (plan_hash, unit.number):
        raise ValueError(f"it belongs to unit {record['unit']!r} of plan {record['plan']!r}")
    crashes = {int(pos): int(number) for pos, number in record["crashes"].items()}
    given_up = frozenset(int(pos) for pos in record["given_up"])
    if any(not 0 <= pos < unit.num_rows for pos in crashes) or not given_up <= crashes.keys():
        raise ValueError("a row has no place in the unit")
    return Strikes(crashes=crashes, given_up=given_up)


def drop_journal_and_staging(store: Store) -> int:
    """Remove what nobody needs once the output is complete; return how many files.

    Other runs may still be at work: one that finds its staged file gone stages it again, and one
    that finds no journal finds the parts.
    """
    names = [name for folder in (FRAGMENTS, ATTEMPTS, STAGING) for name in store.names(folder)]
    for name in names:
        store.remove(name)
    return len(names)


def leftovers(
    store: Store, *, plans: Collection[str], is_committed: Callable[[int], bool], is_finished: bool
) -> Iterator[tuple[str, bool]]:
    """Yield the files that could go, each with whether a run at work could still miss it.

    With no hash in `plans`, which hold, no folder of a plan is named.
    """
    for folder, unit_of in ((FRAGMENTS, fragment_unit), (ATTEMPTS, attempt_unit)):
        for name in store.names(folder):
            unit = unit_of(name)
            if is_finished or (unit is not None and is_committed(unit)):
                yield name, False
    staged = store.names(STAGING)
    probes = [name for name in store.names("_raybatch") if probe_token(name) is not None]
    for name in staged + probes:
        yield name, not is_finished
    for name in store.names(PLANS) if plans else []:
        if plan_of_shard(name) not in (None, *plans):
            yield name, True
