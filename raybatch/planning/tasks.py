"""Tasks of a large plan, run by `large`; plain functions.

describe, split, shard   over a piece of the source: block keys of its rows, which part each belongs
                         to, and what the plan says of them in input order
arrange, rank            over a part: tree, groups, entries in their order; unit and position of
                         each row among all
"""

from collections.abc import Sequence
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
from raybatch.inputs.source import Source
from raybatch.planning.planned import (
    ArrangedPart,
    ArrangeJob,
    PartSummary,
    PieceSummary,
    ProbedRows,
    planned_work,
)
from raybatch.planning.probe import estimate, probe_rows
from raybatch.planning.sample import taken
from raybatch.planning.shards import contents_digest, digest_of, make_shard, places_in_units
from raybatch.planning.sidecar import Sidecar
from raybatch.planning.small import RowDescriber
from raybatch.prefix.block_keys import BlockKeys, ranges, start_offsets
from raybatch.prefix.forecast import (
    CacheLoad,
    CacheSize,
    OrderForecast,
    forecast_orders,
    simulate_hits,
)
from raybatch.prefix.outline import outline_tree
from raybatch.prefix.partition import Partitioner
from raybatch.prefix.plan import (
    Arrangement,
    PlanRows,
    arrange_rows,
    by_adapter,
    cut_by,
    order_entries,
    plan_rows,
    rank_entries,
)
from raybatch.prefix.profile import profile_rows
from raybatch.records.arrays import Floats, Ints, Uint64s
from raybatch.rows.plan_columns import ROW, with_columns

# values in the summary of a part, of those by which its entries are ordered
_NUM_VALUES = 256
# boxes that are drawn of the prefix tree, of all parts together and of one at least
_MAX_BOXES, _MIN_BOXES = 600, 20


def describe(
    options: bytes,
    source: Source,
    slices: range,
    first_row: int,
    sample_every: int,
    row_id_column: str | None,
) -> tuple[PieceSummary, pa.Table]:
    """Describe the rows of some slices: what the driver keeps, and block keys with row numbers.

    Options of stage and plan are pickled; one of `sample_every` rows is in the sample.
    """
    describer = describer_of(options)
    parts = [describer(table)[1] for table in source.read(slices, row_id_column=row_id_column)]
    return summarize(Sidecar.concat(parts), describer, first_row, sample_every)


def summarize(
    piece: Sidecar, describer: RowDescriber, first_row: int, sample_every: int
) -> tuple[PieceSummary, pa.Table]:
    """Return what `describe` does of a piece whose rows are described."""
    columns = {
        "row": piece.asked + first_row,
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
        unasked=piece.unasked,
        sample=keys_of([table.take(chosen)]),
        contents=contents_digest(piece.keys),
        adapters=np.unique(columns.get("adapter", np.zeros(0, np.uint64))),
    )
    return summary, table


@lru_cache(maxsize=2)
def describer_of(options: bytes) -> RowDescriber:
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
    num_rows = sum(part.num_rows for part in source.slices[slices.start : slices.stop])
    begin, end = np.searchsorted(rows, [first_row, first_row + num_rows])
    tables = source.read(slices, row_id_column=row_id_column)
    chosen = pa.concat_tables(taken(tables, rows[begin:end], first_row))
    return chosen.append_column(ROW, pa.array(rows[begin:end]))


def input_hits(size: CacheSize, max_rows: int, is_whole: bool, *rows: pa.Table) -> tuple[int, int]:
    """Return cached and all prompt tokens of a stretch of the input, from an empty cache.

    The first `max_rows` rows are simulated. Where the stretch is not the whole input, their first
    half fills the cache and is not counted.
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
    """Plan one part by itself, from its rows, piece after piece in input order.

    Rows that were generated already are left out; there are none before a probe.
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
    # evenly spaced values, by rows, and the rows that each stands for
    num_ranked, ends = len(part.row), np.cumsum(part.entry_rows)
    goals = np.linspace(1, num_ranked, min(_NUM_VALUES, num_ranked)).astype(np.int64)
    goals = np.unique(goals)
    summary = PartSummary(
        num_rows=len(part.row),
        profile=profile_rows(
            keys,
            rows.expected_tokens,
            arrangement,
            num_rows=len(row),
            unasked={},
            limit_tokens=int(max_tokens.sum()),
            # as many as there are where stretches of parts cut none
            num_units=sum(map(len, unit_sizes(part, np.zeros(0), plan))),
        ),
        work=planned_work(keys, rows.expected_tokens, arrangement, is_grouped=True),
        work_alone=planned_work(keys, rows.expected_tokens, arrangement, is_grouped=False),
        boxes=outline_tree(arrangement.tree, keys, max_boxes=num_boxes),
        probe=probe,
        values=part.values[np.searchsorted(ends, goals)],
        weights=np.diff(goals, prepend=0),
    )
    return summary, part


