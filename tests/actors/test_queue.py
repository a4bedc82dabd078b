"""Who gets which rows, as tables."""

import numpy as np
import pytest

from raybatch.actors.queue.row_queue import RowQueue
from raybatch.actors.wire.records import Credit, RowCrashes, RowRange
from tests.actors.queues import AMPLE, grouped_queue, held_rows, queue_of


def test_rows_are_handed_out_in_order_of_arrival_across_batches():
    queue = queue_of(2, 3)
    assert {7: [RowRange(0, 0, 2), RowRange(1, 0, 3)]} == queue.dispatch({7: AMPLE})


def test_two_idle_replicas_share_a_short_queue_evenly():
    queue = queue_of(10)
    assert {1: [RowRange(0, 0, 5)], 2: [RowRange(0, 5, 10)]} == queue.dispatch({1: AMPLE, 2: AMPLE})


def test_a_replica_about_to_be_ready_keeps_its_share():
    queue = queue_of(10)
    assert {1: [RowRange(0, 0, 5)]} == queue.dispatch({1: AMPLE}, num_expected=1)
    assert queue.dispatch({1: AMPLE}, num_expected=1) == {}


def test_the_share_of_a_late_replica_goes_to_the_ready_one_in_the_end():
    queue = queue_of(10)
    queue.dispatch({1: AMPLE}, num_expected=1)
    assert {1: [RowRange(0, 5, 10)]} == queue.dispatch({1: AMPLE})


def test_the_less_loaded_replica_gets_more():
    queue = queue_of(4, 6)
    queue.dispatch({1: AMPLE})
    queue.add(2, [10] * 2, [10] * 2)
    assert {2: [RowRange(2, 0, 2)]} == queue.dispatch({2: AMPLE})


@pytest.mark.parametrize(
    ("credit", "expected"),
    [
        (Credit(tokens=35, rows=100), RowRange(0, 0, 3)),
        (Credit(tokens=1000, rows=4), RowRange(0, 0, 4)),
        (Credit(tokens=1, rows=1), RowRange(0, 0, 1)),
    ],
    ids=["tokens", "rows", "at-least-one"],
)
def test_a_grant_stays_within_the_room(credit, expected):
    assert {1: [expected]} == queue_of(10).dispatch({1: credit})


def test_a_batch_is_done_when_all_its_rows_are():
    queue = queue_of(3)
    queue.dispatch({1: AMPLE})
    queue.finish(1, 0, [0, 1])
    assert not queue.is_done(0)
    queue.finish(1, 0, [2])
    assert queue.is_done(0)


def test_an_empty_batch_is_done_at_once():
    assert queue_of(0).is_done(0)


def test_a_late_word_from_a_dead_replica_is_ignored():
    queue = queue_of(2)
    queue.dispatch({1: AMPLE})
    queue.lose(1)
    queue.dispatch({2: AMPLE})
    assert queue.finish(1, 0, [0, 1]).tolist() == [False, False]


def test_a_row_counts_as_finished_once():
    queue = queue_of(1)
    queue.dispatch({1: AMPLE})
    assert queue.finish(1, 0, [0]).tolist() == [True]
    assert queue.finish(1, 0, [0]).tolist() == [False]


def test_only_unfinished_rows_of_a_dead_replica_are_queued_again():
    queue = queue_of(5)
    queue.dispatch({1: AMPLE})
    queue.finish(1, 0, [0, 2])
    queue.lose(1)
    assert {2: [RowRange(0, 1, 2), RowRange(0, 3, 5)]} == queue.dispatch({2: AMPLE})
    assert queue.attempts(0).tolist() == [1, 2, 1, 2, 2]


def test_rows_of_a_dead_replica_go_before_those_that_wait():
    queue = queue_of(2, 2)
    queue.dispatch({1: Credit(tokens=20, rows=2)})
    queue.lose(1)
    assert {2: [RowRange(0, 0, 2), RowRange(1, 0, 2)]} == queue.dispatch({2: AMPLE})


