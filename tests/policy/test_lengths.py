"""Output lengths learnt from rows that ended and rows that run."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.lengths import LengthModel, LengthSketch, Outputs, RowKinds, bands

UNBOUNDED = 1 << 30
LENGTHS = st.lists(st.integers(1, 200_000), min_size=1, max_size=200)
SHARES = (0.1, 0.5, 0.9)


def ended_of(lengths, is_cut, before=None):
    """Return outputs that ended; of none anything was known before, unless that is given."""
    return Outputs.ended(lengths, is_cut, np.zeros_like(lengths) if before is None else before)


def sketch_of(ended, *, cut=(), running=()):
    sketch = LengthSketch()
    lengths = np.array([*ended, *cut], np.int64)
    sketch.note(ended_of(lengths, np.arange(len(lengths)) >= len(ended)))
    now = np.array(running, np.int64)
    sketch.note_running(Outputs.running(np.zeros_like(now), now))
    return sketch


def expect(sketch, num_tokens=0, max_tokens=UNBOUNDED):
    return float(sketch.distribution().expect([num_tokens], [max_tokens])[0])


def quantile(sketch, share, num_tokens=0, max_tokens=UNBOUNDED):
    return float(sketch.distribution().quantiles([share], [num_tokens], [max_tokens])[0, 0])


@settings(deadline=None)
@given(LENGTHS, st.floats(0.01, 0.99))
def test_a_quantile_is_within_a_sixteenth_of_the_exact_one(lengths, share):
    exact = np.quantile(lengths, share, method="inverted_cdf")
    assert quantile(sketch_of(lengths), share) == pytest.approx(exact, rel=1 / 16, abs=0.5)


@settings(deadline=None)
@given(st.lists(st.integers(1, 31), min_size=1, max_size=200), st.floats(0.01, 0.99))
def test_quantiles_of_short_outputs_are_exact(lengths, share):
    exact = np.quantile(lengths, share, method="inverted_cdf")
    assert quantile(sketch_of(lengths), share) == exact


@settings(deadline=None)
@given(LENGTHS)
def test_the_mean_is_kept(lengths):
    assert expect(sketch_of(lengths)) == pytest.approx(np.mean(lengths), rel=0.01, abs=0.01)


@pytest.mark.parametrize("length", [5, 100, 400, 777, 4096])
def test_outputs_of_one_length_stay_one_length(length):
    sketch = sketch_of([length] * 9)
    assert [length] * 3 == [quantile(sketch, share) for share in SHARES]


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(1, 300_000), st.lists(st.integers(0, 300_000), min_size=2))
def test_what_is_expected_does_not_fall_as_tokens_come(ended, running, max_tokens, tokens):
    sketch = sketch_of(ended, running=running)
    now = np.sort(np.minimum(tokens, max_tokens))
    distribution, bound = sketch.distribution(), np.full(len(now), max_tokens)
    means, quantiles = (distribution.expect(now, bound), distribution.quantiles(SHARES, now, bound))
    assert (np.diff(means) >= -1e-6 * means[1:]).all()
    assert (np.diff(quantiles, axis=0) >= 0).all()
    assert (np.diff(quantiles, axis=1) >= 0).all()


@settings(deadline=None)
@given(LENGTHS, LENGTHS, st.integers(0, 300_000), st.integers(1, 300_000))
def test_an_output_grows_by_a_token_at_least_and_never_beyond_its_bound(ended, runs, now, bound):
    mean = expect(sketch_of(ended, running=runs), now, bound)
    assert min(now + 1, bound) <= mean <= bound


def test_one_that_has_tokens_is_like_those_that_were_longer():
    assert expect(sketch_of([10, 20, 30]), 15) == pytest.approx(25)


def test_outputs_that_run_count_as_longer_than_they_are():
    # one of two has ended, the other is taken for twice as long as the longest that was seen
    sketch = sketch_of([10], running=[20])
    assert (10 + 2 * 21) / 2 == expect(sketch)
    assert (10 + 30) / 2 == expect(sketch, max_tokens=30)


def test_outputs_that_a_bound_cut_off_would_have_been_longer():
    sketch = sketch_of([10] * 3, cut=[25])
    assert (3 * 10 + 25) / 4 == expect(sketch, max_tokens=25)
    assert (3 * 10 + 40) / 4 == expect(sketch, max_tokens=40)
    assert quantile(sketch, 0.9, max_tokens=25) == 25


def test_outputs_that_run_in_a_wide_bin_are_at_risk_in_half_of_it():
    # the bin is that of 64 to 67 tokens, and all of 5 for itself
    for length, beyond, share in ((66, 2 * 68, (4 + 1) / (2 * 4)), (5, 2 * 6, 1)):
        longer = 1 - 10 / (10 + 10 * share)
        mean = length * (1 - longer) + beyond * longer
        assert expect(sketch_of([length] * 10, running=[length] * 10)) == pytest.approx(mean)


def test_outputs_that_ended_run_no_more():
    sketch = sketch_of([10] * 20, running=[20] * 20)
    sketch.note_running(Outputs.running(np.full(20, 20), np.zeros(20, np.int64)))
    sketch.note(ended_of(np.full(20, 10), np.zeros(20, np.bool_)))
    assert expect(sketch) == 10


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_first_outputs_to_end_do_not_make_all_of_them_short(seed):
    random = np.random.default_rng(seed)
    lengths = np.maximum(1, np.rint(random.lognormal(3, 1, 4000))).astype(np.int64)
    # all began together, and have made 15 tokens
    sketch = sketch_of(lengths[lengths <= 15], running=np.full((lengths > 15).sum(), 15))
    assert quantile(sketch, 0.25) == pytest.approx(np.quantile(lengths, 0.25), abs=1)
    assert quantile(sketch, 0.5) > 15


def test_later_outputs_count_more_than_much_earlier_ones():
    sketch = LengthSketch()
    for length in [10] * 20 + [30] * 20:
        sketch.note(ended_of(np.full(1000, length), np.zeros(1000, np.bool_)))
    assert quantile(sketch, 0.5) == 30
    assert sketch.num_rows <= 8192


def kinds(num_rows, *, client="c", band=7, group=-1):
    of_rows = (np.broadcast_to(value, num_rows).astype(np.int64) for value in (band, group))
    return RowKinds(client=client, **dict(zip(("bands", "groups"), of_rows, strict=True)))


def learn(model, lengths, **known):
    none = np.zeros(len(lengths), np.int64)
    model.note(kinds(len(lengths), **known), np.array(lengths), none > 0, none)


OUTPUTS = st.tuples(
    st.integers(1, 2000), st.booleans(), st.integers(0, 500), st.integers(-1, 3), st.integers(5, 7)
)


@given(st.lists(OUTPUTS, min_size=1, max_size=60))
def test_outputs_of_several_sketches_count_in_each_as_if_they_came_one_by_one(outputs):
    lengths, cut, before, groups, of_bands = (np.array(each) for each in zip(*outputs, strict=True))
    model = LengthModel()
    rows = RowKinds(client="c", bands=of_bands, groups=groups)
    model.note_running(rows, np.zeros_like(before), before)
    model.note(rows, lengths, cut, before)
    for key, at in rows.by_key:
        sketch = model._sketches[key]
        assert len(at) == sketch.num_rows
        # each ran and has ended
        assert not sketch._running.any()
        ended = [(int(lengths[i]), bool(cut[i])) for i in at.tolist()]
        parts = [
            sketch_of(() if is_cut else (length,), cut=(length,) if is_cut else ())
            for length, is_cut in ended
        ]
        assert (sum(part._counts for part in parts) == sketch._counts).all()


def expected_of(model, **known):
    return float(model.expect(kinds(1, **known), np.zeros(1, np.int64), np.array([1000]))[0])


def test_rows_are_estimated_by_the_closest_kind_that_is_known_well():
    model = LengthModel()
    learn(model, [10] * 32, group=1)
    learn(model, [20] * 32, group=2)
    learn(model, [30] * 31, group=3, band=8)
    assert (10, 20) == (expected_of(model, group=1), expected_of(model, group=2))
    # the band is not known well either, and so it is the client
    all_rows = (32 * 10 + 32 * 20 + 31 * 30) / 95
    assert expected_of(model, group=3, band=8) == pytest.approx(all_rows)
    assert expected_of(model, group=9, band=7) == pytest.approx(15)


def test_nothing_is_known_of_rows_of_another_client():
    model = LengthModel()
    learn(model, [10] * 32)
    assert np.isnan(expected_of(model, client="d"))
    assert (32, 0) == (model.num_rows("c"), model.num_rows("d"))


def test_the_kinds_used_least_lately_are_forgotten():
    model = LengthModel(max_keys=10)
    learn(model, [50] * 32, group=0)
    for group in range(1, 30):
        learn(model, [10] * 32, group=group)
    assert len(model) == 10
    # that of its band is known still
    assert expected_of(model, group=0) == pytest.approx(10, rel=0.2)
    assert expected_of(model, group=29) == 10


def test_what_a_plan_expects_is_a_band_of_its_own():
    known = bands(np.array([64, 127, 128]), np.array([4, 7, 8]), np.array([False, False, False]))
    planned = bands(np.array([64, 127, 128]), np.array([4, 7, 8]), np.array([True, True, True]))
    assert known[0] == known[1] != known[2]
    assert planned[0] == planned[1] != planned[2]
    assert not set(known) & set(planned)
