"""The commit protocol keeps its promises in every schedule, and a broken one is found out."""

import pytest

from faultlab.mutations import MUTATIONS
from faultlab.simulate import replay, simulate
from faultlab.world import FAULTS

SEED = 20_261
NUM_SCHEDULES = 2_000
# the slowest of them took 401 schedules with the worst of twelve seeds
NUM_MUTATED = 700


@pytest.fixture(scope="module")
def report():
    return simulate(SEED, NUM_SCHEDULES)


def test_no_schedule_loses_doubles_or_changes_a_row(report):
    assert () == report.violations
    assert NUM_SCHEDULES == report.num_schedules


def test_every_kind_of_fault_was_tried(report):
    assert {*FAULTS, "damaged rows"} == set(report.faults)


def test_foreign_parts_were_tried(report):
    assert report.num_foreign > 0


def test_schedules_whose_input_grows_were_tried(report):
    assert NUM_SCHEDULES / 10 < report.num_grown < NUM_SCHEDULES / 2


def test_parts_were_joined(report):
    assert report.num_joined > NUM_SCHEDULES / 4


def test_commits_that_came_too_late_were_seen(report):
    assert report.num_late > 0


def test_more_units_were_committed_than_one_clean_run_would(report):
    assert report.num_commits > 2 * NUM_SCHEDULES


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found(name):
    found = simulate(SEED, NUM_MUTATED, steps=MUTATIONS[name], max_violations=1)
    assert 1 == len(found.violations)


def test_overwritten_parts_are_found_by_their_bytes_alone():
    steps = MUTATIONS["create overwrites"]
    reported = {violation.what[:13] for violation in simulate(SEED, 200, steps=steps).violations}
    assert {"the bytes of "} == reported


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("success is said for the first plan alone", "_SUCCESS speaks of 5 rows of 7"),
        ("a plan that came later is taken for finished", "_SUCCESS speaks of 5 rows of 7"),
    ],
)
def test_what_is_wrong_with_grown_input_is_told(name, reported):
    found = simulate(SEED, NUM_MUTATED, steps=MUTATIONS[name], max_violations=1)
    assert reported == found.violations[0].what


def test_a_seed_makes_the_same_schedules_again():
    first, second = (simulate(7, 50) for _ in range(2))
    assert (first.faults, first.num_commits) == (second.faults, second.num_commits)


def test_another_seed_makes_others():
    assert simulate(7, 50).faults != simulate(8, 50).faults


def test_schedules_do_not_depend_on_where_a_series_begins():
    together, apart = simulate(7, 20).num_commits, [simulate(7, 10, first=n) for n in (0, 10)]
    assert together == sum(report.num_commits for report in apart)


def test_a_violation_can_be_played_again():
    steps = MUTATIONS["parts are named by attempt"]
    found = simulate(SEED, 100, steps=steps, max_violations=1).violations[0]
    reported = replay(SEED, found.schedule, steps=steps)
    assert found.what == reported.violations[0]
    assert reported.lines == replay(SEED, found.schedule, steps=steps).lines
    assert reported.lines[-1] == f"broken: {reported.violations[-1]}"
