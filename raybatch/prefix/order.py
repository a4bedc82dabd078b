"""The order in which groups run, from their token counts. Rows that share a prefix stay together.

auto   groups of each length are spread over the run, long outputs start early enough to end with
       it, and the last rows are ordered by ratio
ratio  the most output per computed prompt token first, so that long prefills run while many
       sequences decode
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raybatch.config import EngineConfig
from raybatch.prefix.groups import nearest_open
from raybatch.prefix.tree import PrefixTree, sizes_before
from raybatch.records.arrays import Bools, Floats, Ints, Number

# starts are spread as if this fraction of `max_rows` could run at once: prompts start faster than
# on average before any row decodes, and KV is often the tighter limit
_FILL = 0.53
# rows at the end that are ordered by ratio, as a multiple of the rows that may run at once
_TAIL = 2
# the multiples of the golden ratio, modulo 1, spread any stretch of a list evenly
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLoad:
    """Token counts of all groups, read only; a row without a shared prefix is a group of one."""

    prefix_tokens: Ints  # [G], of the prefix that the group's rows share, computed once
    distinct_tokens: Ints  # [G], prompt tokens of all members beyond the prefix
    num_rows: Ints  # [G]
    output_tokens: Floats  # [G], expected of all members

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
    """The tokens and rows that all engines of a run can process at once."""

    step_tokens: int  # tokens of one step
    max_rows: int  # rows that decode at once

    @classmethod
    def of(cls, engine: EngineConfig, num_engines: int = 1) -> "EngineCapacity":
        rows = min(engine.max_num_seqs, engine.token_budget)
        return cls(step_tokens=num_engines * engine.token_budget, max_rows=num_engines * rows)

    def share(self, num_parts: int) -> "EngineCapacity":
        """Return the capacity of one of several parts that run in parallel."""
        return EngineCapacity(
            step_tokens=max(1, self.step_tokens // num_parts),
            max_rows=max(1, self.max_rows // num_parts),
        )


DEFAULT_CAPACITY = EngineCapacity.of(EngineConfig())


def order_in_tree(
    tree: PrefixTree, node: Ints, load: GroupLoad, capacity: EngineCapacity | None
) -> Ints:
    """Return the order of the scheduling groups: int64 [E]; by ratio if `capacity` is None.

    Siblings are ordered by the loads of their subtrees, and a subtree runs before the next one. So
    the rows that use a prefix follow each other at every depth, and a cache of any size that holds
    one row still has the prefix, as if rows were sorted by prompt:

        root
         |-- document 2 ... ratio 4
         |    |-- part 1 .. ratio 5
         |    `-- part 2 .. ratio 1
         `-- document 1 ... ratio 3

    Equal siblings keep the order of the tree. O((E + N) log (E + N)). `node` is the deepest node of
    the tree above all rows of a scheduling group.
    """
    below = _loads_below(tree, node, load)
    if capacity is None or not len(node):
        return _order_of(_places(tree, node, -below.decode_ratio), len(node))
    keys = _spread(tree, node, load, below, capacity)
    places = _places(tree, node, keys)
    num_rows = load.num_rows[_order_of(places, len(node))]
    num_after = np.append(np.cumsum(num_rows[::-1])[::-1], 0)[places]
    # the last rows get keys above 1, because spread siblings have keys below 1
    keys = np.where(num_after <= _TAIL * capacity.max_rows, 1 + 1 / (1 + below.decode_ratio), keys)
    return _order_of(_places(tree, node, keys), len(node))


def _spread(
    tree: PrefixTree, node: Ints, load: GroupLoad, below: GroupLoad, capacity: EngineCapacity
) -> Floats:
    """Return when each sibling starts, as a fraction of the run: float64 [E + N - 1].

    Siblings of similar lengths start at even distances, the last of them its length before the end.
    """
    lengths, above = below.lengths, np.concatenate([node, tree.parent[1:]])
    turns = np.empty(len(lengths))
    turns[np.lexsort((below.decode_ratio, lengths, above))] = np.arange(len(lengths))
    latest = 1 - np.minimum(lengths / _num_steps(load, capacity), 1)
    starts: Floats = (0.5 + turns * _GOLDEN) % 1 * latest
    return starts


def _num_steps(load: GroupLoad, capacity: EngineCapacity) -> float:
    """Return the steps of the shortest run in which rows with these starts fit the capacity."""
    lengths, max_rows = load.lengths, _FILL * capacity.max_rows
    num_tokens = float((load.prefill_tokens + load.output_tokens).sum())
    row_steps = load.num_rows * lengths
    steps = max(num_tokens / capacity.step_tokens, lengths.max(), row_steps.sum() / max_rows)
    # rows that all start within their own length run at once
    while (row_steps / np.maximum(steps - lengths, lengths)).sum() > max_rows:
        steps *= 1.01
    return float(steps)


def _places(tree: PrefixTree, node: Ints, keys: Floats) -> Ints:
    """Return how many scheduling groups run before each sibling: int64 [E + N - 1]; nodes last."""
    num_sched_groups = len(node)
    ones = np.ones(num_sched_groups, np.int64)
    above = np.concatenate([node, tree.parent[1:]])
    first_row = np.concatenate([tree.row_start[node], tree.row_start[1:]])
    sizes = np.concatenate([ones, _sums_below(tree, node, ones)[1:]])
    shift = sizes_before(above, sizes, np.lexsort((first_row, keys, above)))
    # the place of a scheduling group is the sum of the shifts on its path from the root
    change = np.zeros(tree.num_nodes + 1, np.int64)
    change[1:-1] = shift[num_sched_groups:]
    np.subtract.at(change, tree.node_stops()[1:], shift[num_sched_groups:])
    of_node = np.cumsum(change)
    return np.concatenate([of_node[node] + shift[:num_sched_groups], of_node[1:-1]])


def _order_of(places: Ints, num_sched_groups: int) -> Ints:
    order = np.empty(num_sched_groups, np.int64)
    order[places[:num_sched_groups]] = np.arange(num_sched_groups)
    return order


def values_in_tree(
    tree: PrefixTree,
    node: Ints,
    load: GroupLoad,
    order: Ints,
    is_split: Bools,
    *,
    is_by_ratio: bool,
) -> Floats:
    """Return ascending values to merge scheduling groups of several trees by: float64 [E].

    All groups below a highest node that is not split share one value, so no group of another tree
    comes between them. The root and nodes above the maximum size are split. A value is a ratio, or
    the fraction of the rows that run before.
    """
    is_top = ~is_split & is_split[tree.parent]
    top = nearest_open(tree, is_top)[node]
    if is_by_ratio:
        below = _loads_below(tree, node, load).decode_ratio
        of_node = np.append(np.zeros(1), below[len(node) :])[top]
        values = -np.where(top > 0, of_node, below[: len(node)])[order]
        # a subtree in one piece may have a smaller value than those after it below its parent
        rising: Floats = np.maximum.accumulate(values)
        return rising
    top, num_rows = top[order], load.num_rows[order]
    is_first = (np.diff(top, prepend=-1) != 0) | (top == 0)
    begins = (np.cumsum(num_rows) - num_rows)[is_first]
    shares: Floats = (begins / max(1, num_rows.sum()))[np.cumsum(is_first) - 1]
    return shares


def _loads_below(tree: PrefixTree, node: Ints, load: GroupLoad) -> GroupLoad:
    """Return the loads of scheduling groups, then of nodes except the root: [E + N - 1]."""

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
