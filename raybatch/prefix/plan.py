"""The plan of a dataset: what each row shares, when it runs, and where units of commit begin.

Pure and in memory: rows in, plan out. Rows that never reach an engine are left out of it and put
behind all others at the end (`with_unasked`).
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from raybatch.config import PlanConfig
from raybatch.prefix.block_keys import BlockKeys, find_representatives, ranges
from raybatch.prefix.groups import (
    PlannedGroups,
    entries_of_groups,
    entries_of_subtrees,
    exact_single_level,
    make_groups,
    multi_level,
    nearest_open,
    num_computed_tokens,
    passed_nodes,
)
from raybatch.prefix.order import (
    DEFAULT_CAPACITY,
    EngineCapacity,
    GroupLoad,
    order_in_tree,
    values_in_tree,
)
from raybatch.prefix.tree import PrefixTree, TreeStats, build_tree, tree_stats
from raybatch.records.arrays import Bools, Floats, Ints, Number


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlanRows:
    """What planning knows of the rows that engines will see; arrays are read only."""

    # of the prompts. An identical digest means that one result serves both rows, so what else
    # decides a result must be part of it.
    keys: BlockKeys
    expected_tokens: Floats  # [R], output that a row is expected to generate over all samples
    # [R], rows with equal numbers run one after the other; None for all alike
    adapters: npt.NDArray[np.uint64] | None = None

    def __post_init__(self) -> None:
        num_rows, num_lengths = self.keys.num_rows, len(self.expected_tokens)
        assert num_rows == num_lengths, f"{num_rows} rows have {num_lengths} expected lengths"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrangement:
    """Rows in entries: what runs together. An order of entries is all that a plan still needs.

    What an entry is, see `raybatch.prefix.groups`, which also says what the arrays are.
    """

    tree: PrefixTree
    # of all rows; with sharing at all levels, by the deepest shared prefix of each row
    groups: PlannedGroups
    rows: Ints
    starts: Ints
    entry_node: Ints
    load: GroupLoad
    stats: TreeStats
    computed_tokens: int  # prompt tokens that engines compute when every shared prefix runs once

    @property
    def saved_fraction(self) -> float:
        return max(0.0, 1 - self.computed_tokens / max(1, self.stats.logical_tokens))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowPlan:
    """Where each row runs; arrays are read only."""

    order: Ints  # [R], rows by rank
    group_id: Ints  # [R], numbered by their first row; -1 for a row that is alone
    prefix_len: npt.NDArray[np.int32]  # [R], tokens that the row's group shares
    unit_starts: Ints  # [U + 1], ranks at which units begin, and the number of rows
    is_reordered: bool  # rows run in another order than that of the input

    @property
    def num_rows(self) -> int:
        return len(self.order)

    @property
    def num_units(self) -> int:
        return len(self.unit_starts) - 1


def plan_rows(
    rows: PlanRows,
    config: PlanConfig,
    *,
    capacity: EngineCapacity = DEFAULT_CAPACITY,
    dedup: bool = True,
    is_reordered: bool | None = None,
) -> tuple[RowPlan, Arrangement]:
    """Plan rows that fit one process; near-linear in rows.

    Where nothing is worth another order, rows keep that of the input and belong to no group.
    `is_reordered` decides it where these rows are a part of an input.
    """
    arrangement = arrange_rows(rows, config, dedup=dedup)
    if is_reordered is None:
        is_reordered = is_worth_ordering(
            arrangement.saved_fraction, config, has_adapters=rows.adapters is not None
        )
    if not is_reordered:
        kept = RowPlan(
            order=np.arange(rows.keys.num_rows),
            group_id=np.full(rows.keys.num_rows, -1),
            prefix_len=np.zeros(rows.keys.num_rows, np.int32),
            unit_starts=_even_units(rows.keys.num_rows, config),
            is_reordered=False,
        )
        return kept, arrangement
    entries, _ = order_entries(arrangement, config, capacity)
    if rows.adapters is not None:
        entries = by_adapter(entries, rows.adapters[arrangement.rows[arrangement.starts[:-1]]])
    plan = RowPlan(
        order=rank_entries(arrangement, entries),
        group_id=arrangement.groups.group_id,
        prefix_len=arrangement.groups.prefix_tokens,
        unit_starts=cut_by(np.diff(arrangement.starts)[entries], config),
        is_reordered=True,
    )
    return plan, arrangement


def by_adapter(entries: Ints, adapters: npt.NDArray[np.uint64]) -> Ints:
    """Return entries in their order, where those of an adapter follow its first one."""
    _, first, which = np.unique(adapters[entries], return_index=True, return_inverse=True)
    return entries[np.argsort(first[which], kind="stable")]


def is_worth_ordering(saved_fraction: float, config: PlanConfig, *, has_adapters: bool) -> bool:
    """Return whether rows run in another order than that of the input.

    They do where enough is shared, where lengths are known better than by their limit, and where
    rows have several adapters.
    """
    if config.mode == "off":
        return False
    knows_lengths = config.expected_tokens_column is not None or config.lengths == "probe"
    return has_adapters or knows_lengths or saved_fraction >= config.min_saved_fraction


def arrange_rows(rows: PlanRows, config: PlanConfig, *, dedup: bool = True) -> Arrangement:
    keys, all_rows = rows.keys, np.arange(rows.keys.num_rows)
    tree, first_equal = build_tree(keys), find_representatives(keys)
    representative = first_equal if dedup else all_rows
    is_multi = config.sharing == "multi_level"
    if is_multi:
        is_open = multi_level(tree)
        entries = entries_of_subtrees(tree, config.unit_rows, representative)
    else:
        is_open = exact_single_level(tree, keys, representative=representative)
        entries = entries_of_groups(tree, is_open, representative)
    generated = representative == all_rows
    shared = tree.depth_tokens[nearest_open(tree, is_open)[tree.deepest_nodes()]]
    distinct = np.maximum(keys.num_tokens - shared, 1) * generated
    return Arrangement(
        tree=tree,
        groups=make_groups(tree, keys, is_open, representative),
        rows=entries.rows,
        starts=entries.starts,
        entry_node=entries.node,
        load=GroupLoad(
            prefix_tokens=entries.prefix_tokens,
            distinct_tokens=_sums(distinct[entries.rows], entries.starts),
            num_rows=_sums(generated[entries.rows].astype(np.int64), entries.starts),
            output_tokens=_sums((rows.expected_tokens * generated)[entries.rows], entries.starts),
        ),
        stats=tree_stats(tree, keys, first_equal),
        computed_tokens=num_computed_tokens(
            tree, keys, is_open, is_multi, representative=representative
        ),
    )


def order_entries(
    arrangement: Arrangement, config: PlanConfig, capacity: EngineCapacity
) -> tuple[Ints, Floats]:
    """Return the entries in their order, and rising values to merge those of several parts.

    What is below one node of the tree stays together. Both are [E], the first a permutation.
    """
    tree, node, load = arrangement.tree, arrangement.entry_node, arrangement.load
    is_by_ratio = config.order == "ratio"
    entries = order_in_tree(tree, node, load, None if is_by_ratio else capacity)
    is_passed = passed_nodes(tree, config.unit_rows)
    return entries, values_in_tree(tree, node, load, entries, is_passed, is_by_ratio=is_by_ratio)


def rank_entries(arrangement: Arrangement, entries: Ints) -> Ints:
    """Return the rows by rank, int64 [R]."""
    starts = arrangement.starts
    return arrangement.rows[ranges(starts[:-1][entries], np.diff(starts)[entries])]


def put_first(plan: RowPlan, chosen: Ints, config: PlanConfig) -> RowPlan:
    """Return the plan with some rows in units of their own before all others."""
    is_chosen = np.zeros(plan.num_rows, np.bool_)
    is_chosen[chosen] = True
    others = plan.order[~is_chosen[plan.order]]
    group = plan.group_id[others]
    is_border = (np.diff(group, prepend=-2) != 0) | (group < 0)
    borders = np.append(np.flatnonzero(is_border), len(others))
    head = _even_units(len(chosen), config)
    tail = cut_by(np.diff(borders), config)[1:] + len(chosen)
    return replace(
        plan,
        order=np.concatenate([chosen, others]),
        unit_starts=np.concatenate([head, tail]),
        is_reordered=True,
    )


def with_unasked(plan: RowPlan, is_asked: Bools, config: PlanConfig) -> RowPlan:
    """Return the plan of all rows: those that engines see, then the others in input order."""
    asked, others = np.flatnonzero(is_asked), np.flatnonzero(~is_asked)
    order, unit_starts = np.arange(len(is_asked)), _even_units(len(is_asked), config)
    if plan.is_reordered:
        order = np.concatenate([asked[plan.order], others])
        tail = _even_units(len(others), config)[1:] + len(asked)
        unit_starts = np.concatenate([plan.unit_starts, tail])
    group_id, prefix_len = np.full(len(is_asked), -1), np.zeros(len(is_asked), np.int32)
    group_id[asked], prefix_len[asked] = plan.group_id, plan.prefix_len
    return replace(
        plan, order=order, group_id=group_id, prefix_len=prefix_len, unit_starts=unit_starts
    )


def cut_units(group_rows: Ints, *, target_rows: int, max_rows: int) -> Ints:
    """Return the ranks at which units begin, and the number of rows: int64 [units + 1].

    A unit closes at the first border between groups at or after `target_rows`, and before a group
    that would take it above `max_rows`. A group above the maximum is cut into neighbouring units
    of nearly equal size. O(units log G).
    """
    assert 1 <= target_rows <= max_rows, f"units of {target_rows} rows, at most {max_rows}"
    borders = np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)
    num_rows, starts = int(borders[-1]), [0]
    while starts[-1] < num_rows:
        starts.append(_unit_end(borders, starts[-1], target_rows, max_rows))
    return np.array(starts, np.int64)


def _unit_end(borders: Ints, start: int, target_rows: int, max_rows: int) -> int:
    closing = int(np.searchsorted(borders, min(start + target_rows, int(borders[-1]))))
    end, begin = int(borders[closing]), max(int(borders[closing - 1]), start)
    if end - start <= max_rows:
        return end
    num_units = -(-(end - start) // max_rows)
    is_cut_anyway = num_units == -(-(end - begin) // max_rows)
    if begin > start and not (is_cut_anyway and num_units > 1):
        return begin
    return start + -(-(end - start) // num_units)


def cut_by(entry_rows: Ints, config: PlanConfig) -> Ints:
    """Return the ranks at which units of such entries begin, see `cut_units`."""
    return cut_units(entry_rows, target_rows=config.unit_rows, max_rows=config.max_unit_rows)


def _even_units(num_rows: int, config: PlanConfig) -> Ints:
    return cut_by(np.ones(num_rows, np.int64), config)


def _sums(values: npt.NDArray[Number], starts: Ints) -> npt.NDArray[Number]:
    return np.add.reduceat(values, starts[:-1]) if len(values) else values
