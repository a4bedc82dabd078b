"""Opening the plan of an output, and committing a unit: check its rows, create its part once.

A row belongs to one commit unit of a plan that never changes, a unit has one name, and a part has
all rows of its unit; so every row is in the output once or not at all, whatever other attempts do.

In a partitioned output the rows of a unit are in one file per value of some columns of the input.
The files are created one by one, then the record that all exist. Every attempt writes the same
rows under the same names, so files of different attempts can be mixed. If parts are joined, as in
`raybatch.durable.joins`, those of units are not partitioned, and the joined ones are.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import (
    DATA,
    DONE,
    JOINED,
    PLAN,
    UNITS,
    done_name,
    done_unit,
    joined_name,
    joined_units,
    part_folder,
    part_name,
    part_unit,
)
from raybatch.durable.parts import Footer, encode_part, read_footer
from raybatch.durable.storage import Store
from raybatch.durable.units import CommitUnit, Receipt, UnitCounts, UnitPlan, row_sum
from raybatch.errors import CommitError, encodable, error_text
from raybatch.records.arrays import Bools, Ints

# folder name for null
_NULL = "__HIVE_DEFAULT_PARTITION__"
# limit for one path component, so that file systems with short names accept it
_MAX_STEP_BYTES = 200


def open_plan(store: Store, make: Callable[[], bytes], *, name: str = PLAN) -> bytes:
    """Return the plan of an output; create it if it does not exist.

    The returned plan was read from the store: two concurrent runs both follow the plan that was
    created first, and the shards of the other are never read.

    Args:
        make: writes the shards of a new plan, under unique names, and returns `plan.json`.
        name: name of the file; plans for input added later have other names.

    Raises:
        CommitError: there are parts but no plan.
    """
    stored = _read(store, name)
    if stored is None:
        # parts are listed before the plan is read again: another run writes them in that order
        names = store.names(DATA) if name == PLAN else []
        if names and _read(store, PLAN) is None:
            raise CommitError(
                f"{store.uri} has {len(names)} files, such as {names[0]}, but no {PLAN}; choose "
                "another folder, or remove them yourself"
            )
        made = make()
        reach("before_plan")
        store.create(name, made)
        reach("after_plan")
        stored = _read(store, name)
    if stored is None:
        raise CommitError(
            f"{store.uri}/{name} was removed after it was written; stop what deletes files of this "
            "output, and run the job again"
        )
    return stored


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def commit_unit(
    store: Store,
    unit: CommitUnit,
    table: pa.Table,
    *,
    by: Sequence[str] = (),
    joined_by: Sequence[str] = (),
    pos: Ints,
    row: Ints,
    count: Callable[[pa.Table], UnitCounts],
    unwritten: Sequence[str] = (),
    plan_hash: str,
    attempt: str,
    encode: Callable[[pa.Table, str], bytes] = encode_part,
) -> Receipt:
    """Write the part of a unit, unless another attempt has written it.

    With `by` the output is partitioned: missing files are written, then the record that the unit
    is complete.

    Args:
        table: all rows of the unit in the schema of the output, in any order.
        by: input columns that partition the unit; they are not written, since the names of files
            have their values.
        joined_by: input columns that will partition the part that this one is joined into.
        pos: int64 [R], position of each row in its unit.
        row: int64 [R], number of each row in the whole input.
        count: returns the counts of some rows of `table`.
        unwritten: columns of `table` that are counted but not written.
        attempt: name of the writer, for people only.
        encode: makes the bytes of a part from its rows and the text of its footer.

    Returns:
        The receipt of what is in the output; with the other attempt's counts if it was first.

    Raises:
        CommitError: the rows are not those of the unit, once each, or a part of another plan
            exists, and nothing was written; or another attempt partitioned the unit differently.
    """
    if table.num_rows != len(pos):
        raise CommitError(
            f"cannot commit unit {unit.number}: got {table.num_rows} rows, but {len(pos)} positions"
        )
    check_rows(unit, pos, row)
    if np.any(pos[1:] < pos[:-1]):
        order = np.argsort(pos)
        table = table.take(order)
        row = row[order]
    rows_of = rows_by(table, by or joined_by)
    mine = Footer(unit=unit, counts=UnitCounts(), plan=plan_hash, attempt=attempt)
    footers = {
        folder: _counted(replace(mine, folder=folder), count(rows), row[places])
        for folder, (places, rows) in rows_of.items()
    }
    parts = [(footers[folder], rows) for folder, (_, rows) in rows_of.items()]
    if joined_by:
        parts = [(replace(mine.holding(footers.values()), folders=footers), table)]
    stored: dict[str, Footer] = {}
    for footer, rows in parts:
        name = part_name(unit.number, footer.folder)
        data = encode(rows.drop_columns([*by, *unwritten]), footer.to_text())
        stored[name] = publish(store, name, data, footer)
        won = stored[name] is footer
    whole = mine.holding(stored.values())
    if by:
        won = create_record(store, whole, stored)
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=won, counts=whole.counts)


def _counted(footer: Footer, counts: UnitCounts, row: Ints) -> Footer:
    """Return a footer with the counts of some rows of its unit, whose numbers are `row`."""
    unit = footer.unit
    if counts.num_rows != len(row):
        raise CommitError(
            f"cannot commit unit {unit.number}: got counts of {counts.num_rows} rows for "
            f"{len(row)} rows"
        )
    held = replace(unit, num_rows=len(row), row_sum=row_sum(row))
    return replace(footer, unit=held, counts=counts)


def create_record(store: Store, footer: Footer, names: Iterable[str]) -> bool:
    """Create the record that the files of a unit exist; return whether this call has created it."""
    record = {**footer.to_json(), "files": sorted(names)}
    reach("before_done", unit=footer.unit.number)
    return store.create(done_name(footer.unit.number), json.dumps(record, sort_keys=True).encode())


def publish(store: Store, name: str, data: bytes, footer: Footer) -> Footer:
    """Create a part unless it exists, and return the footer of the file there now.

    It is `footer` itself if this call has written the file; otherwise another attempt wrote the
    same rows. CommitError: the existing file belongs to another unit or plan, or was removed.
    """
    reach("before_publish", unit=footer.unit.number)
    won = store.create(name, data)
    reach("after_publish", unit=footer.unit.number)
    if won:
        return footer
    try:
        stored = stored_footer(store, footer.unit.number, name)
    except FileNotFoundError:
        raise CommitError(
            f"{store.uri}/{name} was removed; stop what deletes files of this output, and run the "
            "job again"
        ) from None
    stored.check(footer.unit, footer.plan, f"{store.uri}/{name}")
    return stored


def check_rows(unit: CommitUnit, pos: Ints, row: Ints) -> None:
    """Raise CommitError unless these are the rows of the unit, once each.

    `pos` are their positions in the unit, `row` their numbers in the whole input, int64 [R].
    """
    if len(pos) != unit.num_rows or len(row) != len(pos):
        raise CommitError(
            f"cannot commit unit {unit.number}: it has {unit.num_rows} rows, got {len(pos)}"
        )
    is_there = np.zeros(unit.num_rows, bool)
    inside = pos[(pos >= 0) & (pos < unit.num_rows)]
    is_there[inside] = True
    if not is_there.all():
        raise CommitError(
            f"cannot commit unit {unit.number}: no row has position {int(np.argmin(is_there))} of "
            f"{unit.num_rows}, so another position is there twice or is outside of the unit"
        )
    total = row_sum(row)
    if total != unit.row_sum:
        raise CommitError(
            f"cannot commit unit {unit.number}: its rows are not those of the plan (checksum "
            f"{total:016x}, planned {unit.row_sum:016x}); has the input changed since the plan was "
            "made?"
        )


def receipt_of(
    store: Store, unit: CommitUnit, plan_hash: str, *, is_partitioned: bool = False
) -> Receipt | None:
    """Return the receipt of a unit, None if it is not committed yet; makes one or two requests."""
    name = done_name(unit.number) if is_partitioned else part_name(unit.number)
    try:
        if is_partitioned:
            footer, _ = read_record(store, unit.number)
        else:
            footer = stored_footer(store, unit.number, name)
    except FileNotFoundError:
        return None
    footer.check(unit, plan_hash, f"{store.uri}/{name}")
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=False, counts=footer.counts)


def committed(store: Store, plan: UnitPlan) -> Bools:
    """Return bool [U], whether each unit is in the output, from one listing or two.

    No file is opened.

    Raises:
        CommitError: there is a file that is not a part of a unit of the plan.
    """
    is_done, unknown = listed_units(store, plan)
    if plan.is_partitioned:
        unknown += strange_files(plan, store.names(DATA))
    if unknown:
        raise CommitError(
            f"{store.uri}/{unknown[0]} is not a part of plan {plan.hash} "
            f"({len(unknown)} such files); move them away, or choose another folder"
        )
    return is_done


def listed_units(store: Store, plan: UnitPlan) -> tuple[Bools, list[str]]:
    """Return (whether each unit is in the output, bool [U]; names of files of no unit)."""
    is_done = np.zeros(plan.num_units, bool)
    folder, unit_of = (DONE, done_unit) if plan.is_partitioned else (DATA, part_unit)
    unknown = []
    for name in store.names(folder):
        number = unit_of(name)
        is_ours = number is not None and (plan.is_partitioned or name == part_name(number))
        if number is None or not is_ours or number >= plan.num_units:
            unknown.append(name)
        else:
            is_done[number] = True
    # listed after the parts, because they are removed once they were joined
    for units in joined_ranges(store):
        if units.stop > plan.num_units:
            unknown.append(joined_name(units.start, units.stop))
        else:
            is_done[units.start : units.stop] = True
    return is_done, unknown


def is_of_units(store: Store) -> bool:
    """Return whether the parts of an output are joined into another one.

    What it lacks is generated by the next run of the job, whether it was complete or not.
    """
    return store.uri.endswith(f"/{UNITS}")


def joined_ranges(store: Store) -> list[range]:
    """Return the units whose parts were joined into parts of another output, in order."""
    if not is_of_units(store):  # saves a listing
        return []
    return [units for name in store.names(JOINED) if (units := joined_units(name)) is not None]


def read_joined(store: Store, units: range) -> tuple[str, dict[int, Footer]]:
    """Return the name of the part that has the rows of joined units, and their footers by unit.

    Raises:
        FileNotFoundError: there is no such record.
        CommitError: it is not a record of this library.
    """
    name = joined_name(units.start, units.stop)
    data = store.read(name)
    try:
        record = json.loads(data)
        part, footers = record["part"], list(map(Footer.from_json, record["footers"]))
        if [footer.unit.number for footer in footers] != list(units):
            raise ValueError("it has the footers of other units")
    except (ValueError, KeyError, TypeError) as error:
        raise CommitError(
            f"{store.uri}/{name} is not a record of this output: {error_text(error)}; restore it "
            "from a copy, or choose another folder"
        ) from error
    return part, {footer.unit.number: footer for footer in footers}


def stored_footer(store: Store, unit: int, name: str) -> Footer:
    """Return the footer of the part of a unit, also if it was joined after it was listed.

    FileNotFoundError: there is no part of this name, and it was not joined.
    """
    try:
        return read_footer(store, name)
    except FileNotFoundError:
        for units in joined_ranges(store):
            if unit in units:
                return read_joined(store, units)[1][unit]
        raise


def strange_files(plan: UnitPlan, names: Iterable[str]) -> list[str]:
    """Return those names below `data/` that cannot belong to a unit of the plan.

    Whether one of the others belongs to a partitioned unit, only the record of that unit shows.
    """
    return [
        name
        for name in names
        if (unit := part_unit(name)) is None
        or unit >= plan.num_units
        # all rows of a partitioned output are in folders
        or (name == part_name(unit)) == plan.is_partitioned
    ]


def partition_folder(columns: Sequence[str], values: Sequence[object]) -> str:
    """Return the folder of rows with these values, such as "lang=en/year=2024".

    CommitError: a column name with its value is too long for a folder name, or a text equals the
    folder name for null.
    """
    steps = []
    for column, value in zip(columns, values, strict=True):
        if value == _NULL:
            raise CommitError(
                f"the text {_NULL} in column {column!r} is the folder name for null, so it would "
                "be read as null; partition by another column"
            )
        text = _NULL if value is None else quote(str(value), safe="")
        step = f"{quote(column, safe='')}={text}"
        if len(step) > _MAX_STEP_BYTES:
            raise CommitError(
                f"the partition {step[:60]}... is longer than {_MAX_STEP_BYTES} bytes; partition "
                "by a column with shorter values"
            )
        steps.append(step)
    return "/".join(steps)


def partition_values(name: str) -> tuple[tuple[str, str | None], ...]:
    """Return (column, value) of each folder in a name such as "lang=en/part-000000.parquet".

    Values are texts, or None for null.
    """
    steps = [step.partition("=") for step in name.split("/")[:-1]]
    return tuple(
        (encodable(unquote(column)), None if text == _NULL else encodable(unquote(text)))
        for column, sign, text in steps
        if column and sign
    )


def read_record(store: Store, unit: int) -> tuple[Footer, list[str]]:
    """Return (footer that sums the unit, names of its files) of a complete partitioned unit.

    Raises:
        FileNotFoundError: there is no such record.
        CommitError: the file is not a record of this library.
    """
    name = done_name(unit)
    data = store.read(name)
    try:
        record = json.loads(data)
        return Footer.from_json(record), [str(file) for file in record["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CommitError(
            f"{store.uri}/{name} is not a record of a finished unit of this output: "
            f"{error_text(error)}; move it away"
        ) from error


def files_of(store: Store, unit: int, *, is_partitioned: bool) -> list[str]:
    """Return the names of the files of a unit; raises as `read_record` if it is partitioned."""
    return read_record(store, unit)[1] if is_partitioned else [part_name(unit)]


def read_files(
    store: Store, plan_hash: str, unit: CommitUnit, record: tuple[Footer, Sequence[str]]
) -> Footer:
    """Return the sum of the footers in the files of a unit; makes one or two requests per file.

    `record` is the result of `read_record`.

    Raises:
        FileNotFoundError: a file of the unit is missing.
        CommitError: a file belongs to another unit or plan.
    """
    summary, names = record
    summary.check_plan(unit, plan_hash, f"{store.uri}/{done_name(unit.number)}")
    footers = []
    for name in names:
        footer = read_footer(store, name)
        footer.check_plan(unit, plan_hash, f"{store.uri}/{name}")
        if footer.folder not in ("", part_folder(name)):
            raise CommitError(f"{store.uri}/{name} has the rows of {footer.folder}; move it there")
        footers.append(footer)
    return summary.holding(footers)


def rows_by(table: pa.Table, by: Sequence[str]) -> dict[str, tuple[Ints, pa.Table]]:
    """Return the rows of each folder, with their indices in `table`; "" if there is only one."""
    if not by:
        return {"": (np.arange(table.num_rows), table)}
    columns = [table.column(name).to_pylist() for name in by]
    places: dict[str, list[int]] = {}
    for place in range(table.num_rows):
        folder = partition_folder(by, [column[place] for column in columns])
        places.setdefault(folder, []).append(place)
    # one copy for all: there may be a folder per row
    order = np.array([place for folder in sorted(places) for place in places[folder]], np.int64)
    ordered, found, start = table.take(order), {}, 0
    for folder in sorted(places):
        stop = start + len(places[folder])
        found[folder] = order[start:stop], ordered.slice(start, stop - start)
        start = stop
    return found
