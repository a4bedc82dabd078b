"""Cuts an input into parts that are planned separately, and keeps rows that share much together.

The tree of a sample shows the dense nodes: those with more than a quarter of the rows of a part.
Dense nodes are split, and the nodes directly below them are packed into parts. A row below no
sampled node is assigned by the hash of its first block after the dense nodes, so rows that share
more than those nodes are together as well. Dense identical rows are spread over all parts, and
generated once in each.

    root ......... dense, split
     |-- system .. dense, split
     |    |-- document 1, 2, 3 -> part 0
     |    |-- document 4, 5 ---> part 1
     |    `-- unseen documents -> by the hash of their next block
     |-- other prompts ---------> part 2
     `-- one dense prompt ------> all parts
"""

from dataclasses import dataclass

import numpy as np

from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.tree import build_tree
from raybatch.records.arrays import Floats, Ints, Uint64s
from raybatch.records.hashing import mix64

# a node with more than this share of the rows of a part is split
_DENSE_FRACTION = 0.25


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Partitioner:
    """Assigns rows to parts; deterministic in every process."""

    num_parts: int
    depths: Ints  # [D], depths of nodes in blocks, rising
    keys: tuple[Uint64s, ...]  # keys of the nodes of each depth, rising
    parts: tuple[Ints, ...]  # parts of the nodes of each depth; -1 for a dense node
    digests: Uint64s  # digests of dense identical rows, rising

    def assign(self, rows: BlockKeys, numbers: Ints) -> Ints:
        """Return the part of each row, int64 [R]."""
        part = np.full(rows.num_rows, -1)
        leaves_at = np.zeros(rows.num_rows, np.int64)
        for depth, keys, parts in zip(self.depths.tolist(), self.keys, self.parts, strict=True):
            deep = np.flatnonzero((rows.num_blocks >= depth) & (part < 0))
            wanted = rows.keys[rows.offsets[deep] + depth - 1]
            place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            is_found = keys[place] == wanted
            part[deep[is_found]] = parts[place[is_found]]
            leaves_at[deep[is_found]] = depth
        unseen = np.flatnonzero(part < 0)
        # assigned by the first block after the dense nodes, or by the digest if there is none
        words, has_more = rows.digest[unseen].copy(), (rows.num_blocks > leaves_at)[unseen]
        deeper = unseen[has_more]
        words[has_more] = rows.keys[rows.offsets[deeper] + leaves_at[deeper]]
        part[unseen] = self._dealt(words)
        copies = unseen[np.isin(rows.digest[unseen], self.digests)]
        # hashed, because copies may be at even distances
        part[copies] = self._dealt(numbers[copies].astype(np.uint64))
        return part

    def _dealt(self, words: Uint64s) -> Ints:
        return (mix64(words) % np.uint64(self.num_parts)).astype(np.int64)


def choose_parts(sample: BlockKeys, num_parts: int) -> Partitioner:
    """Choose parts with nearly equal numbers of rows; near-linear in the sample."""
    tree = build_tree(sample)
    sizes = tree.row_stop - tree.row_start
    most = _DENSE_FRACTION * sample.num_rows / num_parts
    digests, counts = np.unique(sample.digest, return_counts=True)
    is_dense = sizes > most
    is_dense[0] = True
    # a node is no larger than its parent, so ancestors of a dense node are dense
    is_packed = ~is_dense & is_dense[tree.parent]
    is_packed[0] = False
    nodes = np.flatnonzero(is_packed | is_dense)[1:]
    # whole nodes are packed into parts with nearly equal numbers of rows
    part, packed = np.full(len(sizes), -1), np.flatnonzero(is_packed)
    ends = np.cumsum(sizes[packed])
    if len(packed):
        middle = ends - sizes[packed] / 2
        part[packed] = np.minimum(middle * num_parts // ends[-1], num_parts - 1)
    depth = tree.depth_tokens[nodes] // sample.block_size
    keys = sample.keys[sample.offsets[tree.row_order[tree.row_start[nodes]]] + depth - 1]
    by_key = np.argsort(keys)
    depths = np.unique(depth)
    by_depth = [by_key[depth[by_key] == value] for value in depths]
    return Partitioner(
        num_parts=num_parts,
        depths=depths,
        keys=tuple(keys[at] for at in by_depth),
        parts=tuple(part[nodes[at]] for at in by_depth),
        # a single sampled row does not show whether it has copies
        digests=digests[(counts > most) & (counts > 1)],
    )


def cut_values(values: Floats, weights: Ints, num_stretches: int) -> Floats:
    """Return the values at which stretches of nearly equal weight begin, rising, all but the first.

    A weight is the number of rows of its value; equal values make fewer stretches.
    """
    order = np.argsort(values, kind="stable")
    ends = np.cumsum(weights[order])
    goals = ends[-1] * np.arange(1, num_stretches) / num_stretches if len(ends) else np.zeros(0)
    return np.unique(values[order][np.searchsorted(ends, goals, side="right")])
