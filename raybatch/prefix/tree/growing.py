"""Finding the nodes of the prefix tree, level by level, over all groups of rows at once.

A group of rows is split by the key of its next block; a part of two rows or more becomes a node,
whose length is searched for instead of walked: chained keys that agree at one block agree at all
blocks before it.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys, Int64s, start_offsets

Bools = npt.NDArray[np.bool_]
# (groups, number of blocks for each) -> whether all rows of the group agree in that many
_Test = Callable[[Int64s, Int64s], Bools]


class Grown(NamedTuple):
    """Nodes in the order in which they were found: the root, its children, their children."""

    parent: Int64s  # [N], -1 for the root
    num_blocks: Int64s  # [N], blocks from the root to the end of the node
    first_row: Int64s  # [N], lowest row number below the node
    round_starts: list[int]  # node number at which each level begins, and N
    node_of_row: Int64s  # [R], deepest node of each row


class _Groups(NamedTuple):
    """Rows by group: `rows[bounds[g]:bounds[g + 1]]` agree in their first `known[g]` blocks."""

    rows: Int64s  # [M]
    bounds: Int64s  # [G + 1]
    parent: Int64s  # [G]
    known: Int64s  # [G]


def grow(keys: BlockKeys) -> Grown:
    """Return the nodes of the tree and the deepest node of each row."""
    num_rows = keys.num_rows
    parents, depths, first_rows = [np.array([-1])], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    round_starts, num_nodes = [0, 1], 1
    node_of_row = np.zeros(num_rows, np.int64)
    rows, depth = np.arange(num_rows), np.zeros(num_rows, np.int64)
    while len(rows):
        groups = _split(keys, rows, depth, node_of_row)
        if len(groups.parent) == 0:
            break
        depths.append(_agreed_blocks(keys, groups))
        parents.append(groups.parent)
        first_rows.append(np.minimum.reduceat(groups.rows, groups.bounds[:-1]))
        sizes = np.diff(groups.bounds)
        rows, depth = groups.rows, np.repeat(depths[-1], sizes)
        node_of_row[rows] = np.repeat(num_nodes + np.arange(len(sizes)), sizes)
        num_nodes += len(sizes)
        round_starts.append(num_nodes)
    return Grown(
        parent=np.concatenate(parents),
        num_blocks=np.concatenate(depths),
        first_row=np.concatenate(first_rows),
        round_starts=round_starts,
        node_of_row=node_of_row,
    )


def _split(keys: BlockKeys, rows: Int64s, depth: Int64s, node_of_row: Int64s) -> _Groups:
    """Group the rows that are not alone in their block number `depth`."""
    places = keys.offsets[rows] + depth
    goes_on = places < keys.offsets[rows + 1]
    rows, depth = rows[goes_on], depth[goes_on]
    # a key stands for all blocks before it too: rows of different nodes fall apart by it
    next_keys = keys.keys[places[goes_on]]
    order = np.argsort(next_keys)
    next_keys = next_keys[order]
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = next_keys[1:] != next_keys[:-1]
    starts = np.flatnonzero(is_first)
    sizes = np.diff(starts, append=len(rows))
    is_shared = sizes > 1
    order = order[np.repeat(is_shared, sizes)]
    bounds = start_offsets(sizes[is_shared])
    heads = order[bounds[:-1]]
    return _Groups(
        rows=rows[order], bounds=bounds, parent=node_of_row[rows[heads]], known=depth[heads] + 1
    )


def _agreed_blocks(keys: BlockKeys, groups: _Groups) -> Int64s:
    """Return how many leading blocks all rows of each group have in common."""
    rows, bounds = groups.rows, groups.bounds
    starts, sizes = bounds[:-1], np.diff(bounds)
    first = keys.offsets[rows]
    heads, tails = first[starts], first[bounds[1:] - 1]
    high = np.minimum.reduceat(keys.offsets[rows + 1] - first, starts)
    # two rows of a group say most of it, for two reads per step
    high = _search(groups.known, high, lambda at, probe: _same(keys, heads[at], tails[at], probe))

    def all_agree(at: Int64s, probe: Int64s) -> Bools:
        members = _ranges(starts[at], sizes[at])
        agree = _same(
            keys, np.repeat(heads[at], sizes[at]), first[members], np.repeat(probe, sizes[at])
        )
        return np.logical_and.reduceat(agree, start_offsets(sizes[at])[:-1])

    low = np.where(sizes == 2, high, groups.known)
    return _search(low, high, all_agree)


def _search(low: Int64s, high: Int64s, agrees: _Test) -> Int64s:
    """Return for each group the largest number up to `high` that agrees; `low` is known to."""
    low, high = low.copy(), high.copy()
    at = np.flatnonzero(low < high)
    # most often it is the upper bound itself
    probe = high[at]
    while len(at):
        good = agrees(at, probe)
        low[at] = np.where(good, probe, low[at])
        high[at] = np.where(good, high[at], probe - 1)
        at = at[low[at] < high[at]]
        probe = (low[at] + high[at] + 1) // 2
    return low


def _same(keys: BlockKeys, first: Int64s, other: Int64s, num_blocks: Int64s) -> Bools:
    same: Bools = keys.keys[first + num_blocks - 1] == keys.keys[other + num_blocks - 1]
    return same


def _ranges(starts: Int64s, sizes: Int64s) -> Int64s:
    """Return the numbers of all ranges, one range after another."""
    offsets = start_offsets(sizes)
    return np.repeat(starts - offsets[:-1], sizes) + np.arange(offsets[-1])
