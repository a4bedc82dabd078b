import pyarrow as pa
import pytest

from raybatch.records.types import Sampling
from raybatch.rows.row_options import row_samplings

BASE = Sampling(max_tokens=16, temperature=1.0)


def samplings_of(values: pa.Array) -> list[Sampling | str]:
    table = pa.table({"p": values})
    return row_samplings(table, BASE, overrides={}, sampling_column="p")


def test_rows_without_options_share_the_stages_record():
    found = row_samplings(pa.table({"a": [1, 2]}), BASE, overrides={}, sampling_column=None)
    assert all(sampling is BASE for sampling in found)


def test_struct_that_turned_ints_into_floats_and_absent_into_null_is_read_back():
    values = pa.array(
        [{"temperature": 0.0, "max_tokens": 5.0}, {"temperature": None, "stop": ["a"]}]
    )
    assert samplings_of(values) == [
        Sampling(max_tokens=5, temperature=0.0),
        Sampling(max_tokens=16, temperature=1.0, stop=("a",)),
    ]


def test_json_texts_and_vllm_spellings_are_read():
    found = samplings_of(pa.array(['{"top_k": -1, "stop": "x"}', "", None]))
    assert found == [Sampling(max_tokens=16, temperature=1.0, stop=("x",)), BASE, BASE]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"temperatur": 1}', "unknown sampling option 'temperatur' (did you mean 'temperature'?)"),
        ('{"max_tokens": 1.5}', "max_tokens must be a whole number, got 1.5"),
        ('{"max_tokens": true}', "max_tokens must be a number, got True"),
        ('{"temperature": -1}', "sampling.temperature must be at least 0, got -1.0"),
        ('{"stop_token_ids": ["7"]}', "stop_token_ids must be a list of token ids, got ['7']"),
        ('{"stop_token_ids": [true]}', "stop_token_ids must be a whole number, got True"),
        ('{"stop": [7]}', "stop must be a list of texts, got [7]"),
        ('{"ignore_eos": 1}', "ignore_eos must be true or false, got 1"),
        (
            '{"n": 2}',
            "n must be the same for all rows, in this stage 1, got 2; set it in the sampling of "
            "the stage",
        ),
        ("[1]", "sampling options must be a JSON object, got '[1]'"),
    ],
)
def test_bad_value_is_the_rows_error(text, message):
    assert samplings_of(pa.array([text])) == [f"InvalidSampling: column 'p': {message}"]


def test_broken_json_is_the_rows_error():
    (found,) = samplings_of(pa.array(["{"]))
    assert isinstance(found, str)
    assert found.startswith("InvalidSampling: ")


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        '{"max_tokens": 1' + "0" * 400 + "}",
        '{"temperature": 1' + "0" * 400 + "}",
        '{"stop_token_ids": [1' + "0" * 400 + "]}",
    ],
    ids=["deep", "max_tokens", "temperature", "stop_token_ids"],
)
def test_a_value_beyond_all_bounds_is_its_rows_error(text):
    bad, good = samplings_of(pa.array([text, '{"max_tokens": 3}']))
    assert bad.startswith("InvalidSampling: ")
    assert good.max_tokens == 3


def test_typed_column_wins_over_the_json_column():
    table = pa.table({"p": ['{"max_tokens": 2, "seed": 9}'], "m": [3]})
    found = row_samplings(table, BASE, overrides={"max_tokens": "m"}, sampling_column="p")
    assert found == [Sampling(max_tokens=3, temperature=1.0, seed=9)]


def test_bad_value_of_a_typed_column_names_the_column():
    table = pa.table({"heat": [-1.0]})
    (found,) = row_samplings(table, BASE, overrides={"temperature": "heat"}, sampling_column=None)
    assert found == (
        "InvalidSampling: column 'heat': sampling.temperature must be at least 0, got -1.0"
    )


def test_options_of_two_columns_may_need_each_other():
    table = pa.table({"least": [1000], "most": [2000]})
    overrides = {"min_tokens": "least", "max_tokens": "most"}
    found = row_samplings(table, BASE, overrides=overrides, sampling_column=None)
    assert found == [Sampling(min_tokens=1000, max_tokens=2000, temperature=1.0)]


def test_options_that_do_not_fit_together_name_their_columns():
    table = pa.table({"least": [3], "most": [2]})
    overrides = {"min_tokens": "least", "max_tokens": "most"}
    (found,) = row_samplings(table, BASE, overrides=overrides, sampling_column=None)
    assert found.startswith("InvalidSampling: columns 'least', 'most': sampling.min_tokens must be")
