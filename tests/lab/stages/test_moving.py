"""Which running rows go on in a later stage: tables of snapshots and moves."""

import numpy as np
import pytest

from raybatch.policy.pool.snapshot import PoolSnapshot, ReplicaSnapshot, RowMove, RunningRows
from raybatch.policy.pool.throughput import StepSeconds
from raybatch_lab.stages.moving import stage_moves

BOUNDS = np.array([100.0])
SECONDS = StepSeconds(0.1, 0.001, 0.0001)


def replica(replica_id, tokens, *, left=50, can_move=True, times=None, **options):
    """Return a replica whose rows have ids from 100 times its own on."""
    num_rows = len(tokens)
    rows = RunningRows(
        ids=np.arange(num_rows) + 100 * replica_id,
        tokens=np.array(tokens, np.int64),
        left=np.broadcast_to(np.array(left, float), num_rows).copy(),
        can_move=np.broadcast_to(np.array(can_move), num_rows).copy(),
        times_moved=None if times is None else np.array(times),
    )
    usual = {"seconds": SECONDS, "free_kv_tokens": 10_000, "free_seqs": 8, "kv_token_bytes": 1000}
    return ReplicaSnapshot(replica_id=replica_id, rows=rows, **(usual | options))


def moves(*replicas, stage_of=None, bounds=BOUNDS, has_waiting=True):
    found = stage_moves(
        PoolSnapshot(replicas=replicas),
        stage_of or {1: 0, 2: 1},
        np.array(bounds, float),
        has_waiting=has_waiting,
    )
    return [(m.row_id, m.source, m.target) for m in found]


def test_rows_that_have_outgrown_their_stage_go_to_the_next_one_the_longest_first():
    assert moves(replica(1, [100, 101, 300]), replica(2, [])) == [(102, 1, 2), (101, 1, 2)]


def test_no_row_goes_back():
    assert moves(replica(1, []), replica(2, [10, 20])) == []


def test_a_row_may_pass_over_a_stage():
    places = replica(1, [300]), replica(2, []), replica(3, [])
    assert moves(*places, stage_of={1: 0, 2: 1, 3: 2}, bounds=[100, 200]) == [(100, 1, 3)]


def test_three_rows_of_a_replica_are_on_their_way_at_most():
    assert len(moves(replica(1, [200] * 5), replica(2, []))) == 3
    assert len(moves(replica(1, [200] * 5, num_moves=2), replica(2, []))) == 1
    assert moves(replica(1, [200] * 5), replica(2, [], num_moves=3)) == []


@pytest.mark.parametrize(
    "options",
    [
        {"free_seqs": 0},
        {"free_kv_tokens": 249},
        {"can_give": False},
        {"is_tp_driver": True},
        {"seconds": None},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_row_stays_where_no_replica_of_its_stage_can_take_it(options):
    assert moves(replica(1, [200]), replica(2, [], **options)) == []


def test_waiting_rows_leave_no_more_seats_than_are_kept():
    def num_moves(has_waiting):
        pool = PoolSnapshot(
            replicas=(replica(1, [200] * 3 + [90], left=[9, 9, 9, 90]), replica(2, []))
        )
        found = stage_moves(
            pool, {1: 0, 2: 1}, BOUNDS, has_waiting=has_waiting, kept_slots=lambda _: 1
        )
        return len(found)

    assert (1, 3) == (num_moves(True), num_moves(False))


def test_room_that_one_row_takes_is_not_there_for_another():
    assert len(moves(replica(1, [200] * 3), replica(2, [], free_kv_tokens=600))) == 2


@pytest.mark.parametrize("options", [{"can_move": False}, {"times": [1]}, {"can_give": False}])
def test_a_row_stays_that_may_not_move_or_has_moved_as_often_as_there_are_later_stages(options):
    assert moves(replica(1, [200], **options), replica(2, [])) == []


def test_a_row_stays_that_ends_within_eight_times_the_seconds_of_its_move():
    # 200 tokens of 1 MB at 1 GB/s take 0.2 s, and a step takes 0.101 s
    assert moves(replica(1, [200], left=15, kv_token_bytes=10**6), replica(2, [])) == []
    assert len(moves(replica(1, [200], left=16, kv_token_bytes=10**6), replica(2, []))) == 1


def test_the_replica_gets_it_that_best_suits_of_those_with_the_lower_load():
    places = replica(1, [200]), replica(2, [500]), replica(3, [400]), replica(4, [300])
    assert moves(*places, stage_of={1: 0, 2: 1, 3: 1, 4: 1}) == [(100, 1, 4)]


def test_kv_goes_along_where_the_other_engine_takes_it():
    def kinds(token_bytes):
        pool = PoolSnapshot(
            replicas=(replica(1, [200]), replica(2, [], kv_token_bytes=token_bytes))
        )
        return stage_moves(pool, {1: 0, 2: 1}, BOUNDS, has_waiting=True)

    assert kinds(1000) == (RowMove(100, 1, 2, True),)
    assert kinds(500) == (RowMove(100, 1, 2, False),)


def test_where_nothing_waits_no_row_goes_where_it_would_end_after_all_others():
    short, long = replica(1, [200, 90], left=[50, 60]), replica(2, [500] * 4, left=55)
    assert moves(short, long, has_waiting=False) == [(100, 1, 2)]
    later = replica(1, [200, 90], left=[61, 60]), replica(2, [500] * 4, left=62)
    assert moves(*later, has_waiting=False) == []
    assert moves(*later, has_waiting=True) == [(100, 1, 2)]


def test_a_replica_with_a_quarter_more_than_its_stage_gives_a_row_that_fits():
    of = {1: 0, 2: 0}
    # 160 and 40 tokens: the mean is 100, and a row of at most 60 goes
    assert moves(replica(1, [60, 60, 40]), replica(2, [40]), stage_of=of) == [(100, 1, 2)]
    assert moves(replica(1, [60, 64]), replica(2, [76]), stage_of=of) == []
    assert moves(replica(1, [60, 60, 40]), replica(2, [40]), stage_of=of, has_waiting=False) == []
    # the only one of its stage has no target
    assert moves(replica(1, [60, 60, 40]), replica(2, [40])) == []


def test_a_replica_that_is_not_of_the_plan_takes_no_part():
    assert moves(replica(1, [200]), replica(2, []), replica(3, []), stage_of={1: 0}) == []


def test_one_that_has_told_nothing_of_its_rows_gets_none():
    silent = ReplicaSnapshot(replica_id=2, seconds=SECONDS, free_seqs=8, free_kv_tokens=10_000)
    assert moves(replica(1, [200]), silent) == []
