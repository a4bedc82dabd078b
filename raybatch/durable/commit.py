"""Which plan holds, and the commit of a unit: its rows are checked, its part is created once.

A row belongs to one unit of a plan that never changes, a unit has one name, and a part holds all
rows of its unit; so every row is in the output once or not at all, whatever other attempts do.

In a partitioned output the rows of a unit lie in one file per value of some columns of the input.
The files are created one by one, then the record that all are there. Every attempt writes the same
rows under the same names, so that files of different attempts can be mixed.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, DONE, PLAN, done_name, done_unit, part_name, part_unit
from raybatch.durable.parts import PARQUET, Footer, PartFormat, read_footer
from raybatch.durable.storage import Store
from raybatch.durable.units import (
    Receipt,
    Unit,
    UnitCounts,
    UnitPlan,
    add_row_sums,
    row_sum,
    sum_counts,
)
from raybatch.errors import CommitError, encodable, error_text
from raybatch.records.arrays import Bools, Ints

# the name of the folder of null
_NULL = "__HIVE_DEFAULT_PARTITION__"
# of one step, so that file systems with short names take it
_MAX_STEP_BYTES = 200


def open_plan(store: Store, make: Callable[[], bytes], *, name: str = PLAN) -> bytes:
    """Return the plan of an output, making it where there is none.

    What is returned was read from the store: of two runs at once both follow the one plan that
    was created first, and the shards of the other are never read.

    Args:
        make: writes the shards of a new plan, under names of its own, and returns `plan.json`.
        name: of the file; another than the first plan's for input that came later.

    Raises:
        CommitError: there are parts and no plan.
    """
    stored = _read(store, name)
    if stored is None:
        # parts are listed before the plan is read again: another run writes them in that order
        names = store.names(DATA) if name == PLAN else []
        if names and _read(store, PLAN) is None:
            raise CommitError(
                f"{store.uri} holds {len(names)} files, such as {names[0]}, and no {PLAN}; choose "
                "another folder, or remove them yourself"
            )
        made = make()
        reach("before_plan")
        store.create(name, made)
        reach("after_plan")
        stored = _read(store, name)
    if stored is None:
        raise CommitError(
            f"{store.uri}/{name} was there and is gone; somebody else removes files of this output"
        )
    return stored


def _read(store: Store, name: str) -> bytes | None:
    try:
        return store.read(name)
    except FileNotFoundError:
        return None


def commit_unit(
    store: Store,
    unit: Unit,
    table: pa.Table,
    *,
    by: Sequence[str] = (),
    pos: Ints,
    row: Ints,
    count: Callable[[pa.Table], UnitCounts],
    unwritten: Sequence[str] = (),
    plan_hash: str,
    attempt: str,
    part_format: PartFormat = PARQUET,
) -> Receipt:
    """Write the part of a unit, unless another attempt has written it.

    With `by` the output is partitioned: files that are not there yet are written, then the record
    that the unit is complete.

    Args:
        table: all rows of the unit in the one schema of the output, in any order.
        by: columns of the input that cut the unit; they are not written, their values are in the
            names of files.
        pos: int64 [R], position of each row in its unit.
        row: int64 [R], number of each row in the whole input.
        count: returns the counts of some rows of `table`.
        unwritten: columns of `table` that are counted and not written.
        attempt: who writes; for people alone.

    Returns:
        What is in the output now; another attempt's counts where that one was first.

    Raises:
        CommitError: the rows are not those of the unit, once each, or a part of another plan lies
            there, and nothing was written; or another attempt has cut the unit in another way.
    """
    if table.num_rows != len(pos):
        raise CommitError(f"unit {unit.number}: {table.num_rows} rows, {len(pos)} positions")
    check_rows(unit, pos, row)
    if np.any(pos[1:] < pos[:-1]):
        order = np.argsort(pos)
        table = table.take(order)
        row = row[order]
    mine = Footer(unit=unit, counts=UnitCounts(), plan=plan_hash, attempt=attempt)
    stored: dict[str, Footer] = {}
    won = True
    for folder, places in _places(table, by).items():
        rows = table.take(places) if by else table
        counts = count(rows)
        if counts.num_rows != rows.num_rows:
            raise CommitError(
                f"unit {unit.number}: {rows.num_rows} rows and counts of {counts.num_rows} rows"
            )
        held = replace(unit, num_rows=rows.num_rows, row_sum=row_sum(row[places]))
        footer = replace(mine, unit=held, counts=counts)
        name = part_name(unit.number, folder)
        written = rows.drop_columns([*by, *unwritten])
        stored[name] = publish(store, name, written, footer, part_format)
        won = stored[name] is footer
    total = sum_counts(footer.counts for footer in stored.values())
    if by:
        record = {**replace(mine, counts=total).to_json(), "files": sorted(stored)}
        reach("before_done", unit=unit.number)
        won = store.create(done_name(unit.number), json.dumps(record, sort_keys=True).encode())
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=won, counts=total)


def publish(
    store: Store, name: str, table: pa.Table, footer: Footer, part_format: PartFormat
) -> Footer:
    """Create a part, and return the footer of what lies there now: the same rows in any case.

    It is `footer` itself where this call has written the file. CommitError where what lies there
    is another unit's or another plan's, or was removed.
    """
    data = part_format.part(table, footer)
    reach("before_publish", unit=footer.unit.number)
    won = store.create(name, data)
    reach("after_publish", unit=footer.unit.number)
    if won:
        return footer
    try:
        stored = read_footer(store, name, part_format)
    except FileNotFoundError:
        raise CommitError(
            f"{store.uri}/{name} was there and is gone; somebody else removes files of this output"
        ) from None
    stored.check(footer.unit, footer.plan, f"{store.uri}/{name}")
    return stored


def check_rows(unit: Unit, pos: Ints, row: Ints) -> None:
    """Raise CommitError unless these are the rows of the unit, once each."""
    if len(pos) != unit.num_rows or len(row) != len(pos):
        raise CommitError(f"unit {unit.number} has {unit.num_rows} rows, got {len(pos)}")
    is_there = np.zeros(unit.num_rows, bool)
    inside = pos[(pos >= 0) & (pos < unit.num_rows)]
    is_there[inside] = True
    if not is_there.all():
        raise CommitError(
            f"unit {unit.number}: position {int(np.argmin(is_there))} of {unit.num_rows} is "
            "missing, so another is there twice or does not belong to it"
        )
    total = row_sum(row)
    if total != unit.row_sum:
        raise CommitError(
            f"unit {unit.number}: its rows are not those of the plan (sum {total:016x}, planned "
            f"{unit.row_sum:016x}); has the input changed since the plan was made?"
        )


def receipt_of(
    store: Store,
    unit: Unit,
    plan_hash: str,
    part_format: PartFormat = PARQUET,
    *,
    is_partitioned: bool = False,
) -> Receipt | None:
    """Return the receipt of a unit that is committed, None where it is not; one or two requests."""
    name = done_name(unit.number) if is_partitioned else part_name(unit.number)
    try:
        if is_partitioned:
            footer, _ = read_record(store, unit.number)
        else:
            footer = read_footer(store, name, part_format)
    except FileNotFoundError:
        return None
    footer.check(unit, plan_hash, f"{store.uri}/{name}")
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=False, counts=footer.counts)


def committed(store: Store, plan: UnitPlan) -> Bools:
    """Return which units are in the output, from one listing or two; no file is opened.

    Raises:
        CommitError: a file lies there that is no part of a unit of the plan.
    """
    is_done, unknown = listed_units(store, plan)
    if plan.is_partitioned:
        unknown += strange_files(plan, store.names(DATA))
    if unknown:
        raise CommitError(
            f"{store.uri}/{unknown[0]} is no part of a unit of plan {plan.hash} "
            f"({len(unknown)} such files); move them away, or choose another folder"
        )
    return is_done


def listed_units(store: Store, plan: UnitPlan) -> tuple[Bools, list[str]]:
    """Return which units are in the output, and the files that are no unit's."""
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
    return is_done, unknown


