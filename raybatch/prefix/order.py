"""The order in which groups run, from their token counts. Members of a group always stay together.

ratio        most output per computed prompt token first, so that long prefills run when many
             sequences decode; of a prefix tree, what shares a prefix is kept together
ascending    the reverse, for comparison
shuffle      whole groups in a seeded random order
depth_first  as given: the order of the prefix tree
dual_scan    from both ends of the groups sorted by compute density, so that every stretch
             computes and reads memory in the proportion of the whole
"""

from dataclasses import asdict, dataclass, fields
from typing import get_args

import numpy as np
import numpy.typing as npt

from raybatch.config import OrderName
from raybatch.errors import ConfigError, did_you_mean
from raybatch.prefix.groups import nearest_open
from raybatch.prefix.tree import PrefixTree, sizes_before
from raybatch.records.arrays import Bools, Floats, Ints, Number

ORDERS: tuple[OrderName, ...] = get_args(OrderName)


# a group this near to the density of the whole has none of its own
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLoad:
    """Token counts of all groups, read only; a row that shares nothing is a group of one."""

    prefix_tokens: Ints  # [G], of the prefix that the group's rows share, computed once
    distinct_tokens: Ints  # [G], prompt tokens of all members beyond the prefix
    num_rows: Ints  # [G]
    output_tokens: Floats  # [G], expected of all members

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            if values.shape != self.num_rows.shape or values.ndim != 1:
                raise ConfigError(
                    f"{field.name} has shape {values.shape}, num_rows {self.num_rows.shape}; "
                    "both need one entry per group"
                )
            is_wrong = ~(values >= (1 if field.name == "num_rows" else 0))
            if is_wrong.any():
                group = int(np.argmax(is_wrong))
                raise ConfigError(f"{field.name} of group {group} is {values[group]}")

    def __len__(self) -> int:
        return len(self.num_rows)

    @property
    def prefill_tokens(self) -> Ints:
        """Prompt tokens that an engine computes per group when the prefix runs once."""
        return self.prefix_tokens + self.distinct_tokens

    @property
    def outputs(self) -> Floats:
        """Output tokens per group, where a row generates at least one."""
        return np.maximum(self.output_tokens, self.num_rows)

    @property
    def decode_ratio(self) -> Floats:
        return self.output_tokens / np.maximum(self.prefill_tokens, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class DensityModel:
    """The part of a model and its device that decides what a token costs.

    Source: BlendServe, arXiv:2411.16102, section 4. A shared prefix is counted once here, with its
    attention, where the paper scales the whole compute time by the share of saved tokens.
    """

    active_params: float
    num_layers: int
    hidden_size: int
    kv_bytes_per_token: float
    flops_per_s: float  # achieved, not peak
    bytes_per_s: float  # achieved memory bandwidth

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not value > 0:
                raise ConfigError(f"{name}={value} of the density model is not above 0")

    def compute_s(self, load: GroupLoad) -> Floats:
        """Return seconds of arithmetic per group, its prefix computed once."""
        per_row = load.distinct_tokens / load.num_rows
        prefix_squared = load.prefix_tokens.astype(float) ** 2
        prompt_squared = (load.prefix_tokens + per_row) ** 2
        pairs = prefix_squared + load.num_rows * (prompt_squared - prefix_squared)
        tokens = load.prefill_tokens + load.outputs
        attention = 4.0 * self.hidden_size * self.num_layers * pairs
        flops: Floats = 2.0 * self.active_params * tokens + attention
        return flops / self.flops_per_s

    def memory_s(self, load: GroupLoad) -> Floats:
        """Return seconds of reading the KV cache per group; every member reads its own prefix."""
        outputs = load.outputs / load.num_rows
        prompts = load.prefix_tokens + load.distinct_tokens / load.num_rows
        reads: Floats = load.num_rows * (prompts * outputs + outputs**2 / 2)
        return reads * (self.kv_bytes_per_token / self.bytes_per_s)


REFERENCE_ROOFLINE = DensityModel(
    active_params=8e9,
    num_layers=32,
    hidden_size=4096,
    kv_bytes_per_token=131_072,
    flops_per_s=2.2e14,
    bytes_per_s=1.6e12,
)


def order_groups(
    load: GroupLoad, *, by: OrderName, seed: int = 0, density: DensityModel = REFERENCE_ROOFLINE
) -> Ints:
    """Return a permutation of the groups: element i is the group that runs as the i-th.

    Deterministic; equal groups keep the order of their ids. O(G log G).

    Source: BatchLLM, arXiv:2412.03594 (ratio, there without outputs) and BlendServe,
    arXiv:2411.16102 (dual scan, there over a tree and against a running batch).
    """
    if by == "ratio":
        return np.argsort(-load.decode_ratio, kind="stable")
    if by == "ascending":
        return np.argsort(load.decode_ratio, kind="stable")
    if by == "shuffle":
        return np.random.default_rng(seed).permutation(len(load)).astype(np.int64)
    if by == "depth_first":
        return np.arange(len(load), dtype=np.int64)
    if by == "dual_scan":
        return _dual_scan(density.compute_s(load), density.memory_s(load))
    raise ConfigError(f"order {by!r} is not one of {', '.join(ORDERS)}{did_you_mean(by, ORDERS)}")


def _dual_scan(compute_s: Floats, memory_s: Floats) -> Ints:
    """Take from the dense end while the scanned part is no denser than the whole, else the other.

    With x the surplus of compute over what the whole's density gives to a group's memory time,
    the dense end holds x >= 0 and the sparse end x < 0. Taking from the side that is behind is
    the merge of two sorted lists: each group's key is the |x| taken from its own side before it.
    """
    if not len(compute_s):
        return np.zeros(0, np.int64)
    surplus = compute_s - memory_s * (compute_s.sum() / memory_s.sum())
    is_dense = surplus >= -ROUNDING * compute_s
    ratio = compute_s / memory_s
    falling, rising = np.argsort(-ratio, kind="stable"), np.argsort(ratio, kind="stable")
    dense, sparse = falling[is_dense[falling]], rising[~is_dense[rising]]
    keys = np.concatenate([_sums_before(surplus[dense]), _sums_before(-surplus[sparse])])
    return np.concatenate([dense, sparse])[np.argsort(keys, kind="stable")]


def _sums_before(values: Floats) -> Floats:
    return np.concatenate([np.zeros(1), np.cumsum(values)])[:-1]


def order_in_tree(tree: PrefixTree, node: Ints, load: GroupLoad, *, is_rising: bool) -> Ints:
    """Return the entries in their order: int64 [E], a permutation.

    Siblings are ordered by the ratio of all that is below them, and what is below one of them runs
    before the next. So each prefix, at whatever depth, is needed by rows that follow each other,
    and a cache of any size that holds a row finds it, as if rows were sorted by prompt:

        root
         |-- document 2 ... ratio 4
         |    |-- part 1 .. ratio 5
         |    `-- part 2 .. ratio 1
         `-- document 1 ... ratio 3

    Equal siblings keep the order of the tree. O((E + N) log (E + N)). `node` is the deepest node of
    the tree that all rows of an entry are below; rising is least output per prompt token first.
    """
    num_entries = len(node)
    ones = np.ones(num_entries, np.int64)
    keys = np.concatenate([_keys(load, is_rising), _node_keys(tree, node, load, is_rising)[1:]])
    above = np.concatenate([node, tree.parent[1:]])
    first_row = np.concatenate([tree.row_start[node], tree.row_start[1:]])
    sizes = np.concatenate([ones, _sums_below(tree, node, ones)[1:]])
    shift = sizes_before(above, sizes, np.lexsort((first_row, keys, above)))
    # the place of an entry is the sum of the shifts on its path from the root
    change = np.zeros(tree.num_nodes + 1, np.int64)
    change[1:-1] = shift[num_entries:]
    np.subtract.at(change, tree.node_stops()[1:], shift[num_entries:])
    order = np.empty(num_entries, np.int64)
    order[np.cumsum(change)[node] + shift[:num_entries]] = np.arange(num_entries)
    return order


def values_in_tree(
    tree: PrefixTree, node: Ints, load: GroupLoad, order: Ints, is_passed: Bools, *, is_rising: bool
) -> Floats:
    """Return values, rising, by which entries of several trees are merged: float64 [E].

    Entries below a highest node that is not passed through share one value, so none of another
    tree comes between them. The root is passed through, and nodes too large to stay in one piece.
    """
    is_top = ~is_passed & is_passed[tree.parent]
    top = nearest_open(tree, is_top)[node]
    of_node = _node_keys(tree, node, load, is_rising)[top]
    values = np.where(top > 0, of_node, _keys(load, is_rising))[order]
    # a subtree in one piece may hold less than what comes after it in its parent's place
    rising: Floats = np.maximum.accumulate(values)
    return rising


def _keys(load: GroupLoad, is_rising: bool) -> Floats:
    return load.decode_ratio * (1 if is_rising else -1)


def _node_keys(tree: PrefixTree, node: Ints, load: GroupLoad, is_rising: bool) -> Floats:
    """Return the key of all entries below each node together: float64 [N]."""
    below = GroupLoad(
        prefix_tokens=_sums_below(tree, node, load.prefix_tokens),
        distinct_tokens=_sums_below(tree, node, load.distinct_tokens),
        num_rows=np.maximum(_sums_below(tree, node, load.num_rows), 1),
        output_tokens=_sums_below(tree, node, load.output_tokens).clip(min=0),
    )
    return _keys(below, is_rising)


def _sums_below(tree: PrefixTree, node: Ints, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
    of_node = np.zeros(tree.num_nodes + 1, values.dtype)
    np.add.at(of_node[1:], node, values)
    ends = np.cumsum(of_node, dtype=values.dtype)
    sums: npt.NDArray[Number] = ends[tree.node_stops()] - ends[:-1]
    return sums
