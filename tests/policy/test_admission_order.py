"""Orders of admission: what they promise, and the published formula of bins."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.admission_order import PATIENCE, next_batch, predicted_steps, shortest_first
from tests.policy.admission_simulation import run_batches, run_continuously, run_stream


def floats(*values):
    return np.array(values, float)


def ints(*values):
    return np.array(values, np.int64)


def batch_of(services, batch_rows, max_bins=16, num_rows=None):
    num_rows = np.ones(len(services), np.int64) if num_rows is None else ints(*num_rows)
    found = next_batch(floats(*services), num_rows, batch_rows=batch_rows, max_bins=max_bins)
    return found.tolist()


def test_a_prompt_counts_as_its_share_of_a_step():
    assert predicted_steps(10, 256, 512) == 10.5


def test_rows_that_come_together_start_by_length():
    assert shortest_first(floats(5, 1, 9, 1), ints(0, 0, 0, 0)).tolist() == [1, 3, 0, 2]


def test_without_patience_rows_start_as_they_came():
    assert shortest_first(floats(5, 1, 9), ints(0, 1, 2), patience=0).tolist() == [0, 1, 2]


def test_a_long_row_goes_before_a_short_one_that_came_late_enough():
    early, late = 100 * PATIENCE - 9, 100 * PATIENCE
    assert shortest_first(floats(100, 1), ints(0, early)).tolist() == [1, 0]
    assert shortest_first(floats(100, 1), ints(0, late)).tolist() == [0, 1]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    patience=st.sampled_from([0.0, 1.0, PATIENCE]),
    num_slots=st.integers(1, 4),
)
def test_no_row_is_passed_by_one_that_comes_after_its_patience(seed, patience, num_slots):
    rng = np.random.default_rng(seed)
    arrivals = np.sort(rng.integers(0, 200, 60))
    service = np.ceil(rng.lognormal(1, 1.2, 60))
    started = run_stream(arrivals, service, patience=patience, num_slots=num_slots)
    place = {entry: i for i, (entry, _) in enumerate(started)}
    for entry in range(60):
        passed = [i for i in range(60) if place[i] < place[entry]]
        latest = max((arrivals[i] for i in passed), default=0)
        assert latest <= arrivals[entry] + patience * service[entry]


def test_a_long_row_starts_although_short_ones_never_end_to_come():
    # more of them in each step than can be served
    arrivals = np.r_[0, np.repeat(np.arange(2000), 2)]
    service = np.r_[50.0, np.ones(4000)]
    started = dict(run_stream(arrivals, service, patience=4.0))
    # all that came before it was due, one a step
    assert 200 < started[0] <= 2 * 50 * 4 + 1


@pytest.mark.parametrize("factor", [1, 2], ids=["oracle", "half to double"])
def test_shortest_first_ends_rows_sooner_and_all_of_them_hardly_later(factor):
    rng = np.random.default_rng(5)
    lengths = np.ceil(rng.lognormal(np.log(50), 1, 4000))
    predicted = lengths * factor ** rng.uniform(-1, 1, 4000)
    arrived = np.zeros(4000, np.int64)
    shortest = run_continuously(lengths, shortest_first(predicted, arrived), num_slots=64)
    fcfs = run_continuously(lengths, np.arange(4000), num_slots=64)
    assert shortest.mean() < 0.62 * fcfs.mean()
    # the longest rows start last
    assert shortest.max() < 1.25 * fcfs.max()


def test_a_batch_is_the_bin_of_the_oldest_row():
    assert batch_of((9, 1, 8, 2, 3, 7), 3) == [0, 2, 5]
    assert batch_of((2, 1, 8, 9, 3, 7), 3) == [0, 1, 4]


def test_a_bin_gives_its_oldest_rows():
    assert batch_of((9, 1, 8, 2, 3, 7), 2, max_bins=2) == [0, 2]


def test_bins_that_hold_no_batch_are_one():
    assert batch_of((9, 1, 8, 2, 3), 3) == [0, 1, 2]


def test_one_bin_is_the_order_of_arrival():
    assert batch_of((9, 1, 8, 2, 3, 7), 4, max_bins=1) == [0, 1, 2, 3]


def test_a_group_is_one_entry_of_its_bin():
    assert batch_of((9, 1, 8, 2), 4, num_rows=(2, 3, 3, 2)) == [0, 2]


def test_nothing_waits_and_nothing_runs():
    assert batch_of((), 4) == []


@settings(max_examples=100, deadline=None)
@given(
    services=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    batch_rows=st.integers(1, 12),
    max_bins=st.integers(1, 8),
    data=st.data(),
)
def test_a_batch_is_full_has_the_oldest_entry_and_no_entry_that_does_not_fit(
    services, batch_rows, max_bins, data
):
    num_rows = data.draw(
        st.lists(st.integers(1, 5), min_size=len(services), max_size=len(services))
    )
    chosen = batch_of(services, batch_rows, max_bins, num_rows)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    # the last one alone may hold more rows than are left
    assert sum(num_rows[i] for i in chosen[:-1]) < batch_rows
    if max(num_rows) == 1:
        assert len(chosen) == min(batch_rows, len(services))


@pytest.mark.parametrize(("batch_rows", "max_bins"), [(0, 1), (1, 0)])
def test_batches_and_bins_that_are_none_are_refused(batch_rows, max_bins):
    with pytest.raises(ConfigError, match="both are at least 1"):
        batch_of((1,), batch_rows, max_bins)


@pytest.mark.parametrize("patience", [-1.0, float("nan"), float("inf")])
def test_a_patience_without_meaning_is_refused(patience):
    with pytest.raises(ConfigError, match="number of at least 0"):
        shortest_first(floats(1), ints(0), patience=patience)


def formula(low, high, batch_rows, num_bins):
    """Rows per step of full batches from equal bins of uniform lengths (arXiv:2412.04504)."""
    of_longest = (batch_rows - 1) / (batch_rows + 1) * (high - low) / (2 * num_bins)
    return batch_rows / ((low + high) / 2 + of_longest)


@pytest.mark.parametrize(
    ("num_bins", "expected"),
    [
        (1, 1.647),
        pytest.param(2, 2.138, marks=pytest.mark.exhaustive),
        (4, 2.514),
        pytest.param(8, 2.755, marks=pytest.mark.exhaustive),
        (32, 2.969),
    ],
)
def test_bins_bring_the_published_throughput(num_bins, expected):
    assert formula(1, 20, 32, num_bins) == pytest.approx(expected, abs=1e-3)
    # evenly spread, so that what differs is the cutting of bins and not the mean length
    lengths = np.random.default_rng(2).permutation(np.linspace(1, 20, 64_000))
    found, waits = run_batches(lengths, lengths, batch_rows=32, max_bins=num_bins, num_waiting=8192)
    assert found == pytest.approx(expected, rel=1e-3)
    # bins take turns as their rows grow old: nobody waits much longer than in the order of arrival
    assert waits.max() <= 1.25 * (8192 / 32) + num_bins


def share_of_continuous(sigma, *, factor=1.0, max_bins=16):
    """What bins gain over the order of arrival, as a share of what continuous batching gains."""
    rng = np.random.default_rng(7)
    lengths = np.ceil(rng.lognormal(np.log(200), sigma, 16_000))
    lengths = np.minimum(lengths, 9.2 * np.percentile(lengths, 95))
    predicted = lengths * factor ** rng.uniform(-1, 1, len(lengths))
    plain, binned = (
        run_batches(lengths, predicted, batch_rows=32, max_bins=bins, num_waiting=4096)[0]
        for bins in (1, max_bins)
    )
    return (binned - plain) / (32 / lengths.mean() - plain)


def test_bins_recover_less_of_continuous_batching_the_longer_the_tail():
    found = [share_of_continuous(sigma) for sigma in (0.5, 1.0, 1.95)]
    assert found == pytest.approx([0.80, 0.53, 0.32], abs=0.05)


def test_bins_by_wrong_predictions_gain_less_and_lose_nothing():
    found = [share_of_continuous(0.5, factor=factor) for factor in (1, 2, 4)]
    assert found == pytest.approx([0.80, 0.27, 0.11], abs=0.05)