def test_rows_with_two_crashes_run_alone_in_halves():
    queue = queue_of(4, 3)
    for replica_id in (1, 2):
        queue.dispatch({replica_id: Credit(tokens=40, rows=4)})
        queue.lose(replica_id)
    grants = queue.dispatch({3: AMPLE})
    assert held_rows(grants[3]) == [(0, 0), (0, 1)]
    assert queue.load(3).is_testing
    assert queue.dispatch({3: AMPLE}) == {}


def test_suspects_that_survive_are_cleared():
    queue = queue_of(2)
    for replica_id in (1, 2):
        queue.dispatch({replica_id: AMPLE})
        queue.lose(replica_id)
    queue.dispatch({3: AMPLE})
    queue.finish(3, 0, [0])
    assert held_rows(queue.dispatch({3: AMPLE})[3]) == [(0, 1)]


def test_suspects_do_not_hold_up_the_other_replicas():
    queue = queue_of(2, 2)
    for replica_id in (1, 2):
        queue.dispatch({replica_id: Credit(tokens=20, rows=2)})
        queue.lose(replica_id)
    queue.dispatch({3: AMPLE})
    queue.dispatch({4: AMPLE})
    assert {5: [RowRange(1, 0, 2)]} == queue.dispatch({5: AMPLE})


def test_a_row_that_dies_alone_too_often_is_given_up():
    queue = queue_of(1)
    poison = []
    for replica_id in (1, 2, 3):
        queue.dispatch({replica_id: AMPLE})
        poison += queue.lose(replica_id).given_up()
    assert [(0, RowCrashes(0, 3, True))] == poison
    assert queue.is_done(0)


def test_a_row_is_not_given_up_in_company():
    queue = queue_of(2, max_row_crashes=1)
    queue.dispatch({1: AMPLE})
    assert queue.lose(1).given_up() == []


def test_returned_rows_count_no_attempt_and_no_crash():
    queue = queue_of(4)
    queue.dispatch({1: AMPLE})
    queue.give_back(1, [RowRange(0, 2, 4)])
    queue.dispatch({2: AMPLE})
    assert queue.attempts(0).tolist() == [1, 1, 1, 1]
    assert [queue.load(1).num_rows, queue.load(2).num_rows] == [2, 2]


def test_rows_returned_by_a_dead_replica_are_not_queued_twice():
    queue = queue_of(2)
    queue.dispatch({1: AMPLE})
    queue.lose(1)
    queue.give_back(1, [RowRange(0, 0, 2)])
    assert queue.num_waiting() == 2


def test_a_dropped_batch_leaves_nothing_behind():
    queue = queue_of(4, 4)
    queue.dispatch({1: Credit(tokens=20, rows=2)})
    assert [queue.drop(0), queue.drop(1)] == [[1], []]
    queue.note_aborted(1, 0)
    assert [queue.num_waiting(), queue.load(1).num_rows] == [0, 0]
    assert queue.dispatch({1: AMPLE}) == {}


def suspects_and_a_busy_replica():
    """Replica 3 runs one row of batch 1; the two rows of batch 0 are suspects."""
    queue = queue_of(2, 1)
    queue.dispatch({1: Credit(tokens=20, rows=2)})
    queue.dispatch({3: AMPLE})
    queue.lose(1)
    queue.dispatch({2: AMPLE})
    queue.lose(2)
    return queue


def test_a_replica_that_still_runs_dropped_rows_gets_no_suspects():
    queue = suspects_and_a_busy_replica()
    queue.drop(1)
    assert queue.dispatch({3: AMPLE}) == {}


def test_a_replica_that_confirmed_the_abort_gets_suspects():
    queue = suspects_and_a_busy_replica()
    queue.drop(1)
    queue.note_aborted(3, 1)
    assert held_rows(queue.dispatch({3: AMPLE})[3]) == [(0, 0)]


