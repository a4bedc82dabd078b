"""When idle engines take part in the steps of the last rows: the truth table of the gain test."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.actors.ext.teams.policy import (
    SwitchTimes,
    TeamKind,
    TeamPace,
    TeamReplica,
    TeamSnapshot,
    TokenPace,
    choose_team,
    plan_teams,
    teams_to_end,
    why_not_eligible,
)
from raybatch.policy.pool.plan import Agreement, plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch.records.types import ReplicaStats
from tests.policy.test_pool import replica, rows_of

WORLD = 8
ALIKE = {"weight_bytes": 10**9, "team_sizes": (2, 4), "token_s": 0.010, "num_paces": 3}
ONE_HOST = TeamKind(2, True)


def busy(replica_id, left, **changes):
    plain = replica(replica_id, left)
    values = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return TeamReplica(**values | ALIKE | changes)


def idle(replica_id, **changes):
    return busy(replica_id, (), **{"token_s": None} | changes)


def pool_of(*replicas, **changes):
    pulling = frozenset(r.replica_id for r in replicas if not r.num_held)
    return TeamSnapshot(replicas=replicas, **{"pulling": pulling, "paces": {}} | changes)


def plan_of(pool):
    """Return what the pool does by itself."""
    plain = PoolSnapshot(replicas=pool.replicas, pulling=pool.pulling, has_waiting=pool.has_waiting)
    return plan_pool(plain)


def tail(num_active, **changes):
    """Return a pool of eight engines, some of which have a row each."""
    with_rows = [busy(i, [1000.0]) for i in range(num_active)]
    return pool_of(*with_rows, *(idle(i) for i in range(num_active, WORLD)), **changes)


@pytest.mark.parametrize(
    ("num_active", "expected"),
    [(0, False), (1, True), (WORLD // 2, True), (WORLD - 1, True), (WORLD, False)],
)
def test_only_fewer_rows_than_engines_are_eligible(num_active, expected):
    assert expected == (not why_not_eligible(tail(num_active)))


@pytest.mark.parametrize(
    "change",
    [
        {"rows": None},
        {"num_held": 2},
        {"num_unstarted": 1},
        {"num_moves": 1},
        {"token_s": None},
        {"num_paces": 2},
        {"team_sizes": ()},
        {"team_sizes": (4, 8)},
        # 50 steps of 10 ms
        {"rows": rows_of([50.0])},
        {"kv_token_bytes": 999},
        {"weight_bytes": 1},
        {"team_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_one_condition_that_does_not_hold_is_enough_for_no(change):
    leader = busy(0, [1000.0])
    assert choose_team(pool_of(leader, idle(1))) is not None
    assert choose_team(pool_of(replace(leader, **change), idle(1))) is None


@pytest.mark.parametrize("change", [{"has_waiting": True}, {"pulling": frozenset()}])
def test_no_team_forms_while_rows_wait_or_of_engines_that_ask_for_none(change):
    assert choose_team(tail(1, **change)) is None


def test_the_engine_that_ends_last_leads_and_those_of_its_host_follow():
    pool = pool_of(
        busy(1, [2000.0], host="a"),
        busy(2, [3000.0], host="b"),
        idle(3, host="a"),
        idle(4, host="b", speed=0.9),
        idle(5, host="b"),
    )
    team = choose_team(pool)
    # four engines would have to be of two hosts, for which there is no other reason
    assert (2, (5, 4, 3)) == (team.leader, team.followers)
    two = choose_team(
        replace(pool, replicas=(replace(pool.replicas[1], team_sizes=(2,)), *pool.replicas[2:]))
    )
    assert (2, (5,), ONE_HOST) == (two.leader, two.followers, two.kind)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (SwitchTimes(0.010, 0.006, 0.5, 1000), True),
        # it would have to save a second, and saves that
        (SwitchTimes(0.010, 0.006, 3.0, 1000), False),
        (SwitchTimes(0.010, 0.0091, 0.0, 1000), False),
        (SwitchTimes(0.010, 0.011, 0.0, 1000), False),
        (SwitchTimes(0.010, 0.001, 0.0, 127), False),
        (SwitchTimes(0.010, 0.001, 0.0, 128), True),
        # a tenth of little is nothing that anybody waits for
        (SwitchTimes(0.001, 0.0005, 0.0, 900), False),
    ],
)
def test_a_switch_must_gain_a_tenth_over_enough_steps(times, expected):
    assert expected == times.pays


def test_what_was_measured_takes_the_place_of_hope():
    pool = tail(1)
    assert choose_team(pool).reason.startswith("a trial")
    slow = {TeamKind(size, True): TeamPace(ratio=0.95, switch_s=0.1) for size in (2, 4)}
    assert choose_team(replace(pool, paces=slow)) is None
    quick = slow | {ONE_HOST: TeamPace(ratio=0.6, switch_s=0.1)}
    team = choose_team(replace(pool, paces=quick))
    assert (ONE_HOST, "2 engines end 3.9 s sooner, as measured before") == (team.kind, team.reason)


def test_a_slow_follower_holds_up_all_ranks():
    pool = pool_of(busy(1, [1000.0]), idle(2, speed=0.5))
    assert choose_team(pool) is None
    assert choose_team(pool_of(busy(1, [1000.0]), idle(2, speed=0.9))) is not None


@given(
    alone_s=st.floats(1e-4, 1.0),
    team_s=st.floats(1e-4, 1.0),
    switch_s=st.floats(0.0, 10.0),
    steps_left=st.floats(1, 10**5),
)
def test_a_switch_that_pays_never_takes_longer_than_going_on(alone_s, team_s, switch_s, steps_left):
    times = SwitchTimes(alone_s, team_s, switch_s, steps_left)
    if times.pays:
        assert switch_s + steps_left * team_s < steps_left * alone_s


# teams that work


def leading(**changes):
    working = {"is_leading": True, "team_size": 2, "team_ratio": 0.7}
    return busy(1, [1000.0], **working | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"team_ratio": None}, {}),
        ({"team_ratio": 1.2}, {1: "its steps take 1.20 times those of its leader alone"}),
    ],
)
def test_a_team_ends_where_its_steps_are_slower(changes, expected):
    pool = pool_of(leading(**changes), idle(3))
    assert expected == teams_to_end(pool)
    assert (None, expected) == plan_teams(pool, PoolPlan())


def test_no_row_moves_to_a_team_or_from_it():
    many = rows_of([5000.0] * 40)
    led = leading(rows=many, num_held=40)
    alone = replace(led, is_leading=False, team_size=0, team_ratio=None)
    assert plan_of(pool_of(alone, idle(2))).moves
    assert () == plan_of(pool_of(led, idle(2))).moves


def test_a_row_that_can_move_to_a_faster_engine_moves_and_forms_no_team():
    pool = pool_of(busy(1, [3000.0, 3000.0]), idle(2))
    plan = plan_of(pool)
    assert plan.moves
    assert (None, {}) == plan_teams(pool, plan)


# boundaries


def test_two_boundaries_in_a_row_have_to_want_the_same():
    agreement = Agreement()
    looks = [("a", 1), ("a", 1), ("b", 2), ("a", 3), (None, 4), ("a", 5), ("a", 6)]
    assert [False] * 6 + [True] == [agreement.look(*look) for look in looks]


def test_the_pace_of_rows_is_that_of_the_latest_steps_of_the_same_rows():
    def stats(num_steps, seconds, *, rows=2):
        return ReplicaStats(
            num_running=rows, num_steps=num_steps, generated_tokens=2 * num_steps, engine_s=seconds
        )

    pace = TokenPace(stats(0, 0.0))
    pace.note(stats(10, 5.0))
    assert pace.token_s is None
    pace.note(stats(20, 0.2))
    assert 0.01 == pytest.approx(pace.token_s)
    pace.note(stats(40, 0.6))
    # a host that others use as well only adds
    assert 0.01 == pytest.approx(pace.token_s)
    for num_steps in (60, 80):
        pace.note(stats(num_steps, 0.6 + 0.02 * (num_steps - 40)))
    assert 0.02 == pytest.approx(pace.token_s)
    pace.note(stats(100, 2.0, rows=1))
    assert pace.token_s is None
    assert 4 == pace.num_measured
    # of what was reported before, nothing counts
    pace.restart(stats(100, 2.0, rows=1))
    pace.note(stats(100, 2.0, rows=1))
    pace.note(stats(120, 9.0, rows=1))
    pace.note(stats(140, 9.2, rows=1))
    assert np.isclose(0.005, pace.token_s)
