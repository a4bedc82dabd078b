"""Tasks of a large plan over its parts; plain functions, run by `large`.

arrange   tree, groups, entries in their order
rank      where a part's entries stand among all: unit and position of each row
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from raybatch.config import PlanConfig
from raybatch.planning.pieces import keys_of
from raybatch.planning.planned import (
    ArrangedPart,
    ArrangeJob,
    PartSummary,
    ProbedRows,
    planned_work,
)
from raybatch.planning.probe import estimate, probe_rows
from raybatch.prefix.block_keys import Floats, Ints
from raybatch.prefix.forecast import OrderForecast, forecast_orders
from raybatch.prefix.hits import CacheSize
from raybatch.prefix.outline import outline_tree
from raybatch.prefix.plan import (
    Arrangement,
    PlanRows,
    arrange_rows,
    by_adapter,
    cut_units,
    order_entries,
    plan_rows,
    rank_entries,
)
from raybatch.prefix.profile import profile_rows

# values in the summary of a part, of those by which its entries are ordered
_NUM_VALUES = 256
# boxes that are drawn of the prefix tree, of all parts together and of one at least
_MAX_BOXES, _MIN_BOXES = 600, 20


def arrange(
    job: ArrangeJob, probed: ProbedRows | None, *pieces: pa.Table
) -> tuple[PartSummary, ArrangedPart]:
    """Plan one part by itself.

    Args:
        job: options, and rows of the whole source.
        probed: rows that were generated already, which are left out; None before a probe.
        pieces: rows of the part, piece after piece in input order.
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
    is_length_known = probed is not None or plan.expected_tokens_column is not None
    expected = rows.expected_tokens if is_length_known else np.full(len(row), np.nan)
    left_out = np.zeros(0, np.int64) if probed is None else probed.row
    part = _ordered(arrangement, replace(rows, expected_tokens=expected), row, plan, left_out)
    num_boxes = max(_MIN_BOXES, _MAX_BOXES // job.num_parts)
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
            num_units=sum(len(starts) - 1 for starts in _units(part, np.zeros(0), plan)),
        ),
        work=planned_work(keys, rows.expected_tokens, arrangement, is_grouped=True),
        work_alone=planned_work(keys, rows.expected_tokens, arrangement, is_grouped=False),
        boxes=outline_tree(arrangement.tree, keys, max_boxes=num_boxes),
        probe=probe,
        **_sketch(part.values, np.cumsum(part.entry_rows)),
    )
    return summary, part


def _ordered(
    arrangement: Arrangement, rows: PlanRows, row: Ints, plan: PlanConfig, left_out: Ints
) -> ArrangedPart:
    """Return a part in its own order, without the rows whose numbers are `left_out`."""
    entries, values = order_entries(arrangement, plan)
    ranked, sizes = rank_entries(arrangement, entries), np.diff(arrangement.starts)[entries]
    is_kept = ~np.isin(row[ranked], left_out)
    entry_of_row = np.repeat(np.arange(len(sizes)), sizes)
    sizes = np.bincount(entry_of_row[is_kept], minlength=len(sizes))
    ranked = ranked[is_kept]
    return ArrangedPart(
        row=row[ranked],
        group_id=arrangement.groups.group_id[ranked],
        prefix_len=arrangement.groups.prefix_tokens[ranked],
        expected=rows.expected_tokens[ranked],
        entry_rows=sizes[sizes > 0],
        values=values[sizes > 0],
        adapters=None
        if rows.adapters is None
        else rows.adapters[arrangement.rows[arrangement.starts[:-1]]][entries][sizes > 0],
    )