def test_a_row_beside_dropped_rows_is_not_given_up():
    queue = queue_of(1, 1, max_row_crashes=1)
    queue.dispatch({1: AMPLE})
    queue.drop(0)
    assert queue.lose(1).given_up() == []


def test_dropped_rows_weigh_until_the_abort_is_confirmed():
    queue = queue_of(4)
    queue.dispatch({1: AMPLE})
    queue.drop(0)
    assert queue.load(1).num_rows == 4
    queue.add(1, [10] * 4, [10] * 4)
    assert {2: [RowRange(1, 0, 4)]} == queue.dispatch({1: AMPLE, 2: AMPLE})


def test_results_and_returns_of_a_dropped_batch_change_nothing():
    queue = queue_of(4)
    queue.dispatch({1: AMPLE})
    queue.drop(0)
    assert queue.finish(1, 0, [0, 1]).tolist() == [False, False]
    queue.give_back(1, [RowRange(0, 2, 4)])
    assert [queue.load(1).num_rows, queue.num_waiting()] == [4, 0]


def test_a_confirmation_of_a_dead_replica_is_ignored():
    queue = queue_of(4)
    queue.dispatch({1: AMPLE})
    queue.drop(0)
    assert queue.lose(1).crashes == {}
    queue.note_aborted(1, 0)
    assert queue.load(1).num_rows == 0


def test_suspects_that_come_back_unstarted_stay_suspects():
    queue = queue_of(2, 2)
    for replica_id in (1, 2):
        queue.dispatch({replica_id: Credit(tokens=20, rows=2)})
        queue.lose(replica_id)
    queue.dispatch({3: AMPLE})
    queue.give_back(3, [RowRange(0, 0, 1)])
    assert held_rows(queue.dispatch({3: AMPLE})[3]) == [(0, 0)]


def test_suspects_that_come_back_unstarted_come_as_one_set():
    queue = queue_of(5)
    queue.dispatch({1: AMPLE})
    queue.finish(1, 0, [1])
    for replica_id in (1, 2):
        queue.dispatch({replica_id: AMPLE})
        queue.lose(replica_id)
    queue.dispatch({3: AMPLE})
    queue.give_back(3, [RowRange(0, 0, 1), RowRange(0, 2, 3)])
    assert held_rows(queue.dispatch({3: AMPLE})[3]) == [(0, 0), (0, 2)]


def test_a_row_that_died_alone_and_comes_back_unstarted_stays_alone():
    queue = queue_of(3)
    queue.pick_canary(1.0)
    queue.dispatch({1: AMPLE})
    queue.lose(1)
    queue.dispatch({2: AMPLE})
    queue.give_back(2, [RowRange(0, 2, 3)])
    assert held_rows(queue.dispatch({2: AMPLE})[2]) == [(0, 2)]


def test_a_dead_replica_leaves_no_load_behind():
    queue = queue_of(2)
    queue.dispatch({1: AMPLE})
    queue.lose(1)
    queue.give_back(1, [RowRange(0, 0, 1)])
    queue.finish(1, 0, [1])
    assert list(queue._replicas) == []


def test_rows_of_a_stopped_replica_are_queued_again_without_a_crash():
    queue = queue_of(3, 2)
    for replica_id in (1, 2, 3):
        queue.dispatch({replica_id: AMPLE})
        queue.release(replica_id)
    assert {4: [RowRange(0, 0, 3), RowRange(1, 0, 2)]} == queue.dispatch({4: AMPLE})
    assert queue.attempts(0).tolist() == [1, 1, 1]


def test_a_stopped_replica_holds_nothing():
    queue = queue_of(2, 2)
    queue.dispatch({1: AMPLE})
    queue.drop(0)
    queue.release(1)
    assert (queue.load(1).num_rows, queue.num_waiting()) == (0, 2)


def test_a_control_that_comes_back_unstarted_is_the_control_still():
    queue = queue_of(3)
    queue.add_canary(7, [10] * 5, [10] * 5, 4)
    queue.dispatch({1: AMPLE})
    queue.give_back(1, [RowRange(7, 4, 5)])
    assert queue.has_canary()
    assert {2: [RowRange(7, 4, 5)]} == queue.dispatch({2: AMPLE})
    assert queue.load(2).is_testing


