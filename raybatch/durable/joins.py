"""Joins parts of consecutive units into one part of another output, each row exactly once.

A job that joins parts writes a part per unit into one output. Units of a second output are
stretches of the units of the first one. Each is made in three steps:

1. The joined part is created in the second output, unless it exists. If that output is partitioned
   these are a file per folder, then the record of the unit.
2. A record with the footers of its units is created in the first output. From then on the record
   says that they are committed.
3. Their parts are removed.

Any process may do any step again, at any time: a joined part and a record are created once, and a
part that a late attempt at a unit creates after step 3 is never read.
"""

import json
import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.commit import create_record, files_of, is_of_units, read_record, rows_by
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import SUCCESS, done_name, joined_name, part_folder, part_name
from raybatch.durable.parts import (
    FOOTER_KEY,
    FolderRows,
    Footer,
    corrupt_part,
    footer_in,
    read_footer,
    read_rows,
)
from raybatch.durable.storage import Store
from raybatch.durable.units import PROTOCOL, CommitUnit, UnitCounts
from raybatch.errors import CommitError, error_text

logger = logging.getLogger(__name__)

# parts that are read at once to be joined
_PARTS_AT_ONCE = 16
# bytes in memory before they are written: of each file, and for how many files at most
_ROW_GROUP_BYTES, _MAX_ROW_GROUPS = 64 << 20, 4


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartJoin:
    """Some parts of an output and the part to make of them; sent to tasks.

    Args:
        source: output with a part per unit, or a partitioned one.
        units: consecutive units of that output.
        source_hash: hash of their plan.
        target: output of the joined part.
        unit: unit of the target that has the rows of `units`, in their order.
        plan_hash: hash of the target's plan.
        by: columns that partition the target.
        attempt: name of the writer, for people only.
        removes_parts: whether to write the record and remove the parts.
    """

    source: Store
    units: tuple[CommitUnit, ...]
    source_hash: str
    target: Store
    unit: CommitUnit
    plan_hash: str
    by: tuple[str, ...] = ()
    attempt: str
    removes_parts: bool

    @property
    def numbers(self) -> range:
        return range(self.units[0].number, self.units[-1].number + 1)

    @property
    def record(self) -> str:
        return joined_name(self.numbers.start, self.numbers.stop)

    @property
    def name(self) -> str:
        """The file of the target that says that the joined part is there."""
        return done_name(self.unit.number) if self.by else part_name(self.unit.number)

    @property
    def is_partitioned(self) -> bool:
        """Whether the source is partitioned, as the target is."""
        return bool(self.by) and not is_of_units(self.source)

    def files(self) -> Iterator[tuple[CommitUnit, str]]:
        """Yield (unit, name) of each file to join, in order of the units."""
        for unit in self.units:
            for name in files_of(self.source, unit.number, is_partitioned=self.is_partitioned):
                yield unit, name

    def has_record(self) -> bool:
        return self.source.size(self.record) is not None

    def is_created(self) -> bool:
        return self.target.size(self.name) is not None

    def footer(self) -> Footer:
        """Return the footer of the joined part without counts."""
        counts = UnitCounts()
        return Footer(unit=self.unit, plan=self.plan_hash, attempt=self.attempt, counts=counts)


def join_parts(join: PartJoin, *, num_threads: int = _PARTS_AT_ONCE) -> None:
    """Create the joined part and, if asked for, the record, and remove the parts; in this order.

    Uses memory of about three times the joined part, if it is one file, else of less than twice all
    files. With `num_threads` 1 no thread is started.

    Raises:
        CommitError: a part is not that of its unit, has other columns than the first one, or is
            missing; nothing was removed.
    """
    if not join.removes_parts:
        if not join.is_created():
            _create_part(join, num_threads)
        return
    footers = None if join.has_record() else _create_part(join, num_threads)
    if footers is not None:
        values = {
            "protocol": PROTOCOL,
            "part": join.name,
            "footers": [replace(footer, folders={}).to_json() for footer in footers],
        }
        join.source.create(join.record, json.dumps(values, sort_keys=True).encode())
    reach("after_join_record", unit=join.unit.number)
    if not join.is_created():
        raise _removed(join)
    remove_parts(join.source, list(map(part_name, join.numbers)))


def remove_parts(source: Store, names: Sequence[str]) -> None:
    """Remove parts whose record exists; logs why if that fails, as nothing reads them."""
    for name in names:
        try:
            source.remove(name)
        except Exception as error:  # file systems raise various classes
            logger.warning(
                "could not remove %s/%s, which is joined; remove it at any time: %s",
                source.uri,
                name,
                error_text(error),
            )
            return


def drop_if_lost(target: Store, unit: int, names: Container[str], *, is_partitioned: bool) -> bool:
    """Return whether a joined part lacks files, or is not there; the record of its unit is removed.

    So its files are written again. `names` are those of an earlier listing.
    """
    try:
        files = files_of(target, unit, is_partitioned=is_partitioned)
    except FileNotFoundError:
        return True
    # a listing may be old; only here a record is removed by what it lacks
    is_lost = not all(name in names or target.size(name) is not None for name in files)
    if is_partitioned and is_lost:
        target.remove(done_name(unit))
    return is_lost


def reopen_lost(source: Store, records: Sequence[range], joined: Collection[range]) -> int:
    """Let units run again whose joined part is gone; return how many.

    Args:
        source: output with the records.
        records: units of the records, listed before `joined`.
        joined: units of each joined part that exists.
    """
    lost = [units for units in records if units not in joined]
    if lost:
        source.remove(SUCCESS)  # first: a complete output runs no units
    for units in lost:
        source.remove(joined_name(units.start, units.stop))
    return sum(map(len, lost))


