"""Histograms over fixed bins."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.prefix.histogram import Histogram

numbers = st.lists(st.integers(0, 2**40), max_size=30)


def histogram(values):
    return Histogram.of(np.array(values, np.int64))


@given(numbers)
def test_every_number_lies_in_the_bin_that_counts_it(values):
    found = histogram(values)
    expected = [sum(a <= v < b for v in values) for a, b in pairwise(found.edges())]
    assert expected == list(found.counts)


@given(st.lists(numbers, max_size=4))
def test_parts_add_up_to_the_whole(parts):
    whole = histogram([value for part in parts for value in part])
    assert whole == Histogram.merge([histogram(part) for part in parts])


def test_small_numbers_have_bins_of_their_own_and_large_ones_four_per_doubling():
    assert [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20] == histogram([16]).edges()


def test_fractions_count_with_the_nearest_number():
    assert Histogram.of(np.array([1.6, 2.4])).counts == (0, 0, 2)


def test_total_and_mean_are_exact():
    found = histogram([100, 300])
    assert (400, 200.0, 100, 300) == (found.total, found.mean, found.lowest, found.highest)


def test_quantiles_are_as_fine_as_the_bins():
    found = histogram(range(10_001))
    assert 5000 == pytest.approx(found.quantile(0.5), rel=0.02)


def test_quantiles_stay_within_the_numbers():
    assert (2200.0, 2200.0) == (histogram([2200] * 5).quantile(0.01), histogram([2200]).quantile(1))


@pytest.mark.parametrize("numbers", [[3], [0, 7, 7], [100, 192, 513], list(range(200, 900, 7))])
def test_bins_alone_tell_the_ends_as_far_as_bins_go(numbers):
    whole = histogram(numbers)
    found = Histogram.of_bins(whole.counts, whole.total)
    assert (found.counts, found.total) == (whole.counts, whole.total)
    assert found.lowest <= min(numbers) <= max(numbers) <= found.highest
    edges = whole.edges()
    assert found.highest == edges[-1] - 1
    assert found.lowest in edges
    assert found.quantile(0.5) == pytest.approx(whole.quantile(0.5), rel=0.2)


def test_nothing_has_a_quantile_of_zero():
    assert (0.0, 0.0, 0) == (Histogram().quantile(0.5), Histogram().mean, Histogram().num_values)
