"""Each order keeps what shares a prefix together, so a small cache is enough for it."""

import numpy as np
import pytest

from raybatch.config import PlanConfig
from raybatch.prefix.forecast import CacheSize, forecast_orders
from raybatch.prefix.groups import nearest_open
from raybatch.prefix.order import DEFAULT_CAPACITY, EngineCapacity
from raybatch.prefix.plan import RowFeatures, order_sched_groups, plan_rows

from .prompts import draw_prefix_tree, keys_of, letters

BLOCK = 4


def draw_nested(seed):
    """Draw rows behind prefixes of prefixes, some of them ending at an inner one."""
    rng = np.random.default_rng(seed)
    prompts = []

    def add(stem, count, shortest):
        for _ in range(count):
            prompts.append(stem + rng.integers(0, 1000, rng.integers(shortest, 30)).tolist())

    def grow(stem, levels):
        stem = stem + rng.integers(0, 1000, rng.integers(4, 60)).tolist()
        if not levels or rng.random() < 0.15:
            add(stem, rng.integers(1, 7), 3)
            return
        if rng.random() < 0.3:
            add(stem, rng.integers(1, 4), 0)
        for _ in range(rng.integers(2, 5)):
            grow(stem, levels - 1)

    for _ in range(rng.integers(1, 4)):
        grow([], 3)
    return [prompts[i] for i in rng.permutation(len(prompts))]


def planned(prompts, outputs, capacity=DEFAULT_CAPACITY, **options):
    rows = RowFeatures(keys=keys_of(prompts, BLOCK), expected_tokens=outputs)
    return plan_rows(rows, PlanConfig(min_saved_fraction=0, **options), capacity=capacity)


def tokens_apart(found, keys):
    """Return the tokens of prefixes of which some rows run with an outer group, others below."""
    tree, is_open = found.tree, np.zeros(found.tree.num_nodes, np.bool_)
    groups = found.groups
    for group in range(groups.num_groups):
        blocks = int(groups.prefix_len[group]) // BLOCK
        key = keys.keys[keys.offsets[groups.first_row[group]] + blocks - 1]
        first = tree.row_order[tree.row_start]
        at = keys.offsets[first] + tree.depth_tokens // BLOCK - 1
        is_open |= (tree.depth_tokens == blocks * BLOCK) & (keys.keys[at.clip(0)] == key)
    has_open_below = [is_open[n + 1 : stop].any() for n, stop in enumerate(tree.node_stops())]
    outer = nearest_open(tree, is_open)
    is_apart = ~is_open & np.array(has_open_below) & (outer > 0)
    return int(tree.edge_tokens()[is_apart].sum())


@pytest.mark.parametrize("draw", [draw_nested, lambda seed: draw_prefix_tree(seed, 100)])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("unit_rows", [1, 8, 1024])
@pytest.mark.parametrize("sharing", ["single_level", "multi_level"])
@pytest.mark.parametrize("capacity", [DEFAULT_CAPACITY, EngineCapacity(step_tokens=16, max_rows=2)])
def test_a_cache_of_any_size_finds_what_it_finds_in_sorted_rows(
    draw, seed, unit_rows, sharing, capacity
):
    prompts = draw(seed)
    keys = keys_of(prompts, BLOCK)
    outputs = np.random.default_rng(seed).integers(1, 200, len(prompts)).astype(float)
    plan, found = planned(prompts, outputs, capacity, unit_rows=unit_rows, sharing=sharing)
    # a group runs in one go, also if rows below one of its prefixes are a separate group
    apart = tokens_apart(found, keys) if sharing == "single_level" else 0
    least_blocks = -(-(max(map(len, prompts)) + 200) // BLOCK)
    for factor in (1, 1.5, 4):
        size = CacheSize(num_blocks=int(factor * least_blocks), concurrency=4)
        orders = forecast_orders(keys, plan, found, output_tokens=outputs, size=size)
        computed = {order.name: order.computed_tokens for order in orders}
        assert computed["planned"] <= 1.005 * computed["sorted"] + apart


def test_documents_below_one_prefix_stay_below_it():
    # between the ratios of two documents of one prefix lies that of another prefix
    words = ["aaaabbbb0", "aaaabbbb1", "aaaacccc0", "aaaacccc1", "xxxxyyyy0", "xxxxyyyy1"]
    plan, _ = planned(letters(words), np.array([9.0, 9, 1, 1, 4, 4]))
    assert [0, 1, 2, 3, 4, 5] == plan.order.tolist()


def test_below_a_prefix_of_all_rows_documents_are_ordered():
    words = [f"aaaa{document * 4}{row}" for document in "bcd" for row in "01"]
    plan, _ = planned(letters(words), np.array([1.0, 1, 9, 9, 4, 4]))
    assert [2, 3, 4, 5, 0, 1] == plan.order.tolist()


def documents(num_prefixes, num_documents, rows_each):
    rng = np.random.default_rng(0)
    prompts, outputs = [], []
    for prefix in range(num_prefixes):
        for document in range(num_documents):
            outputs += [float(rng.integers(1, 100))] * rows_each
            prompts += [
                [prefix] * 8 + [100 + document] * 8 + [1000 + row, prefix, document]
                for row in range(rows_each)
            ]
    return prompts, np.array(outputs)


def values_of(num_prefixes, num_documents, unit_rows, order):
    prompts, outputs = documents(num_prefixes, num_documents, 2)
    config = PlanConfig(unit_rows=unit_rows, order=order)
    _, found = planned(prompts, outputs, unit_rows=unit_rows, order=order)
    sched_groups, values = order_sched_groups(found, config, DEFAULT_CAPACITY)
    first_rows = found.rows[found.starts[:-1]][sched_groups]
    return [prompts[row][0] for row in first_rows.tolist()], values


@pytest.mark.parametrize("order", ["auto", "ratio"])
def test_values_rise(order):
    _, values = values_of(5, 5, 1, order)
    assert (np.diff(values) >= 0).all()


@pytest.mark.parametrize("order", ["auto", "ratio"])
def test_entries_below_one_prefix_share_a_value(order):
    prefixes, values = values_of(40, 5, 1024, order)
    of_prefix = {prefix: set() for prefix in prefixes}
    for prefix, value in zip(prefixes, values.tolist(), strict=True):
        of_prefix[prefix].add(value)
    assert {1} == {len(found) for found in of_prefix.values()}
    assert 1 < len(set(values.tolist()))


@pytest.mark.parametrize("order", ["auto", "ratio"])
def test_a_large_prefix_has_many_values(order):
    _, values = values_of(1, 40, 1, order)
    assert 20 < len(set(values.tolist()))
