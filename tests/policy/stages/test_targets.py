"""Which replica each row belongs to."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.stages.plan import Stage, StagePlan
from raybatch.policy.stages.targets import RowsSnapshot, target_replicas

PLAN = StagePlan(
    stages=(
        Stage(above=0, up_to=100, num_replicas=2),
        Stage(above=100, up_to=1000, num_replicas=2),
    ),
    seconds=1.0,
)


def snapshot(rows, loads=None):
    """Return rows of (length, expected length, holder or None)."""
    lengths, expected, holders = zip(*rows, strict=True)
    running = np.array([holder is not None for holder in holders])
    held = np.array([holder or 0 for holder in holders])
    if loads is None:
        loads = np.bincount(held[running], np.array(lengths)[running], 4)
    return RowsSnapshot(
        lengths=np.array(lengths),
        expected_lens=np.array(expected),
        is_running=running,
        holders=held,
        loads=np.array(loads, float),
    )


def targets(rows, loads=None, bounds=None):
    return target_replicas(PLAN, snapshot(rows, loads), bounds).tolist()


def test_waiting_rows_go_to_the_earliest_stage_that_covers_them():
    assert [0, 2] == targets([(100, 300, None), (101, 300, None)])


def test_a_row_that_outgrew_its_stage_goes_to_the_emptier_replica_of_the_next():
    assert [3] == targets([(101, 300, 1)], loads=(0, 101, 50, 40))


def test_a_row_within_its_stage_stays():
    assert [1, 3] == targets([(100, 300, 1), (500, 600, 3)], loads=(90, 100, 480, 500))


def test_a_row_never_goes_back_where_a_bound_has_moved_up():
    assert [2] == targets([(150, 300, 2)], loads=(0, 0, 150, 150), bounds=[200.0])


def test_bounds_that_have_moved_decide():
    assert [2] == targets([(90, 300, 0)], loads=(90, 0, 10, 20), bounds=[80.0])


def test_rows_are_spread_by_what_they_will_hold_in_their_stage():
    # 100 tokens each is all that rows of the first stage come to, 30 is the whole of the others
    rows = [(10, 900, None), (10, 500, None), (10, 30, None), (10, 30, None)]
    assert [0, 1, 0, 1] == targets(rows)


def test_a_replica_that_a_row_leaves_has_room_for_a_waiting_one():
    # replica 0 holds 150 tokens of a row that goes on, replica 1 holds 50
    rows = [(150, 300, 0), (50, 60, 1), (10, 50, None)]
    assert [2, 1, 0] == targets(rows)


@pytest.mark.parametrize(("second", "expected"), [(61, [0, 0, 1]), (20, [0, 1, 1])])
def test_a_replica_a_quarter_above_its_stage_gives_a_row_away(second, expected):
    rows = [(60, 90, 0), (30, 90, 0), (second, 90, 1)]
    assert expected == targets(rows)


def test_a_row_that_would_overload_the_other_side_stays():
    assert [0] == targets([(90, 95, 0)])


@given(
    rows=st.lists(
        st.tuples(
            st.integers(1, 900), st.integers(1, 900), st.one_of(st.none(), st.integers(0, 3))
        ),
        min_size=1,
        max_size=20,
    )
)
def test_every_target_covers_its_row_or_is_later(rows):
    found = np.array(targets(rows))
    stages = PLAN.stage_of_replica[found]
    lengths = np.array([row[0] for row in rows])
    held = np.array([0 if row[2] is None else PLAN.stage_of_replica[row[2]] for row in rows])
    np.testing.assert_array_equal(np.maximum(held, lengths > 100), stages)


def test_loads_of_other_replicas_than_those_of_the_plan_are_refused():
    with pytest.raises(ConfigError, match="3 loads for 4 replicas"):
        targets([(1, 2, None)], loads=(0, 0, 0))


def test_columns_of_different_lengths_are_refused():
    given_rows = snapshot([(1, 2, None)])
    with pytest.raises(ConfigError, match="as many"):
        RowsSnapshot(
            lengths=np.array([1, 2]),
            expected_lens=given_rows.expected_lens,
            is_running=given_rows.is_running,
            holders=given_rows.holders,
            loads=given_rows.loads,
        )
