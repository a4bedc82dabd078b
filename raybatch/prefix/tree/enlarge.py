"""The choice of shared prefixes: which nodes of the tree are computed once for the rows below.

An engine that shares at a single level computes each open node from the first token on, and a row
uses its nearest open node. So a deep node is worth opening when its rows save more than its whole
depth costs: the first-level prefixes are enlarged at the price of computing their heads again.
A row that its prefix covers entirely still needs one forward token.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import BlockKeys, Int64s
from raybatch.prefix.tree.prefix_tree import PrefixTree

Bools = npt.NDArray[np.bool_]


def multi_level(tree: PrefixTree) -> Bools:
    """Open every node but the root: bool [N]; for engines that share at all levels."""
    return tree.parent >= 0


def exact_single_level(
    tree: PrefixTree, keys: BlockKeys, *, representative: Int64s | None = None
) -> Bools:
    """Open the nodes with which a single level of sharing computes the fewest tokens: bool [N].

    A dynamic programme over pairs of a node and its nearest open ancestor, all nodes of one level
    of the tree at a time. There are no more pairs than keys. A tie opens fewer nodes.

    Args:
        representative: as of `find_representatives`, where identical rows are generated once;
            the others cost nothing.

    Source: facility location on a tree; BatchLLM (arXiv 2412.03594) solves the same by a greedy.
    """
    num_ending, num_covered = _ending_rows(tree, keys, representative)
    levels = _nodes_by_level(tree)
    above = _depths_above(tree, levels)
    opens = []
    below = np.zeros((len(levels[-1]), len(levels)), np.int64)
    for level in range(len(levels) - 1, 0, -1):
        nodes = levels[level]
        own = num_ending[nodes, None] * (tree.depth_tokens[nodes, None] - above[level])
        closed = own + below[:, :level]
        opened = tree.depth_tokens[nodes] + num_covered[nodes] + below[:, level]
        opens.append(opened[:, None] < closed)
        best = np.minimum(opened[:, None], closed)
        below = _sum_by_parent(best, tree.parent[nodes], levels[level - 1])
    return _follow(tree, levels, opens[::-1])


def nearest_open(tree: PrefixTree, open_nodes: Bools) -> Int64s:
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
    representative: Int64s | None = None,
) -> int:
    """Return the prompt tokens that are computed when each open node is computed once.

    Args:
        open_nodes: bool [N]; the root is never computed.
        multi_level: an open node continues the nearest open node above it, instead of computing
            all of its tokens.
    """
    nearest = nearest_open(tree, open_nodes)
    opened = np.flatnonzero(open_nodes[1:]) + 1
    prefix_tokens = int(tree.depth_tokens[opened].sum())
    if multi_level:
        prefix_tokens -= int(tree.depth_tokens[nearest[tree.parent[opened]]].sum())
    prefix = tree.depth_tokens[nearest[tree.deepest_nodes()]]
    rest = np.maximum(keys.num_tokens - prefix, 1)
    return prefix_tokens + int(rest[_is_generated(tree.num_rows, representative)].sum())


def _is_generated(num_rows: int, representative: Int64s | None) -> Bools:
    if representative is None:
        return np.ones(num_rows, np.bool_)
    return np.equal(representative, np.arange(num_rows))


def _ending_rows(
    tree: PrefixTree, keys: BlockKeys, representative: Int64s | None
) -> tuple[Int64s, Int64s]:
    """Count for each node the generated rows that end there, and those that it covers entirely."""
    deepest = tree.deepest_nodes()
    generated = _is_generated(tree.num_rows, representative)
    covered = generated & (keys.num_tokens <= tree.depth_tokens[deepest])
    return (
        np.bincount(deepest[generated], minlength=tree.num_nodes),
        np.bincount(deepest[covered], minlength=tree.num_nodes),
    )


def _nodes_by_level(tree: PrefixTree) -> list[Int64s]:
    levels = tree.levels()
    order = np.argsort(levels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(levels))[:-1])


def _places(nodes: Int64s, wanted: Int64s) -> Int64s:
    return np.searchsorted(nodes, wanted)


def _depths_above(tree: PrefixTree, levels: list[Int64s]) -> list[Int64s]:
    """Return for each level the depths of all ancestors of its nodes, int64 [nodes, level]."""
    above = [np.zeros((1, 0), np.int64)]
    for upper, nodes in pairwise(levels):
        parents = tree.parent[nodes]
        inherited = above[-1][_places(upper, parents)]
        above.append(np.hstack([inherited, tree.depth_tokens[parents, None]]))
    return above


def _sum_by_parent(costs: Int64s, parents: Int64s, upper: Int64s) -> Int64s:
    """Add up the rows of `costs` by parent; the parents are ascending nodes of `upper`."""
    sums = np.zeros((len(upper), costs.shape[1]), np.int64)
    starts = np.flatnonzero(np.diff(parents, prepend=-1))
    sums[_places(upper, parents[starts])] = np.add.reduceat(costs, starts, axis=0)
    return sums


def _follow(tree: PrefixTree, levels: list[Int64s], opens: list[Bools]) -> Bools:
    """Walk down from the root: a node's choice depends on the level of its open ancestor."""
    is_open = np.zeros(tree.num_nodes, np.bool_)
    open_level = np.zeros(1, np.int64)
    for level in range(1, len(levels)):
        nodes = levels[level]
        inherited = open_level[_places(levels[level - 1], tree.parent[nodes])]
        is_open[nodes] = opens[level - 1][np.arange(len(nodes)), inherited]
        open_level = np.where(is_open[nodes], level, inherited)
    return is_open
