"""Shards: tables of the plan with one row per row of the source, in input order."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.durable.units import UnitPlan, row_sum
from raybatch.prefix.block_keys import BlockKeys, ranges
from raybatch.prefix.plan import RowSchedule
from raybatch.records.arrays import Floats, Ints

# maximum size of a unit in memory, prompts included
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


def shard_of(plan: RowSchedule, expected: Floats) -> pa.Table:
    """Return a plan as a shard: a table of unit, position in it and group, by row of the input.

    `expected` are forecast output tokens, float64 [R], NaN if unknown.
    """
    unit, pos = np.empty((2, plan.num_rows), np.int64)
    unit[plan.order], pos[plan.order] = places_in_units(np.diff(plan.unit_starts))
    return make_shard(unit, pos, plan.group_id, plan.prefix_len, expected)


def places_in_units(unit_rows: Ints) -> tuple[Ints, Ints]:
    """Return (unit, position in the unit) of rows in plan order, int64 [R] each, by unit sizes."""
    unit = np.repeat(np.arange(len(unit_rows)), unit_rows)
    return unit, ranges(np.zeros_like(unit_rows), unit_rows)


def make_shard(
    unit: Ints, pos: Ints, group_id: Ints, prefix_len: npt.NDArray[np.int32], expected: Floats
) -> pa.Table:
    """Build a shard from its columns; a negative group and an expected NaN become null."""
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
    """Return one hash of the digests of all requests of a piece, in order."""
    return hashlib.blake2b(keys.digest.astype("<u8").tobytes(), digest_size=16).hexdigest()


def rows_in_stretches(unit_rows: Ints, row: Ints) -> pa.Table:
    """Return the shard of the rows with numbers `row` if units are stretches of the input.

    `unit_rows` are the sizes of all units, in order.
    """
    ends = np.cumsum(unit_rows)
    unit = np.searchsorted(ends, row, side="right")
    pos = row - (ends - unit_rows)[unit]
    nothing, unknown = np.zeros(len(row), np.int32), np.full(len(row), np.nan)
    return make_shard(unit, pos, np.full(len(row), -1), nothing, unknown)


def stretches(plan: str, unit_rows: Ints) -> UnitPlan:
    """Return the units of a plan, given by hash, if they are consecutive stretches of the input."""
    sums = [
        row_sum(np.arange(end - size, end))
        for size, end in zip(unit_rows, np.cumsum(unit_rows), strict=True)
    ]
    return UnitPlan(hash=plan, unit_rows=unit_rows, row_sums=np.array(sums, np.uint64))


def even_units(piece_rows: Sequence[int], plan: PlanConfig) -> Ints:
    """Return the sizes of units in input order, int64 [units]; no unit spans two pieces."""
    return np.concatenate([even_stretch(num_rows, plan) for num_rows in piece_rows])


def even_stretch(num_rows: int, plan: PlanConfig) -> Ints:
    full, rest = divmod(num_rows, plan.unit_rows)
    return np.array([plan.unit_rows] * full + [rest] * (rest > 0), np.int64)
