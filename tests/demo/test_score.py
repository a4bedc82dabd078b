"""Scoring of demo answers."""

import pyarrow as pa

from raybatch.demo.run import exact_match


def test_white_space_around_an_answer_does_not_count():
    found = exact_match(pa.array(["Oak Hill"]), pa.array([" Oak Hill\n"]))
    assert [True] == found.to_pylist()


def test_white_space_inside_an_answer_counts():
    assert [False] == exact_match(pa.array(["Oak Hill"]), pa.array(["Oak  Hill"])).to_pylist()


def test_null_is_never_right():
    expected, generated = pa.array(["red", None, None]), pa.array([None, "red", None])
    assert [False] * 3 == exact_match(expected, generated.cast(pa.string())).to_pylist()


def test_chunked_and_large_strings_are_compared():
    expected = pa.chunked_array([["red"], ["blue"]])
    generated = pa.array(["red", "green"], pa.large_string())
    assert [True, False] == exact_match(expected, generated).to_pylist()


def test_no_rows_give_no_scores():
    empty = pa.array([], pa.string())
    assert [] == exact_match(empty, empty).to_pylist()
