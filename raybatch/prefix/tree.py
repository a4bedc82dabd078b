"""The prefix tree of a dataset in flat arrays: which rows share how many whole blocks.

The tree grows level by level, over all groups of rows at once. A group is split by the key of its
next block; a part of two rows or more becomes a node. A binary search finds the length of the
node: chained keys that agree at one block agree at all blocks before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from raybatch.prefix.block_keys import BlockKeys, equal_to_previous, ranges, start_offsets
from raybatch.records.arrays import Bools, Ints

# (groups, number of blocks for each) -> whether all rows of each group agree in these blocks
_Test = Callable[[Ints, Ints], Bools]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PrefixTree:
    """Nodes in depth-first pre-order; each but the root is a prefix of two rows or more.

    A node is the longest common prefix of the rows below it, so it has at least two children, or
    rows that share no longer prefix with another row. Children are in the order of their first
    input row. The root is the empty prefix, even if all rows share one.
    """

    # row numbers; neighbours share most: first the rows of a node that are in no child, in input
    # order, then those of its children
    row_order: Ints  # [R]
    parent: Ints  # [N], node above; -1 for the root, which is node 0
    depth_tokens: Ints  # [N], from the root to the end of the node
    row_start: Ints  # [N], the rows below node n are `row_order[row_start[n]:row_stop[n]]`
    row_stop: Ints  # [N]
    num_ending: Ints  # [N], rows whose deepest node this is; they are first in the node's slice

    @property
    def num_rows(self) -> int:
        return len(self.row_order)

    @property
    def num_nodes(self) -> int:
        return len(self.parent)

    def deepest_nodes(self) -> Ints:
        """Return the deepest node of each row, by row number: int64 [R]."""
        nodes = np.empty(self.num_rows, np.int64)
        nodes[self.row_order] = np.repeat(np.arange(self.num_nodes), self.num_ending)
        return nodes

    def node_stops(self) -> Ints:
        """Return the node after each node's subtree: int64 [N]."""
        stops = np.searchsorted(self.row_start, self.row_stop, side="left")
        stops[0] = self.num_nodes
        return stops

    def levels(self) -> Ints:
        """Return the number of nodes above each node: int64 [N]."""
        closed = np.bincount(self.node_stops(), minlength=self.num_nodes + 1)
        return np.arange(self.num_nodes) - np.cumsum(closed)[: self.num_nodes]

    def edge_tokens(self) -> Ints:
        """Return the tokens of each node that its parent does not have: int64 [N]."""
        edges = self.depth_tokens.copy()
        edges[1:] -= self.depth_tokens[self.parent[1:]]
        return edges


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeStats:
    """Counts of rows and tokens, and what sharing at all levels of the tree can save."""

    num_rows: int
    num_nodes: int
    num_duplicates: int  # rows that are identical to an earlier one; they count as rows everywhere
    logical_tokens: int  # prompt tokens of all rows
    saved_tokens: int  # logical tokens less physical ones
    # tokens to compute when every node is computed once. A row that its nodes cover entirely still
    # needs one forward token.
    physical_tokens: int
    mean_sharing_degree: float  # rows that share a token of the tree, on average over those tokens
    mean_prefix_len: float  # tokens of a row that are in the tree, on average over the rows
    mean_distinct_len: float  # tokens that a row computes for itself, on average over the rows


