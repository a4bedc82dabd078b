"""When the last rows of a pool are spread over idle engines: the truth table of the gain test."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.policy.pool.partition import (
    NO_VERDICT,
    SwitchTimes,
    TailFacts,
    estimated_switch_s,
    estimated_team_step_s,
    gain_s,
    look,
    why_not_eligible,
)

WORLD = 8
TAIL = TailFacts(
    num_active=1,
    num_engines=WORLD,
    num_open=0,
    is_sealed=True,
    leads_rows=1,
    used_blocks=50,
    next_blocks=1,
    room_blocks=(100, 60),
)
TIMES = SwitchTimes(alone_s=0.010, team_s=0.006, switch_s=0.5, steps_left=1000)


@pytest.mark.parametrize(
    ("num_active", "expected"),
    [(0, False), (1, True), (WORLD // 2, True), (WORLD - 1, True), (WORLD, False)],
)
def test_only_fewer_rows_than_engines_are_eligible(num_active, expected):
    assert expected == (not why_not_eligible(replace(TAIL, num_active=num_active)))


@pytest.mark.parametrize(
    "change",
    [
        {"is_sealed": False},
        {"num_open": 1},
        {"leads_rows": 0},
        {"room_blocks": (100,)},
        {"why_not": "5 query heads cannot be cut for 2 ranks"},
        # 50 and the two spare ones and the next make 53, and nine tenths of 58 are fewer
        {"room_blocks": (100, 58)},
        {"used_blocks": 52},
    ],
)
def test_one_condition_that_does_not_hold_is_enough_for_no(change):
    assert why_not_eligible(replace(TAIL, **change))


def test_a_pool_that_just_holds_the_rows_is_eligible():
    assert "" == why_not_eligible(replace(TAIL, room_blocks=(59, 100)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        # a tenth has to be gained: 1000 steps of 8.5 ms and half a second make 9 s
        ({"team_s": 0.0084}, True),
        ({"team_s": 0.0085}, False),
        ({"switch_s": 2.9}, True),
        ({"switch_s": 3.0}, False),
        ({"team_s": 0.010}, False),
        ({"steps_left": 128, "switch_s": 0.1}, True),
        ({"steps_left": 127, "switch_s": 0.1}, False),
    ],
)
def test_a_switch_must_gain_a_tenth_over_enough_steps(change, expected):
    assert expected == bool(look(NO_VERDICT, TAIL, replace(TIMES, **change)).num_yes)


def test_one_boundary_is_not_enough():
    first = look(NO_VERDICT, TAIL, TIMES)
    assert (False, True) == (first.switches, look(first, TAIL, TIMES).switches)


def test_boundaries_that_say_yes_must_follow_each_other():
    first = look(NO_VERDICT, TAIL, TIMES)
    between = look(first, replace(TAIL, num_open=1), TIMES)
    assert "1 rows wait" == between.reason
    assert not look(between, TAIL, TIMES).switches


def test_a_verdict_of_no_says_the_times():
    verdict = look(NO_VERDICT, TAIL, replace(TIMES, team_s=0.02))
    expected = "1000 steps of 10.00 ms alone, or of 20.00 ms in a team after a switch of 0.50 s"
    assert expected == verdict.reason


def test_a_team_step_has_its_part_of_the_work_and_all_sums():
    made = estimated_team_step_s(step_s=0.010, fixed_s=0.002, sum_s=0.0001, num_layers=4, size=2)
    assert pytest.approx(0.002 + 0.004 + 10 * 0.0001) == made


def test_slow_sums_make_a_team_slower_than_one_engine():
    team_s = estimated_team_step_s(step_s=0.010, fixed_s=0.001, sum_s=0.0009, num_layers=5, size=2)
    assert not look(NO_VERDICT, TAIL, replace(TIMES, team_s=team_s)).num_yes


def test_a_switch_copies_kv_there_reads_it_and_copies_it_back():
    made = estimated_switch_s(
        slice_bytes=400, kv_bytes=100, copy_bytes_per_s=1000.0, connect_s=0.25
    )
    assert pytest.approx(0.25 + 0.7) == made


@given(
    st.builds(
        SwitchTimes,
        alone_s=st.floats(1e-4, 1),
        team_s=st.floats(1e-4, 1),
        switch_s=st.floats(0, 100),
        steps_left=st.integers(1, 10**6),
    )
)
def test_a_switch_that_gains_never_takes_longer_than_going_on(times):
    in_team = times.switch_s + times.steps_left * times.team_s
    if gain_s(times) > 0:
        assert in_team < times.steps_left * times.alone_s
