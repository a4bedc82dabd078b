"""A small plan, its tables, and stores that count or fail."""

import numpy as np
import pyarrow as pa

from raybatch.durable.units import UnitCounts, UnitPlan, row_sums

SCHEMA = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False, metadata={"note": "user's"}),
        pa.field("text", pa.large_string()),
    ],
    metadata={"owner": "user"},
)


def make_plan(units, *, hash="plan-a", is_partitioned=False):
    """Return the plan of units given as lists of row numbers."""
    unit = np.repeat(np.arange(len(units)), [len(rows) for rows in units])
    rows = np.array([row for rows in units for row in rows], np.int64)
    return UnitPlan(
        hash=hash,
        unit_rows=np.array([len(rows) for rows in units], np.int64),
        row_sums=row_sums(unit, rows, len(units)),
        is_partitioned=is_partitioned,
    )


def make_table(rows, *, answer="x"):
    return pa.table(
        {"id": [f"r{row}" for row in rows], "text": [answer] * len(rows)}, schema=SCHEMA
    )


def unit_of(plan, units, number, *, answer="x"):
    """Return the arguments of a commit of one unit of `units`."""
    rows = units[number]
    return {
        "unit": plan.unit(number),
        "table": make_table(rows, answer=answer),
        "pos": np.arange(len(rows)),
        "row": np.array(rows, np.int64),
        "count": lambda table: UnitCounts(
            num_rows=table.num_rows, statuses={"ok": table.num_rows}, generated_tokens=2
        ),
        "plan_hash": plan.hash,
        "attempt": answer,
    }
