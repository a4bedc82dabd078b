"""Who gives rows to an idle replica, how many, and which."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.actors.queue.stealing import ReplicaWork, Steal, choose_rows, choose_steal
from raybatch.records.types import Request, Sampling


def rows_of(ids, *, prefix=100, own=10, new=10):
    """Return a request per row, given by its group."""
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.zeros(own + (0 if group is None else prefix), np.int32),
            sampling=Sampling(max_tokens=new),
            group_id=group,
            prefix_len=0 if group is None else prefix,
        )
        for i, group in enumerate(ids)
    ]


def rows_given(ids, num_open, **limits):
    return [r.request_id for r in choose_rows(rows_of(ids), num_open, **limits)]


def test_rows_without_groups_go_from_the_end():
    assert [3, 4] == rows_given([None] * 5, {}, max_rows=2)


def test_whole_groups_go_from_the_end():
    assert [4, 5] == rows_given([0, 0, 1, 1, 2, 2], {0: 2, 1: 2, 2: 2}, max_rows=3)


def test_a_group_that_has_started_stays_while_a_whole_one_is_there():
    assert [0, 1] == rows_given([0, 0, 1, 1], {0: 2, 1: 3}, max_rows=2)


def test_a_whole_group_goes_before_another_is_cut():
    assert [0, 1, 2] == rows_given([0, 0, 0], {0: 3}, max_rows=1, max_cost=200)


def test_a_group_is_cut_where_no_whole_one_fits():
    # forty rows of 20 are worth eight prefixes of 100
    assert list(range(60, 100)) == rows_given([0] * 100, {0: 100}, max_rows=40, max_cost=1000)


def test_no_group_is_cut_for_less_than_eight_prefixes():
    assert [] == rows_given([0] * 100, {0: 100}, max_rows=39, max_cost=1000)


def test_what_is_given_stays_within_the_cost():
    assert [5, 6] == rows_given([None] * 7, {}, max_rows=5, max_cost=40)


def test_rows_cost_what_is_likely_where_no_plan_expects_anything():
    rows = [replace(row, likely_output_lens=(10, 30)) for row in rows_of([None] * 8, new=1000)]
    assert 3 == len(choose_rows(rows, {}, max_rows=8, max_cost=3 * (10 + 20)))
    planned = [replace(row, expected_output_len=80) for row in rows]
    assert 1 == len(choose_rows(planned, {}, max_rows=8, max_cost=10 + 80))


def test_members_between_other_rows_go_in_order_of_arrival():
    assert [1, 3] == rows_given([None, 5, None, 5], {5: 2}, max_rows=2, max_cost=150)


IDLE = ReplicaWork(1, num_held=0, cost=0)
BUSY = ReplicaWork(2, num_held=9, cost=100, num_unstarted=8)


@pytest.mark.parametrize(
    ("pulling", "others", "expected"),
    [
        ([IDLE], [IDLE, BUSY], Steal(2, max_rows=4, max_cost=50)),
        ([], [BUSY], None),
        ([BUSY], [IDLE, BUSY], None),
        ([IDLE], [IDLE, BUSY._replace(can_give=False)], None),
        ([IDLE], [IDLE, BUSY._replace(num_unstarted=1)], None),
        ([IDLE], [BUSY, BUSY._replace(replica_id=3, num_unstarted=11)], Steal(3, 5, 50)),
        ([IDLE], [BUSY, BUSY._replace(replica_id=3)], Steal(2, 4, 50)),
        ([IDLE, IDLE._replace(num_held=2, cost=30)], [BUSY], Steal(2, 4, 50)),
    ],
    ids=[
        "half of both",
        "nobody asks",
        "nobody is idle",
        "a stale report",
        "one row is not shared",
        "the most unstarted rows",
        "the first of equal ones",
        "the least work counts",
    ],
)
def test_an_idle_replica_takes_half_of_what_the_fullest_has(pulling, others, expected):
    assert expected == choose_steal(pulling, others)


works = st.builds(
    ReplicaWork,
    st.integers(0, 99),
    num_held=st.integers(0, 20),
    cost=st.integers(0, 1000),
    num_unstarted=st.integers(0, 20),
    can_give=st.booleans(),
)


@given(st.lists(works, unique_by=lambda work: work.replica_id), st.data())
def test_a_steal_never_leaves_the_giver_with_less_work_than_the_idle_one(replicas, data):
    pulling = [work for work in replicas if data.draw(st.booleans())]
    steal = choose_steal(pulling, replicas)
    givers = {w.replica_id: w for w in replicas if w.can_give and w.num_unstarted > 1}
    is_idle = any(work.num_held == 0 for work in pulling)
    assert (steal is not None) == (is_idle and bool(givers))
    if steal is not None:
        victim, least = givers[steal.replica_id], min(work.cost for work in pulling)
        assert victim.num_unstarted == max(work.num_unstarted for work in givers.values())
        assert 1 <= steal.max_rows <= victim.num_unstarted - steal.max_rows
        assert victim.cost - steal.max_cost >= least + steal.max_cost
