"""Prefix groups: the rows that use one shared prefix, and the rows that are identical."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys, Int64s
from raybatch.prefix.tree.enlarge import Bools, nearest_open
from raybatch.prefix.tree.prefix_tree import PrefixTree


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
        tree: prefix tree of all rows.
        keys: the keys from which it was built.
        open_nodes: bool [N], which nodes are shared prefixes.
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
