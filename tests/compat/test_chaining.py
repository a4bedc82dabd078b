"""What of an earlier processor's columns is data of the user, and stays."""

import pyarrow as pa
import pytest

from raybatch.compat.processor import Preprocess
from raybatch.rows.schema import ERROR_COLUMN, PARSED_COLUMNS


@pytest.mark.parametrize("name", [*PARSED_COLUMNS, "score", "embeddings"])
def test_columns_that_may_be_data_stay(name):
    table = pa.table({name: ["of the user"], ERROR_COLUMN: [""]})
    out = Preprocess(lambda row: {"prompt": "new"})(table)
    assert out[name].to_pylist() == ["of the user"]


@pytest.mark.parametrize("returned", ["messages", "prompt"])
def test_a_score_keeps_prompts_that_it_is_handed_as_data(returned):
    table = pa.table({"prompt": ["old"], "text": ["a"], ERROR_COLUMN: [""]})
    preprocess = Preprocess(
        lambda row: {"query": row["text"], "document": "b", returned: "x"},
        task="score",
        prompt_columns=(),
    )
    assert preprocess(table)[returned].to_pylist() == ["x"]


def test_a_score_drops_prompts_that_it_is_not_handed():
    table = pa.table({"prompt": ["old"], "text": ["a"], ERROR_COLUMN: [""]})
    preprocess = Preprocess(
        lambda row: {"query": row["text"], "document": "b"}, task="score", prompt_columns=()
    )
    assert "prompt" not in preprocess(table).column_names
