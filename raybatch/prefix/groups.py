"""Chooses shared prefixes, and forms prefix groups and scheduling groups.

An engine that shares at a single level computes each open node from the first token on, and a row
uses its nearest open node. So a deep node is worth opening if its rows save more than the tokens
of its whole depth: a longer first-level prefix costs computing its head again.
A row that its prefix covers entirely still needs one forward token.

A prefix group is the rows that use one shared prefix. A scheduling group is rows that run together:
with one level of sharing a prefix group, or a single row and its duplicates; with sharing at all
levels a subtree of bounded size. A larger subtree is split, so that a system prompt of all rows
leaves something to order:

    root ............ split
     |-- system ..... split; the rows that end here are a scheduling group
     |    |-- document 1 and its subtree -> scheduling group
     |    `-- document 2 and its subtree -> scheduling group
     `-- other prompts -----------------> scheduling group
"""

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.tree import PrefixTree
from raybatch.records.arrays import Bools, Ints

# a subtree with a larger fraction of the rows is split, if it fills more than a unit
_LARGE_FRACTION = 1 / 16


def multi_level(tree: PrefixTree) -> Bools:
    """Open every node but the root: bool [N]; for engines that share at all levels."""
    return tree.parent >= 0


def exact_single_level(
    tree: PrefixTree, keys: BlockKeys, *, representative: Ints | None = None
) -> Bools:
    """Open the nodes with which a single level of sharing computes the fewest tokens: bool [N].

    A dynamic program over pairs of a node and its nearest open ancestor, all nodes of one level
    of the tree at a time. There are no more pairs than keys. A tie opens fewer nodes. With the rows
    of `find_representatives` identical rows are generated once, and duplicates cost nothing.

    Source: facility location on a tree; BatchLLM (arXiv 2412.03594) solves the same by a greedy.
    """
    num_ending, num_covered = _ending_rows(tree, keys, representative)
    depth, level_of_node = tree.depth_tokens, tree.levels()
    by_level = np.argsort(level_of_node, kind="stable")
    levels = np.split(by_level, np.cumsum(np.bincount(level_of_node))[:-1])
    # for each level: the parents' indices in the level above, and the depths of all ancestors
    parents, above = [np.zeros(1, np.int64)], [np.zeros((1, 0), np.int64)]
    for upper, nodes in pairwise(levels):
        parents.append(np.searchsorted(upper, tree.parent[nodes]))
        inherited = above[-1][parents[-1]]
        above.append(np.hstack([inherited, depth[tree.parent[nodes], None]]))
    opens = []
    below = np.zeros((len(levels[-1]), len(levels)), np.int64)
    for level in range(len(levels) - 1, 0, -1):
        nodes = levels[level]
        closed = num_ending[nodes, None] * (depth[nodes, None] - above[level]) + below[:, :level]
        opened = depth[nodes] + num_covered[nodes] + below[:, level]
        opens.append(opened[:, None] < closed)
        best = np.minimum(opened[:, None], closed)
        # parents ascend, and not every node of the level above is a parent
        below = np.zeros((len(levels[level - 1]), level), np.int64)
        starts = np.flatnonzero(np.diff(parents[level], prepend=-1))
        below[parents[level][starts]] = np.add.reduceat(best, starts, axis=0)
    # down from the root: a node's choice depends on the level of its open ancestor
    is_open, open_level = np.zeros(tree.num_nodes, np.bool_), np.zeros(1, np.int64)
    for level, choices in enumerate(reversed(opens), start=1):
        inherited = open_level[parents[level]]
        is_open[levels[level]] = choices[np.arange(len(inherited)), inherited]
        open_level = np.where(is_open[levels[level]], level, inherited)
    return is_open


def nearest_open(tree: PrefixTree, open_nodes: Bools) -> Ints:
    """Return for each node itself when it is open, else its nearest open ancestor: int64 [N].

    The root counts as open.
    """
    nearest = np.where(open_nodes, np.arange(tree.num_nodes), tree.parent)
    nearest[0] = 0
    while True:
        further = nearest[nearest]
        if np.array_equal(further, nearest):
            return nearest
        nearest = further