def build_tree(keys: BlockKeys) -> PrefixTree:
    """Build the prefix tree of all rows.

    Time is near-linear in rows: rows that share nothing cost one sort, and an edge of the tree
    costs the logarithm of its length. Memory is about 100 bytes per row without the keys. The
    result does not depend on the values of the hashes.
    """
    # nodes in the order in which they are found: the root, its children, their children
    parents, depths, first_rows = [np.array([-1])], [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]
    round_starts, num_nodes = [0, 1], 1
    node_of_row = np.zeros(keys.num_rows, np.int64)
    rows, depth = np.arange(keys.num_rows), np.zeros(keys.num_rows, np.int64)
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
    found_parent = np.concatenate(parents)
    pre_order, stops = _number(found_parent, np.concatenate(first_rows), round_starts)
    parent, depth_tokens = np.full(num_nodes, -1, np.int64), np.empty(num_nodes, np.int64)
    parent[pre_order[1:]] = pre_order[found_parent[1:]]
    depth_tokens[pre_order] = np.concatenate(depths) * keys.block_size
    node_of_row = pre_order[node_of_row]
    num_ending = np.bincount(node_of_row, minlength=num_nodes)
    starts = start_offsets(num_ending)
    # by node, then by number; both in one word, which sorts fastest
    packed = node_of_row * max(1, keys.num_rows) + np.arange(keys.num_rows)
    packed.sort()
    return PrefixTree(
        row_order=packed % max(1, keys.num_rows),
        parent=parent,
        depth_tokens=depth_tokens,
        row_start=starts[:-1],
        row_stop=starts[stops],
        num_ending=num_ending,
    )


def _number(parent: Ints, first_row: Ints, round_starts: list[int]) -> tuple[Ints, Ints]:
    """Return the pre-order number of each node, and the end of its subtree in pre-order."""
    rounds = [slice(a, b) for a, b in pairwise(round_starts)]
    sizes = np.ones(len(parent), np.int64)
    for nodes in reversed(rounds[1:]):
        np.add.at(sizes, parent[nodes], sizes[nodes])
    shift = np.zeros(len(parent), np.int64)
    shift[1:] = 1 + sizes_before(parent[1:], sizes[1:], np.lexsort((first_row[1:], parent[1:])))
    numbers = np.zeros(len(parent), np.int64)
    for nodes in rounds[1:]:
        numbers[nodes] = numbers[parent[nodes]] + shift[nodes]
    stops = np.empty(len(parent), np.int64)
    stops[numbers] = numbers + sizes
    return numbers, stops


def sizes_before(above: Ints, sizes: Ints, order: Ints) -> Ints:
    """Return the sizes of the siblings before each element, summed: int64 [n].

    `above` is the parent of each element; `order` has siblings next to each other.
    """
    before = start_offsets(sizes[order])[:-1]
    is_first = ~equal_to_previous(above[order])
    before -= before[is_first][np.cumsum(is_first) - 1]
    summed = np.empty(len(order), np.int64)
    summed[order] = before
    return summed


def tree_stats(tree: PrefixTree, keys: BlockKeys, representative: Ints) -> TreeStats:
    """Return what is shared at all levels of the tree; linear in rows and nodes."""
    edges = tree.edge_tokens()
    num_below = tree.row_stop - tree.row_start
    prefix = tree.depth_tokens[tree.deepest_nodes()]
    distinct = np.maximum(keys.num_tokens - prefix, 1)
    logical = int(keys.num_tokens.sum())
    physical = int(edges.sum() + distinct.sum())
    num_rows = max(1, tree.num_rows)
    is_duplicate = representative != np.arange(tree.num_rows)
    return TreeStats(
        num_rows=tree.num_rows,
        num_nodes=tree.num_nodes - 1,
        num_duplicates=int(np.count_nonzero(is_duplicate)),
        logical_tokens=logical,
        saved_tokens=logical - physical,
        physical_tokens=physical,
        mean_sharing_degree=float((edges * num_below).sum() / max(1, edges.sum())),
        mean_prefix_len=float(prefix.sum() / num_rows),
        mean_distinct_len=float(distinct.sum() / num_rows),
    )


class _Groups(NamedTuple):
    """Rows by group: `rows[bounds[g]:bounds[g + 1]]` agree in their first `known[g]` blocks."""

    rows: Ints  # [M]
    bounds: Ints  # [G + 1]
    parent: Ints  # [G]
    known: Ints  # [G]


