"""Which of its unstarted rows a replica gives back."""

from dataclasses import replace

import numpy as np

from raybatch.actors.queue.pulling import choose_rows
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
