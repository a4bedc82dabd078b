"""The order in which groups run. Members of a group always stay together.

ratio        most output per computed prompt token first, so that long prefills run when many
             sequences decode; of a prefix tree, see `raybatch.prefix.tree.tree_order`
ascending    the reverse, for comparison
shuffle      whole groups in a seeded random order
depth_first  as given: the order of the prefix tree
dual_scan    from both ends of the groups sorted by compute density, so that every stretch
             computes and reads memory in the proportion of the whole
"""

from typing import get_args

import numpy as np

from raybatch.config import OrderName
from raybatch.errors import ConfigError, did_you_mean
from raybatch.prefix.load import REFERENCE_ROOFLINE, DensityModel, Floats, GroupLoad, Ints

ORDERS: tuple[OrderName, ...] = get_args(OrderName)

# a group this near to the density of the whole has none of its own
ROUNDING = 1e-9


def order_groups(
    load: GroupLoad,
    *,
    by: OrderName = "ratio",
    seed: int = 0,
    density: DensityModel = REFERENCE_ROOFLINE,
) -> Ints:
    """Return a permutation of the groups: element i is the group that runs as the i-th.

    Deterministic; equal groups keep the order of their ids. O(G log G).

    Source: BatchLLM, arXiv:2412.03594 (ratio, there without outputs) and BlendServe,
    arXiv:2411.16102 (dual scan, there over a tree and against a running batch).
    """
    if by == "ratio":
        return np.argsort(-decode_ratio(load), kind="stable")
    if by == "ascending":
        return np.argsort(decode_ratio(load), kind="stable")
    if by == "shuffle":
        return np.random.default_rng(seed).permutation(len(load)).astype(np.int64)
    if by == "depth_first":
        return np.arange(len(load), dtype=np.int64)
    if by == "dual_scan":
        return _dual_scan(density.compute_s(load), density.memory_s(load))
    raise ConfigError(f"order {by!r} is not one of {', '.join(ORDERS)}{did_you_mean(by, ORDERS)}")


def decode_ratio(load: GroupLoad) -> Floats:
    """Return expected output tokens per computed prompt token; 1 output where none are known."""
    outputs = 1.0 if load.output_tokens is None else load.output_tokens
    return np.asarray(outputs / np.maximum(load.prefill_tokens, 1), float)


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
