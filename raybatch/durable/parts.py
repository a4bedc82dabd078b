"""The bytes of a part: Parquet, with the metadata of the commit protocol in its footer.

Parts of consecutive units are joined into one part of another output, each row exactly once.

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
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.fault_points import reach
from raybatch.durable.layout import DATA, SUCCESS, joined_name, part_name
from raybatch.durable.storage import Store
from raybatch.durable.units import PROTOCOL, CommitUnit, UnitCounts, add_row_sums, sum_counts
from raybatch.errors import CommitError, error_text, one_line

logger = logging.getLogger(__name__)

FOOTER_KEY = "raybatch"
_MAGIC = b"PAR1"
# most footers are smaller, so that one request reads them
_TAIL_BYTES = 16 << 10
_MAX_FOOTER_BYTES = 64 << 20
# parts that are read at once to be joined
_PARTS_AT_ONCE = 16
# smallest size in memory of a row group of a joined part, except for the last one
_ROW_GROUP_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """The metadata in the footer of a part: its unit, plan and counts."""

    unit: CommitUnit
    plan: str
    # name of the writer, for people only
    attempt: str
    counts: UnitCounts

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON; `row_sum` is text, because many readers are limited to 2**53."""
        return {
            "protocol": PROTOCOL,
            "unit": self.unit.number,
            "rows": self.unit.num_rows,
            "row_sum": f"{self.unit.row_sum:016x}",
            "plan": self.plan,
            "attempt": self.attempt,
            "counts": asdict(self.counts),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Footer":
        """Build a footer from the result of `to_json`.

        Raises ValueError, KeyError or TypeError if it is invalid.
        """
        if values["protocol"] != PROTOCOL:
            raise ValueError(
                f"the file has format version {values['protocol']!r}, expected {PROTOCOL}"
            )
        number, rows, row_sum = values["unit"], values["rows"], values["row_sum"]
        return cls(
            unit=CommitUnit(number=int(number), num_rows=int(rows), row_sum=int(row_sum, 16)),
            plan=str(values["plan"]),
            attempt=str(values["attempt"]),
            counts=UnitCounts.from_json(values["counts"]),
        )

    def to_text(self) -> str:
        """Return `to_json` as JSON, as in the footer of a part."""
        return json.dumps(self.to_json(), sort_keys=True)

    def check(self, unit: CommitUnit, plan_hash: str, where: str) -> None:
        """Raise CommitError unless this is the footer of exactly the rows of `unit` in that plan.

        `where` names the file in the error.
        """
        self.check_plan(unit, plan_hash, where)
        if self.unit != unit:
            raise CommitError(
                f"{where} does not have the planned rows of its unit (it has {self.unit.num_rows}, "
                f"planned are {unit.num_rows}); move the file away"
            )

    def check_plan(self, unit: CommitUnit, plan_hash: str, where: str) -> None:
        """Raise CommitError unless this footer names that unit and that plan.

        `where` names the file in the error.
        """
        if self.plan != plan_hash:
            raise CommitError(
                f"{where} belongs to plan {self.plan}, the output to plan {plan_hash}; move the "
                "file away, or choose another folder"
            )
        if self.unit.number != unit.number:
            raise CommitError(
                f"{where} contains another unit, {self.unit.number}; move the file away"
            )


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows; `Schema.empty_table` fails for tensors of some layouts."""
    return pa.table([pa.nulls(0, kind) for kind in schema.types], schema)


def encode_part(table: pa.Table, footer: str) -> bytes:
    """Return the bytes of a part with these rows; `footer` is the result of `Footer.to_text`."""
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, table.schema) as writer:
        writer.write_table(table)
        # not in the schema, so that all parts have exactly the same schema
        writer.add_key_value_metadata({FOOTER_KEY: footer})
    return bytes(buffer.getvalue())


def footer_text(tail: bytes) -> tuple[int, str]:
    """Return the number of rows and the footer, as a text, from the end of the bytes of a part."""
    metadata = pq.read_metadata(pa.BufferReader(tail))
    text = (metadata.metadata or {})[FOOTER_KEY.encode()]
    return metadata.num_rows, text.decode()


def read_footer(store: Store, name: str) -> Footer:
    """Return the footer of a part; makes one or two requests.

    Raises:
        FileNotFoundError: there is no such file.
        CommitError: it is not a part of this library.
    """
    try:
        tail = store.tail(name, _TAIL_BYTES)
    except IsADirectoryError:
        raise CommitError(
            f"{store.uri}/{name} is a folder, not a part; move it away and run the job again"
        ) from None
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if tail.endswith(_MAGIC) and len(tail) < needed <= _MAX_FOOTER_BYTES:
        tail = store.tail(name, needed)
    return footer_in(tail, f"{store.uri}/{name}")


def corrupt_part(where: str, why: str) -> CommitError:
    """Return the error about a damaged part; `where` is its path."""
    success = f"{where.rpartition(f'/{DATA}/')[0]}/{SUCCESS}"
    return CommitError(
        f"{where} is corrupt: {why}; move it away, with {success} if it exists, and run the job "
        "again, which generates its rows again"
    )


def read_rows(data: bytes, where: str, schema: pa.Schema | None = None) -> pa.Table:
    """Return the rows in the bytes of a part.

    Args:
        where: path of the part, for errors.
        schema: types that it must have, since values of other types must not be read; None: any.

    Raises:
        CommitError: it has other types, or is damaged.
    """
    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        own = file.schema_arrow
        if schema is not None and not own.equals(schema, check_metadata=True):
            raise CommitError(
                f"{where} has other columns than the first part of the output; run `raybatch "
                "verify --deep` to find all such parts"
            )
        # without the footer
        return file.read(use_threads=False).replace_schema_metadata(own.metadata)
    except (OSError, ValueError) as error:
        raise corrupt_part(where, one_line(error_text(error))) from error


def footer_in(tail: bytes, where: str) -> Footer:
    """Return the footer at the end of the bytes of a part; CommitError names `where`."""
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if not tail.endswith(_MAGIC) or len(tail) < needed:
        raise corrupt_part(where, "not a complete Parquet file")
    try:
        num_rows, text = footer_text(tail)
        footer = Footer.from_json(json.loads(text))
        if footer.unit.num_rows != num_rows:
            raise ValueError(f"its footer says {footer.unit.num_rows} rows, but it has {num_rows}")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CommitError(
            f"{where} is not a part of this output: {error_text(error)}; move it away"
        ) from error
    return footer


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
