"""When idle engines join the steps of the last rows: the truth table of the gain test."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.policy.pool.plan import plan_pool
from raybatch.policy.pool.snapshot import PoolPlan, PoolSnapshot
from raybatch.records.types import ReplicaStats
from raybatch_extensions.debounce import Debounce
from raybatch_extensions.tp_groups.policy import (
    SwitchTimes,
    TimePerToken,
    TPGroupKind,
    TPGroupTimes,
    TPReplica,
    TPSnapshot,
    choose_tp_group,
    plan_tp_groups,
    tp_groups_to_end,
    why_not_eligible,
)
from tests.policy.test_pool import replica, rows_of

WORLD = 8
ALIKE = {"weight_bytes": 10**9, "tp_sizes": (2, 4), "token_s": 0.010, "num_measurements": 3}
ONE_HOST = TPGroupKind(2, True)


def busy(replica_id, left, **changes):
    plain = replica(replica_id, left)
    values = {field.name: getattr(plain, field.name) for field in fields(plain)}
    return TPReplica(**values | ALIKE | changes)


def idle(replica_id, **changes):
    return busy(replica_id, (), **{"token_s": None} | changes)


def pool_of(*replicas, **changes):
    pulling = frozenset(r.replica_id for r in replicas if not r.num_held)
    return TPSnapshot(replicas=replicas, **{"pulling": pulling, "measured": {}} | changes)


def plan_of(pool):
    """Return what the pool does by itself."""
    plain = PoolSnapshot(replicas=pool.replicas, pulling=pool.pulling, has_waiting=pool.has_waiting)
    return plan_pool(plain)


def tail(num_active, **changes):
    """Return a pool of eight engines, some with one row each."""
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
        {"num_measurements": 2},
        {"tp_sizes": ()},
        {"tp_sizes": (4, 8)},
        # 50 steps of 10 ms
        {"rows": rows_of([50.0])},
        {"kv_token_bytes": 999},
        {"weight_bytes": 1},
        {"tp_size": 2},
    ],
    ids=lambda change: next(iter(change)),
)
def test_one_failed_condition_is_enough_to_refuse(change):
    driver = busy(0, [1000.0])
    assert choose_tp_group(pool_of(driver, idle(1))) is not None
    assert choose_tp_group(pool_of(replace(driver, **change), idle(1))) is None


@pytest.mark.parametrize("change", [{"has_waiting": True}, {"pulling": frozenset()}])
def test_no_tp_group_forms_while_rows_wait_or_if_engines_allow_none(change):
    assert choose_tp_group(tail(1, **change)) is None


def test_the_engine_that_ends_last_is_the_driver_and_its_host_has_the_workers():
    pool = pool_of(
        busy(1, [2000.0], host="a"),
        busy(2, [3000.0], host="b"),
        idle(3, host="a"),
        idle(4, host="b", speed=0.9),
        idle(5, host="b"),
    )
    tp_group = choose_tp_group(pool)
    # four engines would span two hosts; no other condition excludes them
    assert (2, (5, 4, 3)) == (tp_group.driver, tp_group.workers)
    two = choose_tp_group(
        replace(pool, replicas=(replace(pool.replicas[1], tp_sizes=(2,)), *pool.replicas[2:]))
    )
    assert (2, (5,), ONE_HOST) == (two.driver, two.workers, two.kind)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        (SwitchTimes(0.010, 0.006, 0.5, 1000), True),
        # it must save a second, and does
        (SwitchTimes(0.010, 0.006, 3.0, 1000), False),
        (SwitchTimes(0.010, 0.0091, 0.0, 1000), False),
        (SwitchTimes(0.010, 0.011, 0.0, 1000), False),
        (SwitchTimes(0.010, 0.001, 0.0, 127), False),
        (SwitchTimes(0.010, 0.001, 0.0, 128), True),
        # a tenth of a short time is not worth a switch
        (SwitchTimes(0.001, 0.0005, 0.0, 900), False),
    ],
)
def test_a_switch_must_gain_a_tenth_over_enough_steps(times, expected):
    assert expected == times.pays


def test_measured_times_replace_estimates():
    pool = tail(1)
    assert choose_tp_group(pool).reason.startswith("a trial")
    slow = {TPGroupKind(size, True): TPGroupTimes(ratio=0.95, switch_s=0.1) for size in (2, 4)}
    assert choose_tp_group(replace(pool, measured=slow)) is None
    quick = slow | {ONE_HOST: TPGroupTimes(ratio=0.6, switch_s=0.1)}
    tp_group = choose_tp_group(replace(pool, measured=quick))
    assert tp_group.kind == ONE_HOST
    assert "3.9 s sooner, by earlier measurements" in tp_group.reason


def test_a_slow_worker_holds_up_all_ranks():
    pool = pool_of(busy(1, [1000.0]), idle(2, speed=0.5))
    assert choose_tp_group(pool) is None
    assert choose_tp_group(pool_of(busy(1, [1000.0]), idle(2, speed=0.9))) is not None


@given(
    alone_s=st.floats(1e-4, 1.0),
    tp_s=st.floats(1e-4, 1.0),
    switch_s=st.floats(0.0, 10.0),
    steps_left=st.floats(1, 10**5),
)
def test_a_switch_that_pays_never_takes_longer_than_continuing(alone_s, tp_s, switch_s, steps_left):
    times = SwitchTimes(alone_s, tp_s, switch_s, steps_left)
    if times.pays:
        assert switch_s + steps_left * tp_s < steps_left * alone_s


# committed TP groups


def leading(**changes):
    working = {"is_tp_driver": True, "tp_size": 2, "tp_ratio": 0.7}
    return busy(1, [1000.0], **working | changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {}),
        ({"tp_ratio": None}, {}),
        ({"tp_ratio": 1.2}, {1: "its steps take 1.20 times as long as its driver's alone"}),
    ],
)
def test_a_tp_group_ends_where_its_steps_are_slower(changes, expected):
    pool = pool_of(leading(**changes), idle(3))
    assert expected == tp_groups_to_end(pool)
    assert (None, expected) == plan_tp_groups(pool, PoolPlan())


def test_no_row_moves_to_a_tp_group_or_from_it():
    many = rows_of([5000.0] * 40)
    led = leading(rows=many, num_held=40)
    alone = replace(led, is_tp_driver=False, tp_size=0, tp_ratio=None)
    assert plan_of(pool_of(alone, idle(2))).moves
    assert () == plan_of(pool_of(led, idle(2))).moves


def test_a_row_that_can_move_to_a_faster_engine_moves_and_forms_no_tp_group():
    pool = pool_of(busy(1, [3000.0, 3000.0]), idle(2))
    plan = plan_of(pool)
    assert plan.moves
    assert (None, {}) == plan_tp_groups(pool, plan)


# boundaries


def test_two_boundaries_in_a_row_must_agree():
    debounce = Debounce()
    looks = [("a", 1), ("a", 1), ("b", 2), ("a", 3), (None, 4), ("a", 5), ("a", 6)]
    assert [False] * 6 + [True] == [debounce.update(*look) for look in looks]


def test_the_throughput_of_rows_is_that_of_the_latest_steps_of_the_same_rows():
    def stats(num_steps, seconds, *, rows=2):
        return ReplicaStats(
            num_running=rows, num_steps=num_steps, generated_tokens=2 * num_steps, engine_s=seconds
        )

    measured = TimePerToken(stats(0, 0.0))
    measured.note(stats(10, 5.0))
    assert measured.token_s is None
    measured.note(stats(20, 0.2))
    assert 0.01 == pytest.approx(measured.token_s)
    measured.note(stats(40, 0.6))
    # load of others on the host only adds time
    assert 0.01 == pytest.approx(measured.token_s)
    for num_steps in (60, 80):
        measured.note(stats(num_steps, 0.6 + 0.02 * (num_steps - 40)))
    assert 0.02 == pytest.approx(measured.token_s)
    measured.note(stats(100, 2.0, rows=1))
    assert measured.token_s is None
    assert 4 == measured.num_measured
    # earlier reports do not count
    measured.restart(stats(100, 2.0, rows=1))
    measured.note(stats(100, 2.0, rows=1))
    measured.note(stats(120, 9.0, rows=1))
    measured.note(stats(140, 9.2, rows=1))
    assert np.isclose(0.005, measured.token_s)
