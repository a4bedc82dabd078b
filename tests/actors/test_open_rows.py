"""What an engine has to compute of the rows that it has."""

import pytest

from raybatch.actors.queue.pulling import OpenRows
from tests.actors.test_stealing import rows_of


def test_a_prefix_counts_once():
    rows = OpenRows()
    rows.add(rows_of([0, 0, 0, None]))
    assert (110 + 10 + 10 + 10) / 4 == rows.mean_own_tokens()
    assert rows.own_fraction() == pytest.approx(140 / 340)


def test_a_prefix_counts_again_after_its_last_row():
    rows = OpenRows()
    first, second = rows_of([0, 0])
    rows.add([first])
    rows.close(0)
    rows.add([second])
    assert (110, {0: 1}) == (rows.mean_own_tokens(), dict(rows.groups))


def test_rows_that_are_given_back_leave_no_trace():
    rows = OpenRows()
    rows.add(rows_of([None, 0]))
    rows.give_back(1)
    assert (10, 1, {}) == (rows.mean_own_tokens(), len(rows), dict(rows.groups))


def test_nothing_is_known_of_no_rows():
    assert (0, 1.0) == (OpenRows().mean_own_tokens(), OpenRows().own_fraction())
