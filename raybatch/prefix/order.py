"""The order in which groups run, from their token counts. What shares a prefix stays together.

auto   groups of every length spread over the run, long outputs early enough to end with it, and the
       last rows by ratio
ratio  most output per computed prompt token first, so that long prefills run when many sequences
       decode
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from raybatch.config import EngineConfig
from raybatch.prefix.groups import nearest_open
from raybatch.prefix.tree import PrefixTree, sizes_before
from raybatch.records.arrays import Bools, Floats, Ints, Number

# of the rows that may run at once, what starts are spread for: before any row decodes prompts start
# faster than on average, and KV is often the tighter limit
_FILL = 0.53
# rows at the end that are ordered by ratio, in rows that may run at once
_TAIL = 2
# multiples of it, modulo 1, spread any stretch of a list evenly
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLoad:
    """Token counts of all groups, read only; a row that shares nothing is a group of one."""

    prefix_tokens: Ints  # [G], of the prefix that the group's rows share, computed once
    distinct_tokens: Ints  # [G], prompt tokens of all members beyond the prefix
    num_rows: Ints  # [G]
    output_tokens: Floats  # [G], expected of all members

    def __post_init__(self) -> None:
        for field in fields(self):
            values, least = getattr(self, field.name), int(field.name == "num_rows")
            is_right = values.shape == (len(self),) and (values >= least).all()
            assert is_right, f"{field.name} of {len(self)} groups is {values}"

    def __len__(self) -> int:
        return len(self.num_rows)

    @property
    def prefill_tokens(self) -> Ints:
        """Prompt tokens that an engine computes per group when the prefix runs once."""
        return self.prefix_tokens + self.distinct_tokens

    @property
    def lengths(self) -> Floats:
        """Output tokens of a row of each group on average, at least one."""
        return np.maximum(self.output_tokens / self.num_rows, 1.0)

    @property
    def decode_ratio(self) -> Floats:
        return self.output_tokens / np.maximum(self.prefill_tokens, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCapacity:
    """What the engines of a run do at once, all together."""

    step_tokens: int  # of one step
    max_rows: int  # that decode at once

    @classmethod
    def of(cls, engine: EngineConfig, num_engines: int = 1) -> "EngineCapacity":
        rows = min(engine.max_num_seqs, engine.token_budget)
        return cls(step_tokens=num_engines * engine.token_budget, max_rows=num_engines * rows)

    def share(self, num_parts: int) -> "EngineCapacity":
        """Return what one of several parts has of it, which all run side by side."""
        return EngineCapacity(
            step_tokens=max(1, self.step_tokens // num_parts),
            max_rows=max(1, self.max_rows // num_parts),
        )


DEFAULT_CAPACITY = EngineCapacity.of(EngineConfig())


def order_in_tree(
    tree: PrefixTree, node: Ints, load: GroupLoad, capacity: EngineCapacity | None
) -> Ints:
    """Return the entries in their order: int64 [E], a permutation; with `capacity` None by ratio.

    Siblings are ordered by all that is below them, and what is below one of them runs before the
    next. So each prefix, at whatever depth, is needed by rows that follow each other, and a cache
    of any size that holds a row finds it, as if rows were sorted by prompt:

        root
         |-- document 2 ... ratio 4
         |    |-- part 1 .. ratio 5
         |    `-- part 2 .. ratio 1
         `-- document 1 ... ratio 3

    Equal siblings keep the order of the tree. O((E + N) log (E + N)). `node` is the deepest node of
    the tree that all rows of an entry are below.
    """
    below = _loads_below(tree, node, load)
    if capacity is None or not len(node):
        return _entries_by(_places(tree, node, -below.decode_ratio), len(node))
    keys = _spread(tree, node, load, below, capacity)
    places = _places(tree, node, keys)
    num_rows = load.num_rows[_entries_by(places, len(node))]
    num_after = np.append(np.cumsum(num_rows[::-1])[::-1], 0)[places]
    # behind all that is spread, which has keys below 1
    keys = np.where(num_after <= _TAIL * capacity.max_rows, 1 + 1 / (1 + below.decode_ratio), keys)
    return _entries_by(_places(tree, node, keys), len(node))


def _spread(
    tree: PrefixTree, node: Ints, load: GroupLoad, below: GroupLoad, capacity: EngineCapacity
) -> Floats:
    """Return when each sibling starts, as a share of the run: float64 [E + N - 1], from 0 to 1.

    Siblings of like lengths start at even distances until their length before the end of the run.
    """
    lengths, above = below.lengths, np.concatenate([node, tree.parent[1:]])
    turns = np.empty(len(lengths))
    turns[np.lexsort((below.decode_ratio, lengths, above))] = np.arange(len(lengths))
    latest = 1 - np.minimum(lengths / _num_steps(load, capacity), 1)
    starts: Floats = (0.5 + turns * _GOLDEN) % 1 * latest
    return starts


def _num_steps(load: GroupLoad, capacity: EngineCapacity) -> float:
    """Return the steps of the shortest run in which the rows of such starts find room."""
    lengths, max_rows = load.lengths, _FILL * capacity.max_rows
    num_tokens = float((load.prefill_tokens + load.output_tokens).sum())
    row_steps = load.num_rows * lengths
    steps = max(num_tokens / capacity.step_tokens, lengths.max(), row_steps.sum() / max_rows)
    # rows that all start within their own length run at once
    while (row_steps / np.maximum(steps - lengths, lengths)).sum() > max_rows:
        steps *= 1.01
    return float(steps)


def _places(tree: PrefixTree, node: Ints, keys: Floats) -> Ints:
    """Return how many entries run before each sibling: int64 [E + N - 1], entries, then nodes."""
    num_entries = len(node)
    ones = np.ones(num_entries, np.int64)
    above = np.concatenate([node, tree.parent[1:]])
    first_row = np.concatenate([tree.row_start[node], tree.row_start[1:]])
    sizes = np.concatenate([ones, _sums_below(tree, node, ones)[1:]])
    shift = sizes_before(above, sizes, np.lexsort((first_row, keys, above)))
    # the place of an entry is the sum of the shifts on its path from the root
    change = np.zeros(tree.num_nodes + 1, np.int64)
    change[1:-1] = shift[num_entries:]
    np.subtract.at(change, tree.node_stops()[1:], shift[num_entries:])
    of_node = np.cumsum(change)
    return np.concatenate([of_node[node] + shift[:num_entries], of_node[1:-1]])


def _entries_by(places: Ints, num_entries: int) -> Ints:
    order = np.empty(num_entries, np.int64)
    order[places[:num_entries]] = np.arange(num_entries)
    return order


def values_in_tree(
    tree: PrefixTree,
    node: Ints,
    load: GroupLoad,
    order: Ints,
    is_passed: Bools,
    *,
    is_by_ratio: bool,
) -> Floats:
    """Return values, rising, by which entries of several trees are merged: float64 [E].

    Entries below a highest node that is not passed through share one value, so none of another
    tree comes between them. The root is passed through, and nodes too large to stay in one piece.
    A value is a ratio, or the share of the rows that run before.
    """
    is_top = ~is_passed & is_passed[tree.parent]
    top = nearest_open(tree, is_top)[node]
    if is_by_ratio:
        below = _loads_below(tree, node, load).decode_ratio
        of_node = np.append(np.zeros(1), below[len(node) :])[top]
        values = -np.where(top > 0, of_node, below[: len(node)])[order]
        # a subtree in one piece may hold less than what comes after it in its parent's place
        rising: Floats = np.maximum.accumulate(values)
        return rising
    top, num_rows = top[order], load.num_rows[order]
    is_first = (np.diff(top, prepend=-1) != 0) | (top == 0)
    begins = (np.cumsum(num_rows) - num_rows)[is_first]
    shares: Floats = (begins / max(1, num_rows.sum()))[np.cumsum(is_first) - 1]
    return shares


def _loads_below(tree: PrefixTree, node: Ints, load: GroupLoad) -> GroupLoad:
    """Return the loads of entries, and of all entries below each node but the root: [E + N - 1]."""

    def with_nodes(values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        return np.concatenate([values, _sums_below(tree, node, values)[1:]])

    return GroupLoad(
        prefix_tokens=with_nodes(load.prefix_tokens),
        distinct_tokens=with_nodes(load.distinct_tokens),
        num_rows=np.maximum(with_nodes(load.num_rows), 1),
        output_tokens=with_nodes(load.output_tokens).clip(min=0),
    )


def _sums_below(tree: PrefixTree, node: Ints, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    of_node = np.zeros(tree.num_nodes + 1, values.dtype)
    np.add.at(of_node[1:], node, values)
    ends = np.cumsum(of_node, dtype=values.dtype)
    sums: npt.NDArray[Number] = ends[tree.node_stops()] - ends[:-1]
    return sums
