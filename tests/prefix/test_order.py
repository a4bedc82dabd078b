"""The order of entries that share nothing, or a part of their prompts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.prefix.order import DEFAULT_CAPACITY, EngineCapacity, order_in_tree
from raybatch.prefix.tree import build_tree
from tests.prefix.loads import loads, make_load
from tests.prefix.prompts import keys_of

SMALL = EngineCapacity(step_tokens=16, max_rows=4)


def order_of(load, capacity=SMALL):
    """Return the order of groups that share nothing with each other."""
    tree = build_tree(keys_of([[number] * 4 for number in range(len(load))], 4))
    return order_in_tree(tree, np.zeros(len(load), np.int64), load, capacity).tolist()


@given(loads(), st.sampled_from([None, SMALL, DEFAULT_CAPACITY]))
def test_an_order_is_a_permutation_and_repeats(load, capacity):
    order = order_of(load, capacity)
    assert sorted(order) == list(range(len(load)))
    assert order == order_of(load, capacity)


def test_without_outputs_short_prefills_come_first():
    load = make_load([100, 10, 40], [20, 10, 10], [2, 2, 2])
    assert [1, 2, 0] == order_of(load, None)


def test_with_outputs_the_ratio_decides():
    load = make_load([100, 10, 40], [20, 10, 10], [2, 2, 2], [240, 10, 75])
    assert [0, 2, 1] == order_of(load, None)


def test_rows_that_run_at_once_go_by_ratio():
    load = make_load([0] * 8, [9, 1, 8, 2, 7, 3, 6, 4], [1] * 8, [3] * 8)
    assert order_of(load, None) == order_of(load, EngineCapacity(step_tokens=16, max_rows=4))


def test_the_last_rows_go_by_ratio():
    random = np.random.default_rng(0)
    load = make_load([0] * 200, random.integers(1, 99, 200), [1] * 200, random.integers(1, 99, 200))
    ratios = load.decode_ratio[order_of(load)]
    assert (np.diff(ratios[-8:]) <= 0).all()
    assert not (np.diff(ratios[:-8]) <= 0).all()


def test_rows_of_each_length_are_spread_evenly():
    """Every stretch of 20 rows has 4 to 6 of the fifth that are longer."""
    load = make_load([0] * 500, [30] * 500, [1] * 500, [8] * 400 + [9] * 100)
    is_longer = np.array(order_of(load)) >= 400
    counts = np.add.reduceat(is_longer[:480].astype(int), np.arange(0, 480, 20))
    assert (3, 5) <= (counts.min(), counts.max()) <= (4, 6)


def test_long_outputs_start_early_enough_to_end_with_the_run():
    """Of about 160 steps, rows of 100 tokens start in the first third or so."""
    load = make_load([0] * 220, [10] * 220, [1] * 220, [1] * 216 + [60] * 4)
    places = np.argsort(order_of(load))
    assert places[216:].max() < 220 * 0.8


def test_long_rows_start_no_faster_than_others_end():
    """All 110 of 60 tokens would start at once if 16 rows were not all that run at once."""
    load = make_load([0] * 220, [10] * 220, [1] * 220, [1] * 110 + [60] * 110)
    places = np.argsort(order_of(load, EngineCapacity(step_tokens=10_000, max_rows=16)))
    assert places[110:].max() > 180


def test_no_groups_have_an_order():
    assert [] == order_of(make_load([], [], []))


def test_room_is_that_of_all_engines():
    engine = EngineConfig(max_batched_tokens=64, max_num_seqs=256)
    assert EngineCapacity(step_tokens=192, max_rows=192) == EngineCapacity.of(engine, 3)
    # parts of a large plan run side by side
    assert EngineCapacity(step_tokens=24, max_rows=24) == EngineCapacity.of(engine, 3).share(8)
    assert EngineCapacity(step_tokens=1, max_rows=1) == EngineCapacity.of(engine).share(1000)
