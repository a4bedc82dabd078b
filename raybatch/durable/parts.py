"""The bytes of a part: Parquet, with what the protocol must know of it in the footer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raybatch.durable.layout import SUCCESS
from raybatch.durable.storage import Store
from raybatch.durable.units import PROTOCOL, Unit, UnitCounts
from raybatch.errors import CommitError, error_text

FOOTER_KEY = "raybatch"
_MAGIC = b"PAR1"
# most footers are smaller, so that one request reads them
_TAIL_BYTES = 16 << 10
_MAX_FOOTER_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Footer:
    """What the footer of a part holds."""

    unit: Unit
    plan: str
    # who wrote it; for people alone
    attempt: str
    counts: UnitCounts

    def to_json(self) -> dict[str, Any]:
        """Return plain values; the sum as text, because JSON numbers end at 2**53 for many."""
        return {
            "protocol": PROTOCOL,
            "unit": self.unit.number,
            "rows": self.unit.num_rows,
            "row_sum": f"{self.unit.row_sum:016x}",
            "plan": self.plan,
            "attempt": self.attempt,
            "counts": self.counts.to_json(),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Footer":
        """Return the footer of plain values; raise ValueError, KeyError or TypeError."""
        if values["protocol"] != PROTOCOL:
            raise ValueError(f"it follows protocol {values['protocol']!r}, this is {PROTOCOL}")
        number, rows, row_sum = values["unit"], values["rows"], values["row_sum"]
        return cls(
            unit=Unit(number=int(number), num_rows=int(rows), row_sum=int(row_sum, 16)),
            plan=str(values["plan"]),
            attempt=str(values["attempt"]),
            counts=UnitCounts.from_json(values["counts"]),
        )

    def check(self, unit: Unit, plan_hash: str, where: str) -> None:
        """Raise CommitError unless this is the part of `unit` in the plan of that hash."""
        self.check_plan(unit, plan_hash, where)
        if self.unit != unit:
            raise CommitError(
                f"{where} holds other rows than the plan says ({self.unit.num_rows} of "
                f"{unit.num_rows}); move the file away"
            )

    def check_plan(self, unit: Unit, plan_hash: str, where: str) -> None:
        """Raise CommitError unless this names that unit and that plan."""
        if self.plan != plan_hash:
            raise CommitError(
                f"{where} belongs to plan {self.plan}, the output to plan {plan_hash}; move the "
                "file away, or choose another folder"
            )
        if self.unit.number != unit.number:
            raise CommitError(f"{where} is the part of unit {self.unit.number}; move the file away")


def empty_table(schema: pa.Schema) -> pa.Table:
    """Return a table without rows; `Schema.empty_table` fails for tensors of some layouts."""
    return pa.table([pa.nulls(0, kind) for kind in schema.types], schema)


def _encode(table: pa.Table, footer: str) -> bytes:
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, table.schema) as writer:
        writer.write_table(table)
        # not in the schema, so that every part has the one schema exactly
        writer.add_key_value_metadata({FOOTER_KEY: footer})
    return bytes(buffer.getvalue())


def _footer_text(tail: bytes) -> tuple[int, str]:
    metadata = pq.read_metadata(pa.BufferReader(tail))
    text = (metadata.metadata or {})[FOOTER_KEY.encode()]
    return metadata.num_rows, text.decode()


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFormat:
    """How rows become the bytes of a part, and back."""

    encode: Callable[[pa.Table, str], bytes]
    footer_text: Callable[[bytes], tuple[int, str]]

    def part(self, table: pa.Table, footer: Footer) -> bytes:
        return self.encode(table, json.dumps(footer.to_json(), sort_keys=True))


PARQUET = PartFormat(encode=_encode, footer_text=_footer_text)


def read_footer(store: Store, name: str, part_format: PartFormat = PARQUET) -> Footer:
    """Return the footer of a part, after one or two requests.

    Raises:
        FileNotFoundError: there is none of this name.
        CommitError: it is no part of this library.
    """
    try:
        tail = store.tail(name, _TAIL_BYTES)
    except IsADirectoryError:
        raise CommitError(
            f"{store.uri}/{name} is a folder and no part; move it away and run the job again"
        ) from None
    needed = int.from_bytes(tail[-8:-4], "little") + 8
    if tail.endswith(_MAGIC) and len(tail) < needed <= _MAX_FOOTER_BYTES:
        tail = store.tail(name, needed)
    if not tail.endswith(_MAGIC) or len(tail) < needed:
        raise CommitError(
            f"{store.uri}/{name} is damaged: it is no whole Parquet file; move it away, with "
            f"{SUCCESS} if it is there, and run the job again, which makes its rows anew"
        )
    try:
        num_rows, text = part_format.footer_text(tail)
        footer = Footer.from_json(json.loads(text))
        if footer.unit.num_rows != num_rows:
            raise ValueError(f"it says {footer.unit.num_rows} rows and holds {num_rows}")
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CommitError(
            f"{store.uri}/{name} is no part of this output: {error_text(error)}; move the file away"
        ) from error
    return footer
