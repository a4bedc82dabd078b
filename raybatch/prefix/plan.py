"""The plan of a dataset: the shared prefix and rank of each row, and the start of each commit unit.

Pure and in memory: rows in, plan out. Rows that are not sent to an engine are not planned;
`append_skipped` puts them after all others.

`plan_in_flight` plans waiting rows where no plan over all rows exists. The name of a group is then
the block key at the end of its prefix, so the group has the same name whenever some of its rows are
grouped.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from raybatch.config import PlanConfig
from raybatch.prefix.block_keys import BlockKeys, find_representatives, ranges
from raybatch.prefix.groups import (
    PlannedGroups,
    exact_single_level,
    make_groups,
    multi_level,
    nearest_open,
    num_computed_tokens,
    sched_groups_by_prefix,
    sched_groups_by_subtree,
    split_nodes,
)
from raybatch.prefix.order import (
    DEFAULT_CAPACITY,
    EngineCapacity,
    GroupLoad,
    order_in_tree,
    values_in_tree,
)
from raybatch.prefix.tree import PrefixTree, TreeStats, build_tree, tree_stats
from raybatch.records.arrays import Bools, Floats, Ints, Number, Uint64s, mix64

# a node with more than this share of the rows of a part is split
_DENSE_FRACTION = 0.25


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowFeatures:
    """The features of the rows that engines will see; arrays are read only."""

    # keys of the prompts. Rows with equal digests share one result, so a digest must include
    # everything else that decides the result.
    keys: BlockKeys
    expected_tokens: Floats  # [R], output that a row is expected to generate over all samples
    # [R], id of each row's adapter; rows of one adapter run one after the other. None without
    # adapters
    adapters: npt.NDArray[np.uint64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Arrangement:
    """Rows in scheduling groups; a plan adds only the order of the groups.

    See `raybatch.prefix.groups` for scheduling groups and the arrays.
    """

    tree: PrefixTree
    # prefix groups of all rows; with sharing at all levels, by each row's deepest shared prefix
    groups: PlannedGroups
    rows: Ints
    starts: Ints
    sched_node: Ints
    load: GroupLoad
    stats: TreeStats
    computed_tokens: int  # prompt tokens that engines compute when every shared prefix runs once

    @property
    def saved_fraction(self) -> float:
        return max(0.0, 1 - self.computed_tokens / max(1, self.stats.logical_tokens))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RowSchedule:
    """The rank, prefix group and unit of each row; arrays are read only."""

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
    rows: RowFeatures,
    config: PlanConfig,
    *,
    capacity: EngineCapacity = DEFAULT_CAPACITY,
    dedup: bool = True,
    is_reordered: bool | None = None,
) -> tuple[RowSchedule, Arrangement]:
    """Plan rows that fit one process; near-linear in rows.

    If reordering is not worthwhile, rows keep the order of the input and belong to no group.
    `is_reordered` overrides that decision if these rows are only a part of the input.
    """
    arrangement = arrange_rows(rows, config, dedup=dedup)
    if is_reordered is None:
        is_reordered = is_worth_ordering(
            arrangement.saved_fraction, config, has_adapters=rows.adapters is not None
        )
    if not is_reordered:
        kept = RowSchedule(
            order=np.arange(rows.keys.num_rows),
            group_id=np.full(rows.keys.num_rows, -1),
            prefix_len=np.zeros(rows.keys.num_rows, np.int32),
            unit_starts=_even_units(rows.keys.num_rows, config),
            is_reordered=False,
        )
        return kept, arrangement
    group_order, _ = order_sched_groups(arrangement, config, capacity)
    if rows.adapters is not None:
        group_order = by_adapter(
            group_order, rows.adapters[arrangement.rows[arrangement.starts[:-1]]]
        )
    plan = RowSchedule(
        order=rank_rows(arrangement, group_order),
        group_id=arrangement.groups.group_id,
        prefix_len=arrangement.groups.prefix_tokens,
        unit_starts=cut_units(np.diff(arrangement.starts)[group_order], config),
        is_reordered=True,
    )
    return plan, arrangement


def by_adapter(group_order: Ints, adapters: npt.NDArray[np.uint64]) -> Ints:
    """Return the order with all scheduling groups of an adapter next to its first one."""
    _, first, which = np.unique(adapters[group_order], return_index=True, return_inverse=True)
    return group_order[np.argsort(first[which], kind="stable")]


def is_worth_ordering(saved_fraction: float, config: PlanConfig, *, has_adapters: bool) -> bool:
    """Return whether rows run in another order than that of the input.

    They do if enough is shared, if lengths are estimated better than by their limit, or if rows
    have several adapters.
    """
    if config.mode == "off":
        return False
    knows_lengths = config.expected_tokens_column is not None or config.lengths == "probe"
    return has_adapters or knows_lengths or saved_fraction >= config.min_saved_fraction


def arrange_rows(rows: RowFeatures, config: PlanConfig, *, dedup: bool = True) -> Arrangement:
    keys, all_rows = rows.keys, np.arange(rows.keys.num_rows)
    tree, first_equal = build_tree(keys), find_representatives(keys)
    representative = first_equal if dedup else all_rows
    is_multi = config.sharing == "multi_level"
    if is_multi:
        is_open = multi_level(tree)
        sched_groups = sched_groups_by_subtree(tree, config.unit_rows, representative)
    else:
        is_open = exact_single_level(tree, keys, representative=representative)
        sched_groups = sched_groups_by_prefix(tree, is_open, representative)
    generated = representative == all_rows
    shared = tree.depth_tokens[nearest_open(tree, is_open)[tree.deepest_nodes()]]
    distinct = np.maximum(keys.num_tokens - shared, 1) * generated
    return Arrangement(
        tree=tree,
        groups=make_groups(tree, keys, is_open, representative),
        rows=sched_groups.rows,
        starts=sched_groups.starts,
        sched_node=sched_groups.node,
        load=GroupLoad(
            prefix_tokens=sched_groups.prefix_tokens,
            distinct_tokens=_sums(distinct[sched_groups.rows], sched_groups.starts),
            num_rows=_sums(generated[sched_groups.rows].astype(np.int64), sched_groups.starts),
            output_tokens=_sums(
                (rows.expected_tokens * generated)[sched_groups.rows], sched_groups.starts
            ),
        ),
        stats=tree_stats(tree, keys, first_equal),
        computed_tokens=num_computed_tokens(
            tree, keys, is_open, is_multi, representative=representative
        ),
    )


def order_sched_groups(
    arrangement: Arrangement, config: PlanConfig, capacity: EngineCapacity
) -> tuple[Ints, Floats]:
    """Return the order of the scheduling groups, and ascending values by which parts are merged.

    Rows below one node of the tree stay together. Both arrays are [E], the first a permutation.
    """
    tree, node, load = arrangement.tree, arrangement.sched_node, arrangement.load
    is_by_ratio = config.order == "ratio"
    group_order = order_in_tree(tree, node, load, None if is_by_ratio else capacity)
    is_split = split_nodes(tree, config.unit_rows)
    return group_order, values_in_tree(
        tree, node, load, group_order, is_split, is_by_ratio=is_by_ratio
    )


def rank_rows(arrangement: Arrangement, group_order: Ints) -> Ints:
    """Return the rows by rank, int64 [R]."""
    starts = arrangement.starts
    return arrangement.rows[ranges(starts[:-1][group_order], np.diff(starts)[group_order])]


def put_first(plan: RowSchedule, chosen: Ints, config: PlanConfig) -> RowSchedule:
    """Return the plan with the chosen rows first, in separate units."""
    is_chosen = np.zeros(plan.num_rows, np.bool_)
    is_chosen[chosen] = True
    others = plan.order[~is_chosen[plan.order]]
    group = plan.group_id[others]
    is_border = (np.diff(group, prepend=-2) != 0) | (group < 0)
    borders = np.append(np.flatnonzero(is_border), len(others))
    head = _even_units(len(chosen), config)
    tail = cut_units(np.diff(borders), config)[1:] + len(chosen)
    return replace(
        plan,
        order=np.concatenate([chosen, others]),
        unit_starts=np.concatenate([head, tail]),
        is_reordered=True,
    )


def append_skipped(plan: RowSchedule, is_requested: Bools, config: PlanConfig) -> RowSchedule:
    """Return the plan of all rows: those that engines see, then the others in input order."""
    requested, others = np.flatnonzero(is_requested), np.flatnonzero(~is_requested)
    order, unit_starts = np.arange(len(is_requested)), _even_units(len(is_requested), config)
    if plan.is_reordered:
        order = np.concatenate([requested[plan.order], others])
        tail = _even_units(len(others), config)[1:] + len(requested)
        unit_starts = np.concatenate([plan.unit_starts, tail])
    group_id, prefix_len = np.full(len(is_requested), -1), np.zeros(len(is_requested), np.int32)
    group_id[requested], prefix_len[requested] = plan.group_id, plan.prefix_len
    return replace(
        plan, order=order, group_id=group_id, prefix_len=prefix_len, unit_starts=unit_starts
    )


def cut_units(group_rows: Ints, config: PlanConfig) -> Ints:
    """Return the ranks at which units begin, and the number of rows: int64 [units + 1].

    A unit closes at the first border between groups at or after `unit_rows`, and before a group
    that would take it above `max_unit_rows`. A group above the maximum is cut into consecutive
    units of nearly equal size. O(units log G).
    """
    borders = np.concatenate([[0], np.cumsum(group_rows)]).astype(np.int64)
    num_rows, starts = int(borders[-1]), [0]
    while starts[-1] < num_rows:
        starts.append(_unit_end(borders, starts[-1], config.unit_rows, config.max_unit_rows))
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


def _even_units(num_rows: int, config: PlanConfig) -> Ints:
    return cut_units(np.ones(num_rows, np.int64), config)


def _sums(values: npt.NDArray[Number], starts: Ints) -> npt.NDArray[Number]:
    return np.add.reduceat(values, starts[:-1]) if len(values) else values


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class InFlightPlan:
    """Groups of rows and their order; a row that is alone has group -1."""

    group_id: Ints  # [R], name of each row's group
    prefix_len: Ints  # [R], tokens that the group shares
    order: Ints  # [R], rows as they should run, members of a group together


def plan_in_flight(keys: BlockKeys, output_tokens: Ints) -> InFlightPlan:
    """Group rows by the prefixes that save most, and order the groups; near-linear in rows.

    Groups with the most output per computed prompt token come first. Rows that share a prefix stay
    together, in the order of the prefix tree. A row that is alone counts as a group of one.
    """
    rows = RowFeatures(keys=keys, expected_tokens=output_tokens.astype(float))
    arranged = arrange_rows(rows, PlanConfig(), dedup=False)
    groups, tree = arranged.groups, arranged.tree
    last_block = groups.prefix_len // keys.block_size - 1
    last_keys = keys.keys[keys.offsets[groups.first_row] + last_block]
    # a row that is alone has group -1, which indexes the last name
    names = np.append(_as_names(last_keys), -1)
    return InFlightPlan(
        group_id=names[groups.group_id],
        prefix_len=groups.prefix_tokens.astype(np.int64),
        order=rank_rows(
            arranged, order_in_tree(tree, arranged.sched_node, arranged.load, capacity=None)
        ),
    )


def match_prefixes(keys: BlockKeys, groups: Sequence[Set[int]]) -> tuple[Ints, Ints]:
    """Find for each row the longest prefix that names one of the groups; linear in the keys.

    Return the name of each row's group, -1 without any, and the tokens of the prefix; int64 [R].
    Groups are sets of names of any size, such as the keys of dictionaries.
    """
    names = _as_names(keys.keys)
    wanted = set(names.tolist())
    known = [name for some in groups for name in some & wanted]
    matches = np.flatnonzero(np.isin(names, known))
    rows = np.searchsorted(keys.offsets, matches, side="right") - 1
    # of several prefixes of one row, the last assignment is the longest
    group_id = np.full(keys.num_rows, -1, np.int64)
    group_id[rows] = names[matches]
    prefix_len = np.zeros(keys.num_rows, np.int64)
    prefix_len[rows] = (matches - keys.offsets[rows] + 1) * keys.block_size
    return group_id, prefix_len


def _as_names(keys: npt.NDArray[np.uint64]) -> Ints:
    return (keys >> np.uint64(1)).astype(np.int64)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partitioner:
    """Assigns rows to parts that are planned separately; deterministic in every process.

    The tree of a sample shows the dense nodes: those with more than a quarter of the rows of a
    part. Dense nodes are split, and the nodes directly below them are packed into parts. A row
    below no sampled node is assigned by the hash of its first block after the dense nodes, so rows
    that share more than those nodes are together as well. Dense identical rows are spread over all
    parts, and generated once in each.

        root ......... dense, split
         |-- system .. dense, split
         |    |-- document 1, 2, 3 -> part 0
         |    |-- document 4, 5 ---> part 1
         |    `-- unseen documents -> by the hash of their next block
         |-- other prompts ---------> part 2
         `-- one dense prompt ------> all parts
    """

    num_parts: int
    depths: Ints  # [D], depths of nodes in blocks, rising
    keys: tuple[Uint64s, ...]  # keys of the nodes of each depth, rising
    parts: tuple[Ints, ...]  # parts of the nodes of each depth; -1 for a dense node
    digests: Uint64s  # digests of dense identical rows, rising

    def assign(self, rows: BlockKeys, numbers: Ints) -> Ints:
        """Return the part of each row, int64 [R]."""
        part = np.full(rows.num_rows, -1)
        leaves_at = np.zeros(rows.num_rows, np.int64)
        for depth, keys, parts in zip(self.depths.tolist(), self.keys, self.parts, strict=True):
            deep = np.flatnonzero((rows.num_blocks >= depth) & (part < 0))
            wanted = rows.keys[rows.offsets[deep] + depth - 1]
            place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            is_found = keys[place] == wanted
            part[deep[is_found]] = parts[place[is_found]]
            leaves_at[deep[is_found]] = depth
        unseen = np.flatnonzero(part < 0)
        # assigned by the first block after the dense nodes, or by the digest if there is none
        words, has_more = rows.digest[unseen].copy(), (rows.num_blocks > leaves_at)[unseen]
        deeper = unseen[has_more]
        words[has_more] = rows.keys[rows.offsets[deeper] + leaves_at[deeper]]
        part[unseen] = self._dealt(words)
        copies = unseen[np.isin(rows.digest[unseen], self.digests)]
        # hashed, because copies may be at even distances
        part[copies] = self._dealt(numbers[copies].astype(np.uint64))
        return part

    def _dealt(self, words: Uint64s) -> Ints:
        return (mix64(words) % np.uint64(self.num_parts)).astype(np.int64)


def choose_parts(sample: BlockKeys, num_parts: int) -> Partitioner:
    """Choose parts with nearly equal numbers of rows; near-linear in the sample."""
    tree = build_tree(sample)
    sizes = tree.row_stop - tree.row_start
    most = _DENSE_FRACTION * sample.num_rows / num_parts
    digests, counts = np.unique(sample.digest, return_counts=True)
    is_dense = sizes > most
    is_dense[0] = True
    # a node is no larger than its parent, so ancestors of a dense node are dense
    is_packed = ~is_dense & is_dense[tree.parent]
    is_packed[0] = False
    nodes = np.flatnonzero(is_packed | is_dense)[1:]
    # whole nodes are packed into parts with nearly equal numbers of rows
    part, packed = np.full(len(sizes), -1), np.flatnonzero(is_packed)
    ends = np.cumsum(sizes[packed])
    if len(packed):
        middle = ends - sizes[packed] / 2
        part[packed] = np.minimum(middle * num_parts // ends[-1], num_parts - 1)
    depth = tree.depth_tokens[nodes] // sample.block_size
    keys = sample.keys[sample.offsets[tree.row_order[tree.row_start[nodes]]] + depth - 1]
    by_key = np.argsort(keys)
    depths = np.unique(depth)
    by_depth = [by_key[depth[by_key] == value] for value in depths]
    return Partitioner(
        num_parts=num_parts,
        depths=depths,
        keys=tuple(keys[at] for at in by_depth),
        parts=tuple(part[nodes[at]] for at in by_depth),
        # a single sampled row does not show whether it has copies
        digests=digests[(counts > most) & (counts > 1)],
    )


def cut_values(values: Floats, weights: Ints, num_stretches: int) -> Floats:
    """Return the values at which stretches of nearly equal weight begin, rising, all but the first.

    A weight is the number of rows of its value; equal values make fewer stretches.
    """
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    goals = ends[-1] * np.arange(1, num_stretches) / num_stretches if len(ends) else np.zeros(0)
    return np.unique(values[order][np.searchsorted(ends, goals, side="right")])
