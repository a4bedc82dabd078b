"""Sums over ranges of lengths, beside those of every single token."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch_lab.stages.lengths import RangeWork, RowLengths

ROWS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=8)


def lengths_of(rows):
    return RowLengths(*(np.array(column) for column in zip(*rows, strict=True)))


def directly(rows, low, high):
    """Return what rows do in (low, high], token by token."""
    made = [x for p, o in rows for x in range(p + 1, p + o + 1) if low < x <= high]
    begun = [p for p, _ in rows if low < p <= high]
    squares = sum(x * x for x in made)
    pairs = sum(p * (p + 1) / 2 for p in begun)
    return [len(made), sum(made), squares, len(begun), sum(begun), pairs]


@given(rows=ROWS, low=st.integers(0, 130), span=st.integers(0, 130))
def test_the_work_of_a_range_is_that_of_its_tokens(rows, low, span):
    lengths = lengths_of(rows)
    found = lengths.below(low + span) - lengths.below(low)
    np.testing.assert_allclose(found, directly(rows, low, low + span), rtol=1e-12, atol=1e-9)


@given(rows=ROWS, bound=st.integers(0, 130))
def test_rows_cross_a_bound_if_they_are_made_on_both_sides(rows, bound):
    expected = sum(p <= bound < p + o for p, o in rows)
    assert expected == lengths_of(rows).crossing(bound)


@given(rows=ROWS, cuts=st.lists(st.integers(1, 119), max_size=4, unique=True))
def test_a_row_is_charged_once_for_each_token_however_many_ranges_it_passes(rows, cuts):
    lengths, bounds = lengths_of(rows), np.array([0, *sorted(cuts), 120])
    parts = np.diff(lengths.below(bounds), axis=1)
    np.testing.assert_allclose(parts.sum(axis=1), directly(rows, 0, 120), rtol=1e-12)


def test_variation_is_that_of_all_lengths_at_which_tokens_are_made():
    lengths = lengths_of([(10, 90), (3, 5)])
    made = np.array([*range(11, 101), *range(4, 9)])
    work = RangeWork.of_sums(lengths.below([100]))
    assert work.variation[0] == pytest.approx(made.std() / made.mean())
    assert work.mean_len[0] == pytest.approx(made.mean())


def test_a_range_in_which_nothing_is_made_has_no_variation():
    work = RangeWork.of_sums(lengths_of([(10, 5)]).below([4]))
    assert (work.variation[0], work.mean_len[0]) == (0.0, 0.0)


@pytest.mark.parametrize("rows", [[(0, 5)], [(5, 0)]])
def test_a_length_below_one_is_refused(rows):
    with pytest.raises(ConfigError, match="must be at least 1 token"):
        lengths_of(rows)


def test_no_rows_are_refused():
    with pytest.raises(ConfigError, match="must be equal, and at least 1"):
        RowLengths(np.array([], int), np.array([], int))
