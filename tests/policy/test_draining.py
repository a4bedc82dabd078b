"""Where the running rows of a replica go that will end soon."""

from raybatch.policy.pool.snapshot import RowMove
from raybatch.policy.pool.spread import drain_moves
from tests.policy.test_pool import pool_of, replica, rows_of

DRAINING = replica(1, [5.0, 50.0, 20.0, 10.0])


def test_rows_with_most_to_come_go_first_and_three_at_once():
    moves = drain_moves(pool_of(DRAINING, replica(2)), 1)
    assert moves == tuple(RowMove(1000 + row, 1, 2, True) for row in (1, 2, 3))


def test_each_row_goes_to_the_replica_with_most_free_sequences():
    pool = pool_of(DRAINING, replica(2, free_seqs=2), replica(3, free_seqs=3))
    assert [move.target for move in drain_moves(pool, 1)] == [3, 2, 3]


def test_an_engine_of_another_kind_takes_what_those_alike_have_no_room_for():
    alike, other = replica(2, free_seqs=1), replica(3, kv_token_bytes=0)
    moves = drain_moves(pool_of(DRAINING, alike, other), 1)
    assert [(m.target, m.with_kv) for m in moves] == [(2, True), (3, False), (3, False)]


def test_a_row_stays_where_nobody_has_room_for_it():
    full = [replica(2, free_seqs=0), replica(3, free_kv_tokens=100), replica(4, num_moves=3)]
    unknown = replica(5, rows=None)
    assert drain_moves(pool_of(DRAINING, *full, unknown), 1) == ()


def test_rows_that_cannot_move_stay():
    bound = replica(1, [5.0, 50.0], rows=rows_of([5.0, 50.0], can_move=False))
    assert drain_moves(pool_of(bound, replica(2)), 1) == ()


def test_a_replica_that_tells_nothing_of_its_rows_gives_none():
    assert drain_moves(pool_of(replica(1, rows=None), replica(2)), 1) == ()
