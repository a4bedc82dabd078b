"""Rows that are pooled: what is asked, what fits, and which columns come out."""

import json

import numpy as np
import pyarrow as pa
import pytest

from raybatch.backends.fake import fake_vector
from raybatch.errors import ConfigError
from raybatch.rows.options import build_stage_config
from raybatch.rows.prepare import fit_pooled
from raybatch.rows.render import read_pair
from raybatch.rows.schema import ERROR_COLUMN, OutputSchema
from raybatch.text.tokenizer import Prompt, Tokenizer
from tests.stages.support import EOS, SYSTEM, answer, fake_stage, local, make_tokenizer


@pytest.fixture(scope="module")
def framed(tmp_path_factory):
    """A tokenizer that puts a token before each text and one behind it."""
    return make_tokenizer(tmp_path_factory.mktemp("framed") / "m", frame=True)


def pooled(model, task, **options):
    options.setdefault("sampling", None)
    return local(fake_stage(model, task=task, **options))


def prompts_of(stage):
    return [request.prompt_token_ids.tolist() for request in stage.pool.requests]


def bytes_of(text):
    return list(text.encode())


@pytest.mark.parametrize(
    ("task", "column", "kind"),
    [
        ("embed", "embeddings", pa.list_(pa.float32())),
        ("classify", "embeddings", pa.list_(pa.float32())),
        ("score", "score", pa.float32()),
    ],
)
def test_numbers_stand_in_the_place_of_text(model, task, column, kind):
    stage = pooled(model, task, prompt="{text}")
    out = answer(stage, pa.table({"text": ["a", None]}))
    assert out.schema.names == [
        "text",
        "row_id",
        column,
        "num_input_tokens",
        "num_cached_tokens",
        "finish_reason",
        "group_id",
        "attempts",
        ERROR_COLUMN,
    ]
    assert out.schema.field(column).type == kind
    assert [value is None for value in out[column].to_pylist()] == [False, True]


def test_the_numbers_are_those_of_the_backend(model):
    stage = pooled(model, "embed", prompt="{text}")
    out = answer(stage, pa.table({"text": ["a", "b"]}))
    expected = [fake_vector(request, "embed").tolist() for request in stage.pool.requests]
    assert expected == out["embeddings"].to_pylist()


def test_a_row_batch_whose_rows_all_fail_has_the_same_columns(model):
    out = answer(pooled(model, "embed", prompt="{text}"), pa.table({"text": pa.nulls(2)}))
    assert out.schema == pa.schema(
        [pa.field("text", pa.null()), *OutputSchema(task="embed").arrow()]
    )


def test_a_chat_template_is_not_put_around_what_is_pooled(chat_model):
    stage = pooled(chat_model, "embed", prompt="{text}")
    answer(stage, pa.table({"text": ["ab"]}))
    assert prompts_of(stage) == [bytes_of("ab")]


def test_options_of_a_row_reach_the_engine(model):
    stage = pooled(
        model, "embed", prompt="{text}", pooling={"normalize": False}, pooling_column="options"
    )
    columns = {"text": ["a", "b", "c"], "options": [None, '{"dimensions": 3}', '{"dimension": 3}']}
    out = answer(stage, pa.table(columns))
    assert [request.payload for request in stage.pool.requests] == [
        {"pooling": {"use_activation": False}},
        {"pooling": {"use_activation": False, "dimensions": 3}},
    ]
    assert [None if v is None else len(v) for v in out["embeddings"].to_pylist()] == [8, 3, None]
    assert out[ERROR_COLUMN][2].as_py().startswith("InvalidPooling: column 'options': ")


def test_equal_texts_with_other_options_are_no_copies(model):
    stage = pooled(model, "embed", prompt="{text}", pooling_column="options")
    columns = {"text": ["a"] * 3, "options": [None, '{"dimensions": 3}', None]}
    out = answer(stage, pa.table(columns))
    assert len(stage.pool.requests) == 2
    assert out["embeddings"][0] == out["embeddings"][2]


def test_query_and_document_are_the_columns_of_these_names(model):
    stage = pooled(model, "score")
    answer(stage, pa.table({"query": ["ab"], "document": ["cd"]}))
    assert prompts_of(stage) == [bytes_of("abcd")]


@pytest.mark.parametrize("column", ["query", "document"])
def test_an_empty_text_of_a_pair_is_the_rows_error(model, column):
    columns = {"query": ["a"], "document": ["b"]} | {column: [""]}
    out = answer(pooled(model, "score"), pa.table(columns))
    assert out[ERROR_COLUMN].to_pylist() == [f"InvalidPrompt: the {column} is empty"]


def test_special_tokens_in_a_pair_are_text(model):
    stage = pooled(model, "score")
    answer(stage, pa.table({"query": ["<|eos|>"], "document": ["a"]}))
    assert prompts_of(stage) == [bytes_of("<|eos|>a")]


