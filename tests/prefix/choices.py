"""Other choices of shared prefixes, to compare with the exact one."""

import numpy as np


def naive_first_level(tree):
    """Open the children of the root: bool [N]."""
    return np.equal(tree.parent, 0)


def greedy_single_level(tree, keys, *, representative=None):
    """Open nodes bottom-up as long as each by itself saves tokens: bool [N].

    A node becomes a separate prefix next to its parent if the tokens that its rows share beyond the
    parent outweigh computing the parent's tokens once more. Never worse than
    `naive_first_level`, never better than `exact_single_level`, whose arguments it takes.

    Source: BatchLLM (arXiv 2412.03594), algorithm 1; the forward token of covered rows is added.
    """
    rows, deepest = np.arange(tree.num_rows), tree.deepest_nodes()
    generated = np.ones(tree.num_rows, bool) if representative is None else representative == rows
    is_covered = generated & (keys.num_tokens <= tree.depth_tokens[deepest])
    num_rows, num_covered = (
        np.bincount(deepest[chosen], minlength=tree.num_nodes) for chosen in (generated, is_covered)
    )
    edges, levels = tree.edge_tokens(), tree.levels()
    moving = at = np.zeros(0, np.int64)
    for level in range(int(levels.max()), 0, -1):
        nodes = np.flatnonzero(levels == level)
        gain = (num_rows[moving] - 1) * (tree.depth_tokens[moving] - tree.depth_tokens[at])
        moves_up = gain - num_covered[moving] > edges[at]
        np.add.at(num_rows, at[~moves_up], num_rows[moving[~moves_up]])
        moving = np.concatenate([moving[moves_up], nodes])
        at = np.concatenate([tree.parent[at[moves_up]], tree.parent[nodes]])
    is_open = np.zeros(tree.num_nodes, bool)
    is_open[moving[num_rows[moving] > 1]] = True
    return is_open
