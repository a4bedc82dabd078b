"""The results of a feeder in this process: every table once, and the first error."""

import asyncio
import logging

import pyarrow as pa
import pytest

from raybatch.stages.feeder import CALLS_PER_FEEDER
from raybatch.stages.unit_run import local_results

NUM_TABLES = 100


def tables(num_tables=NUM_TABLES):
    return (pa.table({"row": [i]}) for i in range(num_tables))


def rows_of(results):
    return sorted(row for table in results for row in table["row"].to_pylist())


class AtOnce:
    """Answers without waiting, so that all calls end in one turn of the loop."""

    async def __call__(self, table):
        return table


def test_no_table_is_lost_where_all_calls_end_at_once():
    assert rows_of(local_results(tables(), AtOnce)) == list(range(NUM_TABLES))


def test_an_input_without_tables_has_no_results():
    assert rows_of(local_results(tables(0), AtOnce)) == []


def test_the_number_of_concurrent_calls_is_limited():
    most = 0

    class Counting:
        def __init__(self):
            self.num_open = 0

        async def __call__(self, table):
            nonlocal most
            self.num_open += 1
            most = max(most, self.num_open)
            await asyncio.sleep(0)
            self.num_open -= 1
            return table

    assert rows_of(local_results(tables(), Counting)) == list(range(NUM_TABLES))
    assert most == CALLS_PER_FEEDER


def test_results_of_earlier_calls_come_before_an_error(caplog):
    class Failing:
        async def __call__(self, table):
            (row,) = table["row"].to_pylist()
            if row >= 3:
                raise ValueError(f"row {row}")
            return table

    results = local_results(tables(), Failing)
    with caplog.at_level(logging.ERROR):
        assert rows_of(next(results) for _ in range(3)) == [0, 1, 2]
        with pytest.raises(ValueError, match="row"):
            next(results)
    # asyncio does not log further errors as never retrieved
    assert caplog.text == ""


def test_calls_end_when_the_results_are_closed():
    cancelled = []

    class Waiting:
        async def __call__(self, table):
            (row,) = table["row"].to_pylist()
            try:
                if row:
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(row)
                raise
            return table

    results = local_results(tables(5), Waiting)
    assert next(results)["row"].to_pylist() == [0]
    results.close()
    assert sorted(cancelled) == [1, 2, 3, 4]
