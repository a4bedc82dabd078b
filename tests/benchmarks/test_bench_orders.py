import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from orders import REFERENCE_ROOFLINE, DensityModel, order_groups

from raybatch.errors import ConfigError
from tests.prefix.loads import loads, make_load

ORDERS = ["auto", "ratio", "ascending", "shuffle", "tail .5", "depth_first", "dual_scan"]
# workload W3: sharing documents, long prompts, long outputs; 2 groups, 20 and 12 rows
MIXED = make_load(
    [600] * 2 + [0] * 32,
    [80 * 60] * 2 + [1200] * 20 + [100] * 12,
    [60] * 2 + [1] * 32,
    [120] * 2 + [120] * 20 + [3000] * 12,
)


def densities(load):
    return REFERENCE_ROOFLINE.compute_s(load) / REFERENCE_ROOFLINE.memory_s(load)


@given(loads(), st.sampled_from(ORDERS), st.integers(0, 3))
def test_every_order_is_a_permutation_and_repeats(load, by, seed):
    order = order_groups(load, by=by, seed=seed)
    assert sorted(order) == list(range(len(load)))
    assert order.tolist() == order_groups(load, by=by, seed=seed).tolist()


@pytest.mark.parametrize("by", ["ratio", "ascending", "depth_first", "dual_scan"])
def test_equal_groups_keep_their_order(by):
    load = make_load([7] * 9, [5] * 9, [3] * 9, [11] * 9)
    assert list(range(9)) == order_groups(load, by=by).tolist()


def test_an_unknown_order_is_refused():
    with pytest.raises(ConfigError, match="unknown order 'ratios'"):
        order_groups(MIXED, by="ratios")


def test_densities_agree_with_the_published_workload():
    """Loose: the shared attention of a group is counted exactly here."""
    assert densities(MIXED)[[0, 2, 22]] == pytest.approx([60, 7.8, 0.57], rel=0.05)


def test_the_density_of_a_union_is_the_ratio_of_sums():
    both = make_load([0], [2 * 1200], [2], [240])
    one = make_load([0], [1200], [1], [120])
    assert densities(one)[0] == pytest.approx(densities(both)[0])
    assert 2 * REFERENCE_ROOFLINE.compute_s(one)[0] == pytest.approx(
        REFERENCE_ROOFLINE.compute_s(both)[0]
    )


def test_unknown_outputs_count_as_one_token_each():
    unknown, known = make_load([4], [6], [2]), make_load([4], [6], [2], [2])
    assert densities(known)[0] == densities(unknown)[0]


def test_dual_scan_keeps_the_density_of_the_whole():
    order = order_groups(MIXED, by="dual_scan")
    compute, memory = REFERENCE_ROOFLINE.compute_s(MIXED), REFERENCE_ROOFLINE.memory_s(MIXED)
    surplus = compute - memory * (compute.sum() / memory.sum())
    drift = np.abs(np.cumsum(surplus[order]))
    assert drift.max() <= np.abs(surplus).max()


def test_dual_scan_follows_the_step_by_step_rule():
    compute, memory = REFERENCE_ROOFLINE.compute_s(MIXED), REFERENCE_ROOFLINE.memory_s(MIXED)
    surplus = compute - memory * (compute.sum() / memory.sum())
    dense = [int(g) for g in np.argsort(-compute / memory, kind="stable") if surplus[g] >= 0]
    sparse = [int(g) for g in np.argsort(compute / memory, kind="stable") if surplus[g] < 0]
    order, taken_dense, taken_sparse = [], 0.0, 0.0
    while dense or sparse:
        side = dense if not sparse or (dense and taken_dense <= taken_sparse) else sparse
        order.append(side.pop(0))
        if side is dense:
            taken_dense += surplus[order[-1]]
        else:
            taken_sparse -= surplus[order[-1]]
    assert order == order_groups(MIXED, by="dual_scan").tolist()


def test_a_density_model_without_bandwidth_is_refused():
    with pytest.raises(ConfigError, match="bytes_per_s must be above 0, got 0"):
        DensityModel(
            active_params=1,
            num_layers=1,
            hidden_size=1,
            kv_bytes_per_token=1,
            flops_per_s=1,
            bytes_per_s=0,
        )
