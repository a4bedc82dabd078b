"""How many replicas a pool has: when further ones are worth their start, when idle ones stop."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.pool.autoscaling import (
    LEAST_IDLE_S,
    AutoscaleOptions,
    AutoscalePlan,
    AutoscaleSnapshot,
    RemainingWork,
    plan_autoscaling,
    seconds_left,
)
from raybatch.policy.pool.throughput import StepSeconds
from tests.tiers import examples

STEP = StepSeconds(step_s=0.010, row_s=0.001, token_s=0.0001)
ONE_TO_EIGHT = AutoscaleOptions(min_replicas=1, max_replicas=8)


def work_of(num_rows, *, prompt=100, output=100, longest=100.0):
    return RemainingWork(num_rows, num_rows * prompt, num_rows * output, longest)


MUCH = work_of(100_000)


def pool(num_replicas=1, **changes):
    """Return a pool that computes rows whose lengths and steps are known."""
    known = {"work": MUCH, "seconds": STEP, "num_slots": 64.0, "start_s": 20.0, "is_at_work": True}
    return AutoscaleSnapshot(num_replicas=num_replicas, **(known | changes))


def test_replicas_that_share_all_rows_evenly_need_their_part_of_the_time():
    seconds = [seconds_left(MUCH, STEP, num_slots=64, num_replicas=n) for n in (1, 4)]
    # 64 rows in a step of 74 ms, and 0.1 ms for each token of a prompt
    assert [pytest.approx(10_000_000 / 64 * 0.074 + 1000), pytest.approx(seconds[0] / 4)] == seconds


def test_no_number_of_replicas_ends_before_its_longest_row():
    work = work_of(8, longest=5000.0)
    alone_s = 5000 * (STEP.step_s + STEP.row_s)
    assert seconds_left(work, STEP, num_slots=64, num_replicas=8) >= alone_s


def test_much_work_starts_all_that_may_be_and_says_why():
    plan = plan_autoscaling(pool(), ONE_TO_EIGHT)
    assert (plan.num_starts, plan.stops) == (7, ())
    assert "12562 s of work left with 1, 1588 s with 8" in plan.reason


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"work": work_of(64)}, id="one batch of rows that one replica decodes at once"
        ),
        pytest.param({"start_s": 9000.0}, id="work that is done soon after a start"),
        pytest.param({"work": None}, id="rows of unknown lengths"),
        pytest.param({"seconds": None}, id="steps of unknown times"),
        pytest.param({"num_starting": 1}, id="a replica that starts"),
        pytest.param({"idle_s": {1: 0.5}}, id="an idle replica"),
        pytest.param({"work": work_of(70, longest=90_000.0)}, id="one long row"),
    ],
)
def test_nothing_starts_for(changes):
    assert plan_autoscaling(pool(2, **changes), ONE_TO_EIGHT) == AutoscalePlan()


def test_as_many_start_as_work_for_as_long_as_a_start_takes():
    # 1256 s for one; each of three works 419 s before starts, and of four 314 s
    plan = plan_autoscaling(pool(work=work_of(10_000), start_s=300.0), ONE_TO_EIGHT)
    assert plan.num_starts == 2


def test_no_more_start_than_make_steps_shorter_by_half_of_what_they_might():
    # 40 rows make steps of 50, 30, 23.3, 20 and 18 ms on one to five replicas, 16.7 ms on six
    few = work_of(40, output=11_000, longest=11_000.0)
    assert plan_autoscaling(pool(work=few, start_s=1.0), ONE_TO_EIGHT).num_starts in (3, 4)


def test_rows_that_have_come_for_long_are_taken_to_come_for_as_long_again():
    little = pool(work=work_of(200), start_s=60.0)
    assert plan_autoscaling(little, ONE_TO_EIGHT) == AutoscalePlan()
    assert plan_autoscaling(replace(little, fed_s=900.0), ONE_TO_EIGHT).num_starts > 0


def test_a_pool_below_its_least_starts_whatever_is_known():
    two = AutoscaleOptions(min_replicas=2, max_replicas=4)
    assert plan_autoscaling(AutoscaleSnapshot(num_replicas=0), two).num_starts == 2


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        ({"idle_s": {1: 20.0, 2: 30.0, 3: 19.0}}, (2, 1)),
        ({"idle_s": {1: 20.0, 2: 30.0}, "start_s": 25.0}, (2,)),
        ({"idle_s": {1: LEAST_IDLE_S}, "start_s": 0.1}, (1,)),
        ({"idle_s": {1: 99.0}, "has_waiting": True}, ()),
        ({"idle_s": {1: 99.0}, "is_at_work": False}, ()),
        ({"idle_s": {1: 99.0}, "num_starting": 2, "unplaced": (7,)}, (7, 1)),
        ({"idle_s": {1: 9.0}, "num_starting": 2, "unplaced": (7,)}, ()),
        ({"idle_s": {1: 99.0, 2: 98.0, 3: 97.0, 4: 96.0}}, (1, 2, 3)),
    ],
)
def test_those_stop_that_were_idle_for_as_long_as_a_start_takes(changes, stops):
    assert plan_autoscaling(pool(4, **changes), ONE_TO_EIGHT).stops == stops


numbers = st.floats(0, 1e6)
snapshots = st.builds(
    AutoscaleSnapshot,
    num_replicas=st.integers(0, 12),
    num_starting=st.integers(0, 2),
    unplaced=st.lists(st.integers(20, 22), unique=True).map(tuple),
    idle_s=st.dictionaries(st.integers(1, 12), numbers, max_size=4),
    has_waiting=st.booleans(),
    is_at_work=st.booleans(),
    work=st.none() | st.builds(RemainingWork, numbers, numbers, numbers, numbers),
    fed_s=numbers,
    seconds=st.none() | st.builds(StepSeconds, *[st.floats(0, 1)] * 3),
    num_slots=st.floats(1, 1000),
    start_s=st.floats(0.001, 1000),
)


@settings(max_examples=examples(200, full=3000), deadline=None)
@given(snapshots, st.integers(1, 8), st.integers(0, 8))
def test_a_plan_stays_between_the_limits_and_stops_none_that_holds_rows(snapshot, least, more):
    options = AutoscaleOptions(min_replicas=least, max_replicas=least + more)
    plan = plan_autoscaling(snapshot, options)
    assert set(plan.stops) <= {*snapshot.idle_s, *snapshot.unplaced}
    assert not (plan.num_starts and plan.stops)
    if plan.num_starts:
        assert least <= snapshot.num_replicas + plan.num_starts <= options.max_replicas
        assert plan.num_starts > 0
    if plan.stops:
        assert snapshot.num_replicas - len(plan.stops) >= least


@settings(max_examples=examples(30, full=300), deadline=None)
@given(st.lists(st.floats(0.5, 2.0), min_size=400, max_size=400), st.integers(500, 20_000))
def test_noisy_estimates_of_a_load_that_shrinks_start_and_stop_no_replica_in_turn(noise, num_rows):
    """Replicas share what is left until rows are too few; estimates are off by up to twice."""
    num_replicas, num_left, idle_since, changes = 1, float(num_rows), {}, []
    for now, factor in enumerate(noise):
        num_left = max(0.0, num_left - 8.0 * num_replicas)
        num_busy = min(num_replicas, int(num_left))
        idle_since = {r: idle_since.get(r, now) for r in range(num_busy, num_replicas)}
        snapshot = pool(
            num_replicas,
            work=work_of(factor * num_left),
            idle_s={r: float(now - since) for r, since in idle_since.items()},
            is_at_work=num_busy > 0,
        )
        plan = plan_autoscaling(snapshot, ONE_TO_EIGHT)
        changes += [1] * plan.num_starts + [-1] * len(plan.stops)
        num_replicas += plan.num_starts - len(plan.stops)
        idle_since = {r: s for r, s in idle_since.items() if r < num_replicas}
    assert changes == sorted(changes, reverse=True)
