"""Ray tasks of a large plan, run by `large`; plain functions.

describe, split, shard   for a piece of the source: block keys and prompts of its rows, the part of
                         each, and its plan in input order
read_rows, describe_rows for many rows that one file has: reads them for tasks that describe them
arrange, rank            for a part: tree, groups, ordered scheduling groups; unit and position of
                         each row in the whole plan
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from ray import cloudpickle

from raybatch.config import PlanConfig
from raybatch.durable.units import row_sums
from raybatch.inputs.file_slices import ROWS_PER_TABLE
from raybatch.inputs.source import Source
from raybatch.planning.dataset import taken
from raybatch.planning.planned import (
    ArrangedPart,
    ArrangeJob,
    PartSummary,
    PieceSummary,
    PlanIndex,
    ProbedRows,
    planned_work,
)
from raybatch.planning.probe import estimate, probe_rows
from raybatch.planning.run import RowDescriber
from raybatch.planning.shards import contents_digest, digest_of, make_shard, places_in_units
from raybatch.prefix.block_keys import BlockKeys, ranges, start_offsets
from raybatch.prefix.forecast import (
    CacheLoad,
    CacheSize,
    OrderForecast,
    forecast_orders,
    simulate_hits,
)
from raybatch.prefix.plan import (
    Arrangement,
    Partitioner,
    RowFeatures,
    arrange_rows,
    by_adapter,
    cut_units,
    order_sched_groups,
    plan_rows,
    rank_rows,
)
from raybatch.prefix.profile import profile_rows
from raybatch.prefix.tree import summarize_tree
from raybatch.records.arrays import Floats, Ints, Uint64s
from raybatch.rows.batches import as_movable
from raybatch.rows.plan_columns import ROW, prompt_columns, with_columns

# sampled values in the summary of a part
_NUM_VALUES = 256
# boxes of the prefix tree's drawing: for all parts together, and at least per part
_MAX_BOXES, _MIN_BOXES = 600, 20


def describe(
    options: bytes,
    source: Source,
    slices: range,
    first_row: int,
    sample_every: int,
    row_id_column: str | None,
    keeps_prompts: bool,
) -> tuple[PieceSummary, pa.Table, pa.Table | None]:
    """Render and tokenize the rows of some slices.

    Returns a summary, a table of the rows' keys, and with `keeps_prompts` their prompts as plan
    columns; no prompts if one has images, which are large. `options` are the pickled options of
    stage and plan, `first_row` is the number in the source of the first row. Every
    `sample_every`-th row is in the sample of the summary.
    """
    tables = source.read(slices, row_id_column=row_id_column)
    return _described(options, tables, first_row, sample_every, keeps_prompts)


def read_rows(
    source: Source, slices: range, row_id_column: str | None, num_rows: int
) -> Iterator[pa.Table]:
    """Yield the rows of some slices, `num_rows` at a time."""
    held, num_held = list[pa.Table](), 0
    for table in source.read(slices, row_id_column=row_id_column):
        held.append(as_movable(table))
        num_held += table.num_rows
        while num_held >= num_rows:
            rows = pa.concat_tables(held)
            yield rows.slice(0, num_rows)
            held, num_held = [rows.slice(num_rows)], num_held - num_rows
    if num_held:
        yield pa.concat_tables(held)


def describe_rows(
    options: bytes, rows: pa.Table, first_row: int, sample_every: int, keeps_prompts: bool
) -> tuple[PieceSummary, pa.Table, pa.Table | None]:
    """Render and tokenize rows that `read_rows` has read; returns what `describe` does."""
    starts = range(0, rows.num_rows, ROWS_PER_TABLE)
    tables = (rows.slice(start, ROWS_PER_TABLE) for start in starts)
    return _described(options, tables, first_row, sample_every, keeps_prompts)


def _described(
    options: bytes,
    tables: Iterable[pa.Table],
    first_row: int,
    sample_every: int,
    keeps_prompts: bool,
) -> tuple[PieceSummary, pa.Table, pa.Table | None]:
    describer = describer_of(options)
    parts, prompts = [], []
    for table in tables:
        prepared, plan_index = describer(table)
        parts.append(plan_index)
        if keeps_prompts := keeps_prompts and not any(p.num_images for p in prepared.prompts):
            prompts.append(pa.table(prompt_columns(prepared.prompts)))
    summary, keys = summarize(PlanIndex.concat(parts), describer, first_row, sample_every)
    summary = replace(summary, has_prompts=keeps_prompts)
    return summary, keys, pa.concat_tables(prompts) if keeps_prompts else None


def summarize(
    piece: PlanIndex, describer: RowDescriber, first_row: int, sample_every: int
) -> tuple[PieceSummary, pa.Table]:
    """Return the summary and keys that `describe` returns, for rows that are already described."""
    columns = {
        "row": piece.requested + first_row,
        "expected": piece.expected_tokens,
        "max_tokens": piece.max_tokens,
    }
    if describer.has_adapters:
        columns["adapter"] = piece.adapters
    table = with_columns(
        piece.keys.to_table(), {name: pa.array(values) for name, values in columns.items()}
    )
    chosen = np.arange(piece.keys.num_rows)[::sample_every]
    summary = PieceSummary(
        num_rows=piece.num_rows,
        num_keys=len(piece.keys.keys),
        skipped=piece.skipped,
        sample=keys_of([table.take(chosen)]),
        contents=contents_digest(piece.keys),
        adapters=np.unique(columns.get("adapter", np.zeros(0, np.uint64))),
    )
    return summary, table


@lru_cache(maxsize=2)
def describer_of(options: bytes) -> RowDescriber:
    """Return the describer for pickled options; a worker process loads its tokenizer once."""
    return RowDescriber(*cloudpickle.loads(options))


def split(piece: pa.Table, rule: Partitioner) -> Any:  # noqa: ANN401 - one object is no list
    """Split a piece by `rule` into a table per part; for one part return the table itself."""
    part = rule.assign(BlockKeys.from_table(piece), piece.column("row").to_numpy())
    tables = [piece.take(np.flatnonzero(part == number)) for number in range(rule.num_parts)]
    return tables[0] if rule.num_parts == 1 else tables


def chosen_rows(
    source: Source, slices: range, first_row: int, rows: Ints, row_id_column: str | None
) -> pa.Table:
    """Return the rows of some slices whose numbers in the source are in `rows`, ascending.

    `first_row` is the number of the first row of the slices.
    """
    num_rows = sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    begin, end = np.searchsorted(rows, [first_row, first_row + num_rows])
    tables = source.read(slices, row_id_column=row_id_column)
    chosen = pa.concat_tables(taken(tables, rows[begin:end], first_row))
    return chosen.append_column(ROW, pa.array(rows[begin:end]))


def input_hits(size: CacheSize, max_rows: int, is_whole: bool, *rows: pa.Table) -> tuple[int, int]:
    """Simulate a stretch of the input with an empty cache; return (cached, all) prompt tokens.

    At most `max_rows` rows are simulated. Unless the stretch is the whole input, the first half of
    them only warms up the cache and is not counted.
    """
    piece = pa.concat_tables(rows).slice(0, max_rows)
    keys = keys_of([piece])
    load = CacheLoad(keys=keys, output_tokens=piece.column("expected").to_numpy())
    order = load.rows_that_fit(size)
    counted = slice(0 if is_whole else len(order) // 2, None)
    cached = simulate_hits(load, order, size)[counted].sum()
    return int(cached), int(keys.num_tokens[order[counted]].sum())


def arrange(
    job: ArrangeJob, probed: ProbedRows | None, *pieces: pa.Table
) -> tuple[PartSummary, ArrangedPart]:
    """Plan one part by itself; return its summary, and its rows in the order of the plan.

    `pieces` are the rows of the part, a table per piece of the source. Rows in `probed` are already
    generated: their lengths are used, and they are left out of the order.
    """
    plan, rows = job.plan, _plan_rows(pieces)
    keys, row, max_tokens = rows.keys, _column(pieces, "row"), _column(pieces, "max_tokens")
    arrangement = arrange_rows(rows, plan, dedup=job.dedup)
    group_id = arrangement.groups.group_id
    probe = np.zeros(0, np.int64)
    if probed is not None:
        at = np.flatnonzero(np.isin(row, probed.row))
        lengths = probed.lengths[np.searchsorted(probed.row, row[at])]
        rows = replace(rows, expected_tokens=estimate(at, lengths, group_id, max_tokens))
        arrangement = arrange_rows(rows, plan, dedup=job.dedup)
    elif plan.lengths == "probe":
        probe = row[probe_rows(group_id, max_tokens, plan, num_rows=job.num_rows)]
    known = rows
    if probed is None and plan.expected_tokens_column is None:
        known = replace(rows, expected_tokens=np.full(len(row), np.nan))
    left_out = np.zeros(0, np.int64) if probed is None else probed.row
    part = _ordered(arrangement, known, row, job, left_out)
    num_boxes = max(_MIN_BOXES, _MAX_BOXES // job.num_parts)
    # values sampled evenly by rows, and the rows that each represents
    num_ranked, ends = len(part.row), np.cumsum(part.sched_rows)
    goals = np.linspace(1, num_ranked, min(_NUM_VALUES, num_ranked)).astype(np.int64)
    goals = np.unique(goals)
    summary = PartSummary(
        num_rows=len(part.row),
        profile=profile_rows(
            keys,
            rows.expected_tokens,
            arrangement,
            num_rows=len(row),
            skipped={},
            limit_tokens=int(max_tokens.sum()),
            # all units, if cuts between stretches split none
            num_units=sum(map(len, unit_sizes(part, np.zeros(0), plan))),
        ),
        work=planned_work(keys, rows.expected_tokens, arrangement, is_grouped=True),
        work_alone=planned_work(keys, rows.expected_tokens, arrangement, is_grouped=False),
        boxes=summarize_tree(arrangement.tree, keys, max_boxes=num_boxes),
        probe=probe,
        values=part.values[np.searchsorted(ends, goals)],
        weights=np.diff(goals, prepend=0),
    )
    return summary, part


def _ordered(
    arrangement: Arrangement, rows: RowFeatures, row: Ints, job: ArrangeJob, left_out: Ints
) -> ArrangedPart:
    """Return a part in its own order, without rows whose numbers are in `left_out`."""
    group_order, values = order_sched_groups(
        arrangement, job.plan, job.capacity.share(job.num_parts)
    )
    ranked, sizes = rank_rows(arrangement, group_order), np.diff(arrangement.starts)[group_order]
    is_kept = ~np.isin(row[ranked], left_out)
    sched_of_row = np.repeat(np.arange(len(sizes)), sizes)[is_kept]
    sizes, ranked = np.bincount(sched_of_row, minlength=len(sizes)), ranked[is_kept]
    adapters = None
    if rows.adapters is not None:
        first_rows = arrangement.rows[arrangement.starts[:-1]]
        adapters = rows.adapters[first_rows[group_order]][sizes > 0]
    return ArrangedPart(
        row=row[ranked],
        group_id=arrangement.groups.group_id[ranked],
        prefix_len=arrangement.groups.prefix_tokens[ranked],
        expected=rows.expected_tokens[ranked],
        sched_rows=sizes[sizes > 0],
        values=values[sizes > 0],
        adapters=adapters,
    )


def forecast(
    job: ArrangeJob, is_reordered: bool, size: CacheSize, max_rows: int, *pieces: pa.Table
) -> tuple[OrderForecast, ...]:
    """Forecast the tokens that one part computes in each order, see `forecast_orders`.

    That of the input order is not valid, as a part has gaps in it: see `input_hits`.
    """
    rows = _plan_rows(pieces)
    plan, arrangement = plan_rows(
        rows, job.plan, capacity=job.capacity, dedup=job.dedup, is_reordered=is_reordered
    )
    return forecast_orders(
        rows.keys,
        plan,
        arrangement,
        output_tokens=rows.expected_tokens,
        size=size,
        max_rows=max_rows,
    )


def unit_sizes(part: ArrangedPart, cuts: Floats, plan: PlanConfig) -> list[Ints]:
    stretches = _stretches(part, cuts)
    return [np.diff(cut_units(part.sched_rows[sched_groups], plan)) for sched_groups in stretches]


def rank(
    part: ArrangedPart,
    cuts: Floats,
    plan: PlanConfig,
    first_units: Sequence[int],
    first_group: int,
    piece_rows: Ints,
) -> Any:  # noqa: ANN401 - one object is no list
    """Return unit, position and group of a part's rows: a table for each piece of the source.

    For one piece the table itself is returned.

    Args:
        cuts: values at which the plan cuts all parts into stretches.
        first_units: number of the first unit of this part in each stretch.
        first_group: number of its first group.
        piece_rows: number of the first row of each piece, then that of all rows.
    """
    # indices in the part of its rows, in the order of stretches
    sched_groups = np.concatenate(_stretches(part, cuts))
    ranked = ranges(start_offsets(part.sched_rows)[sched_groups], part.sched_rows[sched_groups])
    sizes = unit_sizes(part, cuts, plan)
    numbers = [first + np.arange(len(s)) for first, s in zip(first_units, sizes, strict=True)]
    unit, pos = places_in_units(np.concatenate(sizes))
    # unit and position of each row, by its number in the source
    by_row, place = np.argsort(part.row), np.empty_like(ranked)
    place[ranked] = np.arange(len(ranked))
    place, group_id = place[by_row], part.group_id[by_row]
    columns = {
        "row": part.row[by_row],
        "unit": np.concatenate(numbers)[unit[place]].astype(np.int32),
        "pos": pos[place].astype(np.int32),
        "group_id": pa.array(group_id + first_group, mask=group_id < 0),
        "prefix_len": part.prefix_len[by_row],
        "expected": part.expected[by_row],
    }
    table = pa.table(columns)
    bounds = np.searchsorted(columns["row"], piece_rows).tolist()
    tables = [table.slice(start, stop - start).combine_chunks() for start, stop in pairwise(bounds)]
    return tables[0] if len(tables) == 1 else tables


def _stretches(part: ArrangedPart, cuts: Floats) -> list[Ints]:
    """Return the scheduling groups of each stretch in order, grouped by adapter."""
    bounds = [0, *np.searchsorted(part.values, cuts).tolist(), len(part.values)]
    stretches = [np.arange(start, stop) for start, stop in pairwise(bounds)]
    if part.adapters is None:
        return stretches
    return [by_adapter(sched_groups, part.adapters) for sched_groups in stretches]


def shard(
    first_row: int,
    num_rows: int,
    num_skipped_before: int,
    first_unit: int,
    unit_rows: int,
    probe: Ints,
    *parts: pa.Table,
) -> tuple[str, pa.Table]:
    """Return the digest of the shard of one piece, and the shard.

    Rows of a probe come first in the plan, skipped rows last.

    Args:
        num_skipped_before: skipped rows of earlier pieces.
        first_unit: number of the first unit of skipped rows.
        unit_rows: size of units of skipped rows and of a probe.
        probe: int64 [n], numbers of the rows of a probe in the whole source, ascending.
    """
    rows = pa.concat_tables(parts).combine_chunks()
    place = rows.column("row").to_numpy() - first_row
    begin, end = np.searchsorted(probe, [first_row, first_row + num_rows])
    probed = probe[begin:end] - first_row
    is_skipped = np.ones(num_rows, np.bool_)
    is_skipped[place] = is_skipped[probed] = False
    unit, pos = divmod(num_skipped_before + np.cumsum(is_skipped) - 1, unit_rows)
    unit += first_unit
    unit[probed], pos[probed] = divmod(np.arange(begin, end), unit_rows)
    group_id, prefix_len = np.full(num_rows, -1), np.zeros(num_rows, np.int32)
    expected = np.full(num_rows, np.nan)
    columns = {"unit": unit, "pos": pos, "prefix_len": prefix_len, "expected": expected}
    for name, values in columns.items():
        values[place] = rows.column(name).to_numpy()
    group_id[place] = rows.column("group_id").fill_null(-1).to_numpy()
    table = make_shard(unit, pos, group_id, prefix_len, expected)
    return digest_of(table), table


def sums_of(shard: pa.Table, first_row: int, num_units: int) -> Uint64s:
    """Return for each unit the checksum of its rows that are in one piece: uint64 [num_units]."""
    rows = np.arange(first_row, first_row + shard.num_rows)
    return row_sums(shard.column("unit").to_numpy(), rows, num_units)


def added(*sums: Uint64s) -> Uint64s:
    """Return the checksums of units over several pieces, given those of each piece."""
    total = sums[0].copy()
    for more in sums[1:]:
        total += more
    return total


def _plan_rows(pieces: Sequence[pa.Table]) -> RowFeatures:
    has_adapters = "adapter" in pieces[0].column_names
    return RowFeatures(
        keys=keys_of(pieces),
        expected_tokens=_column(pieces, "expected"),
        adapters=_column(pieces, "adapter") if has_adapters else None,
    )


def keys_of(tables: Sequence[pa.Table]) -> BlockKeys:
    return BlockKeys.concat([BlockKeys.from_table(table) for table in tables])


def _column(pieces: Sequence[pa.Table], name: str) -> npt.NDArray[Any]:
    return np.concatenate([piece.column(name).to_numpy() for piece in pieces])
