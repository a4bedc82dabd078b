"""Bounds that follow running rows, and the even parts of sets that they are found by."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch_lab.stages.heterogeneity import variation
from raybatch_lab.stages.refinement import best_split, even_part, refine_bounds
from tests.lab.stages.pools import QUALITY, curve_to

CURVE = curve_to(3.0)


def seconds(lengths):
    if not len(lengths):
        return 0.0
    factor = CURVE.at(lengths.std() / lengths.mean())
    costs = QUALITY
    return costs.step_s + costs.row_s * len(lengths) + costs.context_s * factor * lengths.sum()


@given(values=st.lists(st.integers(1, 10**5), min_size=1, max_size=30))
def test_a_split_is_the_best_of_all(values):
    lengths = np.sort(np.array(values))
    each = [max(seconds(lengths[:i]), seconds(lengths[i:])) for i in range(len(lengths))]
    assert each[best_split(lengths, QUALITY, CURVE)] == pytest.approx(min(each), rel=1e-9)


def refined(bounds, *stages, smoothing=1.0):
    running = [[np.array(replica, int) for replica in stage] for stage in stages]
    return refine_bounds(np.array(bounds, float), running, QUALITY, CURVE, smoothing=smoothing)


def test_a_bound_goes_down_where_the_stage_before_has_too_much():
    crowded = list(range(10, 600))
    assert refined([600.0], [crowded], [[700, 800]])[0] < 600


def test_a_bound_goes_up_where_the_stage_after_has_too_much():
    assert refined([100.0], [[50, 60]], [list(range(100, 600))])[0] > 100


@pytest.mark.parametrize(("num_rows", "moves"), [(4, False), (5, True)])
def test_a_bound_stays_where_fewer_than_five_rows_are(num_rows, moves):
    rows = [200] * (num_rows - 1)
    assert moves == (refined([1000.0], [rows], [[1200]])[0] != 1000.0)


def test_stages_without_rows_keep_their_bounds():
    np.testing.assert_array_equal([10.0, 20.0], refined([10.0, 20.0], [[], []], [[]], [[]]))


@given(
    bounds=st.lists(st.integers(1, 500), min_size=1, max_size=4, unique=True).map(sorted),
    seed=st.integers(0, 1000),
)
def test_bounds_stay_in_order(bounds, seed):
    rng = np.random.default_rng(seed)
    stages = [
        [rng.integers(1, 600, rng.integers(0, 20)).tolist() for _ in range(rng.integers(1, 4))]
        for _ in range(len(bounds) + 1)
    ]
    assert (np.diff([0.0, *refined(bounds, *stages)]) > 0).all()


def test_a_smoothed_bound_varies_less_than_one_that_jumps_on_drifting_rows():
    steps = {}
    for smoothing in (0.2, 1.0):
        rng, bounds, found = np.random.default_rng(0), np.array([200.0]), []
        for turn in range(60):
            drawn = rng.lognormal(5 + turn / 60, 1, 24).astype(int) + 1
            running = [[drawn[drawn <= bounds[0]]], [drawn[drawn > bounds[0]]]]
            bounds = refine_bounds(bounds, running, QUALITY, CURVE, smoothing=smoothing)
            found.append(bounds[0])
        steps[smoothing] = np.abs(np.diff(found)).mean()
    assert steps[0.2] < steps[1.0] / 2


def test_an_average_part_stands_for_each_stage():
    # as many replicas as rows of each length: the parts are what one replica would have
    one = refined([100.0], [[20, 40, 60, 80]], [[200, 300, 400, 500]])
    three = refined([100.0], [[20, 40, 60, 80]] * 3, [[200, 300, 400, 500]] * 3)
    np.testing.assert_array_equal(one, three)


def test_variation_of_no_rows_is_none():
    assert 0.0 == variation(*np.zeros((3, 1)))[0]


def test_every_nth_value_is_taken_from_the_middle_of_the_first_n_on():
    assert [3, 7] == even_part(np.array([8, 2, 7, 3, 6, 4, 5, 1]), 4).tolist()


def test_one_part_is_the_set_itself():
    assert [1, 2, 3] == even_part(np.array([3, 1, 2]), 1).tolist()


@given(size=st.integers(0, 12), num_parts=st.integers(1, 12))
def test_the_part_has_the_average_size_within_one(size, num_parts):
    assert abs(len(even_part(np.arange(size), num_parts)) - size / num_parts) < 1


@pytest.mark.parametrize(("size", "expected"), [(0, []), (2, []), (3, [2]), (4, [2])])
def test_fewer_values_than_parts_give_one_if_more_than_half(size, expected):
    assert expected == even_part(np.arange(size), 5).tolist()


def test_the_part_has_nearly_the_sum_of_an_average_part(rng, record_property):
    errors = []
    for _ in range(200):
        lengths = rng.lognormal(6, 1, int(rng.integers(50, 400))).astype(int)
        num_parts = int(rng.integers(2, 6))
        average = lengths.sum() / num_parts
        errors.append(abs(even_part(lengths, num_parts).sum() / average - 1))
    record_property("mean error of the sum", float(np.mean(errors)))
    assert np.mean(errors) < 0.07


def test_no_parts_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        even_part(np.arange(3), 0)
