"""Nonnegative least squares: the optimum by its conditions, and by what is known."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.policy.cost.roofline import solve_nonnegative


def test_a_positive_solution_is_that_of_plain_least_squares(rng):
    matrix = rng.random((20, 4))
    truth = np.array([3.0, 0.5, 2.0, 1e-6])
    np.testing.assert_allclose(solve_nonnegative(matrix, matrix @ truth), truth, atol=1e-9)


def test_columns_of_very_different_size_are_all_found(rng):
    matrix = rng.random((20, 3)) * np.array([1.0, 1e6, 1e-6])
    truth = np.array([2.0, 3e-8, 5e5])
    np.testing.assert_allclose(solve_nonnegative(matrix, matrix @ truth), truth, rtol=1e-6)


def test_what_would_be_negative_is_zero():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    np.testing.assert_allclose(solve_nonnegative(matrix, np.array([3.0, 2.0, 1.0])), [2.0, 0.0])


def test_a_column_of_zeros_gets_zero():
    matrix = np.array([[1.0, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(solve_nonnegative(matrix, np.array([2.0, 2.0])), [2.0, 0.0])


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 12), columns=st.integers(1, 8))
@settings(max_examples=150, deadline=None)
def test_no_feasible_direction_lowers_the_residual(seed, rows, columns):
    random = np.random.default_rng(seed)
    matrix, target = random.normal(size=(rows, columns)), random.normal(size=rows)
    x = solve_nonnegative(matrix, target)
    gradient = matrix.T @ (target - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-7).all()
    np.testing.assert_allclose(gradient[x > 0], 0, atol=1e-7)