def test_a_pair_may_be_two_sequences(framed):
    found = read_pair(Tokenizer.load(framed), "ab", "cde", form="apart")
    assert found.token_ids.tolist() == [SYSTEM, 97, 98, EOS, SYSTEM, 99, 100, 101, EOS]
    assert (json.loads(found.payload), found.cuttable) == ({"document_at": 4}, (5, 8))


def test_a_pair_may_be_one_text(framed):
    found = read_pair(Tokenizer.load(framed), "ab", "cde", form="joined")
    assert found.token_ids.tolist() == [SYSTEM, 97, 98, 99, 100, 101, EOS]
    assert (found.payload, found.cuttable) == (None, (3, 6))


def test_a_pair_has_the_border_that_the_tokenizer_puts_there(framed):
    found = read_pair(Tokenizer.load(framed), "ab", "cde", form="pair")
    assert found.token_ids.tolist() == [SYSTEM, 97, 98, EOS, 99, 100, 101, EOS]
    assert (found.payload, found.cuttable) == (None, (4, 7))


def test_a_model_that_knows_types_is_told_where_the_document_begins(tmp_path):
    model = make_tokenizer(tmp_path / "m", frame=True, has_types=True)
    found = read_pair(Tokenizer.load(model), "ab", "cde", form="pair")
    assert json.loads(found.payload) == {"types_at": 4}


@pytest.mark.parametrize(
    ("on_too_long", "expected"),
    [("truncate_right", [SYSTEM, 97, 98, EOS]), ("truncate_left", [SYSTEM, 99, 100, EOS])],
)
def test_a_cut_leaves_what_the_tokenizer_puts_around_a_text(framed, on_too_long, expected):
    stage = pooled(
        framed, "embed", prompt="{text}", on_too_long=on_too_long, engine={"max_model_len": 4}
    )
    answer(stage, pa.table({"text": ["abcd"]}))
    assert prompts_of(stage) == [expected]


def test_a_prompt_may_fill_the_context(framed):
    stage = pooled(
        framed, "embed", prompt="{text}", engine={"max_model_len": 4}, fake={"max_model_len": 4}
    )
    out = answer(stage, pa.table({"text": ["ab", "abc"]}))
    errors = out[ERROR_COLUMN].to_pylist()
    assert (errors[0], errors[1].partition(":")[0]) == ("", "PromptTooLong")


def test_only_the_document_of_a_pair_is_cut(framed):
    found = read_pair(Tokenizer.load(framed), "ab", "cde", form="pair")
    prompt = Prompt(found.token_ids, cuttable=found.cuttable)
    cut = fit_pooled(prompt, max_len=6, on_too_long="truncate_right")
    assert cut.token_ids.tolist() == [SYSTEM, 97, 98, EOS, 99, EOS]
    assert cut == fit_pooled(cut, max_len=6, on_too_long="truncate_right")
    none = fit_pooled(prompt, max_len=5, on_too_long="truncate_right")
    assert none.error.partition(":")[0] == "PromptTooLong"


def test_each_sequence_of_a_pair_has_the_context_to_itself(framed):
    found = read_pair(Tokenizer.load(framed), "ab", "cde", form="apart")
    prompt = Prompt(found.token_ids, payload=found.payload, cuttable=found.cuttable)
    fits = fit_pooled(prompt, max_len=5, on_too_long="error")
    assert fits is prompt
    cut = fit_pooled(prompt, max_len=4, on_too_long="truncate_right")
    assert cut.token_ids.tolist() == [SYSTEM, 97, 98, EOS, SYSTEM, 99, 100, EOS]
    query = fit_pooled(prompt, max_len=3, on_too_long="truncate_right")
    assert query.error.partition(":")[0] == "PromptTooLong"


def test_a_row_that_does_not_fit_can_be_dropped():
    prompt = Prompt(np.arange(5, dtype=np.int32))
    assert fit_pooled(prompt, max_len=4, on_too_long="drop").is_filtered


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "embed", "backend": "native"}, "native backend generates text.*backend='vllm'"),
        ({"task": "embed", "backend": "transformers"}, "transformers backend generates text"),
        ({"task": "embedd", "backend": "vllm"}, "did you mean 'embed'"),
        ({"pooling": {"dimensions": 2}}, "need task 'embed'"),
        ({"task": "embed", "query": "{a}", "document": "{b}"}, "query needs task 'score'"),
        ({"task": "score", "query": "{a}"}, "set both"),
        ({"task": "score", "query": "{a}", "document": "{b}", "prompt": "{c}"}, "set only one of"),
        ({"task": "embed", "sampling": {"n": 2}}, "sampling.n=2 has no effect"),
        ({"task": "embed", "sampling_column": "s"}, "have no effect"),
        (
            {"backend": {"kind": "vllm", "options": {"engine_kwargs": {"runner": "pooling"}}}},
            "runner must be 'auto' or 'generate' for task 'generate', got 'pooling'",
        ),
    ],
)
def test_options_that_do_not_fit_the_task_are_refused(options, message):
    options = {"backend": "fake"} | options
    with pytest.raises(ConfigError, match=message):
        build_stage_config("m", options, where="LLMStage")
