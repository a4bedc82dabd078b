"""When drafts pay, as pure numbers."""

import math

import pytest

from raybatch.policy.speculation import MAX_BREAK_EVEN, StepTimes, draft_length


def times_of(seconds, *, max_growth=9, max_age=256):
    """Step times of which each size was seen three times."""
    times = StepTimes(max_growth, max_age=max_age)
    for rows, cost in seconds.items():
        for _ in range(3):
            times.note(rows, cost)
    return times


def test_steps_run_without_drafts_until_their_size_is_known():
    times = StepTimes(9)
    for _ in range(2):
        times.note(8, 0.010)
        assert times.break_even(8) == math.inf
    times.note(8, 0.010)
    assert times.break_even(8) < MAX_BREAK_EVEN
    assert times.break_even(64) == math.inf


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({8: 0.010, 16: 0.013}, 0.3),
        # rows that cost nothing
        ({8: 0.010, 16: 0.010}, 0.05),
        # nothing but rows
        ({8: 0.010, 16: 0.020}, 1.0),
        # eight times the rows for 3.8 times the time
        ({8: 0.010, 64: 0.038}, 0.4),
        # the worst of them
        ({8: 0.010, 16: 0.013, 64: 0.038}, 0.4),
        # beyond what drafts can make of it
        ({8: 0.010, 16: 0.013, 1024: 9.0}, 0.3),
    ],
)
def test_the_break_even_share_is_the_growth_of_time_over_that_of_rows(seconds, expected):
    assert times_of(seconds).break_even(8) == pytest.approx(expected)


def test_one_slow_step_changes_nothing():
    times = times_of({8: 0.010, 16: 0.013})
    times.note(16, 5.0)
    assert times.break_even(8) == pytest.approx(0.3)


def test_a_size_that_was_not_seen_for_long_is_tried_again():
    times = times_of({16: 0.050}, max_age=20)
    for _ in range(20):
        times.note(8, 0.010)
    assert times.break_even(8) == pytest.approx(4.0)
    times.note(8, 0.010)
    assert times.break_even(8) == pytest.approx(0.3)
    for _ in range(3):
        times.note(16, 0.012)
    assert times.break_even(8) == pytest.approx(0.2)


def test_a_large_batch_gets_no_drafts():
    # weights are read in 10 ms, a row takes 0.1 ms: one draft for each of the sequences
    def cost(rows):
        return 0.010 + 0.0001 * rows

    found = {
        rows: draft_length(
            1.0, times_of({rows: cost(rows), 2 * rows: cost(2 * rows)}).break_even(rows), 4
        )
        for rows in (1, 16, 256, 1024, 4096)
    }
    assert found == {1: 4, 16: 4, 256: 4, 1024: 0, 4096: 0}


@pytest.mark.parametrize(
    ("acceptance", "break_even", "expected"),
    [
        (0.29, 0.3, 0),
        (0.5, 0.3, 1),
        (0.6, 0.3, 2),
        (0.9, 0.3, 8),
        (0.9, 0.05, 8),
        (1.0, 0.3, 8),
        (1.0, 0.91, 0),
        (0.0, 0.05, 0),
        (1.0, math.inf, 0),
    ],
)
def test_the_last_draft_is_worth_its_cost(acceptance, break_even, expected):
    assert draft_length(acceptance, break_even, 8) == expected
