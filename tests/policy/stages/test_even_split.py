"""One even part beside the average over all of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.policy.stages.even_split import even_part


def test_every_nth_value_is_taken_from_the_middle_of_the_first_n_on():
    assert [3, 7] == even_part(np.array([8, 2, 7, 3, 6, 4, 5, 1]), 4).tolist()


def test_one_part_is_the_set_itself():
    assert [1, 2, 3] == even_part(np.array([3, 1, 2]), 1).tolist()


@given(size=st.integers(0, 12), num_parts=st.integers(1, 12))
def test_the_part_has_the_average_size_within_one(size, num_parts):
    assert abs(len(even_part(np.arange(size), num_parts)) - size / num_parts) < 1


@pytest.mark.parametrize(("size", "expected"), [(0, []), (2, []), (3, [2]), (4, [2])])
def test_fewer_values_than_parts_give_one_if_more_than_half(size, expected):
    assert expected == even_part(np.arange(size), 5).tolist()


def test_the_part_has_nearly_the_sum_of_an_average_part(rng, record_property):
    errors = []
    for _ in range(200):
        lengths = rng.lognormal(6, 1, int(rng.integers(50, 400))).astype(int)
        num_parts = int(rng.integers(2, 6))
        average = lengths.sum() / num_parts
        errors.append(abs(even_part(lengths, num_parts).sum() / average - 1))
    record_property("mean error of the sum", float(np.mean(errors)))
    assert np.mean(errors) < 0.07


def test_no_parts_are_refused():
    with pytest.raises(ConfigError, match="at least 1"):
        even_part(np.arange(3), 0)
