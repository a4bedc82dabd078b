"""What finished rows are counted as."""

from dataclasses import asdict

import numpy as np
import pyarrow as pa

from raybatch.durable.units import ErrorTally, UnitCounts, sum_counts
from raybatch.planning.tally import unit_counts
from raybatch.prefix.histogram import Histogram
from raybatch.report.record import error_counts
from raybatch.rows.schema import OutputSchema

TOKENS = ("num_input_tokens", "num_cached_tokens", "num_generated_tokens", "attempts")


def finished(rows, tokens=None):
    """Return rows of (row_id, finish_reason, error) with tokens in the order of TOKENS."""
    names = ("row_id", "finish_reason", "__inference_error__")
    columns = list(zip(*rows, strict=True)) if rows else [[], [], []]
    table = pa.table({n: pa.array(c, pa.string()) for n, c in zip(names, columns, strict=True)})
    values = zip(*(tokens or [(1, 0, 1, 1)] * len(rows)), strict=True) if rows else [[]] * 4
    for name, column in zip(TOKENS, values, strict=True):
        table = table.append_column(name, pa.array(column, pa.int32()))
    return table


def counts(*tables):
    return sum_counts(unit_counts(table, OutputSchema()) for table in tables)


def test_statuses_of_units_add_up():
    found = counts(
        finished([("a", "stop", ""), ("b", "length", "")]),
        finished([("c", "stop", ""), ("d", "error", "InvalidPrompt: null")]),
    )
    assert (found.num_rows, found.statuses) == (4, {"ok": 2, "invalid": 1, "truncated": 1})


def test_nothing_counts_nothing():
    assert counts(finished([])) == UnitCounts()


def test_three_row_ids_are_kept_of_each_class_of_errors():
    rows = [(str(i), "error", f"PromptTooLong: {i} tokens") for i in range(5)]
    found = counts(finished(rows[:2]), finished([*rows[2:], ("x", "error", "InvalidPrompt: null")]))
    assert found.errors == {
        "PromptTooLong": ErrorTally(
            num_rows=5, row_ids=("0", "1", "2"), message="PromptTooLong: 0 tokens"
        ),
        "InvalidPrompt": ErrorTally(num_rows=1, row_ids=("x",), message="InvalidPrompt: null"),
    }
    names = [error.error_class for error in error_counts(found)]
    assert names == ["PromptTooLong", "InvalidPrompt"]


def test_rows_with_the_result_of_another_are_counted_as_copies():
    tokens = [(10, 0, 3, 1), (10, 10, 3, 1), (10, 9, 3, 1), (None, None, None, 0)]
    rows = [(str(i), "stop", "") for i in range(3)] + [("3", "error", "InvalidPrompt: null")]
    found = counts(finished(rows, tokens))
    assert (found.num_asked, found.num_copies) == (3, 1)
    assert (found.prompt_tokens, found.cached_tokens, found.generated_tokens) == (30, 19, 9)


def test_counts_survive_json():
    found = counts(finished([("a", "stop", ""), ("d", "error", "InvalidPrompt: null")]))
    assert UnitCounts.from_json(asdict(found)) == found


def test_lengths_of_units_add_up_bin_by_bin():
    short = finished([("a", "stop", "")], [(3, 0, 1, 1)])
    long = finished([("b", "stop", ""), ("c", "stop", "")], [(3, 0, 9, 1), (100, 0, 9, 1)])
    found = counts(short, long)
    assert Histogram.of(np.array([3, 3, 100])).counts == found.prompt_lengths
    assert Histogram.of(np.array([1, 9, 9])).counts == found.output_lengths


def test_rows_that_were_never_asked_have_no_length():
    found = counts(finished([("d", "error", "InvalidPrompt: null")], [(None, None, None, 0)]))
    assert ((), ()) == (found.prompt_lengths, found.output_lengths)


def test_counts_without_lengths_are_read():
    values = asdict(UnitCounts(num_rows=2))
    del values["prompt_lengths"], values["output_lengths"]
    assert UnitCounts.from_json(values) == UnitCounts(num_rows=2)
