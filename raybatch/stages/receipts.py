"""What travels back through Ray for a unit: that it is written, by whom, and what it took."""

import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from raybatch.durable.units import Receipt

RECEIPT_SCHEMA = pa.schema(
    [
        ("unit", pa.int64()),
        ("num_rows", pa.int64()),
        ("won", pa.bool_()),
        ("num_errors", pa.int64()),
        ("prompt_tokens", pa.int64()),
        ("cached_tokens", pa.int64()),
        ("generated_tokens", pa.int64()),
        ("started", pa.float64()),
        ("ended", pa.float64()),
        ("host", pa.string()),
        ("pid", pa.int64()),
    ]
)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitReceipt:
    """A unit that is written, as the driver hears of it.

    Args:
        unit: number of the unit.
        num_rows: of the unit.
        won: this attempt wrote it; False where another one had.
        num_errors: rows that carry an error.
        prompt_tokens: of the rows that were asked.
        cached_tokens: prompt tokens whose KV came from another row.
        generated_tokens: of all rows.
        started: when its rows were handed to the engines, in seconds since 1970.
        ended: when it was written.
        host: of the feeder.
        pid: of the feeder.
    """

    unit: int
    num_rows: int
    won: bool
    num_errors: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    started: float
    ended: float
    host: str
    pid: int

    @classmethod
    def of(cls, receipt: Receipt, *, started: float, ended: float) -> "UnitReceipt":
        """Return the receipt of a unit that this process has written, or found written."""
        counts = receipt.counts
        return cls(
            unit=receipt.unit,
            num_rows=receipt.num_rows,
            won=receipt.won,
            num_errors=sum(error.num_rows for error in counts.errors.values()),
            prompt_tokens=counts.prompt_tokens,
            cached_tokens=counts.cached_tokens,
            generated_tokens=counts.generated_tokens,
            started=started,
            ended=ended,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def to_row(self) -> dict[str, Any]:
        """Return a row of `RECEIPT_SCHEMA`."""
        return asdict(self)
