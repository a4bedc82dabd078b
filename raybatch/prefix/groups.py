"""Prefix groups: the rows that use one shared prefix, and the rows that are identical."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys, Int64s, find_representatives
from raybatch.prefix.enlarge import Bools, nearest_open
from raybatch.prefix.tree import PrefixTree

__all__ = ["PrefixGroups", "collect_groups", "make_groups"]


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
    tree: PrefixTree, keys: BlockKeys, open_nodes: Bools, *, dedup: bool
) -> PrefixGroups:
    """Group the rows by their nearest open node; linear in rows and nodes.

    Args:
        tree: prefix tree of all rows.
        keys: the keys from which it was built.
        open_nodes: bool [N], which nodes are shared prefixes.
        dedup: generate identical rows once. Only for results that do not depend on the row.
    """
    node_of_row = nearest_open(tree, open_nodes)[tree.deepest_nodes()]
    return collect_groups(node_of_row, tree.depth_tokens, keys, dedup=dedup)


def collect_groups(
    label: Int64s, prefix_len: Int64s, keys: BlockKeys, *, dedup: bool
) -> PrefixGroups:
    """Make a group of the rows of each label that has a prefix and two rows or more.

    Args:
        label: int64 [R], label of each row.
        prefix_len: int64 [labels], tokens that the rows of a label share; whole blocks.
        keys: keys of the rows.
        dedup: generate identical rows once.
    """
    rows = np.arange(keys.num_rows)
    counts = np.bincount(label, minlength=len(prefix_len))
    first_row = np.full(len(prefix_len), keys.num_rows)
    np.minimum.at(first_row, label, rows)
    chosen = np.flatnonzero((counts > 1) & (prefix_len > 0))
    chosen = chosen[np.argsort(first_row[chosen])]
    id_of_label = np.full(len(prefix_len), -1)
    id_of_label[chosen] = np.arange(len(chosen))
    group_id = id_of_label[label]
    prefix_tokens = np.where(group_id >= 0, prefix_len[label], 0)
    representative = find_representatives(keys) if dedup else rows
    counted = np.flatnonzero((group_id >= 0) & (representative == rows))
    distinct = np.maximum(keys.num_tokens - prefix_tokens, 1)
    distinct_tokens = np.zeros(len(chosen), np.int64)
    np.add.at(distinct_tokens, group_id[counted], distinct[counted])
    return PrefixGroups(
        group_id=group_id,
        prefix_tokens=prefix_tokens.astype(np.int32),
        num_rows=counts[chosen],
        prefix_len=prefix_len[chosen],
        distinct_tokens=distinct_tokens,
        first_row=first_row[chosen],
        representative=representative,
    )
