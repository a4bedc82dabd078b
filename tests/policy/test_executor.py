"""Where the engines of a job run that leaves it open."""

import pytest

from raybatch.policy.executor import choose_executor, engines_for

SMALL = {
    "is_connected": False,
    "needs_ray": "",
    "num_rows": 10,
    "num_bytes": 1000,
    "max_driver_bytes": 32 << 20,
}


def test_a_small_input_runs_without_ray():
    assert choose_executor(**SMALL) == (True, "no cluster is connected, and the input is small")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_connected": True}, "a Ray cluster is connected"),
        ({"needs_ray": "pool.bundles=..."}, "pool.bundles=... needs Ray"),
        ({"num_rows": 10_001}, "10001 rows exceed 10000"),
        ({"num_bytes": 33554433}, "33554433 bytes exceed 33554432"),
        ({"max_driver_bytes": 999}, "1000 bytes exceed 999"),
    ],
)
def test_ray_is_taken_where_it_is_there_needed_or_worth_its_start(changes, reason):
    assert choose_executor(**(SMALL | changes)) == (False, reason)


def test_the_largest_input_that_runs_without_ray():
    inputs = SMALL | {"num_rows": 10_000, "num_bytes": 32 << 20}
    assert choose_executor(**inputs)[0]


@pytest.mark.parametrize(
    ("num_rows", "most", "num_engines"),
    [(0, 4, 1), (1, 4, 1), (256, 4, 1), (257, 4, 2), (1024, 4, 4), (10_000, 4, 4), (10_000, 1, 1)],
)
def test_few_rows_start_few_engines(num_rows, most, num_engines):
    assert engines_for(num_rows, most) == num_engines
