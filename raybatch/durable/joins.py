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
from collections.abc import Collection, Container, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.commit import create_record, files_of, is_of_units, places_by, read_record
from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, SUCCESS, done_name, joined_name, part_name
from raybatch.durable.parts import (
    FOOTER_KEY,
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
# rows of a joined file in memory, and of all files of a join, before they are written
_ROW_GROUP_BYTES, _ROW_GROUPS_BYTES = 64 << 20, 256 << 20


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

    Uses memory of about three times the joined part. With `num_threads` 1 no thread is started.

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


def has_files(target: Store, unit: int, names: Container[str], *, is_partitioned: bool) -> bool:
    """Return whether all files of a joined part exist; `names` are those of an earlier listing.

    The record of a unit that lacks files is removed, so that these are written again.
    """
    try:
        files = files_of(target, unit, is_partitioned=is_partitioned)
    except FileNotFoundError:
        return False
    # a listing may be old; only here a record is removed by what it lacks
    is_whole = all(name in names or target.size(name) is not None for name in files)
    if is_partitioned and not is_whole:
        target.remove(done_name(unit))
    return is_whole


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


def _removed(join: PartJoin) -> CommitError:
    return CommitError(
        f"{join.target.uri}/{join.name} was removed while the job ran; run the job again, which "
        "generates its rows again"
    )


def _create_part(join: PartJoin, num_threads: int) -> list[Footer] | None:
    """Create the joined part unless it exists; return the footers of the parts it was made of.

    None if another process has joined and removed them meanwhile.
    """
    files: dict[str, _JoinedFile] = {}
    try:
        if join.is_created():
            footers = [
                _checked(join, unit, read_footer(join.source, n)) for unit, n in join.files()
            ]
        else:
            files, footers = _joined(join, num_threads)
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
    stored = []
    for folder in sorted(files):
        name = part_name(join.unit.number, folder)
        footer = join.footer().holding(files[folder].footers)
        reach("before_join", unit=join.unit.number)
        join.target.create(name, files.pop(folder).close(footer))
        stored.append((name, footer.unit))
    try:
        _check_files(join, stored)
    except FileNotFoundError:
        raise _removed(join) from None
    reach("after_join", unit=join.unit.number)
    return footers


def _check_files(join: PartJoin, files: Sequence[tuple[str, CommitUnit]]) -> None:
    """Check the files that exist now, and create the record of a unit of a partitioned target.

    `files` are the names of those that this call has created, with their rows.
    """
    footers = []
    for name, unit in files:
        footers.append(read_footer(join.target, name))
        footers[-1].check(unit, join.plan_hash, f"{join.target.uri}/{name}")
    if join.by:
        if files:
            create_record(join.target, join.footer().holding(footers), [name for name, _ in files])
        footers = [read_record(join.target, join.unit.number)[0]]
    elif not files:
        footers = [read_footer(join.target, join.name)]
    footers[0].check(join.unit, join.plan_hash, f"{join.target.uri}/{join.name}")


class _JoinedFile:
    """The Parquet file with the rows of one folder of a joined part, written by row groups."""

    def __init__(self, schema: pa.Schema) -> None:
        self._buffer = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._buffer, schema)
        self._held: list[pa.Table] = []
        self.num_bytes = 0
        """Bytes of the rows that are not written yet."""
        self.footers: list[Footer] = []

    def add(self, rows: pa.Table, footer: Footer) -> None:
        self._held.append(rows)
        self.footers.append(footer)
        self.num_bytes += rows.nbytes
        if self.num_bytes >= _ROW_GROUP_BYTES:
            self.write()

    def write(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held))
        self._held, self.num_bytes = [], 0

    def close(self, footer: Footer) -> bytes:
        """Return the bytes of the file, with this footer."""
        self.write()
        self._writer.add_key_value_metadata({FOOTER_KEY: footer.to_text()})
        self._writer.close()
        return bytes(self._buffer.getvalue())


def _joined(join: PartJoin, num_threads: int) -> tuple[dict[str, _JoinedFile], list[Footer]]:
    """Return the files of the joined part by folder, "" for one without, and the parts' footers."""
    files: dict[str, _JoinedFile] = {}
    footers, schema = list[Footer](), None
    for unit, name, data in _read(join, num_threads):
        where = f"{join.source.uri}/{name}"
        footers.append(_checked(join, unit, footer_in(data, where)))
        table = read_rows(data, where, schema)
        schema = table.schema
        for folder, rows, footer in _by_folder(join, name, table, footers[-1]):
            if folder not in files:
                files[folder] = _JoinedFile(rows.schema)
            files[folder].add(rows, footer)
        if sum(file.num_bytes for file in files.values()) >= _ROW_GROUPS_BYTES:
            for file in files.values():
                file.write()
    return files, footers


def _by_folder(
    join: PartJoin, name: str, table: pa.Table, footer: Footer
) -> Iterator[tuple[str, pa.Table, Footer]]:
    """Yield (folder, rows, footer of these rows) of a part with this name."""
    if not join.by or join.is_partitioned:
        yield name.removeprefix(f"{DATA}/").rpartition("/")[0], table, footer
        return
    places = places_by(table, join.by)
    known = {folder: one.unit.num_rows for folder, one in footer.folders.items()}
    if {folder: len(some) for folder, some in places.items()} != known:
        where = f"{join.source.uri}/{name}"
        raise corrupt_part(where, "its footer has other folders than its rows")
    table = table.drop_columns(list(join.by))
    for folder, some in places.items():
        yield folder, table.take(some), footer.folders[folder]


def _read(join: PartJoin, num_threads: int) -> Iterator[tuple[CommitUnit, str, bytes]]:
    """Yield (unit, name, bytes) of each file to join."""
    names = list(join.files())
    if num_threads == 1:
        yield from ((unit, name, join.source.read(name)) for unit, name in names)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        for start in range(0, len(names), num_threads):
            some = names[start : start + num_threads]
            read = threads.map(join.source.read, [name for _, name in some])
            yield from ((*one, data) for one, data in zip(some, read, strict=True))


def _checked(join: PartJoin, unit: CommitUnit, footer: Footer) -> Footer:
    check = footer.check_plan if join.is_partitioned else footer.check
    check(unit, join.source_hash, f"{join.source.uri}/{part_name(unit.number)}")
    return footer
