"""Where a sequence runs as it grows, and when a replica has too much."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch_lab.stages.plan import is_overloaded, next_stage, stage_for

BOUNDS = st.lists(st.integers(1, 100), min_size=1, max_size=5, unique=True).map(sorted)


def test_a_length_at_a_bound_is_in_the_stage_that_ends_there():
    assert [0, 0, 1, 2] == stage_for([8, 16], np.array([1, 8, 9, 17])).tolist()


@given(bounds=BOUNDS, prompt=st.integers(1, 100), output=st.integers(1, 100))
def test_a_growing_row_runs_at_each_length_in_the_one_stage_that_covers_it(bounds, prompt, output):
    stage = stage_for(bounds, np.array([prompt]))
    edges = [0, *bounds, np.inf]
    for length in range(prompt, prompt + output + 1):
        found = next_stage(bounds, np.array([length]), stage)
        assert found[0] >= stage[0]
        assert edges[found[0]] < length <= edges[found[0] + 1]
        stage = found


@given(
    bounds=st.lists(BOUNDS, min_size=2, max_size=6),
    lengths=st.lists(st.integers(1, 200), max_size=6),
)
def test_a_row_never_goes_back_where_bounds_move(bounds, lengths):
    stage = np.array([0])
    for found, length in zip(bounds, sorted(lengths), strict=False):
        later = next_stage(found, np.array([length]), stage)
        assert later[0] >= stage[0]
        stage = later


@pytest.mark.parametrize(
    ("loads", "expected"),
    [
        ((124.0, 76.0), (False, False)),
        ((125.0, 75.0), (True, False)),
        ((126.0, 74.0), (True, False)),
        ((100.0, 100.0, 100.0), (False, False, False)),
        ((0.0, 0.0), (False, False)),
        ((500.0,), (False,)),
        ((), ()),
    ],
    ids=["below", "at", "above", "level", "empty", "alone", "none"],
)
def test_a_quarter_above_the_average_is_too_much(loads, expected):
    assert expected == tuple(is_overloaded(np.array(loads)).tolist())
