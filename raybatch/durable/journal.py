"""Files of runs next to the parts, and cleaning them up; none of them counts as data.

A journal stores finished rows of incomplete commit units, and checkpointed tokens of unfinished
rows, for the next attempt. It has each row at least once and never counts as a commit; unreadable
fragments are generated again. Markers store how often engines crashed with which rows of a unit.
Each has all counts that its writer knew, so markers are merged by the largest count. Unreadable
markers are skipped: a bad row then costs a few more crashes.
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
    fragment_folder,
    fragment_name,
    fragment_unit,
    plan_of_shard,
    probe_token,
    token_checkpoint_name,
    token_checkpoint_unit,
)
from raybatch.durable.parts import empty_table
from raybatch.durable.storage import Store
from raybatch.durable.units import CommitUnit
from raybatch.errors import CommitError, error_text

logger = logging.getLogger(__name__)

POS = "__rb_pos"
ROW = "__rb_row"
# position in its unit of an unfinished row
PLACE = "row"
_KEY = b"raybatch"


def journal_schema(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with two more columns: a row's position in its unit, and in the input."""
    for name in (POS, ROW):
        schema = schema.append(pa.field(name, pa.int64(), nullable=False))
    return schema


def write_fragment(
    store: Store, unit: CommitUnit, table: pa.Table, *, plan_hash: str, attempt: str
) -> None:
    """Write finished rows of a unit to the journal; rows that it has already are fine.

    Args:
        table: one or more rows in the schema of the journal.
        attempt: name of the writer, unique among the attempts at the unit.

    Raises:
        CommitError: there are no rows, or a position is outside of the unit.
    """
    pos = table.column(POS).to_numpy()
    if not len(pos) or pos.min() < 0 or pos.max() >= unit.num_rows:
        raise CommitError(
            f"cannot write to the journal: unit {unit.number} has {unit.num_rows} rows, got the "
            f"positions {pos[:3]}"
        )
    name = fragment_name(unit.number, int(pos.min()), len(pos), attempt)
    reach("before_fragment", unit=unit.number)
    store.create(name, _encoded(table, unit, plan_hash))
    reach("after_fragment", unit=unit.number)


def write_token_checkpoint(
    store: Store, unit: CommitUnit, tokens: pa.RecordBatch, *, plan_hash: str, attempt: str
) -> None:
    """Store the tokens of unfinished rows of a unit; column `PLACE` has their positions in it."""
    data = _encoded(pa.Table.from_batches([tokens]), unit, plan_hash)
    store.create(token_checkpoint_name(unit.number, attempt), data)


def read_token_checkpoints(
    store: Store, unit: CommitUnit, schema: pa.Schema, *, plan_hash: str
) -> Iterator[pa.RecordBatch]:
    """Yield the tokens of unfinished rows that earlier attempts at a unit stored, in any order.

    Files with another schema are skipped.
    """
    for table in _fragments(store, unit, schema, plan_hash, PLACE):
        yield from table.combine_chunks().to_batches()


def read_fragments(
    store: Store, unit: CommitUnit, schema: pa.Schema, *, plan_hash: str
) -> pa.Table:
    """Return the rows of a unit that earlier attempts have finished, each once, by position.

    A fragment is skipped and logged if it is damaged, or if its schema, unit or plan is another.

    Returns:
        A table in `journal_schema(schema)`; of a row in several fragments, the first by name.
    """
    wanted = journal_schema(schema)
    fragments = _fragments(store, unit, wanted, plan_hash, POS)
    table = pa.concat_tables([empty_table(wanted), *fragments])
    _, firsts = np.unique(table.column(POS).to_numpy(), return_index=True)
    return table.take(firsts)


def _fragments(
    store: Store, unit: CommitUnit, wanted: pa.Schema, plan_hash: str, place: str
) -> Iterator[pa.Table]:
    """Yield fragments of one kind, by the column `place` of the position in the unit.

    Invalid fragments are skipped.
    """
    for name in store.names(fragment_folder(unit.number)):
        if (token_checkpoint_unit(name) is not None) != (place == PLACE):
            continue
        try:
            data = store.read(name)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        try:
            table = _decoded(data, unit, wanted, plan_hash)
            _check_places(table, place, unit)
        except (ValueError, KeyError, OSError) as error:
            logger.warning("skipped %s/%s: %s", store.uri, name, error_text(error))
            continue
        yield table


def _encoded(table: pa.Table, unit: CommitUnit, plan_hash: str) -> bytes:
    owner = json.dumps({"plan": plan_hash, "unit": unit.number}).encode()
    marked = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: owner})
    buffer = pa.BufferOutputStream()
    # rows read separately have different dictionaries, but a file has one per column
    options = pa.ipc.IpcWriteOptions(unify_dictionaries=True)
    with pa.ipc.new_file(buffer, marked.schema, options=options) as out:
        out.write_table(marked)
    return bytes(buffer.getvalue())


