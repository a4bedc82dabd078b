"""Which units are in time, and the cheapest engines for all of them."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.policy.deadline import (
    EngineChoice,
    RunProgress,
    UnitDeadline,
    cheapest_in_time,
    is_in_time,
    largest_in_time,
    replica_counts,
)

seconds = st.floats(0.0, 1e6, allow_nan=False)
# seconds of the first one, two, three ... units: forecasts need not rise everywhere
forecasts = st.lists(seconds, min_size=1, max_size=40)
progresses = st.builds(
    RunProgress,
    rows_done=st.integers(0, 10**6),
    rows_open=st.integers(0, 10**6),
    rows_running=st.floats(0.0, 1e4),
    work_s=seconds,
)
deadlines = st.builds(
    UnitDeadline, ends_at=seconds, ready_at=seconds, row_s=st.none() | st.floats(1e-6, 1e3)
)


def largest(forecast, deadline_s):
    return largest_in_time(lambda units: forecast[units - 1], len(forecast), deadline_s)


@given(forecasts, seconds)
def test_what_is_chosen_is_in_time_and_one_unit_more_is_not(forecast, deadline_s):
    units = largest(forecast, deadline_s)
    assert units == 0 or forecast[units - 1] <= deadline_s
    assert units == len(forecast) or forecast[units] > deadline_s


@given(forecasts, seconds, seconds)
def test_more_time_never_means_fewer_units(forecast, one, other):
    less, more = sorted((one, other))
    assert largest(forecast, less) <= largest(forecast, more)


@given(st.lists(seconds, min_size=1, max_size=40), seconds)
def test_a_rising_forecast_chooses_all_units_in_time(forecast, deadline_s):
    rising = sorted(forecast)
    assert sum(end <= deadline_s for end in rising) == largest(rising, deadline_s)


def test_there_are_few_predictions_for_many_units():
    predicted = []
    largest_in_time(lambda units: predicted.append(units) or float(units), 1 << 20, 12345.0)
    assert len(predicted) <= 21


def test_without_units_none_is_in_time():
    assert 0 == largest_in_time(lambda _: 0.0, 0, 10.0)


@given(progresses, deadlines, st.integers(1, 10**5), seconds, seconds)
def test_what_starts_in_time_starts_with_more_time_as_well(progress, deadline, rows, now_s, more_s):
    later = replace(deadline, ends_at=deadline.ends_at + more_s)
    assert is_in_time(progress, rows, deadline, now_s) <= is_in_time(progress, rows, later, now_s)


@given(progresses, deadlines, st.integers(1, 10**5), st.integers(0, 10**5), seconds)
def test_what_starts_in_time_starts_with_fewer_rows_as_well(progress, deadline, rows, more, now_s):
    assert is_in_time(progress, rows + more, deadline, now_s) <= is_in_time(
        progress, rows, deadline, now_s
    )


DEADLINE = UnitDeadline(ends_at=100.0, ready_at=20.0, row_s=1.0)


def test_before_the_first_row_the_start_of_engines_counts():
    assert is_in_time(RunProgress(), 80, DEADLINE, 0.0)
    assert not is_in_time(RunProgress(), 81, DEADLINE, 0.0)


def test_rows_that_are_open_come_first():
    assert is_in_time(RunProgress(rows_open=50), 30, DEADLINE, 0.0)
    assert not is_in_time(RunProgress(rows_open=51), 30, DEADLINE, 0.0)


def test_rows_that_run_are_half_done():
    assert is_in_time(RunProgress(rows_open=20, rows_running=20), 70, DEADLINE, 0.0)
    assert not is_in_time(RunProgress(rows_open=20, rows_running=20), 71, DEADLINE, 0.0)


@pytest.mark.parametrize(("done", "row_s"), [(0, 1.0), (10, 2.0), (1000, 2.99)])
def test_measurements_count_more_with_every_row(done, row_s):
    progress = RunProgress(rows_done=done, rows_open=10, rows_running=10, work_s=3.0 * (done + 5))
    assert row_s == pytest.approx(progress.row_s(1.0), abs=0.01)


def test_a_run_without_a_forecast_may_begin():
    unknown = replace(DEADLINE, row_s=None)
    assert is_in_time(RunProgress(rows_open=10**6), 10**6, unknown, 0.0)
    assert not is_in_time(RunProgress(), 1, unknown, 100.0)
    measured = RunProgress(rows_done=10, work_s=20.0)
    assert is_in_time(measured, 25, unknown, 50.0)
    assert not is_in_time(measured, 26, unknown, 50.0)


def choice(replicas, rows, done_after_s):
    return EngineChoice(num_replicas=replicas, max_num_seqs=rows, done_after_s=done_after_s)


CHOICES = (choice(1, 8, 100.0), choice(2, 8, 60.0), choice(2, 4, 60.0), choice(4, 8, 40.0))


@pytest.mark.parametrize(("deadline_s", "number"), [(100, 0), (99, 1), (59, 3)])
def test_the_least_engine_hours_in_time_are_chosen(deadline_s, number):
    assert CHOICES[number] == cheapest_in_time(CHOICES, deadline_s)


def test_no_choice_meets_a_deadline_below_the_fastest():
    assert cheapest_in_time(CHOICES, 39.0) is None


@given(st.integers(1, 5000))
def test_numbers_of_replicas_are_few_and_go_from_one_to_all(most):
    counts = replica_counts(most)
    assert (1, most) == (counts[0], counts[-1])
    assert len(counts) <= 8
    assert sorted(set(counts)) == list(counts)
