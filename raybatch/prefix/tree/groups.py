"""Prefix groups, and entries: the rows that run together, and what their shared prefixes cost.

A group is the rows that use one shared prefix. With one level of sharing an entry is a group, or a
row that is alone and its duplicates. With sharing at all levels it is a subtree of bounded size.
What is larger is passed through, so that a system prompt of all rows leaves something to order:

    root ............ passed through
     |-- system ..... passed through; the rows that end here are an entry
     |    |-- document 1, with all below -> entry
     |    `-- document 2, with all below -> entry
     `-- other prompts -----------------> entry
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys, Int64s
from raybatch.prefix.load import Floats, Ints
from raybatch.prefix.tree.enlarge import Bools, nearest_open
from raybatch.prefix.tree.prefix_tree import PrefixTree

# a subtree with a larger share of the rows is passed through, if it fills more than a unit
_LARGE_FRACTION = 1 / 16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixGroups:
    """Groups of two rows or more, numbered by their first row in the input.

    Args:
        group_id: group of each row; -1 for a row that is alone.
        prefix_tokens: tokens of each row that its group shares; 0 for a row that is alone.
        num_rows: rows of each group, duplicates included.
        prefix_len: tokens of the shared prefix of each group.
        distinct_tokens: tokens of each group beyond its prefix: the sum over the rows that are
            generated, at least 1 for each.
        first_row: lowest row number of each group.
        representative: the row that is generated in place of each row; itself, unless it is a
            duplicate of an earlier one.
    """

    group_id: Int64s  # [R]
    prefix_tokens: npt.NDArray[np.int32]  # [R]
    num_rows: Int64s  # [G]
    prefix_len: Int64s  # [G]
    distinct_tokens: Int64s  # [G]
    first_row: Int64s  # [G]
    representative: Int64s  # [R]

    @property
    def num_groups(self) -> int:
        """Groups; rows that are alone belong to none."""
        return len(self.num_rows)


def make_groups(
    tree: PrefixTree, keys: BlockKeys, open_nodes: Bools, representative: Int64s | None = None
) -> PrefixGroups:
    """Group the rows by their nearest open node; linear in rows and nodes.

    Args:
        representative: as of `find_representatives`, to generate identical rows once; None
            generates every row. Only for results that do not depend on the row.
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
    counted = np.flatnonzero((group_id >= 0) & (representative == rows))
    distinct = np.maximum(keys.num_tokens - prefix_tokens, 1)
    distinct_tokens = np.zeros(len(chosen), np.int64)
    np.add.at(distinct_tokens, group_id[counted], distinct[counted])
    return PrefixGroups(
        group_id=group_id,
        prefix_tokens=prefix_tokens.astype(np.int32),
        num_rows=counts[chosen],
        prefix_len=tree.depth_tokens[chosen],
        distinct_tokens=distinct_tokens,
        first_row=first_row[chosen],
        representative=representative,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Entries:
    """Rows in entries; arrays are read only.

    Args:
        rows: int64 [R], the rows of one entry after those of another, in the order of the tree,
            identical ones side by side.
        starts: int64 [E + 1], where entries begin in `rows`.
        prefix_tokens: int64 [E], tokens of the prefixes that an entry computes once. What several
            entries share is split among them by their rows.
    """

    rows: Ints
    starts: Ints
    prefix_tokens: Ints
    node: Ints


def entries_of_groups(tree: PrefixTree, is_open: Bools, representative: Ints) -> Entries:
    """Return the entries where each row shares the deepest open node above it."""
    own = np.where(is_open, tree.depth_tokens, 0)
    own[0] = 0
    return _entries(tree, nearest_open(tree, is_open), own, representative)


def entries_of_subtrees(tree: PrefixTree, unit_rows: int, representative: Ints) -> Entries:
    """Return the entries where each node of the tree is shared by all that is below it.

    An entry is the subtree of a highest node that has at most one unit's rows, or a sixteenth of
    all rows where that is more, or what ends at a node above.
    """
    is_passed = passed_nodes(tree, unit_rows)
    edges = tree.edge_tokens()
    entries = _entries(
        tree,
        nearest_open(tree, is_passed[tree.parent]),
        np.where(is_passed, 0, edges),
        representative,
    )
    # rounded at the borders of entries, so that all shares of a node add up to its tokens
    before = np.rint(_tokens_before(tree, np.flatnonzero(is_passed), edges)[entries.starts])
    shares: Ints = np.diff(before).astype(np.int64)
    return replace(entries, prefix_tokens=entries.prefix_tokens + shares)


def passed_nodes(tree: PrefixTree, unit_rows: int) -> Bools:
    """Return the nodes that are too large to stay in one piece: bool [N]; the root is one."""
    sizes = tree.row_stop - tree.row_start
    is_passed: Bools = sizes > max(unit_rows, _LARGE_FRACTION * tree.num_rows)
    is_passed[0] = True
    return is_passed


def _tokens_before(tree: PrefixTree, nodes: Ints, edges: Ints) -> Floats:
    """Return what the rows before each place bear of some nodes, and all rows: float64 [R + 1].

    Each row below a node bears an equal share of the node's own tokens.
    """
    start, stop = tree.row_start[nodes], tree.row_stop[nodes]
    share = edges[nodes] / np.maximum(stop - start, 1)
    change = np.zeros(tree.num_rows + 1)
    np.add.at(change, start, share)
    np.add.at(change, stop, -share)
    per_row = np.cumsum(change)[:-1].clip(min=0)
    return np.concatenate([np.zeros(1), np.cumsum(per_row)])


def _entries(tree: PrefixTree, entry_of_node: Ints, own_tokens: Ints, first_equal: Ints) -> Entries:
    """Return the entries of all rows.

    Args:
        entry_of_node: int64 [N], node that names the entry; 0 for none.
        own_tokens: int64 [N], tokens of each node that its entry computes once.
        first_equal: int64 [R], the first row that is identical.
    """
    deepest = tree.deepest_nodes()
    places = _places(deepest, first_equal)
    label = _labels(entry_of_node[deepest], places, places[first_equal], tree.num_nodes)
    by_entry = np.lexsort((places, label))
    starts = np.append(np.flatnonzero(np.diff(label[by_entry], prepend=-1)), len(label))
    first = deepest[by_entry[starts[:-1]]]
    tokens = np.bincount(entry_of_node, own_tokens, minlength=tree.num_nodes).astype(np.int64)
    tokens[0] = 0
    return Entries(
        rows=by_entry,
        starts=starts,
        prefix_tokens=tokens[entry_of_node[first]],
        node=np.where(entry_of_node[first] > 0, entry_of_node[first], first),
    )


def _places(deepest: Ints, representative: Ints) -> Ints:
    """Return the place of each row in the order of the tree, identical rows side by side."""
    places = np.empty(len(deepest), np.int64)
    places[np.lexsort((representative, deepest))] = np.arange(len(deepest))
    return places


def _labels(entry: Ints, places: Ints, first_equal: Ints, num_nodes: int) -> Ints:
    """Return for each row the first place of its entry: int64 [R]."""
    first = np.full(num_nodes, len(places))
    np.minimum.at(first, entry, places)
    label: Ints = np.where(entry > 0, first[entry], first_equal)
    return label
