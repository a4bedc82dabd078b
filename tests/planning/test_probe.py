import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.planning.probe import choose_probe, estimate_from_probe
from raybatch.prefix.histogram import Histogram, histogram_bands, length_bands

ROWS = st.lists(st.tuples(st.integers(-1, 5), st.integers(0, 3)), min_size=1, max_size=60)


def ints(*values):
    return np.array(values, np.int64)


@given(ROWS, st.floats(0.01, 1), st.integers(0, 5))
def test_every_stratum_gives_its_share_of_distinct_rows(rows, fraction, seed):
    group, strata = np.array(rows, np.int64).T
    probe = choose_probe(group, strata, fraction=fraction, seed=seed)
    assert probe.tolist() == sorted(set(probe.tolist()))
    for stratum in set(strata.tolist()):
        expected = int(np.ceil(fraction * np.count_nonzero(strata == stratum)))
        assert expected == np.count_nonzero(strata[probe] == stratum)


def test_a_probe_is_spread_over_the_groups():
    group = np.repeat(np.arange(10), 100)
    probe = choose_probe(group, np.zeros(1000, np.int64), fraction=0.02, seed=3)
    assert [2] * 10 == np.bincount(group[probe]).tolist()


def test_a_probe_depends_on_its_seed_alone():
    group, strata = np.full(1000, -1), np.zeros(1000, np.int64)
    first, again, other = (
        choose_probe(group, strata, fraction=0.01, seed=s).tolist() for s in (1, 1, 2)
    )
    assert (True, False) == (first == again, first == other)


def test_every_row_is_as_likely_as_the_others():
    group, strata = np.repeat(np.arange(4), 5), np.zeros(20, np.int64)
    counts = np.zeros(20)
    for seed in range(2000):
        counts[choose_probe(group, strata, fraction=0.1, seed=seed)] += 1
    assert counts.mean() == 200
    assert np.abs(counts - 200).max() < 75


def test_no_rows_have_no_probe():
    assert [] == choose_probe(ints(), ints(), fraction=0.01).tolist()


@pytest.mark.parametrize("fraction", [0.0, 1.5])
def test_a_share_out_of_range_is_refused(fraction):
    with pytest.raises(AssertionError, match=f"a probe of {fraction}"):
        choose_probe(ints(1), ints(1), fraction=fraction)


def test_a_group_counts_before_its_stratum_and_the_stratum_before_all():
    group, strata = ints(7, 7, 7, 8, 8, 9), ints(0, 0, 0, 0, 1, 2)
    estimate = estimate_from_probe(ints(0, 1, 4), ints(10, 20, 60), group, strata)
    assert [10, 20, 15, 60, 60, 30] == estimate.tolist()


def test_rows_that_are_alone_do_not_speak_for_each_other():
    group, strata = ints(-1, -1, -1), ints(0, 0, 1)
    estimate = estimate_from_probe(ints(0, 1), ints(10, 30), group, strata)
    assert [10, 30, 20] == estimate.tolist()


@given(ROWS, st.integers(0, 3), st.data())
def test_a_probe_of_everything_gives_the_true_lengths(rows, seed, data):
    group, strata = np.array(rows, np.int64).T
    lengths = np.array([data.draw(st.integers(1, 9)) for _ in rows])
    probe = choose_probe(group, strata, fraction=1.0, seed=seed)
    assert lengths.tolist() == estimate_from_probe(probe, lengths[probe], group, strata).tolist()


def test_an_empty_probe_is_refused():
    with pytest.raises(AssertionError, match="a probe without rows"):
        estimate_from_probe(ints(), ints(), ints(1), ints(1))


def test_bands_are_quantiles():
    bands = length_bands(np.arange(1.0, 102.0))
    assert (6, 26, 51, 76, 96, 100) == bands.tokens
    assert (51, pytest.approx(965 / 5151)) == (bands.mean, bands.top_tenth)


def test_no_rows_have_no_bands():
    with pytest.raises(AssertionError, match="one row"):
        length_bands(np.zeros(0))
    with pytest.raises(AssertionError, match="one row"):
        histogram_bands(Histogram())


def test_a_histogram_tells_the_bands_as_far_as_its_bins_do():
    lengths = np.random.default_rng(0).lognormal(4, 1, 5000).round() + 1
    exact, found = length_bands(lengths), histogram_bands(Histogram.of(lengths))
    assert exact.tokens == pytest.approx(found.tokens, rel=0.1)
    assert (exact.mean, exact.top_tenth) == (found.mean, pytest.approx(found.top_tenth, rel=0.1))


def test_equal_lengths_have_one_band():
    found = histogram_bands(Histogram.of(np.full(7, 100)))
    assert {100.0} == set(found.tokens)
