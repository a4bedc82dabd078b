"""Rows that take too much memory: found in every layout, and answered with an error."""

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.rows.batches import large_rows
from tests.stages.support import answer, fake_stage, local

TEXTS = ["a", "b" * 20, "x" * 1000, None, "c"] * 3
LARGE = [2, 7, 12]

COLUMNS = {
    "string": pa.array(TEXTS),
    "large string": pa.array(TEXTS, pa.large_string()),
    "view": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "list": pa.array([[text] for text in TEXTS]),
    "list of views": pa.array([[text] for text in TEXTS], pa.large_list(pa.string_view())),
    "list of dictionaries": pa.array(
        [[text] for text in TEXTS], pa.list_(pa.dictionary(pa.int8(), pa.string()))
    ),
    "fixed list": pa.array([[text] for text in TEXTS], pa.list_(pa.string(), 1)),
    "messages": pa.array(
        [[{"role": "user", "content": text}] for text in TEXTS],
        pa.list_(pa.struct([("role", pa.string_view()), ("content", pa.string_view())])),
    ),
    "map": pa.array([[("key", text)] for text in TEXTS], pa.map_(pa.string(), pa.string())),
    "json": pa.array([None if t is None else f'"{t}"' for t in TEXTS], pa.json_()),
    "numbers": pa.array(
        [[0] * (200 if i in LARGE else 2) for i in range(15)], pa.list_(pa.int64())
    ),
}


@pytest.mark.parametrize("layout", COLUMNS)
@pytest.mark.parametrize("start", [0, 3])
def test_large_rows_are_found_in_every_layout(layout, start):
    table = pa.table({"x": COLUMNS[layout], "n": range(15)}).slice(start)
    found = large_rows(table, max_bytes=900)
    assert [row + start for row in found] == [row for row in LARGE if row >= start]
    assert all(1000 <= num_bytes < 1700 for num_bytes in found.values())


def test_all_columns_of_a_row_count_together():
    table = pa.table({"x": ["y" * 500] * 2, "z": ["y" * 500, "y"]})
    assert list(large_rows(table, max_bytes=900)) == [0]


def test_rows_that_are_large_only_together_are_none():
    assert large_rows(pa.table({"x": ["y" * 500] * 100}), max_bytes=900) == {}


def test_large_row_is_an_error_row_and_the_others_are_answered(model):
    stage = local(fake_stage(model, prompt="{text}", max_row_bytes=900))
    out = answer(stage, pa.table({"text": ["a", "x" * 1000, "b"]}))
    errors = out.column("__inference_error__").to_pylist()
    assert errors[0] == errors[2] == ""
    assert errors[1].startswith("RowTooLarge: the row has 1,0")
    assert errors[1].endswith("max_row_bytes=900")
    assert out.column("num_input_tokens").to_pylist()[::2] == [1, 1]
    assert stage.pool.errors_outside == {"RowTooLarge": 1}


def test_prompt_of_a_large_row_is_never_made(model):
    seen = []

    def messages(row):
        seen.append(row["text"][0])
        return [{"role": "user", "content": row["text"]}]

    options = {"chat_template": "{{ messages[0].content }}", "max_row_bytes": 900}
    stage = local(fake_stage(model, messages=messages, **options))
    answer(stage, pa.table({"text": ["a", "x" * 1000, "b"]}))
    assert seen == ["a", "b"]


def test_batch_of_large_rows_alone_is_answered(model):
    stage = local(fake_stage(model, prompt="{text}", max_row_bytes=900))
    out = answer(stage, pa.table({"text": ["x" * 1000]}))
    assert out.column("__inference_error__")[0].as_py().startswith("RowTooLarge")


def test_limit_below_one_is_refused(model):
    with pytest.raises(ConfigError, match="max_row_bytes must be a whole number of at least 1"):
        fake_stage(model, prompt="{text}", max_row_bytes=0)
