"""Units of commit: borders between groups, sizes, and groups that are too large for one."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raybatch.config import PlanConfig
from raybatch.prefix.plan import cut_units


def units(group_rows, target, maximum):
    config = PlanConfig(unit_rows=target, max_unit_rows=maximum)
    return cut_units(np.array(group_rows), config).tolist()


def test_a_unit_closes_at_the_first_border_after_the_target():
    assert [0, 12, 24, 28] == units([4] * 7, 10, 20)


def test_a_group_that_would_exceed_the_maximum_begins_the_next_unit():
    assert [0, 8, 26] == units([8, 18], 10, 20)


def test_a_group_above_the_maximum_is_cut_into_equal_units():
    assert [0, 17, 34, 50] == units([50], 10, 20)


def test_rows_before_a_large_group_join_its_first_unit_if_that_costs_no_cut():
    assert [0, 18, 36, 53] == units([3, 50], 10, 20)


def test_the_end_of_a_large_group_goes_on_with_the_next_groups():
    assert [0, 11, 25] == units([21, 4], 12, 20)


def test_no_rows_make_no_units():
    assert [0] == units([], 10, 20)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 20), st.integers(0, 20))
def test_units_hold_all_rows_and_stay_below_the_maximum(group_rows, target, more):
    bounds = units(group_rows, target, target + more)
    sizes = np.diff(bounds)
    assert sum(group_rows) == bounds[-1]
    assert all(0 < size <= target + more for size in sizes)


@given(st.lists(st.integers(1, 60), max_size=40), st.integers(1, 20), st.integers(0, 20))
def test_only_groups_above_the_maximum_are_cut_and_no_more_than_needed(group_rows, target, more):
    bounds, borders = units(group_rows, target, target + more), np.cumsum([0, *group_rows])
    for begin, end in itertools.pairwise(borders):
        num_cuts = sum(begin < bound < end for bound in bounds)
        assert num_cuts <= -(-(end - begin) // (target + more)) - 1
