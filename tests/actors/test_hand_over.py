"""Rows that run are held by another replica from one moment to the next."""

import pytest

from raybatch.actors.queue.row_queue import RowQueue
from tests.actors.queues import ROOMY, add_groups, queue_of


def test_a_row_that_is_handed_over_dies_with_its_taker():
    queue = queue_of(4)
    queue.dispatch({0: ROOMY})
    assert queue.hand_over(0, 1, 0, 2)
    assert [3, 1] == [queue.load(replica_id).num_rows for replica_id in (0, 1)]
    queue.lose(0)
    assert 3 == queue.num_waiting()
    queue.lose(1)
    assert 4 == queue.num_waiting()


def test_a_row_takes_the_cost_of_its_prefix_along_where_the_group_ends():
    queue = RowQueue(3)
    add_groups(queue, 0, [5, 6], prefix=100, distinct=10, new=10)
    queue.dispatch({0: ROOMY})
    assert queue.hand_over(0, 1, 0, 0)
    assert [120, 120] == [queue.load(replica_id).cost for replica_id in (0, 1)]
    assert [{6}, {5}] == [set(queue.load(replica_id).groups) for replica_id in (0, 1)]


@pytest.mark.parametrize(("giver", "batch"), [(1, 0), (0, 7)])
def test_a_row_that_its_giver_does_not_hold_stays_where_it_is(giver, batch):
    queue = queue_of(4)
    queue.dispatch({0: ROOMY})
    assert not queue.hand_over(giver, 2, batch, 0)
    assert 4 == queue.load(0).num_rows


def test_a_row_that_is_handed_over_is_no_new_attempt():
    queue = queue_of(1)
    queue.dispatch({0: ROOMY})
    queue.hand_over(0, 1, 0, 0)
    assert [1] == queue.attempts(0).tolist()
    assert [True] == queue.finish(1, 0, [0]).tolist()