def strange_files(plan: UnitPlan, names: Iterable[str]) -> list[str]:
    """Return those of the files below `data/` that are no file of a unit of a partitioned output.

    Whether a unit has such a file is known by its record alone.
    """
    return [
        name
        for name in names
        # rows of every unit lie in folders
        if (unit := part_unit(name)) is None or unit >= plan.num_units or name == part_name(unit)
    ]


def partition_folder(columns: Sequence[str], values: Sequence[object]) -> str:
    """Return the folder of rows with these values, such as "lang=en/year=2024".

    CommitError where a name and its value are too long for a file name, or a text is that which
    stands for null.
    """
    steps = []
    for column, value in zip(columns, values, strict=True):
        if value == _NULL:
            raise CommitError(
                f"the text {_NULL} in column {column!r} is the folder of null, so it would come "
                "back as null; partition by another column"
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
    """Return columns and values in a name such as "lang=en/part-000000.parquet", as texts."""
    steps = [step.partition("=") for step in name.split("/")[:-1]]
    return tuple(
        (encodable(unquote(column)), None if text == _NULL else encodable(unquote(text)))
        for column, sign, text in steps
        if column and sign
    )


def read_record(store: Store, unit: int) -> tuple[Footer, list[str]]:
    """Return the record of a complete unit, and the names of its files.

    Raises:
        FileNotFoundError: there is none.
        CommitError: it is no record of this library.
    """
    name = done_name(unit)
    data = store.read(name)
    try:
        record = json.loads(data)
        return Footer.from_json(record), [str(file) for file in record["files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CommitError(
            f"{store.uri}/{name} is no record of this output: {error_text(error)}; move it away"
        ) from error


def read_files(
    store: Store,
    plan_hash: str,
    unit: Unit,
    record: tuple[Footer, Sequence[str]],
    part_format: PartFormat,
) -> Footer:
    """Return the sum of the footers of a complete unit; a request or two for each file.

    Raises:
        FileNotFoundError: a file of it is missing.
        CommitError: a file of it is another unit's or another plan's.
    """
    summary, names = record
    summary.check_plan(unit, plan_hash, f"{store.uri}/{done_name(unit.number)}")
    footers = []
    for name in names:
        footer = read_footer(store, name, part_format)
        footer.check_plan(unit, plan_hash, f"{store.uri}/{name}")
        footers.append(footer)
    num_rows = sum(footer.unit.num_rows for footer in footers)
    sums = add_row_sums(footer.unit.row_sum for footer in footers)
    counts = sum_counts(footer.counts for footer in footers)
    held = replace(unit, num_rows=num_rows, row_sum=sums)
    return replace(summary, unit=held, counts=counts)


def _places(table: pa.Table, by: Sequence[str]) -> dict[str, Ints]:
    """Return the places in `table` of the rows of each folder; "" where there is but one."""
    if not by:
        return {"": np.arange(table.num_rows)}
    columns = [table.column(name).to_pylist() for name in by]
    places: dict[str, list[int]] = {}
    for place in range(table.num_rows):
        folder = partition_folder(by, [column[place] for column in columns])
        places.setdefault(folder, []).append(place)
    return {folder: np.array(places[folder], np.int64) for folder in sorted(places)}
