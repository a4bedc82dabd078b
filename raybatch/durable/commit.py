"""Which plan holds, and the commit of a unit: its rows are checked, its part is created once.

A row belongs to one unit of a plan that never changes, a unit has one name, and a part holds all
rows of its unit; so every row is in the output once or not at all, whatever other attempts do.
"""

from collections.abc import Callable, Iterable

import numpy as np
import pyarrow as pa

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, DONE, PLAN, done_unit, part_name, part_unit
from raybatch.durable.parts import PARQUET, Footer, PartFormat, read_footer
from raybatch.durable.stores import Store
from raybatch.durable.units import Receipt, Unit, UnitCounts, UnitPlan, row_sum
from raybatch.errors import CommitError
from raybatch.records.arrays import Bools, Ints


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
    pos: Ints,
    row: Ints,
    counts: UnitCounts,
    plan_hash: str,
    attempt: str,
    part_format: PartFormat = PARQUET,
) -> Receipt:
    """Write the part of a unit, unless another attempt has written it.

    Args:
        table: all rows of the unit in the one schema of the output, in any order.
        pos: int64 [R], position of each row in its unit.
        row: int64 [R], number of each row in the whole input.
        attempt: who writes; for people alone.

    Returns:
        What is in the output now; another attempt's counts where that one was first.

    Raises:
        CommitError: the rows are not those of the unit, once each, or a part of another plan lies
            there. Nothing was written.
    """
    if not table.num_rows == len(pos) == counts.num_rows:
        raise CommitError(
            f"unit {unit.number}: {table.num_rows} rows, {len(pos)} positions and counts of "
            f"{counts.num_rows} rows"
        )
    check_rows(unit, pos, row)
    if np.any(pos[1:] < pos[:-1]):
        table = table.take(np.argsort(pos))
    footer = Footer(unit=unit, counts=counts, plan=plan_hash, attempt=attempt)
    stored = publish(store, part_name(unit.number), table, footer, part_format)
    return Receipt(
        unit=unit.number, num_rows=unit.num_rows, won=stored is footer, counts=stored.counts
    )


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
    store: Store, unit: Unit, plan_hash: str, part_format: PartFormat = PARQUET
) -> Receipt | None:
    """Return the receipt of a unit that is committed, None where it is not; one or two requests."""
    name = part_name(unit.number)
    try:
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
