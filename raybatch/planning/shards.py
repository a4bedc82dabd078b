"""Shards: tables with a row of the plan for each row of a source, in input order."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.durable.units import UnitPlan, row_sum
from raybatch.prefix.block_keys import BlockKeys, ranges
from raybatch.prefix.plan import RowPlan
from raybatch.records.arrays import Floats, Ints

# what a unit may hold in memory, prompts included
MAX_UNIT_BYTES = 64 << 20

SHARD_SCHEMA = pa.schema(
    [
        pa.field("unit", pa.int32(), nullable=False),
        pa.field("pos", pa.int32(), nullable=False),
        pa.field("group_id", pa.int64()),
        pa.field("prefix_len", pa.int32(), nullable=False),
        pa.field("expected_len", pa.int32()),
    ]
)


def shard_of(plan: RowPlan, expected: Floats) -> pa.Table:
    """Return the shard of a plan of all rows of a source: one row each, in input order.

    `expected` is float64 [R], NaN where nothing is known.
    """
    unit, pos = np.empty((2, plan.num_rows), np.int64)
    unit[plan.order], pos[plan.order] = places_in_units(np.diff(plan.unit_starts))
    return make_shard(unit, pos, plan.group_id, plan.prefix_len, expected)


def places_in_units(unit_rows: Ints) -> tuple[Ints, Ints]:
    """Return unit and position of rows by rank, where units have so many rows each."""
    unit = np.repeat(np.arange(len(unit_rows)), unit_rows)
    return unit, ranges(np.zeros_like(unit_rows), unit_rows)


def make_shard(
    unit: Ints, pos: Ints, group_id: Ints, prefix_len: npt.NDArray[np.int32], expected: Floats
) -> pa.Table:
    """Return a shard of columns; a negative group and an expected length of NaN become null."""
    is_unknown = np.isnan(expected)
    columns = [
        unit.astype(np.int32),
        pos.astype(np.int32),
        pa.array(group_id, mask=group_id < 0),
        prefix_len,
        pa.array(np.ceil(np.nan_to_num(expected)).astype(np.int32), mask=is_unknown),
    ]
    return pa.table(columns, schema=SHARD_SCHEMA)


def digest_of(shard: pa.Table) -> str:
    """Return a hash of the values of a shard."""
    digest = hashlib.blake2b(digest_size=16)
    for column in shard.columns:
        values = column.fill_null(-1).to_numpy()
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def contents_digest(keys: BlockKeys) -> str:
    """Return a hash of the requests of a piece: its rows' digests, in order."""
    return hashlib.blake2b(keys.digest.astype("<u8").tobytes(), digest_size=16).hexdigest()


def rows_in_stretches(unit_rows: Ints, row: Ints) -> pa.Table:
    """Return the shard of some rows, by number, where units of such sizes are stretches."""
    ends = np.cumsum(unit_rows)
    unit = np.searchsorted(ends, row, side="right")
    pos = row - (ends - unit_rows)[unit]
    nothing, unknown = np.zeros(len(row), np.int32), np.full(len(row), np.nan)
    return make_shard(unit, pos, np.full(len(row), -1), nothing, unknown)


def stretches(plan: str, unit_rows: Ints) -> UnitPlan:
    """Return the units of a plan that are stretches of the input, one after the other."""
    sums = [
        row_sum(np.arange(end - size, end))
        for size, end in zip(unit_rows, np.cumsum(unit_rows), strict=True)
    ]
    return UnitPlan(hash=plan, unit_rows=unit_rows, row_sums=np.array(sums, np.uint64))


def even_units(piece_rows: Sequence[int], plan: PlanConfig) -> Ints:
    """Return the rows of units in the order of the input; each lies in one piece."""
    return np.concatenate([even_stretch(num_rows, plan) for num_rows in piece_rows])


def even_stretch(num_rows: int, plan: PlanConfig) -> Ints:
    full, rest = divmod(num_rows, plan.unit_rows)
    return np.array([plan.unit_rows] * full + [rest] * (rest > 0), np.int64)