def _create_part(join: PartJoin, num_threads: int) -> list[Footer] | None:
    """Create the joined part unless it exists; return the footers of the parts it was made of.

    None if another process has joined and removed them meanwhile.
    """
    files: dict[str, _JoinedFile] | None = None
    try:
        if drop_if_lost(join.target, join.unit.number, (), is_partitioned=bool(join.by)):
            files, footers = _joined(join, num_threads)
        else:
            footers = [
                _checked(join, unit, read_footer(join.source, n)) for unit, n in join.files()
            ]
    except FileNotFoundError as error:
        if join.removes_parts and join.has_record():
            return None
        way_out = "run the job again" if join.removes_parts else "restore it from a copy"
        raise CommitError(
            f"{join.source.uri}: a part to join is missing ({error}); {way_out}"
        ) from error
    if join.footer().holding(footers).unit != join.unit:
        raise CommitError(
            f"units {join.numbers.start} to {join.numbers.stop - 1} of {join.source.uri} are not "
            f"the rows of unit {join.unit.number} of {join.target.uri}; choose another folder"
        )
    try:
        if files is not None:
            _write(join, files, num_threads)
        if join.by:
            stored, _ = read_record(join.target, join.unit.number)
        else:
            stored = read_footer(join.target, join.name)
        stored.check(join.unit, join.plan_hash, f"{join.target.uri}/{join.name}")
    except FileNotFoundError:
        raise _removed(join) from None
    reach("after_join", unit=join.unit.number)
    return footers


def _removed(join: PartJoin) -> CommitError:
    return CommitError(
        f"{join.target.uri}/{join.name} was removed after it was written; stop what deletes files "
        "of this output, and run the same command again"
    )


def _write(join: PartJoin, files: dict[str, "_JoinedFile"], num_threads: int) -> None:
    """Create the files of a joined part and, if it is partitioned, its record."""

    def create(folder: str) -> tuple[str, Footer]:
        name = part_name(join.unit.number, folder)
        footer = replace(join.footer(), folder=folder).holding(files[folder].rows)
        reach("before_join", unit=join.unit.number)
        if not join.target.create(name, files.pop(folder).close(footer)):
            stored = read_footer(join.target, name)
            stored.check(footer.unit, join.plan_hash, f"{join.target.uri}/{name}")
            footer = stored
        return name, footer

    stored = dict(_mapped(create, sorted(files), num_threads))
    if join.by:
        create_record(join.target, join.footer().holding(stored.values()), stored)


def _mapped(call: Callable[[Any], Any], items: Sequence[Any], num_threads: int) -> Iterator[Any]:
    """Yield the result of each call, in order; few results wait in memory."""
    if num_threads == 1:
        yield from map(call, items)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        for start in range(0, len(items), num_threads):
            yield from threads.map(call, items[start : start + num_threads])


class _JoinedFile:
    """The Parquet file with the rows of one folder of a joined part, written by row groups."""

    def __init__(self, schema: pa.Schema) -> None:
        self._buffer = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._buffer, schema)
        self._held: list[pa.Table] = []
        self.rows: list[FolderRows] = []

    def add(self, table: pa.Table, rows: FolderRows) -> None:
        self._held.append(table)
        self.rows.append(rows)

    def write(self) -> None:
        """Write the rows that are held as a row group."""
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held))
        self._held = []

    def close(self, footer: Footer) -> bytes:
        """Return the bytes of the file, with this footer."""
        self.write()
        self._writer.add_key_value_metadata({FOOTER_KEY: footer.to_text()})
        self._writer.close()
        return bytes(self._buffer.getvalue())


def _joined(join: PartJoin, num_threads: int) -> tuple[dict[str, _JoinedFile], list[Footer]]:
    """Return the files of the joined part by folder, "" for one without, and the parts' footers."""
    files: dict[str, _JoinedFile] = {}
    footers, schema, num_held = list[Footer](), None, 0
    names = list(join.files())
    data_of = _mapped(join.source.read, [name for _, name in names], num_threads)
    for (unit, name), data in zip(names, data_of, strict=True):
        where = f"{join.source.uri}/{name}"
        footers.append(_checked(join, unit, footer_in(data, where)))
        table = read_rows(data, where, schema)
        schema = table.schema
        for folder, some, rows in _by_folder(join, name, table, footers[-1]):
            if folder not in files:
                files[folder] = _JoinedFile(some.schema)
            files[folder].add(some, rows)
        num_held += table.nbytes
        if num_held >= _ROW_GROUP_BYTES * min(len(files), _MAX_ROW_GROUPS):
            num_held = 0
            for file in files.values():
                file.write()
    return files, footers


def _by_folder(
    join: PartJoin, name: str, table: pa.Table, footer: Footer
) -> Iterator[tuple[str, pa.Table, FolderRows]]:
    """Yield (folder, table, its rows) of a part with this name."""
    if not join.by or join.is_partitioned:
        yield part_folder(name), table, footer
        return
    found = rows_by(table, join.by)
    known = {folder: one.unit.num_rows for folder, one in footer.folders.items()}
    if {folder: some.num_rows for folder, (_, some) in found.items()} != known:
        where = f"{join.source.uri}/{name}"
        raise corrupt_part(where, "its footer has other folders than its rows")
    for folder, (_, some) in found.items():
        yield folder, some.drop_columns(list(join.by)), footer.folders[folder]


def _checked(join: PartJoin, unit: CommitUnit, footer: Footer) -> Footer:
    check = footer.check_plan if join.is_partitioned else footer.check
    check(unit, join.source_hash, f"{join.source.uri}/{part_name(unit.number)}")
    return footer