def _split(keys: BlockKeys, rows: Ints, depth: Ints, node_of_row: Ints) -> _Groups:
    """Group the rows that are not alone in their block number `depth`."""
    places = keys.offsets[rows] + depth
    goes_on = places < keys.offsets[rows + 1]
    rows, depth = rows[goes_on], depth[goes_on]
    # a key covers all blocks before it too, so it also separates rows of different nodes
    next_keys = keys.keys[places[goes_on]]
    order = np.argsort(next_keys)
    next_keys = next_keys[order]
    starts = np.flatnonzero(~equal_to_previous(next_keys))
    sizes = np.diff(starts, append=len(rows))
    is_shared = sizes > 1
    order = order[np.repeat(is_shared, sizes)]
    bounds = start_offsets(sizes[is_shared])
    heads = order[bounds[:-1]]
    return _Groups(
        rows=rows[order], bounds=bounds, parent=node_of_row[rows[heads]], known=depth[heads] + 1
    )


def _agreed_blocks(keys: BlockKeys, groups: _Groups) -> Ints:
    """Return how many leading blocks all rows of each group have in common."""
    rows, bounds = groups.rows, groups.bounds
    starts, sizes = bounds[:-1], np.diff(bounds)
    first = keys.offsets[rows]
    heads, tails = first[starts], first[bounds[1:] - 1]
    high = np.minimum.reduceat(keys.offsets[rows + 1] - first, starts)
    # the first and the last row of a group narrow the range, with two reads per step
    high = _search(groups.known, high, lambda at, probe: _same(keys, heads[at], tails[at], probe))

    def all_agree(at: Ints, probe: Ints) -> Bools:
        members = ranges(starts[at], sizes[at])
        agree = _same(
            keys, np.repeat(heads[at], sizes[at]), first[members], np.repeat(probe, sizes[at])
        )
        return np.logical_and.reduceat(agree, start_offsets(sizes[at])[:-1])

    low = np.where(sizes == 2, high, groups.known)
    return _search(low, high, all_agree)


def _search(low: Ints, high: Ints, agrees: _Test) -> Ints:
    """Return for each group the largest number up to `high` that agrees; `low` agrees already."""
    low, high = low.copy(), high.copy()
    at = np.flatnonzero(low < high)
    # most often the result is the upper bound itself, so it is tested first
    probe = high[at]
    while len(at):
        good = agrees(at, probe)
        low[at] = np.where(good, probe, low[at])
        high[at] = np.where(good, high[at], probe - 1)
        at = at[low[at] < high[at]]
        probe = (low[at] + high[at] + 1) // 2
    return low


def _same(keys: BlockKeys, first: Ints, other: Ints, num_blocks: Ints) -> Bools:
    same: Bools = keys.keys[first + num_blocks - 1] == keys.keys[other + num_blocks - 1]
    return same


@dataclass(frozen=True, kw_only=True, slots=True)
class SummaryBox:
    """A rectangle over rows and token positions."""

    row_start: int  # place of its first row, in an order that puts wide nodes first
    row_stop: int
    token_start: float  # first position; a mean if nodes are merged
    token_stop: float
    level: int
    num_nodes: int  # prefixes in this box; 0 for unshared tokens
    saved_tokens: int  # prompt tokens in this box that need no computing
    example_row: int  # a row whose prompt runs through this box
    text: str = ""  # text of one prefix; "" if unknown

    @property
    def num_rows(self) -> int:
        return self.row_stop - self.row_start


