"""Units whose rows lie in one file per value of some input columns.

The files of a unit are created one by one, then the record that all are there. They are cut by
columns of the input alone, so every attempt writes the same rows under the same names, and files
of different attempts can be mixed.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from urllib.parse import quote, unquote

import numpy as np
import pyarrow as pa

from raybatch.durable.commit import check_rows, publish
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import done_name, part_name
from raybatch.durable.parts import PARQUET, Footer, PartFormat, read_footer
from raybatch.durable.stores import Store
from raybatch.durable.units import Receipt, Unit, UnitCounts, add_row_sums, row_sum, sum_counts
from raybatch.errors import CommitError, encodable, error_text
from raybatch.records.arrays import Ints

_NULL = "__HIVE_DEFAULT_PARTITION__"
# of one step, so that file systems with short names take it
_MAX_STEP_BYTES = 200


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


def commit_partitioned(
    store: Store,
    unit: Unit,
    table: pa.Table,
    *,
    by: Sequence[str],
    pos: Ints,
    row: Ints,
    count: Callable[[pa.Table], UnitCounts],
    unwritten: Sequence[str] = (),
    plan_hash: str,
    attempt: str,
    part_format: PartFormat = PARQUET,
) -> Receipt:
    """Write the files of a unit that are not there yet, then the record that it is complete.

    Args:
        table: all rows of the unit in the one schema of the output and in any order; the columns
            `by` are not written, their values are in the names.
        by: columns of the input that cut the unit.
        count: returns the counts of some rows of `table`.
        unwritten: columns of `table` that are counted and not written.

    Raises:
        CommitError: see `commit_unit`; or another attempt has cut the unit in another way.
    """
    if table.num_rows != len(pos):
        raise CommitError(f"unit {unit.number}: {table.num_rows} rows, {len(pos)} positions")
    check_rows(unit, pos, row)
    mine = Footer(unit=unit, counts=UnitCounts(), plan=plan_hash, attempt=attempt)
    footers = {}
    for folder, places in _places(table, by, pos).items():
        rows = table.take(places)
        held = replace(unit, num_rows=len(places), row_sum=row_sum(row[places]))
        footer = replace(mine, unit=held, counts=count(rows))
        name = part_name(unit.number, folder)
        written = rows.drop_columns([*by, *unwritten])
        footers[name] = publish(store, name, written, footer, part_format)
    counts = sum_counts(footer.counts for footer in footers.values())
    record = {**replace(mine, counts=counts).to_json(), "files": sorted(footers)}
    reach("before_done", unit=unit.number)
    won = store.create(done_name(unit.number), json.dumps(record, sort_keys=True).encode())
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=won, counts=counts)


def partitioned_receipt_of(store: Store, unit: Unit, plan_hash: str) -> Receipt | None:
    """Return the receipt of a unit that is complete, None where it is not; one request."""
    try:
        footer, _ = read_record(store, unit.number)
    except FileNotFoundError:
        return None
    footer.check(unit, plan_hash, f"{store.uri}/{done_name(unit.number)}")
    return Receipt(unit=unit.number, num_rows=unit.num_rows, won=False, counts=footer.counts)


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


def _places(table: pa.Table, by: Sequence[str], pos: Ints) -> dict[str, Ints]:
    """Return the places in `table` of the rows of each folder, by position in the unit."""
    columns = [table.column(name).to_pylist() for name in by]
    places: dict[str, list[int]] = {}
    for place in np.argsort(pos).tolist():
        folder = partition_folder(by, [column[place] for column in columns])
        places.setdefault(folder, []).append(place)
    return {folder: np.array(places[folder], np.int64) for folder in sorted(places)}
