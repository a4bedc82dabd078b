"""The prefix tree reduced to boxes for a drawing: small nodes are merged.

rows  -------------------------------------->
0     | system prompt                       |
token | document A    | document B   | +812 |   nodes, widest first
  |   |  |   |  |     |  |  | |      ||||||||   tokens that rows do not share
  v
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from raybatch.prefix.block_keys import BlockKeys, start_offsets
from raybatch.prefix.tree import PrefixTree
from raybatch.records.arrays import Ints


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
    """Return at most about `max_boxes` boxes, parents before children.

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