def num_computed_tokens(
    tree: PrefixTree,
    keys: BlockKeys,
    open_nodes: Bools,
    multi_level: bool = False,
    *,
    representative: Ints | None = None,
) -> int:
    """Return the prompt tokens that are computed when each open node is computed once.

    With `multi_level` an open node continues the nearest open node above it, instead of computing
    all of its tokens. The root is never computed.
    """
    nearest = nearest_open(tree, open_nodes)
    opened = np.flatnonzero(open_nodes[1:]) + 1
    prefix_tokens = int(tree.depth_tokens[opened].sum())
    if multi_level:
        prefix_tokens -= int(tree.depth_tokens[nearest[tree.parent[opened]]].sum())
    prefix = tree.depth_tokens[nearest[tree.deepest_nodes()]]
    rest = np.maximum(keys.num_tokens - prefix, 1)
    return prefix_tokens + int(rest[_is_generated(tree.num_rows, representative)].sum())


def _is_generated(num_rows: int, representative: Ints | None) -> Bools:
    if representative is None:
        return np.ones(num_rows, np.bool_)
    return np.equal(representative, np.arange(num_rows))


def _ending_rows(
    tree: PrefixTree, keys: BlockKeys, representative: Ints | None
) -> tuple[Ints, Ints]:
    """Count for each node the generated rows that end there, and those that it covers entirely."""
    deepest = tree.deepest_nodes()
    generated = _is_generated(tree.num_rows, representative)
    covered = generated & (keys.num_tokens <= tree.depth_tokens[deepest])
    return (
        np.bincount(deepest[generated], minlength=tree.num_nodes),
        np.bincount(deepest[covered], minlength=tree.num_nodes),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PlannedGroups:
    """Groups of two rows or more, numbered by their first row in the input."""

    group_id: Ints  # [R], -1 for a row that is alone
    # tokens of each row that its group shares; 0 for a row that is alone
    prefix_tokens: npt.NDArray[np.int32]  # [R]
    num_rows: Ints  # [G], rows of each group, duplicates included
    prefix_len: Ints  # [G], tokens of the shared prefix of each group
    first_row: Ints  # [G], lowest row number of each group
    # the row that is generated in place of each row; itself, unless it is a duplicate of an earlier
    # one
    representative: Ints  # [R]

    @property
    def num_groups(self) -> int:
        return len(self.num_rows)


def make_groups(
    tree: PrefixTree, keys: BlockKeys, open_nodes: Bools, representative: Ints | None = None
) -> PlannedGroups:
    """Group the rows by their nearest open node; linear in rows and nodes.

    With the rows of `find_representatives` identical rows are generated once, else each is.
    """
    rows = np.arange(keys.num_rows)
    representative = rows if representative is None else representative
    node_of_row = nearest_open(tree, open_nodes)[tree.deepest_nodes()]
    counts = np.bincount(node_of_row, minlength=tree.num_nodes)
    first_row = np.full(tree.num_nodes, keys.num_rows)
    np.minimum.at(first_row, node_of_row, rows)
    chosen = np.flatnonzero((counts > 1) & (tree.depth_tokens > 0))
    chosen = chosen[np.argsort(first_row[chosen])]
    id_of_node = np.full(tree.num_nodes, -1)
    id_of_node[chosen] = np.arange(len(chosen))
    group_id = id_of_node[node_of_row]
    prefix_tokens = np.where(group_id >= 0, tree.depth_tokens[node_of_row], 0)
    return PlannedGroups(
        group_id=group_id,
        prefix_tokens=prefix_tokens.astype(np.int32),
        num_rows=counts[chosen],
        prefix_len=tree.depth_tokens[chosen],
        first_row=first_row[chosen],
        representative=representative,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SchedulingGroups:
    """Rows by scheduling group; arrays are read only."""

    rows: Ints  # [R], by scheduling group, in the order of the tree
    starts: Ints  # [E + 1], where scheduling groups begin in `rows`
    prefix_tokens: Ints  # [E], computed once; tokens that several groups share are split by rows
    node: Ints  # [E], the deepest node of the tree above all rows of a scheduling group


def sched_groups_by_prefix(
    tree: PrefixTree, is_open: Bools, representative: Ints
) -> SchedulingGroups:
    """Return the scheduling groups if each row shares the deepest open node above it."""
    own = np.where(is_open, tree.depth_tokens, 0)
    own[0] = 0
    return _sched_groups(tree, nearest_open(tree, is_open), own, representative)


def sched_groups_by_subtree(
    tree: PrefixTree, unit_rows: int, representative: Ints
) -> SchedulingGroups:
    """Return the scheduling groups if each node of the tree is shared by its subtree.

    A group is the subtree of a highest node that has at most `unit_rows` rows (or 1/16 of all rows
    if that is more), or the rows that end at a node above such nodes.
    """
    is_split, edges = split_nodes(tree, unit_rows), tree.edge_tokens()
    own = np.where(is_split, 0, edges)
    sched_groups = _sched_groups(
        tree, nearest_open(tree, is_split[tree.parent]), own, representative
    )
    # each row below a split node bears an equal share of the node's own tokens
    start, stop = tree.row_start[is_split], tree.row_stop[is_split]
    share = edges[is_split] / np.maximum(stop - start, 1)
    change = np.zeros(tree.num_rows + 1)
    np.add.at(change, start, share)
    np.add.at(change, stop, -share)
    per_row = np.cumsum(change)[:-1].clip(min=0)
    before = np.concatenate([np.zeros(1), np.cumsum(per_row)])
    # rounded at the borders of groups, so that all shares of a node add up to its tokens
    shares: Ints = np.diff(np.rint(before[sched_groups.starts])).astype(np.int64)
    return replace(sched_groups, prefix_tokens=sched_groups.prefix_tokens + shares)


def split_nodes(tree: PrefixTree, unit_rows: int) -> Bools:
    """Return the nodes that are split because they are too large, bool [N]; the root is one."""
    sizes = tree.row_stop - tree.row_start
    is_split: Bools = sizes > max(unit_rows, _LARGE_FRACTION * tree.num_rows)
    is_split[0] = True
    return is_split


def _sched_groups(
    tree: PrefixTree, sched_of_node: Ints, own_tokens: Ints, first_equal: Ints
) -> SchedulingGroups:
    """Return the scheduling groups of all rows.

    `sched_of_node` [N] maps each node to the node that identifies its scheduling group, 0 for none.
    `own_tokens` [N] are the tokens of each node that its scheduling group computes once.
    """
    deepest = tree.deepest_nodes()
    sched_group = sched_of_node[deepest]
    # place of each row in the order of the tree, and the first place of each scheduling group
    places = np.empty(len(deepest), np.int64)
    places[np.lexsort((first_equal, deepest))] = np.arange(len(deepest))
    first_place = np.full(tree.num_nodes, len(places))
    np.minimum.at(first_place, sched_group, places)
    label = np.where(sched_group > 0, first_place[sched_group], places[first_equal])
    by_sched_group = np.lexsort((places, label))
    starts = np.append(np.flatnonzero(np.diff(label[by_sched_group], prepend=-1)), len(label))
    first = deepest[by_sched_group[starts[:-1]]]
    tokens = np.bincount(sched_of_node, own_tokens, minlength=tree.num_nodes).astype(np.int64)
    tokens[0] = 0
    return SchedulingGroups(
        rows=by_sched_group,
        starts=starts,
        prefix_tokens=tokens[sched_of_node[first]],
        node=np.where(sched_of_node[first] > 0, sched_of_node[first], first),
    )
