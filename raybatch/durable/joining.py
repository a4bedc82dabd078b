"""Joining the parts of consecutive units into one part of another output, each row exactly once.

A job that joins parts writes a part per unit into one output. Units of a second output are
stretches of the units of the first one. Each is made in three steps:

1. The joined part is created in the second output, unless it exists.
2. A record with the footers of its units is created in the first output. From then on the record
   says that they are committed.
3. Their parts are removed.

Any process may do any step again, at any time: a joined part and a record are created once, and a
part that a late attempt at a unit creates after step 3 is never read.
"""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import SUCCESS, joined_name, part_name
from raybatch.durable.parts import FOOTER_KEY, Footer, footer_in, read_footer, read_rows
from raybatch.durable.storage import Store
from raybatch.durable.units import PROTOCOL, CommitUnit, UnitCounts, add_row_sums, sum_counts
from raybatch.errors import CommitError, error_text

logger = logging.getLogger(__name__)

# parts that are read at once
_PARTS_AT_ONCE = 16
# smallest size in memory of a row group, except for the last one
_ROW_GROUP_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartJoin:
    """Some parts of an output and the part to make of them; sent to tasks.

    Args:
        source: output with a part per unit.
        units: consecutive units of that output.
        source_hash: hash of their plan.
        target: output of the joined part.
        unit: unit of the target that has the rows of `units`, in their order.
        plan_hash: hash of the target's plan.
        attempt: name of the writer, for people only.
        removes_parts: whether to write the record and remove the parts.
    """

    source: Store
    units: tuple[CommitUnit, ...]
    source_hash: str
    target: Store
    unit: CommitUnit
    plan_hash: str
    attempt: str
    removes_parts: bool

    @property
    def numbers(self) -> range:
        return range(self.units[0].number, self.units[-1].number + 1)

    @property
    def record(self) -> str:
        return joined_name(self.numbers.start, self.numbers.stop)

    def has_record(self) -> bool:
        return self.source.size(self.record) is not None


def join_parts(join: PartJoin, *, num_threads: int = _PARTS_AT_ONCE) -> None:
    """Create the joined part and, if asked for, the record, and remove the parts; in this order.

    Uses memory of about three times the joined part. With `num_threads` 1 no thread is started.

    Raises:
        CommitError: a part is not that of its unit, has other columns than the first one, or is
            missing; nothing was removed.
    """
    name = part_name(join.unit.number)
    if not join.removes_parts:
        if join.target.size(name) is None:
            _create_part(join, num_threads)
        return
    footers = None if join.has_record() else _create_part(join, num_threads)
    if footers is not None:
        values = {
            "protocol": PROTOCOL,
            "part": name,
            "footers": [footer.to_json() for footer in footers],
        }
        join.source.create(join.record, json.dumps(values, sort_keys=True).encode())
    reach("after_join_record", unit=join.unit.number)
    if join.target.size(name) is None:
        raise _removed(join)
    remove_parts(join.source, list(map(part_name, join.numbers)))


def _removed(join: PartJoin) -> CommitError:
    return CommitError(
        f"{join.target.uri}/{part_name(join.unit.number)} was removed while the job ran; run the "
        "job again, which generates its rows again"
    )


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


def _create_part(join: PartJoin, num_threads: int) -> list[Footer] | None:
    """Create the joined part unless it exists; return the footers of the parts it was made of.

    None if another process has joined and removed them meanwhile.
    """
    where, name = join.target.uri, part_name(join.unit.number)
    is_there, data = join.target.size(name) is not None, b""
    try:
        if is_there:
            parts = ((unit, part_name(unit.number)) for unit in join.units)
            footers = [_checked(join, unit, read_footer(join.source, one)) for unit, one in parts]
            _sum_of(join, footers)
        else:
            data, footers = _joined(join, num_threads)
    except FileNotFoundError as error:
        if join.removes_parts and join.has_record():
            return None
        way_out = "run the job again" if join.removes_parts else "restore it from a copy"
        raise CommitError(
            f"{join.source.uri}: a part to join is missing ({error}); {way_out}"
        ) from error
    if not is_there:
        reach("before_join", unit=join.unit.number)
        join.target.create(name, data)
    try:
        stored = read_footer(join.target, name)
    except FileNotFoundError:
        raise _removed(join) from None
    stored.check(join.unit, join.plan_hash, f"{where}/{name}")
    reach("after_join", unit=join.unit.number)
    return footers


def _joined(join: PartJoin, num_threads: int) -> tuple[bytes, list[Footer]]:
    """Return the bytes of the joined part, and the footers of its parts."""
    footers: list[Footer] = []
    buffer, writer, held = pa.BufferOutputStream(), None, list[pa.Table]()
    try:
        for unit, data in _parts_of(join, num_threads):
            where = f"{join.source.uri}/{part_name(unit.number)}"
            footers.append(_checked(join, unit, footer_in(data, where)))
            held.append(read_rows(data, where, writer and writer.schema))
            if writer is None:
                writer = pq.ParquetWriter(buffer, held[0].schema)
            if sum(table.nbytes for table in held) >= _ROW_GROUP_BYTES:
                writer.write_table(pa.concat_tables(held))
                held.clear()
        assert writer is not None, "a join has units"
        if held:
            writer.write_table(pa.concat_tables(held))
        writer.add_key_value_metadata({FOOTER_KEY: _sum_of(join, footers).to_text()})
    finally:
        if writer is not None:
            writer.close()
    return bytes(buffer.getvalue()), footers


def _parts_of(join: PartJoin, num_threads: int) -> Iterator[tuple[CommitUnit, bytes]]:
    names = [part_name(unit.number) for unit in join.units]
    if num_threads == 1:
        yield from zip(join.units, map(join.source.read, names), strict=True)
        return
    with ThreadPoolExecutor(num_threads) as threads:
        for start in range(0, len(names), num_threads):
            some = slice(start, start + num_threads)
            yield from zip(
                join.units[some], threads.map(join.source.read, names[some]), strict=True
            )


def _checked(join: PartJoin, unit: CommitUnit, footer: Footer) -> Footer:
    footer.check(unit, join.source_hash, f"{join.source.uri}/{part_name(unit.number)}")
    return footer


def _sum_of(join: PartJoin, footers: list[Footer]) -> Footer:
    """Return the footer of the joined part; CommitError: it would have other rows than planned."""
    num_rows = sum(footer.unit.num_rows for footer in footers)
    row_sum = add_row_sums(footer.unit.row_sum for footer in footers)
    if replace(join.unit, num_rows=num_rows, row_sum=row_sum) != join.unit:
        raise CommitError(
            f"units {join.numbers.start} to {join.numbers.stop - 1} of {join.source.uri} are not "
            f"the rows of unit {join.unit.number} of {join.target.uri}; choose another folder"
        )
    counts: UnitCounts = sum_counts(footer.counts for footer in footers)
    return Footer(unit=join.unit, plan=join.plan_hash, attempt=join.attempt, counts=counts)


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
