"""Orders of groups that benchmarks compare: those of raybatch, and others that it does not use.

auto, ratio  the orders of raybatch
ascending    the reverse of ratio
shuffle      whole groups in a seeded random order
tail f       a shuffle whose last share of the rows goes by ratio
depth_first  as given: the order of the prefix tree
dual_scan    from both ends of the groups sorted by compute density, so that every stretch
             computes and reads memory in the proportion of the whole
"""

from dataclasses import asdict, dataclass

import numpy as np

from raybatch.errors import ConfigError
from raybatch.prefix.order import DEFAULT_CAPACITY, EngineCapacity, GroupLoad, order_in_tree
from raybatch.prefix.tree import PrefixTree
from raybatch.records.arrays import Floats, Ints

# a group whose density differs from the whole's by less than this share counts as dense
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class DensityModel:
    """The part of a model and its device that decides the cost of a token.

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
                raise ConfigError(f"density model: {name} must be above 0, got {value}")

    def compute_s(self, load: GroupLoad) -> Floats:
        """Return seconds of arithmetic per group, its prefix computed once."""
        per_row = load.distinct_tokens / load.num_rows
        prefix_squared = load.prefix_tokens.astype(float) ** 2
        prompt_squared = (load.prefix_tokens + per_row) ** 2
        pairs = prefix_squared + load.num_rows * (prompt_squared - prefix_squared)
        tokens = load.prefill_tokens + outputs_of(load)
        attention = 4.0 * self.hidden_size * self.num_layers * pairs
        flops: Floats = 2.0 * self.active_params * tokens + attention
        return flops / self.flops_per_s

    def memory_s(self, load: GroupLoad) -> Floats:
        """Return seconds of reading the KV cache per group; every member reads its own prefix."""
        outputs = load.lengths
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
    load: GroupLoad,
    *,
    by: str,
    seed: int = 0,
    density: DensityModel = REFERENCE_ROOFLINE,
    capacity: EngineCapacity = DEFAULT_CAPACITY,
) -> Ints:
    """Return a permutation of the groups: element i is the group that runs i-th.

    Deterministic; equal groups keep the order of their ids, except in a shuffle. O(G log G).

    Source: BatchLLM, arXiv:2412.03594 (ratio, there without outputs) and BlendServe,
    arXiv:2411.16102 (dual scan, there over a tree and against a running batch).
    """
    if by in ("auto", "ratio"):
        flat, nodes = _flat_tree(int(load.num_rows.sum())), np.zeros(len(load), np.int64)
        return order_in_tree(flat, nodes, load, capacity if by == "auto" else None)
    if by == "ascending":
        return np.argsort(load.decode_ratio, kind="stable")
    if by == "shuffle":
        return np.random.default_rng(seed).permutation(len(load)).astype(np.int64)
    if by == "depth_first":
        return np.arange(len(load), dtype=np.int64)
    if by == "dual_scan":
        return _dual_scan(density.compute_s(load), density.memory_s(load))
    if by.startswith("tail "):
        return _shuffle_with_tail(load, seed, float(by.split()[1]))
    raise ConfigError(f"unknown order {by!r}; the docstring of orders.py lists all orders")


def outputs_of(load: GroupLoad) -> Floats:
    """Return output tokens per group; a row generates at least one."""
    return np.maximum(load.output_tokens, load.num_rows)


def _flat_tree(num_rows: int) -> PrefixTree:
    """Return a tree of prompts that share nothing."""
    zero, rows = np.zeros(1, np.int64), np.array([num_rows])
    return PrefixTree(
        row_order=np.arange(num_rows),
        parent=np.array([-1]),
        depth_tokens=zero,
        row_start=zero,
        row_stop=rows,
        num_ending=rows,
    )


def _shuffle_with_tail(load: GroupLoad, seed: int, share: float) -> Ints:
    order = order_groups(load, by="shuffle", seed=seed)
    ends = np.cumsum(load.num_rows[order])
    first = int(np.searchsorted(ends, (1 - share) * ends[-1]))
    tail = order[first:]
    by_ratio = tail[np.argsort(-load.decode_ratio[tail], kind="stable")]
    return np.concatenate([order[:first], by_ratio])


def _dual_scan(compute_s: Floats, memory_s: Floats) -> Ints:
    """Take from the dense end while the part taken is no denser than the whole, else the sparse.

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
