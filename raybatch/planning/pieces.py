"""Tasks of a large plan over pieces of the source; plain functions, run by `large`.

describe  prompts to block keys
split     the rows of a piece by part, see `raybatch.prefix.partition`
shard     what the plan says of the rows of a piece, in input order
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from ray import cloudpickle

from raybatch.durable.units import Uint64s, row_sums
from raybatch.inputs.source import Source
from raybatch.planning.planned import PieceSummary
from raybatch.planning.shards import contents_digest, digest_of, make_shard
from raybatch.planning.sidecar import Sidecar
from raybatch.planning.small import RowDescriber
from raybatch.prefix.block_keys import BlockKeys, Ints
from raybatch.prefix.hits import CacheLoad, CacheSize, simulate_hits
from raybatch.prefix.partition import Partitioner
from raybatch.rows.batches import as_movable
from raybatch.rows.plan_columns import ROW


def describe(
    options: bytes,
    source: Source,
    slices: range,
    first_row: int,
    sample_every: int,
    row_id_column: str | None,
) -> tuple[PieceSummary, pa.Table]:
    """Describe the rows of some slices: what the driver keeps, and block keys with row numbers.

    Args:
        options: pickled options of stage and plan.
        first_row: number of its first row in the source.
        sample_every: one of so many rows is in the sample.
        row_id_column: column to make for ids; None where the user has one.
    """
    describer = _describer(options)
    parts = [describer(table)[1] for table in source.read(slices, row_id_column=row_id_column)]
    piece = Sidecar.concat(parts)
    table = piece.keys.to_table()
    table = table.append_column("row", pa.array(piece.asked + first_row))
    table = table.append_column("expected", pa.array(piece.expected_tokens))
    table = table.append_column("max_tokens", pa.array(piece.max_tokens))
    adapters = np.zeros(0, np.uint64)
    if describer.has_adapters:
        table = table.append_column("adapter", pa.array(piece.adapters))
        adapters = np.unique(piece.adapters)
    chosen = np.arange(piece.keys.num_rows)[::sample_every]
    summary = PieceSummary(
        num_rows=piece.num_rows,
        num_keys=len(piece.keys.keys),
        unasked=piece.unasked,
        sample=keys_of([table.take(chosen)]),
        contents=contents_digest(piece.keys),
        adapters=adapters,
    )
    return summary, table


@lru_cache(maxsize=2)
def _describer(options: bytes) -> RowDescriber:
    """Load the tokenizer once in a worker process."""
    return RowDescriber(*cloudpickle.loads(options))


def split(piece: pa.Table, rule: Partitioner) -> Any:  # noqa: ANN401 - one object is no list
    """Return the rows of each part, in input order."""
    part = rule.assign(BlockKeys.from_table(piece), piece.column("row").to_numpy())
    tables = [piece.take(np.flatnonzero(part == number)) for number in range(rule.num_parts)]
    return tables[0] if rule.num_parts == 1 else tables


def chosen_rows(
    source: Source, slices: range, first_row: int, rows: Ints, row_id_column: str | None
) -> pa.Table:
    """Return those rows of some slices whose numbers in the source are among `rows`."""
    tables = []
    for table in source.read(slices, row_id_column=row_id_column):
        begin, end = np.searchsorted(rows, [first_row, first_row + table.num_rows])
        chosen = rows[begin:end]
        table_rows = as_movable(table).take(chosen - first_row)
        tables.append(table_rows.append_column(ROW, pa.array(chosen)))
        first_row += table.num_rows
    return pa.concat_tables(tables)


def input_hits(
    size: CacheSize, max_rows: int, is_whole: bool, *stretch: pa.Table
) -> tuple[int, int]:
    """Return cached and all prompt tokens of a stretch of the input, from an empty cache.

    Args:
        max_rows: rows to simulate, the first ones of the stretch.
        is_whole: the stretch is the whole input; else its first half fills the cache and is not
            counted.
    """
    piece = pa.concat_tables(stretch).slice(0, max_rows)
    keys = keys_of([piece])
    load = CacheLoad(keys=keys, output_tokens=piece.column("expected").to_numpy())
    order = load.rows_that_fit(size)
    counted = slice(0 if is_whole else len(order) // 2, None)
    cached = simulate_hits(load, order, size)[counted].sum()
    return int(cached), int(keys.num_tokens[order[counted]].sum())


def shard(
    first_row: int,
    num_rows: int,
    num_unasked_before: int,
    first_unit: int,
    unit_rows: int,
    probe: Ints,
    *parts: pa.Table,
) -> tuple[str, pa.Table]:
    """Return the shard of one piece and its digest.

    Rows of a probe come first in the plan, rows that no engine sees last.

    Args:
        num_unasked_before: rows of the pieces before that no engine sees.
        first_unit: number of the first unit of such rows.
        unit_rows: size of their units, and of those of a probe.
        probe: int64 [n], numbers of the rows of a probe in the whole source, rising.
        parts: what the plan says of the other rows, by part.
    """
    rows = pa.concat_tables(parts).combine_chunks()
    place = rows.column("row").to_numpy() - first_row
    begin, end = np.searchsorted(probe, [first_row, first_row + num_rows])
    probed = probe[begin:end] - first_row
    is_unasked = np.ones(num_rows, np.bool_)
    is_unasked[place] = is_unasked[probed] = False
    count = num_unasked_before + np.cumsum(is_unasked) - 1
    columns = {"unit": first_unit + count // unit_rows, "pos": count % unit_rows}
    for name, values in columns.items():
        values[place] = rows.column(name).to_numpy()
    columns["unit"][probed], columns["pos"][probed] = divmod(np.arange(begin, end), unit_rows)
    group_id, prefix_len = np.full(num_rows, -1), np.zeros(num_rows, np.int32)
    group_id[place] = rows.column("group_id").fill_null(-1).to_numpy()
    prefix_len[place] = rows.column("prefix_len").to_numpy()
    expected = np.full(num_rows, np.nan)
    expected[place] = rows.column("expected").to_numpy()
    unit, pos = (columns[name].astype(np.int32) for name in ("unit", "pos"))
    table = make_shard(unit, pos, group_id, prefix_len, expected)
    return digest_of(table), table


def sums_of(shard: pa.Table, first_row: int, num_units: int) -> Uint64s:
    """Return the sums of the row numbers of one piece, by unit."""
    rows = np.arange(first_row, first_row + shard.num_rows)
    return row_sums(shard.column("unit").to_numpy(), rows, num_units)


def added(*sums: Uint64s) -> Uint64s:
    """Return sums of several pieces together, modulo 2^64."""
    total = np.zeros_like(sums[0])
    for one in sums:
        total += one
    return total


def keys_of(tables: Sequence[pa.Table]) -> BlockKeys:
    """Return the block keys of tables, one after another."""
    return BlockKeys.concat([BlockKeys.from_table(table) for table in tables])