def _ordered(
    arrangement: Arrangement, rows: PlanRows, row: Ints, job: ArrangeJob, left_out: Ints
) -> ArrangedPart:
    """Return a part in its own order, without the rows whose numbers are `left_out`."""
    entries, values = order_entries(arrangement, job.plan, job.capacity.share(job.num_parts))
    ranked, sizes = rank_entries(arrangement, entries), np.diff(arrangement.starts)[entries]
    is_kept = ~np.isin(row[ranked], left_out)
    entry_of_row = np.repeat(np.arange(len(sizes)), sizes)[is_kept]
    sizes, ranked = np.bincount(entry_of_row, minlength=len(sizes)), ranked[is_kept]
    adapters = None
    if rows.adapters is not None:
        first_rows = arrangement.rows[arrangement.starts[:-1]]
        adapters = rows.adapters[first_rows[entries]][sizes > 0]
    return ArrangedPart(
        row=row[ranked],
        group_id=arrangement.groups.group_id[ranked],
        prefix_len=arrangement.groups.prefix_tokens[ranked],
        expected=rows.expected_tokens[ranked],
        entry_rows=sizes[sizes > 0],
        values=values[sizes > 0],
        adapters=adapters,
    )


def forecast(
    job: ArrangeJob, is_reordered: bool, size: CacheSize, max_rows: int, *pieces: pa.Table
) -> tuple[OrderForecast, ...]:
    """Return what orders of one part compute; `input_hits` does that of the input."""
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
    return [np.diff(cut_by(part.entry_rows[entries], plan)) for entries in stretches]


def rank(
    part: ArrangedPart,
    cuts: Floats,
    plan: PlanConfig,
    first_units: Sequence[int],
    first_group: int,
    piece_rows: Ints,
) -> Any:  # noqa: ANN401 - one object is no list
    """Return the plan of the part's rows, a table for each piece of the source.

    Stretches begin at these units; `piece_rows` is the first row of each piece, and of all rows.
    """
    # the places in the part of its rows, in the order of their stretches
    entries = np.concatenate(_stretches(part, cuts))
    ranked = ranges(start_offsets(part.entry_rows)[entries], part.entry_rows[entries])
    sizes = unit_sizes(part, cuts, plan)
    numbers = [first + np.arange(len(s)) for first, s in zip(first_units, sizes, strict=True)]
    unit, pos = places_in_units(np.concatenate(sizes))
    # where each row, by its number in the source, stands among the units
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
    """Return the entries of each stretch in their order; those of an adapter follow each other."""
    bounds = [0, *np.searchsorted(part.values, cuts).tolist(), len(part.values)]
    stretches = [np.arange(start, stop) for start, stop in pairwise(bounds)]
    if part.adapters is None:
        return stretches
    return [by_adapter(entries, part.adapters) for entries in stretches]


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
    """
    rows = pa.concat_tables(parts).combine_chunks()
    place = rows.column("row").to_numpy() - first_row
    begin, end = np.searchsorted(probe, [first_row, first_row + num_rows])
    probed = probe[begin:end] - first_row
    is_unasked = np.ones(num_rows, np.bool_)
    is_unasked[place] = is_unasked[probed] = False
    unit, pos = divmod(num_unasked_before + np.cumsum(is_unasked) - 1, unit_rows)
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
    """Return the sums of the row numbers of one piece, by unit."""
    rows = np.arange(first_row, first_row + shard.num_rows)
    return row_sums(shard.column("unit").to_numpy(), rows, num_units)


def added(*sums: Uint64s) -> Uint64s:
    """Return sums of several pieces together, modulo 2^64."""
    total = sums[0].copy()
    for more in sums[1:]:
        total += more
    return total


def _plan_rows(pieces: Sequence[pa.Table]) -> PlanRows:
    has_adapters = "adapter" in pieces[0].column_names
    return PlanRows(
        keys=keys_of(pieces),
        expected_tokens=_column(pieces, "expected"),
        adapters=_column(pieces, "adapter") if has_adapters else None,
    )


def keys_of(tables: Sequence[pa.Table]) -> BlockKeys:
    return BlockKeys.concat([BlockKeys.from_table(table) for table in tables])


def _column(pieces: Sequence[pa.Table], name: str) -> npt.NDArray[Any]:
    return np.concatenate([piece.column(name).to_numpy() for piece in pieces])