def _decoded(data: bytes, unit: CommitUnit, wanted: pa.Schema, plan_hash: str) -> pa.Table:
    reader = pa.ipc.open_file(pa.BufferReader(data))
    owner = json.loads((reader.schema.metadata or {})[_KEY])
    if owner != {"plan": plan_hash, "unit": unit.number}:
        raise ValueError(f"the file belongs to {owner}")
    # types first: values of an unknown type are never touched
    if not reader.schema.equals(wanted):
        raise ValueError("it has another schema")
    table = reader.read_all()
    table.validate(full=True)
    return table.replace_schema_metadata(wanted.metadata)


def _check_places(table: pa.Table, column: str, unit: CommitUnit) -> None:
    pos = table.column(column).to_numpy()
    if len(pos) and (pos.min() < 0 or pos.max() >= unit.num_rows):
        raise ValueError(f"it has a position outside of the {unit.num_rows} rows of the unit")


@dataclass(frozen=True, kw_only=True, slots=True)
class CrashCounts:
    """How often an engine crashed while it ran each row of a unit, by position in the unit."""

    crashes: Mapping[int, int] = field(default_factory=dict)
    # rows that ran alone when the last engine crashed; they are error rows
    given_up: Set[int] = frozenset()

    def __or__(self, other: "CrashCounts") -> "CrashCounts":
        """Return the union; both may have counted the same crashes."""
        more = {pos: max(n, self.crashes.get(pos, 0)) for pos, n in other.crashes.items()}
        return CrashCounts(
            crashes={**self.crashes, **more}, given_up=self.given_up | other.given_up
        )


def write_crash_counts(
    store: Store, unit: CommitUnit, crash_counts: CrashCounts, *, plan_hash: str
) -> None:
    """Store crash counts of a unit as one more file, a marker, under the next free number.

    CommitError: there are no counts, or a position is outside of the unit.
    """
    places = sorted(crash_counts.crashes)
    if not places or places[0] < 0 or places[-1] >= unit.num_rows:
        raise CommitError(
            f"cannot store crash counts: unit {unit.number} has {unit.num_rows} rows, got the "
            f"positions {places}"
        )
    record = {
        "plan": plan_hash,
        "unit": unit.number,
        "crashes": {str(pos): crash_counts.crashes[pos] for pos in places},
        "given_up": sorted(crash_counts.given_up),
    }
    data = json.dumps(record, sort_keys=True).encode()
    number = len(_markers(store, unit))
    while not store.create(attempt_name(unit.number, number), data):
        number += 1


def read_crash_counts(store: Store, unit: CommitUnit, *, plan_hash: str) -> CrashCounts:
    """Return the union of all crash counts stored for a unit; without any, costs one listing."""
    known = CrashCounts()
    for name in _markers(store, unit):
        try:
            known |= _crash_counts(store.read(name), unit, plan_hash)
        except FileNotFoundError:  # dropped after another run was complete
            continue
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("skipped %s/%s: %s", store.uri, name, error_text(error))
    return known


def _markers(store: Store, unit: CommitUnit) -> list[str]:
    names = store.names(attempt_folder(unit.number))
    return [name for name in names if attempt_unit(name) == unit.number]


def _crash_counts(data: bytes, unit: CommitUnit, plan_hash: str) -> CrashCounts:
    record = json.loads(data)
    if (record["plan"], record["unit"]) != (plan_hash, unit.number):
        raise ValueError(f"the file belongs to unit {record['unit']!r} of plan {record['plan']!r}")
    crashes = {int(pos): int(number) for pos, number in record["crashes"].items()}
    given_up = frozenset(int(pos) for pos in record["given_up"])
    if any(not 0 <= pos < unit.num_rows for pos in crashes) or not given_up <= crashes.keys():
        raise ValueError("a row's position is outside of the unit, or it has no crash count")
    return CrashCounts(crashes=crashes, given_up=given_up)


def drop_journal_and_staging(store: Store) -> int:
    """Remove journal and staged files of a complete output; return how many files were removed.

    Other runs may still be active: they stage a removed file again, and find the parts if there is
    no journal.
    """
    names = [name for folder in (FRAGMENTS, ATTEMPTS, STAGING) for name in store.names(folder)]
    for name in names:
        store.remove(name)
    return len(names)


def leftovers(
    store: Store, *, plans: Collection[str], is_committed: Callable[[int], bool], is_finished: bool
) -> Iterator[tuple[str, bool]]:
    """Yield (name, whether an active run may still need it) of each file that could be removed.

    Args:
        plans: hashes of valid plans; if empty, no folder of a plan is yielded.
        is_committed: returns whether the unit with this number is committed.
        is_finished: whether the whole output is complete.
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
