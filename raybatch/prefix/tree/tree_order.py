"""The order of entries by output per prefill that keeps together what shares a prefix.

Siblings are ordered by the ratio of all that is below them, and what is below one of them runs
before the next. So each prefix, at whatever depth, is needed by rows that follow each other, and a
cache of any size that holds a row finds it, as if rows were sorted by prompt:

    root
     |-- document 2 ... ratio 4
     |    |-- part 1 .. ratio 5
     |    `-- part 2 .. ratio 1
     `-- document 1 ... ratio 3
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from raybatch.prefix.block_keys import start_offsets
from raybatch.prefix.load import Floats, GroupLoad, Ints
from raybatch.prefix.order import decode_ratio
from raybatch.prefix.tree.enlarge import Bools, nearest_open
from raybatch.prefix.tree.prefix_tree import PrefixTree

_Number = TypeVar("_Number", np.int64, np.float64)


def order_in_tree(
    tree: PrefixTree, node: Ints, load: GroupLoad, *, is_rising: bool = False
) -> Ints:
    """Return the entries in their order: int64 [E], a permutation.

    Equal siblings keep the order of the tree. O((E + N) log (E + N)).

    Args:
        node: int64 [E], the deepest node that all rows of an entry are below.
        is_rising: least output per computed prompt token first.
    """
    num_entries, stops = len(node), tree.node_stops()
    keys = np.concatenate([_keys(load, is_rising), _node_keys(tree, node, load, is_rising)[1:]])
    above = np.concatenate([node, tree.parent[1:]])
    first_row = np.concatenate([tree.row_start[node], tree.row_start[1:]])
    sizes = _sums_below(tree, node, np.ones(num_entries, np.int64))[1:]
    sizes = np.concatenate([np.ones(num_entries, np.int64), sizes])
    siblings = np.lexsort((first_row, keys, above))
    before = start_offsets(sizes[siblings])[:-1]
    is_first = np.diff(above[siblings], prepend=-1) != 0
    before -= before[is_first][np.cumsum(is_first) - 1]
    shift = np.empty(len(siblings), np.int64)
    shift[siblings] = before
    # the place of an entry is the sum of the shifts on its path from the root
    change = np.zeros(tree.num_nodes + 1, np.int64)
    change[1:-1] = shift[num_entries:]
    np.subtract.at(change, stops[1:], shift[num_entries:])
    order = np.empty(num_entries, np.int64)
    order[np.cumsum(change)[node] + shift[:num_entries]] = np.arange(num_entries)
    return order


def values_in_tree(
    tree: PrefixTree,
    node: Ints,
    load: GroupLoad,
    order: Ints,
    is_passed: Bools,
    *,
    is_rising: bool = False,
) -> Floats:
    """Return values, rising, by which entries of several trees are merged: float64 [E].

    Entries below a highest node that is not passed through share one value, so none of another
    tree comes between them.

    Args:
        is_passed: bool [N], nodes that are too large to stay in one piece; the root is one.
    """
    is_top = ~is_passed & is_passed[tree.parent]
    top = nearest_open(tree, is_top)[node]
    of_node = _node_keys(tree, node, load, is_rising)[top]
    values = np.where(top > 0, of_node, _keys(load, is_rising))[order]
    # a subtree in one piece may hold less than what comes after it in its parent's place
    rising: Floats = np.maximum.accumulate(values)
    return rising


def _keys(load: GroupLoad, is_rising: bool) -> Floats:
    return decode_ratio(load) * (1 if is_rising else -1)


def _node_keys(tree: PrefixTree, node: Ints, load: GroupLoad, is_rising: bool) -> Floats:
    """Return the key of all entries below each node together: float64 [N]."""
    outputs = np.ones(len(node)) if load.output_tokens is None else load.output_tokens
    below = GroupLoad(
        prefix_tokens=_sums_below(tree, node, load.prefix_tokens),
        distinct_tokens=_sums_below(tree, node, load.distinct_tokens),
        num_rows=np.maximum(_sums_below(tree, node, load.num_rows), 1),
        output_tokens=_sums_below(tree, node, outputs).clip(min=0),
    )
    return _keys(below, is_rising)


def _sums_below(tree: PrefixTree, node: Ints, values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    of_node = np.zeros(tree.num_nodes + 1, values.dtype)
    np.add.at(of_node[1:], node, values)
    ends = np.cumsum(of_node, dtype=values.dtype)
    sums: npt.NDArray[_Number] = ends[tree.node_stops()] - ends[:-1]
    return sums
