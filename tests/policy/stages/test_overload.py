"""When a replica has too much."""

import numpy as np
import pytest

from raybatch.policy.stages.overload import is_overloaded


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
