"""The bytes of a part: Parquet, with the metadata of the commit protocol in its footer."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.layout import DATA, SUCCESS
from raybatch.durable.storage import Store
from raybatch.durable.units import PROTOCOL, CommitUnit, UnitCounts, add_row_sums, sum_counts
from raybatch.errors import CommitError, error_text, one_line

FOOTER_KEY = "raybatch"
_MAGIC = b"PAR1"
# most footers are smaller, so that one request reads them
_TAIL_BYTES = 16 << 10
_MAX_FOOTER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderRows:
    """The rows of a unit that will be in one folder, and their counts."""

    unit: CommitUnit
    counts: UnitCounts

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON; `row_sum` is text, because many readers are limited to 2**53."""
        return {
            "unit": self.unit.number,
            "rows": self.unit.num_rows,
            "row_sum": f"{self.unit.row_sum:016x}",
            "counts": asdict(self.counts),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build from the result of `to_json`; ValueError, KeyError or TypeError: it is invalid."""
        number, rows, row_sum = values["unit"], values["rows"], values["row_sum"]
        return cls(
            unit=CommitUnit(number=int(number), num_rows=int(rows), row_sum=int(row_sum, 16)),
            counts=UnitCounts.from_json(values["counts"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer(FolderRows):
    """The metadata in the footer of a part: its unit, plan and counts.

    A part of a partitioned output names its folder, and one that will be joined into such an output
    its rows by folder.
    """

    plan: str
    # name of the writer, for people only
    attempt: str
    folder: str = ""
    folders: Mapping[str, FolderRows] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return a dict for JSON; `row_sum` is text, because many readers are limited to 2**53."""
        folders = {folder: FolderRows.to_json(rows) for folder, rows in self.folders.items()}
        return {
            **FolderRows.to_json(self),
            **({"folder": self.folder} if self.folder else {}),
            **({"folders": folders} if folders else {}),
            "protocol": PROTOCOL,
            "plan": self.plan,
            "attempt": self.attempt,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Build a footer from the result of `to_json`.

        Raises ValueError, KeyError or TypeError if it is invalid.
        """
        if values["protocol"] != PROTOCOL:
            raise ValueError(
                f"the file has format version {values['protocol']!r}, expected {PROTOCOL}"
            )
        rows = FolderRows.from_json(values)
        return cls(
            unit=rows.unit,
            counts=rows.counts,
            plan=str(values["plan"]),
            attempt=str(values["attempt"]),
            folder=str(values.get("folder", "")),
            folders={
                str(folder): FolderRows.from_json(of_folder)
                for folder, of_folder in values.get("folders", {}).items()
            },
        )

    def holding(self, rows: Iterable[FolderRows]) -> Self:
        """Return this footer with some rows and their counts, which are of distinct rows."""
        parts = list(rows)
        num_rows = sum(one.unit.num_rows for one in parts)
        sums = add_row_sums(one.unit.row_sum for one in parts)
        counts = sum_counts(one.counts for one in parts)
        unit = replace(self.unit, num_rows=num_rows, row_sum=sums)
        return replace(self, unit=unit, counts=counts)

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
    """Return the bytes of a part with these rows; `footer` is the result of `Footer.to_text`.

    CommitError: the footer is too large to be read again, as it has very many folders.
    """
    if len(footer) > _MAX_FOOTER_BYTES // 2:
        raise CommitError(
            f"the footer of a unit, which names the folder of each row, takes {len(footer)} bytes; "
            "set a smaller plan.unit_rows, or partition by a column with fewer values"
        )
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