def forecast(
    job: ArrangeJob, is_reordered: bool, size: CacheSize, max_rows: int, *pieces: pa.Table
) -> tuple[OrderForecast, ...]:
    """Return what orders of one part compute; `input_hits` does that of the input.

    Args:
        job: options, and rows of the whole source.
        is_reordered: the plan of the whole source orders its rows.
    """
    rows = _plan_rows(pieces)
    plan, arrangement = plan_rows(rows, job.plan, dedup=job.dedup, is_reordered=is_reordered)
    return forecast_orders(
        rows.keys,
        plan,
        arrangement,
        output_tokens=rows.expected_tokens,
        size=size,
        max_rows=max_rows,
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
    """Return the plan of the part's rows, a table for each piece of the source.

    Args:
        first_units: number of the first unit of each stretch.
        piece_rows: int64 [T + 1], number of the first row of each piece, and of all rows.
    """
    ranked = _ranked_rows(part, cuts)
    unit, pos = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for starts, first in zip(_units(part, cuts, plan), first_units, strict=True):
        sizes = np.diff(starts)
        unit.append(np.repeat(first + np.arange(len(sizes)), sizes))
        pos.append(np.arange(int(starts[-1])) - np.repeat(starts[:-1], sizes))
    group_id = np.where(part.group_id >= 0, part.group_id + first_group, -1)
    by_row = np.argsort(part.row)
    row = part.row[by_row]
    # where each row, in the order of the part, stands among the units
    place = np.empty_like(ranked)
    place[ranked] = np.arange(len(ranked))
    place = place[by_row]
    columns = {
        "row": row,
        "unit": np.concatenate(unit)[place].astype(np.int32),
        "pos": np.concatenate(pos)[place].astype(np.int32),
        "group_id": pa.array(group_id[by_row], mask=group_id[by_row] < 0),
        "prefix_len": part.prefix_len[by_row],
        "expected": part.expected[by_row],
    }
    table = pa.table(columns)
    bounds = np.searchsorted(row, piece_rows)
    tables = [
        table.slice(start, stop - start).combine_chunks()
        for start, stop in pairwise(bounds.tolist())
    ]
    return tables[0] if len(tables) == 1 else tables


def _units(part: ArrangedPart, cuts: Floats, plan: PlanConfig) -> list[Ints]:
    """Return the places at which units begin in each stretch, and its number of rows at the end."""
    return [
        cut_units(part.entry_rows[entries], target_rows=plan.unit_rows, max_rows=plan.max_unit_rows)
        for entries in _stretches(part, cuts)
    ]


def _stretches(part: ArrangedPart, cuts: Floats) -> list[Ints]:
    """Return the entries of each stretch in their order; those of an adapter follow each other."""
    bounds = [0, *np.searchsorted(part.values, cuts).tolist(), len(part.values)]
    stretches = [np.arange(start, stop) for start, stop in pairwise(bounds)]
    if part.adapters is None:
        return stretches
    return [by_adapter(entries, part.adapters) for entries in stretches]


def _ranked_rows(part: ArrangedPart, cuts: Floats) -> Ints:
    """Return the places in the part of its rows, in the order of their stretches: int64 [R]."""
    entries = np.concatenate(_stretches(part, cuts))
    sizes, ends = part.entry_rows[entries], np.cumsum(part.entry_rows)
    first = ends[entries] - sizes
    ranked: Ints = np.arange(sizes.sum()) + np.repeat(first - (np.cumsum(sizes) - sizes), sizes)
    return ranked


def _plan_rows(pieces: Sequence[pa.Table]) -> PlanRows:
    has_adapters = "adapter" in pieces[0].column_names
    return PlanRows(
        keys=keys_of(pieces),
        expected_tokens=_column(pieces, "expected"),
        adapters=_column(pieces, "adapter") if has_adapters else None,
    )


def _sketch(values: Floats, ends: Ints) -> dict[str, Any]:
    """Return evenly spaced values, by rows, and the rows that each stands for."""
    if not len(values):
        return {"values": np.zeros(0), "weights": np.zeros(0, np.int64)}
    goals = np.unique(np.linspace(1, ends[-1], min(_NUM_VALUES, int(ends[-1]))).astype(np.int64))
    return {"values": values[np.searchsorted(ends, goals)], "weights": np.diff(goals, prepend=0)}


def _column(pieces: Sequence[pa.Table], name: str) -> npt.NDArray[Any]:
    return np.concatenate([piece.column(name).to_numpy() for piece in pieces])