def summarize_tree(tree: PrefixTree, keys: BlockKeys, *, max_boxes: int = 600) -> list[SummaryBox]:
    """Return at most about `max_boxes` boxes for a drawing, parents before children.

        rows  -------------------------------------->
        0     | system prompt                       |
        token | document A    | document B   | +812 |   nodes, widest first
          |   |  |   |  |     |  |  | |      ||||||||   tokens that rows do not share
          v

    Nodes with too few rows are merged with siblings of similar depth, and nodes below them are
    omitted. O(N log N) time for N nodes.
    """
    summarizer = _TreeSummarizer(tree, keys)
    min_rows = max(1, tree.num_rows // (max_boxes // 2))
    boxes = summarizer.boxes(min_rows)
    while len(boxes) > max_boxes and min_rows <= tree.num_rows:
        min_rows *= 2
        boxes = summarizer.boxes(min_rows)
    return boxes


def join_summaries(parts: Sequence[tuple[Sequence[SummaryBox], int]]) -> list[SummaryBox]:
    """Return the boxes of parts, each with its number of rows, one part after another.

    A prefix in several parts has a box in each of them.
    """
    firsts = accumulate((num_rows for _, num_rows in parts), initial=0)
    return [
        replace(box, row_start=box.row_start + first, row_stop=box.row_stop + first)
        for (boxes, _), first in zip(parts, firsts, strict=False)
        for box in boxes
    ]


class _TreeSummarizer:
    """Makes boxes of a tree, from the children of each node and sums over rows in tree order."""

    def __init__(self, tree: PrefixTree, keys: BlockKeys) -> None:
        self.tree = tree
        self.num_below = tree.row_stop - tree.row_start
        self.prompt_sums = start_offsets(keys.num_tokens[tree.row_order])
        self.by_parent = np.lexsort((-tree.depth_tokens, -self.num_below, tree.parent))
        parents = tree.parent[self.by_parent]
        self.first_child = np.searchsorted(parents, np.arange(tree.num_nodes + 1))

    def boxes(self, min_rows: int) -> list[SummaryBox]:
        """Return boxes of at least `min_rows` rows, except for the last merged siblings."""
        tree, boxes, stack = self.tree, list[SummaryBox](), [(0, 0, 0)]
        while stack:
            node, place, level = stack.pop()
            if node:
                boxes.append(self._box(np.array([node]), place, level))
            children = self.by_parent[self.first_child[node] : self.first_child[node + 1]]
            num_wide = int(np.searchsorted(-self.num_below[children], -min_rows, side="right"))
            for child in children[:num_wide].tolist():
                stack.append((child, place, level + 1))
                place += int(self.num_below[child])
            # small siblings, deep ones first, in runs of `min_rows` rows or a little more
            small = children[num_wide:]
            small = small[np.lexsort((small, -tree.depth_tokens[small]))]
            before = np.cumsum(self.num_below[small]) - self.num_below[small]
            cuts = np.flatnonzero(np.diff(before // min_rows)) + 1
            for nodes in np.split(small, cuts) if len(small) else []:
                shared = self._box(nodes, place, level + 1)
                place, rows = shared.row_stop, slice(shared.row_start, shared.row_stop)
                prompts = self.prompt_sums[tree.row_stop[nodes]]
                tokens = (prompts - self.prompt_sums[tree.row_start[nodes]]).sum()
                rest = self._rest(rows, tokens, shared.token_stop, level + 2, shared.example_row)
                boxes += [shared, *rest]
            # the rows of the node that are in no child
            first, count = int(tree.row_start[node]), int(tree.num_ending[node])
            if count:
                rows, depth = slice(place, place + count), float(tree.depth_tokens[node])
                tokens = self.prompt_sums[first + count] - self.prompt_sums[first]
                boxes += self._rest(rows, tokens, depth, level + 1, int(tree.row_order[first]))
        return boxes

    def _box(self, nodes: Ints, place: int, level: int) -> SummaryBox:
        """Return the box of the prefixes of some siblings."""
        tree, rows = self.tree, self.num_below[nodes]
        num_rows, depth = int(rows.sum()), tree.depth_tokens[nodes]
        start = int(tree.depth_tokens[tree.parent[nodes[0]]])
        return SummaryBox(
            row_start=place,
            row_stop=place + num_rows,
            token_start=start,
            token_stop=float((depth * rows).sum() / num_rows),
            level=level,
            num_nodes=len(nodes),
            saved_tokens=int(((rows - 1) * (depth - start)).sum()),
            example_row=int(tree.row_order[tree.row_start[nodes[0]]]),
        )

    def _rest(
        self, rows: slice, prompt_tokens: int, token_start: float, level: int, example_row: int
    ) -> list[SummaryBox]:
        """Return the box of the unshared tokens of some rows, if they have any."""
        mean_prompt = float(prompt_tokens) / (rows.stop - rows.start)
        if mean_prompt <= token_start:
            return []
        return [
            SummaryBox(
                row_start=rows.start,
                row_stop=rows.stop,
                token_start=token_start,
                token_stop=mean_prompt,
                level=level,
                num_nodes=0,
                saved_tokens=0,
                example_row=example_row,
            )
        ]
