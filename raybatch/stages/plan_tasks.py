"""The plan of a large source, made by Ray tasks; the driver holds references and counts.

    describe  for each piece of the source: prompts to block keys
    split     its rows by part, see `raybatch.prefix.partition`
    arrange   for each part: tree, groups, entries in their order
    rank      where the part's entries stand among all: unit and position of each row
    shard     for each piece: what the plan says of its rows, in input order

These are plain functions; `raybatch.stages.plan_large` runs them as tasks. The number of parts
follows from the number of rows and every choice from the rows, so the plan is the same on every
cluster.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from ray import cloudpickle

from raybatch.config import PlanConfig
from raybatch.policy.work import WorkTotals
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.forecast import OrderForecast, forecast_orders, rows_that_fit
from raybatch.prefix.hits import CacheLoad, CacheSize, simulate_hits
from raybatch.prefix.load import Floats, Ints
from raybatch.prefix.order import decode_ratio, order_groups
from raybatch.prefix.outline import TreeBox, outline_tree
from raybatch.prefix.partition import Partitioner
from raybatch.prefix.plan import (
    Arrangement,
    PlanRows,
    arrange_rows,
    is_worth_ordering,
    plan_rows,
    rank_entries,
)
from raybatch.prefix.profile import InputProfile, profile_rows
from raybatch.prefix.split import cut_units
from raybatch.stages.movable import as_movable
from raybatch.stages.plan import RowDescriber
from raybatch.stages.plan_store import SHARD_SCHEMA, digest_of
from raybatch.stages.probe import estimate, probe_rows
from raybatch.stages.sidecar import Sidecar
from raybatch.stages.source import Source
from raybatch.stages.work import planned_work

__all__ = [
    "ArrangeJob",
    "ArrangedPart",
    "PartSummary",
    "PieceSummary",
    "ProbedRows",
    "arrange",
    "chosen_rows",
    "describe",
    "forecast",
    "input_hits",
    "input_shard",
    "rank",
    "shard",
    "split",
    "unit_sizes",
]

# what a summary of a part says of the values by which its entries are ordered
_NUM_VALUES = 256
# boxes that are drawn of the prefix tree, of all parts together and of one at least
_MAX_BOXES, _MIN_BOXES = 600, 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PieceSummary:
    """What the driver keeps of one piece of the source.

    Args:
        num_rows: of the piece.
        unasked: rows that no engine sees, by class of error, or "filtered".
        sample: keys of some rows.
    """

    num_rows: int
    unasked: Counter[str]
    sample: BlockKeys


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PartSummary:
    """What the driver keeps of one part.

    Args:
        num_rows: that are still to be generated.
        profile: of all rows of the part.
        work: that they make.
        boxes: their prefix tree, to be drawn.
        values: float64 [n], some of the values by which entries are ordered.
        weights: int64 [n], rows that each of them stands for.
        probe: int64 [m], numbers of the rows to generate first, where lengths are to be probed.
    """

    num_rows: int
    profile: InputProfile
    work: WorkTotals
    boxes: Sequence[TreeBox]
    values: Floats
    weights: Ints
    probe: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ArrangedPart:
    """A part in its own order; stays in the object store.

    Args:
        row: int64 [R], number in the source of each row, by rank inside the part.
        group_id: int64 [R], numbered inside the part; -1 for a row that is alone.
        prefix_len: int32 [R].
        entry_rows: int64 [E], rows of each entry.
        values: float64 [E], rising; what entries of different parts are ordered by.
    """

    row: Ints
    group_id: Ints
    prefix_len: npt.NDArray[np.int32]
    entry_rows: Ints
    values: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrangeJob:
    """What `arrange` needs beside the rows.

    Args:
        plan: options.
        dedup: identical rows are generated once.
        num_rows: of the whole source.
        num_parts: of the plan.
    """

    plan: PlanConfig
    dedup: bool
    num_rows: int
    num_parts: int


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ProbedRows:
    """Rows that were generated before the plan.

    Args:
        row: int64 [n], their numbers in the source, rising.
        lengths: float64 [n], tokens that each generated; NaN after an error.
    """

    row: Ints
    lengths: Floats


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
        source: to read from.
        slices: of the piece.
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
    chosen = np.arange(piece.keys.num_rows)[::sample_every]
    summary = PieceSummary(
        num_rows=piece.num_rows,
        unasked=piece.unasked,
        sample=_keys_of([table.take(chosen)]),
    )
    return summary, table


@lru_cache(maxsize=2)
def _describer(options: bytes) -> RowDescriber:
    """Load the tokenizer once in a worker process."""
    return RowDescriber(*cloudpickle.loads(options))


def split(piece: pa.Table, rule: Partitioner) -> Any:  # noqa: ANN401 - one object is no list
    """Return the rows of each part, in input order."""
    part = rule.assign(BlockKeys.from_table(piece))
    tables = [piece.take(np.flatnonzero(part == number)) for number in range(rule.num_parts)]
    return tables[0] if rule.num_parts == 1 else tables


def arrange(
    job: ArrangeJob, probed: ProbedRows | None, *pieces: pa.Table
) -> tuple[PartSummary, ArrangedPart]:
    """Plan one part by itself.

    Args:
        job: options, and rows of the whole source.
        probed: rows that were generated already, which are left out; None before a probe.
        pieces: rows of the part, piece after piece in input order.
    """
    plan, keys = job.plan, _keys_of(pieces)
    row, max_tokens = _column(pieces, "row"), _column(pieces, "max_tokens")
    rows = PlanRows(keys=keys, expected_tokens=_column(pieces, "expected"))
    found = arrange_rows(rows, plan, dedup=job.dedup)
    group_id = found.groups.group_id
    probe = np.zeros(0, np.int64)
    if probed is not None:
        at = np.flatnonzero(np.isin(row, probed.row))
        lengths = probed.lengths[np.searchsorted(probed.row, row[at])]
        rows = replace(rows, expected_tokens=estimate(at, lengths, group_id, max_tokens))
        found = arrange_rows(rows, plan, dedup=job.dedup)
    elif plan.lengths == "probe":
        probe = row[probe_rows(group_id, max_tokens, plan, num_rows=job.num_rows)]
    part = _ordered(found, row, plan, np.zeros(0, np.int64) if probed is None else probed.row)
    is_grouped = is_worth_ordering(found.saved_fraction, plan)
    num_boxes = max(_MIN_BOXES, _MAX_BOXES // job.num_parts)
    summary = PartSummary(
        num_rows=len(part.row),
        profile=profile_rows(
            keys,
            rows.expected_tokens,
            found,
            num_rows=len(row),
            unasked={},
            limit_tokens=int(max_tokens.sum()),
            # as many as there are where stretches of parts cut none
            num_units=sum(len(starts) - 1 for starts in _units(part, np.zeros(0), plan)),
        ),
        work=planned_work(keys, rows.expected_tokens, found, is_grouped=is_grouped),
        boxes=outline_tree(found.tree, keys, max_boxes=num_boxes),
        probe=probe,
        **_sketch(part.values, np.cumsum(part.entry_rows)),
    )
    return summary, part


def forecast(
    job: ArrangeJob, size: CacheSize, max_rows: int, *pieces: pa.Table
) -> tuple[OrderForecast, ...]:
    """Return what orders of one part compute; that of the input is told by `input_hits`.

    Args:
        job: options, and rows of the whole source.
        size: of the cache of one engine.
        max_rows: rows to simulate for each order.
        pieces: rows of the part.
    """
    rows = PlanRows(keys=_keys_of(pieces), expected_tokens=_column(pieces, "expected"))
    plan, found = plan_rows(rows, job.plan, dedup=job.dedup)
    return forecast_orders(
        rows.keys,
        plan,
        found,
        output_tokens=rows.expected_tokens,
        size=size,
        max_rows=max_rows,
    )


def input_hits(piece: pa.Table, size: CacheSize, max_rows: int) -> tuple[int, int]:
    """Return cached and all prompt tokens of a stretch of the input, from an empty cache.

    The first half of the stretch fills the cache and is not counted.

    Args:
        piece: rows in input order, of which the first `max_rows` are taken.
        size: of the cache of one engine.
        max_rows: rows to simulate.
    """
    piece = piece.slice(0, max_rows)
    keys, expected = _keys_of([piece]), _column([piece], "expected")
    load = CacheLoad(
        keys=keys.keys,
        offsets=keys.offsets,
        num_tokens=keys.num_tokens,
        block_size=keys.block_size,
        output_tokens=np.ceil(expected).astype(np.int64),
    )
    order = rows_that_fit(keys, expected, size)
    counted = slice(len(order) // 2, None)
    cached = simulate_hits(load, order, size)[counted].sum()
    return int(cached), int(keys.num_tokens[order[counted]].sum())


def _ordered(found: Arrangement, row: Ints, plan: PlanConfig, left_out: Ints) -> ArrangedPart:
    """Return a part in its own order, without the rows whose numbers are `left_out`."""
    entries = order_groups(found.load, by=plan.order, seed=plan.seed)
    ranked, sizes = rank_entries(found, entries), np.diff(found.starts)[entries]
    if plan.order in ("ratio", "ascending"):
        values = decode_ratio(found.load)[entries] * (-1 if plan.order == "ratio" else 1)
    else:
        values = (np.cumsum(sizes) - sizes / 2) / max(1, len(row))
    is_kept = ~np.isin(row[ranked], left_out)
    entry_of_row = np.repeat(np.arange(len(sizes)), sizes)
    sizes = np.bincount(entry_of_row[is_kept], minlength=len(sizes))
    ranked = ranked[is_kept]
    return ArrangedPart(
        row=row[ranked],
        group_id=found.groups.group_id[ranked],
        prefix_len=found.groups.prefix_tokens[ranked],
        entry_rows=sizes[sizes > 0],
        values=values[sizes > 0],
    )


def unit_sizes(part: ArrangedPart, cuts: Floats, plan: PlanConfig) -> list[Ints]:
    """Return the rows of each unit, for each stretch of a part."""
    return [np.diff(starts) for starts in _units(part, cuts, plan)]


def rank(
    part: ArrangedPart,
    cuts: Floats,
    plan: PlanConfig,
    first_units: Sequence[int],
    first_group: int,
    piece_rows: Ints,
) -> Any:  # noqa: ANN401 - one object is no list
    """Return what the plan says of the part's rows, a table for each piece of the source.

    Args:
        part: in its own order.
        cuts: values at which stretches begin.
        plan: options.
        first_units: number of the first unit of each stretch.
        first_group: number of the part's first group.
        piece_rows: int64 [T + 1], number of the first row of each piece, and of all rows.
    """
    unit, pos = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for starts, first in zip(_units(part, cuts, plan), first_units, strict=True):
        sizes = np.diff(starts)
        unit.append(np.repeat(first + np.arange(len(sizes)), sizes))
        pos.append(np.arange(int(starts[-1])) - np.repeat(starts[:-1], sizes))
    group_id = np.where(part.group_id >= 0, part.group_id + first_group, -1)
    by_row = np.argsort(part.row)
    row = part.row[by_row]
    columns = {
        "row": row,
        "unit": np.concatenate(unit)[by_row].astype(np.int32),
        "pos": np.concatenate(pos)[by_row].astype(np.int32),
        "group_id": pa.array(group_id[by_row], mask=group_id[by_row] < 0),
        "prefix_len": part.prefix_len[by_row],
    }
    table = pa.table(columns)
    bounds = np.searchsorted(row, piece_rows)
    tables = [
        table.slice(start, stop - start).combine_chunks()
        for start, stop in pairwise(bounds.tolist())
    ]
    return tables[0] if len(tables) == 1 else tables


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
        first_row: number of the piece's first row.
        num_rows: of the piece.
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
    table = pa.table(
        [
            columns["unit"].astype(np.int32),
            columns["pos"].astype(np.int32),
            pa.array(group_id, mask=group_id < 0),
            prefix_len,
        ],
        schema=SHARD_SCHEMA,
    )
    return digest_of(table), table


def input_shard(first_row: int, num_rows: int, unit_rows: int) -> tuple[str, pa.Table]:
    """Return the shard of one piece where rows keep the order of the input, and its digest."""
    row = np.arange(first_row, first_row + num_rows)
    columns = [
        (row // unit_rows).astype(np.int32),
        (row % unit_rows).astype(np.int32),
        pa.nulls(num_rows, pa.int64()),
        np.zeros(num_rows, np.int32),
    ]
    table = pa.table(columns, schema=SHARD_SCHEMA)
    return digest_of(table), table


def chosen_rows(
    source: Source, slices: range, first_row: int, rows: Ints, row_id_column: str | None
) -> pa.Table:
    """Return those rows of some slices whose numbers in the source are among `rows`."""
    tables = []
    for table in source.read(slices, row_id_column=row_id_column):
        begin, end = np.searchsorted(rows, [first_row, first_row + table.num_rows])
        tables.append(as_movable(table).take(rows[begin:end] - first_row))
        first_row += table.num_rows
    return pa.concat_tables(tables)


def _column(pieces: Sequence[pa.Table], name: str) -> npt.NDArray[Any]:
    return np.concatenate([piece.column(name).to_numpy() for piece in pieces])


def _keys_of(tables: Sequence[pa.Table]) -> BlockKeys:
    return BlockKeys.concat([BlockKeys.from_table(table) for table in tables])


def _sketch(values: Floats, ends: Ints) -> dict[str, Any]:
    """Return evenly spaced values, by rows, and the rows that each stands for."""
    if not len(values):
        return {"values": np.zeros(0), "weights": np.zeros(0, np.int64)}
    goals = np.unique(np.linspace(1, ends[-1], min(_NUM_VALUES, int(ends[-1]))).astype(np.int64))
    return {
        "values": values[np.searchsorted(ends, goals)],
        "weights": np.diff(goals, prepend=0),
    }


def _units(part: ArrangedPart, cuts: Floats, plan: PlanConfig) -> list[Ints]:
    """Return the places at which units begin in each stretch, and its number of rows at the end."""
    bounds = [0, *np.searchsorted(part.values, cuts).tolist(), len(part.values)]
    return [
        cut_units(
            part.entry_rows[start:stop], target_rows=plan.unit_rows, max_rows=plan.max_unit_rows
        )
        for start, stop in pairwise(bounds)
    ]