def test_no_second_control_is_picked_while_one_runs():
    queue = queue_of(3)
    queue.pick_canary(1.0)
    queue.dispatch({1: AMPLE})
    assert queue.pick_canary(1.0)
    assert held_rows(queue.dispatch({2: AMPLE})[2]) == [(0, 0), (0, 1)]


def test_a_control_runs_alone_before_all_others():
    queue = queue_of(6)
    assert queue.pick_canary(0.5)
    assert held_rows(queue.dispatch({1: AMPLE})[1]) == [(0, 2)]
    assert queue.load(1).is_testing
    assert queue.dispatch({1: AMPLE}) == {}


@pytest.mark.parametrize(("place", "row"), [(0.0, (0, 0)), (0.7, (1, 1)), (1.0, (1, 2))])
def test_a_control_comes_from_its_place_in_the_queue(place, row):
    queue = queue_of(2, 3)
    queue.pick_canary(place)
    assert held_rows(queue.dispatch({1: AMPLE})[1]) == [row]
    rest = held_rows(queue.dispatch({2: AMPLE})[2])
    assert sorted([row, *rest]) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_a_control_of_its_own_batch_runs_one_row():
    queue = queue_of(3)
    queue.add_canary(7, [10] * 5, [10] * 5, 4)
    assert {1: [RowRange(7, 4, 5)]} == queue.dispatch({1: AMPLE})
    assert queue.finish(1, 7, [4]).all()
    assert [queue.has_canary(), queue.is_done(7)] == [False, True]


def test_the_death_with_a_canary_is_told():
    queue = queue_of(3)
    queue.pick_canary(1.0)
    queue.dispatch({1: AMPLE})
    queue.dispatch({2: AMPLE})
    assert [queue.lose(2).was_canary, queue.lose(1).was_canary] == [False, True]


def test_a_control_of_a_dropped_batch_is_gone():
    queue = queue_of(3)
    queue.pick_canary(1.0)
    queue.drop(0)
    assert [queue.has_canary(), queue.num_waiting()] == [False, 0]


def test_a_row_that_died_alone_once_stays_alone():
    queue = queue_of(3)
    queue.pick_canary(1.0)
    queue.dispatch({1: AMPLE})
    queue.lose(1)
    assert held_rows(queue.dispatch({2: AMPLE})[2]) == [(0, 2)]


def test_one_poison_row_among_many_costs_a_logarithmic_number_of_deaths():
    queue = queue_of(256)
    poison, num_deaths, replica_id = [], 0, 0
    while not queue.is_done(0):
        replica_id += 1
        while grants := queue.dispatch({replica_id: AMPLE}):
            rows = held_rows(grants[replica_id])
            if (0, 77) in rows:
                poison += queue.lose(replica_id).given_up()
                num_deaths += 1
                break
            queue.finish(replica_id, 0, [row for _, row in rows])
    assert [(batch_id, crashes.row) for batch_id, crashes in poison] == [(0, 77)]
    assert num_deaths <= 2 + 8


def test_the_counts_of_attempts_are_those_of_the_rows():
    queue = RowQueue(3)
    queue.add(5, np.array([1, 2, 3], np.int32), np.array([1, 1, 1], np.int64))
    queue.dispatch({1: Credit(tokens=3, rows=9)})
    assert queue.attempts(5).tolist() == [1, 1, 0]


def test_suspects_of_several_groups_come_back_from_a_replica_that_was_stopped():
    queue = grouped_queue([1, 1, 2, 2, 3, 3, 4, 4])
    for replica_id in (1, 2):
        queue.dispatch({replica_id: AMPLE})
        queue.lose(replica_id)
    queue.dispatch({3: AMPLE})
    queue.release(3)
    row_ranges = queue.dispatch({4: AMPLE})[4]
    assert [0, 1, 2, 3] == [row for _, row in held_rows(row_ranges)]
    for _, row in held_rows(row_ranges):
        queue.finish(4, 0, [row])
    assert 0 == queue.load(4).cost


