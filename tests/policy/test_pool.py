"""Balancing of a pool: shares, steals, moves, and the throughput of each replica."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raybatch.policy.pool.plan import choose_steal, plan_pool, rebalancing_cost, share_of
from raybatch.policy.pool.snapshot import (
    LEFT_SHARES,
    PoolSnapshot,
    ReplicaSnapshot,
    RowMove,
    RunningRows,
    Steal,
)
from raybatch.policy.pool.spread import end_s, longest, spread_rows
from raybatch.policy.pool.throughput import StepSeconds, ThroughputModel
from raybatch.records.types import ReplicaStats
from tests.tiers import examples

IDLE = ReplicaSnapshot(replica_id=1)
BUSY = ReplicaSnapshot(replica_id=2, num_held=9, cost=100, num_unstarted=8)
STEP = StepSeconds(step_s=0.010, row_s=0.010, token_s=0.001)


def rows_of(left, *, first_id=0, tokens=100, can_move=True):
    count = len(left)
    return RunningRows(
        ids=np.arange(first_id, first_id + count),
        tokens=np.full(count, tokens),
        left=np.array(left, float),
        can_move=np.full(count, can_move),
    )


def replica(replica_id, left=(), **changes):
    """Return a replica that decodes rows with `left` remaining tokens, and has free slots."""
    rows = rows_of(left, first_id=1000 * replica_id)
    return ReplicaSnapshot(
        **{
            "replica_id": replica_id,
            "num_held": len(left),
            "seconds": STEP,
            "rows": rows,
            "free_kv_tokens": 100_000,
            "free_seqs": 64,
            "kv_token_bytes": 1000,
        }
        | changes
    )


def pool_of(*replicas, pulling=None, **changes):
    idle = [r.replica_id for r in replicas if not r.num_held]
    return PoolSnapshot(
        replicas=replicas, pulling=frozenset(idle if pulling is None else pulling), **changes
    )


def ends_of(pool, moves):
    """Return when each replica ends after the moves, without their cost."""
    left = {
        (r.replica_id, int(i)): float(n)
        for r in pool.replicas
        for i, n in zip(r.rows.ids, r.rows.left, strict=True)
    }
    for move in moves:
        left[move.target, move.row_id] = left.pop((move.source, move.row_id))
    return {
        r.replica_id: end_s(
            np.array([n for (owner, _), n in left.items() if owner == r.replica_id]), r.seconds
        )
        for r in pool.replicas
    }


# shares


def test_a_replica_of_twice_the_speed_has_twice_the_share():
    assert (100, 200) == (share_of(300, 1.0, [2.0]), share_of(300, 2.0, [1.0]))


@given(
    st.tuples(st.integers(0, 10**6), st.floats(0.1, 10)),
    st.tuples(st.integers(0, 10**6), st.floats(0.1, 10)),
)
def test_a_steal_lets_both_end_together(giver, taker):
    cost = rebalancing_cost(giver, taker)
    ends = ((giver[0] - cost) / giver[1], (taker[0] + cost) / taker[1])
    assert ends[0] == pytest.approx(ends[1], abs=1.001 * (1 / giver[1] + 1 / taker[1]))


# steals


@pytest.mark.parametrize(
    ("pulling", "others", "expected"),
    [
        ([IDLE], [IDLE, BUSY], Steal(2, max_rows=4, max_cost=50)),
        ([], [BUSY], None),
        ([BUSY], [IDLE, BUSY], None),
        ([IDLE], [IDLE, replace(BUSY, can_give=False)], None),
        ([IDLE], [IDLE, replace(BUSY, num_unstarted=1)], None),
        ([IDLE], [BUSY, replace(BUSY, replica_id=3, num_unstarted=12)], Steal(3, 6, 50)),
        ([IDLE], [BUSY, replace(BUSY, replica_id=3)], Steal(2, 4, 50)),
        ([IDLE, replace(IDLE, num_held=2, cost=30)], [BUSY], Steal(2, 4, 50)),
        ([IDLE], [BUSY, replace(BUSY, replica_id=3, speed=0.5)], Steal(3, 5, 66)),
        ([replace(IDLE, speed=3.0)], [BUSY], Steal(2, 6, 75)),
    ],
    ids=[
        "half of both",
        "no demand",
        "no idle replica",
        "a stale report",
        "one row is not shared",
        "the most unstarted rows",
        "the first of equal ones",
        "the least work counts",
        "the slowest gives first",
        "the fast take more",
    ],
)
def test_an_idle_replica_takes_its_share_of_the_fullest(pulling, others, expected):
    assert expected == choose_steal(pulling, others)


works = st.builds(
    ReplicaSnapshot,
    replica_id=st.integers(0, 99),
    num_held=st.integers(0, 20),
    cost=st.integers(0, 1000),
    num_unstarted=st.integers(0, 20),
    can_give=st.booleans(),
    speed=st.sampled_from([0.5, 1.0, 2.0]),
)


@given(st.lists(works, unique_by=lambda work: work.replica_id), st.data())
def test_a_steal_never_leaves_the_source_with_less_time_than_the_idle_one(replicas, data):
    pulling = [work for work in replicas if data.draw(st.booleans())]
    steal = choose_steal(pulling, replicas)
    givers = {w.replica_id: w for w in replicas if w.can_give and w.num_unstarted > 1}
    is_idle = any(work.num_held == 0 for work in pulling)
    assert (steal is not None) == (is_idle and bool(givers))
    if steal is not None:
        victim = givers[steal.replica_id]
        taker = min(pulling, key=lambda work: work.cost / work.speed)
        assert 1 <= steal.max_rows <= victim.num_unstarted
        rest_s = (victim.cost - steal.max_cost) / victim.speed
        assert rest_s >= (taker.cost + steal.max_cost) / taker.speed - 1e-9


# moves


def test_rows_end_when_the_longest_does_and_each_step_costs_its_rows():
    # ten steps of three rows, ten of two, ten of one
    assert 10 * (0.04 + 0.03 + 0.02) == pytest.approx(end_s(np.array([30.0, 10, 20]), STEP))


def test_the_longest_of_some_rows_is_the_mean_over_all_their_lengths():
    below = (np.array(LEFT_SHARES[1:]) + np.array(LEFT_SHARES[:-1])) / 2
    weights = np.diff([0.0, *below, 1.0])
    rows = np.array([[1, 2, 3, 5, 8, 13, 21], [4, 4, 4, 4, 4, 4, 4], [2, 2, 6, 6, 7, 7, 90.0]])
    places = list(itertools.product(range(len(weights)), repeat=len(rows)))
    chances = weights[places].prod(axis=1)
    lengths = np.array([[row[i] for row, i in zip(rows, place, strict=True)] for place in places])
    assert chances @ lengths.max(axis=1) == pytest.approx(longest(rows))


@given(st.lists(st.integers(1, 500), max_size=9))
def test_the_longest_of_rows_that_are_certain_is_the_longest(left):
    rows = np.repeat(np.array(left, float)[:, None], len(LEFT_SHARES), axis=1)
    assert longest(rows) == pytest.approx(max(left, default=0))


def test_rows_of_unknown_length_last_longer_than_any_is_expected_to():
    left = np.full(30, 100.0)
    quantiles = np.tile([0.0, 10, 30, 60, 200, 400, 900], (30, 1))
    # a step for each token of the longest, and the rows of each step
    expected = 0.01 * longest(quantiles) + 0.01 * 30 * 100
    assert expected == pytest.approx(end_s(left, STEP, quantiles))
    assert longest(quantiles) > 600


def test_short_rows_leave_a_long_one_to_itself_even_for_a_slow_replica():
    flat = StepSeconds(step_s=0.0128, row_s=0.0002, token_s=0.0002)
    long_row, short = 30_000, [6_000] * 8
    fast = replica(2, [long_row, *short], seconds=flat)
    plan = plan_pool(pool_of(replica(1, seconds=flat.times(2.0)), fast))
    # eight rows fewer in 6,000 steps of the remaining one
    assert {2000 + i for i in range(1, 9)} == {move.row_id for move in plan.moves}
    assert plan.saved_s == pytest.approx(8 * 6_000 * 0.0002)


def test_rows_that_may_be_long_leave_the_slow_replica():
    flat = StepSeconds(step_s=0.0128, row_s=0.0002, token_s=0.0002)
    slow = replica(1, [1000] * 4, seconds=flat.times(2.0))
    fast = replica(2, [1100] * 4, seconds=flat)
    # equal means, but two of the rows may be long
    quantiles = np.tile(slow.rows.left[:, None], len(LEFT_SHARES))
    quantiles[:2, -1] = 60_000
    slow = replace(slow, rows=replace(slow.rows, quantiles=quantiles))
    assert {(move.row_id, move.target) for move in plan_pool(pool_of(slow, fast)).moves} >= {
        (1000, 2),
        (1001, 2),
    }


def test_nothing_moves_while_rows_wait():
    assert plan_pool(pool_of(replica(1), replica(2, [500] * 8), has_waiting=True)).moves == ()


def test_waiting_rows_of_an_engine_move_before_running_ones():
    plan = plan_pool(pool_of(replica(1), replica(2, [500] * 8, num_unstarted=4)))
    assert plan.steal is not None
    assert plan.moves == ()


def test_half_of_equal_rows_move_to_an_idle_replica():
    plan = plan_pool(pool_of(replica(1), replica(2, [500] * 8)))
    assert [RowMove(2000 + i, 2, 1, True) for i in range(4)] == sorted(plan.moves)
    # 500 steps of 90 ms become steps of 50 ms
    assert plan.saved_s == pytest.approx(500 * 0.04, abs=0.01)


def test_three_idle_replicas_take_a_quarter_each():
    plan = plan_pool(pool_of(*map(replica, (1, 3, 4)), replica(2, [500] * 8)))
    targets = [move.target for move in plan.moves]
    assert {1: 2, 3: 2, 4: 2} == {t: targets.count(t) for t in targets}


def test_a_single_row_moves_only_to_a_faster_replica():
    fast = replica(1, seconds=STEP.times(0.5))
    assert plan_pool(pool_of(replica(1), replica(2, [500]))).moves == ()
    assert plan_pool(pool_of(fast, replica(2, [500]))).moves == (RowMove(2000, 2, 1, True),)


def test_rows_stay_if_steps_cost_the_same_with_any_rows():
    bound = StepSeconds(step_s=0.01, row_s=1e-6, token_s=0.001)
    pool = pool_of(replica(1, seconds=bound), replica(2, [500] * 64, seconds=bound))
    assert plan_pool(pool).moves == ()


def test_rows_that_are_about_to_end_stay():
    assert plan_pool(pool_of(replica(1), replica(2, [2] * 8))).moves == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"free_seqs": 0},
        {"free_kv_tokens": 99},
        {"rows": None},
        {"seconds": None},
        {"can_give": False},
    ],
    ids=["no slot", "no KV", "rows unknown", "pace unknown", "suspects"],
)
def test_a_replica_without_free_slots_gets_nothing(changes):
    assert plan_pool(pool_of(replica(1, **changes), replica(2, [500] * 8))).moves == ()


def test_a_replica_gets_no_more_rows_than_its_memory_holds_in_the_end():
    plan = plan_pool(pool_of(replica(1, free_kv_tokens=1250), replica(2, [500] * 8)))
    # 100 tokens now and 500 remaining each
    assert 2 == len(plan.moves)


def test_a_row_that_has_moved_twice_stays():
    pool = pool_of(replica(1, [500.0] * 4), replica(2))
    assert plan_pool(pool).moves
    rows = replace(pool.replicas[0].rows, times_moved=np.array([2, 2, 2, 2]))
    still = replace(pool, replicas=(replace(pool.replicas[0], rows=rows), pool.replicas[1]))
    assert () == plan_pool(still).moves


def test_rows_that_cannot_move_stay():
    busy = replica(2, rows=rows_of([500] * 8, can_move=False), num_held=8)
    assert plan_pool(pool_of(replica(1), busy)).moves == ()


def test_kv_stays_if_recomputing_it_is_faster():
    slow_link = pool_of(replica(1), replica(2, [500] * 8), bytes_per_s=1e3)
    assert {False} == {move.with_kv for move in plan_pool(slow_link).moves}


def test_kv_does_not_move_to_an_engine_with_incompatible_kv():
    pool = pool_of(replica(1, kv_token_bytes=500), replica(2, [500] * 8))
    assert {False} == {move.with_kv for move in plan_pool(pool).moves}


def test_rows_stay_if_the_move_costs_what_it_saves():
    dear = STEP._replace(token_s=1.0)
    pool = pool_of(
        replica(1, seconds=dear, kv_token_bytes=0), replica(2, [500] * 8, kv_token_bytes=0)
    )
    assert plan_pool(pool).moves == ()


replicas = st.builds(
    lambda number, left, factor, free: replica(
        number, left, seconds=STEP.times(factor), free_seqs=free
    ),
    st.integers(1, 40),
    st.lists(st.integers(1, 400), max_size=6),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 8),
)
pools = st.lists(replicas, min_size=2, max_size=4, unique_by=lambda r: r.replica_id)


@settings(max_examples=examples(100, full=2000))
@given(pools)
def test_moves_end_the_pool_sooner_and_keep_each_row(replicas):
    pool = pool_of(*replicas)
    moves, saved_s = spread_rows(pool)
    before, after = ends_of(pool, ()), ends_of(pool, moves)
    assert saved_s == 0 or saved_s > 0.25
    assert saved_s == pytest.approx(max(before.values()) - max(after.values()), abs=1e-9)
    assert (saved_s > 0) == bool(moves)
    # no row moves back and forth, and each from its own replica
    assert len({move.row_id for move in moves}) == len(moves)
    assert all(move.row_id // 1000 == move.source for move in moves)


@settings(max_examples=examples(60, full=600))
@given(pools)
def test_moves_are_close_to_the_best_of_all(replicas):
    pool = pool_of(*(replace(r, free_seqs=64) for r in replicas))
    rows = [(r.replica_id, int(i)) for r in pool.replicas for i in r.rows.ids]
    ids = [r.replica_id for r in pool.replicas]
    assume(len(ids) ** len(rows) <= 4096)
    best = min(
        max(
            ends_of(
                pool, [RowMove(i, s, t, True) for (s, i), t in zip(rows, to, strict=True) if s != t]
            ).values()
        )
        for to in itertools.product(ids, repeat=len(rows))
    )
    moves, _ = spread_rows(pool)
    got = max(ends_of(pool, moves).values())
    # no swaps: 1.5 times at most, or a gain that is not worth a move
    assert got <= max(1.5 * best, best + 0.3 * len(ids))


def test_the_same_snapshot_has_the_same_plan():
    pool = pool_of(*map(replica, (1, 3, 4)), replica(2, [500, 400, 300, 500, 20, 7, 500]))
    assert plan_pool(pool) == plan_pool(pool)


# pace


def stats_after(num_steps, rows, *, prompts=0, pace=1.0, before=None):
    """Return the counters after steps of `rows` rows, with `prompts` prompt tokens in total."""
    before = before or ReplicaStats()
    seconds = num_steps * (STEP.step_s + STEP.row_s * rows) + STEP.token_s * prompts
    return ReplicaStats(
        num_steps=before.num_steps + num_steps,
        generated_tokens=before.generated_tokens + num_steps * rows,
        prompt_tokens=before.prompt_tokens + prompts,
        engine_s=before.engine_s + pace * seconds,
    )


def reported(throughput, paces, *, seed=0, count=60):
    """Let replicas report in turns, each at its pace."""
    generator, stats = np.random.default_rng(seed), dict.fromkeys(paces, ReplicaStats())
    for _ in range(count):
        for replica_id, pace in paces.items():
            stats[replica_id] = stats_after(
                int(generator.integers(1, 9)),
                int(generator.integers(1, 64)),
                prompts=int(generator.integers(0, 200)),
                pace=pace,
                before=stats[replica_id],
            )
            throughput.note(replica_id, stats[replica_id])
    return stats


def test_costs_of_steps_are_learned_from_counters():
    throughput = ThroughputModel()
    assert throughput.seconds(1) is None
    reported(throughput, {1: 1.0})
    assert STEP == pytest.approx(throughput.seconds(1), rel=1e-6)


def test_prompts_count_in_the_steps_that_compute_them_not_when_their_row_starts():
    throughput, stats, generator = ThroughputModel(), ReplicaStats(), np.random.default_rng(0)
    for turn in range(80):
        chunk = 200 if turn % 8 < 5 else 0
        before = stats
        stats = stats_after(
            int(generator.integers(1, 4)),
            int(generator.integers(1, 64)),
            prompts=chunk,
            before=before,
        )
        # a prompt of five chunks is counted with the first of them
        started = before.prompt_tokens + (1000 if turn % 8 == 0 else 0)
        chunks = before.num_chunk_tokens + chunk
        stats = replace(stats, prompt_tokens=started, num_chunk_tokens=chunks)
        throughput.note(1, stats)
    assert STEP == pytest.approx(throughput.seconds(1), rel=1e-6)


def test_a_replica_of_half_the_throughput_counts_as_half_as_fast():
    throughput = ThroughputModel()
    reported(throughput, {1: 1.0, 2: 1.0, 3: 2.0})
    speeds = [throughput.speed(replica_id) for replica_id in (1, 2, 3)]
    assert speeds[0] / speeds[2] == pytest.approx(2.0, rel=0.02)
    assert speeds[0] == pytest.approx(speeds[1], rel=0.02)
    assert STEP.times(2.0) == pytest.approx(throughput.seconds(3), rel=0.02)


def test_a_replica_that_becomes_slow_is_noticed():
    throughput = ThroughputModel()
    stats = reported(throughput, {1: 1.0, 2: 1.0})
    assert throughput.speed(2) == pytest.approx(throughput.speed(1), rel=0.02)
    for _ in range(40):
        for replica_id, pace in ((1, 1.0), (2, 3.0)):
            stats[replica_id] = stats_after(4, 32, pace=pace, before=stats[replica_id])
            throughput.note(replica_id, stats[replica_id])
    assert throughput.speed(1) / throughput.speed(2) == pytest.approx(3.0, rel=0.1)


def test_an_unknown_replica_is_like_the_others():
    throughput = ThroughputModel()
    reported(throughput, {1: 1.0})
    assert throughput.speed(9) == 1.0


def test_counters_of_a_removed_replica_start_again():
    throughput = ThroughputModel()
    reported(throughput, {1: 1.0})
    throughput.forget(1)
    throughput.note(1, ReplicaStats())
    assert STEP == pytest.approx(throughput.seconds(1), rel=1e-6)