def two_holders():
    """A queue whose eight rows are held by two replicas, four each."""
    queue = queue_of(8)
    queue.dispatch({1: AMPLE, 2: AMPLE})
    return queue


def test_a_row_that_has_moved_is_finished_by_the_other_replica_alone():
    queue = two_holders()
    assert queue.begin_move(1, 0, 0)
    assert queue.commit_move(1, 2, 0, 0, with_kv=True)
    assert [False] == queue.finish(1, 0, [0]).tolist()
    assert [True] == queue.finish(2, 0, [0]).tolist()
    assert (3, 4) == (queue.load(1).num_rows, queue.load(2).num_rows)
    assert (60, 80) == (queue.load(1).cost, queue.load(2).cost)


def test_a_row_on_its_way_is_finished_by_the_replica_that_it_leaves():
    queue = two_holders()
    assert queue.begin_move(1, 0, 0)
    assert [True] == queue.finish(1, 0, [0]).tolist()
    assert not queue.commit_move(1, 2, 0, 0, with_kv=True)
    assert (3, 4) == (queue.load(1).num_rows, queue.load(2).num_rows)


def test_a_row_moves_only_once_at_a_time_and_from_where_it_is():
    queue = two_holders()
    assert not queue.begin_move(2, 0, 0)
    assert queue.begin_move(1, 0, 0)
    assert not queue.begin_move(1, 0, 0)
    queue.end_move(1, 0, 0)
    assert queue.begin_move(1, 0, 0)


def test_a_row_whose_replica_died_on_its_way_waits_again_and_does_not_move():
    queue = two_holders()
    assert queue.begin_move(1, 0, 0)
    assert queue.lose(1).num_rows == 4
    assert not queue.commit_move(1, 2, 0, 0, with_kv=True)
    assert (4, 4) == (queue.num_waiting(), queue.load(2).num_rows)


def test_a_row_that_nobody_waits_for_does_not_move():
    queue = two_holders()
    assert queue.begin_move(1, 0, 0)
    assert [1, 2] == queue.drop(0)
    assert not queue.commit_move(1, 2, 0, 0, with_kv=True)
    queue.note_aborted(1, 0)
    assert 0 == queue.load(1).num_rows


def test_no_row_moves_to_or_from_a_replica_that_runs_suspects():
    queue = two_holders()
    queue.lose(1)
    queue.dispatch({3: AMPLE})
    queue.lose(3)
    queue.dispatch({4: AMPLE})
    assert queue.is_held(4, 0, np.array([0])).all()
    assert not queue.begin_move(4, 0, 0)
    assert queue.begin_move(2, 0, 7)
    assert not queue.commit_move(2, 4, 0, 7, with_kv=True)
    assert [True] == queue.finish(2, 0, [7]).tolist()


def test_a_move_with_kv_computes_no_prefix_once_more():
    for with_kv, num_cuts in ((True, 0), (False, 1)):
        queue = grouped_queue([1] * 4)
        queue.dispatch({1: AMPLE})
        assert queue.begin_move(1, 0, 0)
        assert queue.commit_move(1, 2, 0, 0, with_kv=with_kv)
        assert (num_cuts, 100 * num_cuts) == queue.cuts()


def test_what_is_left_is_summed_apart_for_rows_that_wait_and_rows_that_are_held():
    queue = RowQueue(3)
    queue.add(1, [10, 20, 30], [1, 2, 3])
    assert queue.dispatch({7: Credit(tokens=10, rows=1)}) == {7: [RowRange(1, 0, 1)]}
    assert queue.tokens_left(is_held=True) == (1, 10, 1)
    assert queue.tokens_left(is_held=False) == (2, 50, 5)
    queue.finish(7, 1, [0])
    assert queue.tokens_left(is_held=True) == (0, 0, 0)
