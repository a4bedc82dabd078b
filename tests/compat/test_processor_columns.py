"""Columns and options that rows of a processor have beside those of a stage."""

import logging

import pyarrow as pa
import pytest

from raybatch.actors.wire.columns import LOGPROBS_TYPE
from raybatch.compat.processor import Preprocess
from raybatch.errors import ConfigError
from raybatch.llm import ChatTemplateStageConfig, ProcessorConfig, TokenizerStageConfig
from raybatch.rows.row_options import warn_once
from raybatch.rows.schema import ERROR_COLUMN
from tests.compat.support import LocalRun, user
from tests.stages.support import ASSISTANT, USER, make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("model") / "chat")


@pytest.fixture
def config(model):
    return ProcessorConfig(model_source=str(model), backend="fake")


def with_options(model, **options):
    return ProcessorConfig(model_source=str(model), backend="fake", **options)


def test_rows_say_what_was_asked_in_text_and_tokens(config):
    (row,) = LocalRun(config, [{"messages": user("a")}]).rows
    assert row["prompt"] == "<|user|>a<|assistant|>"
    assert row["prompt_token_ids"] == [USER, ord("a"), ASSISTANT]


def test_rows_without_tokens_have_null_in_both_columns(config):
    rows = LocalRun(config, [{"messages": user("a")}, {"messages": None}]).rows
    assert (rows[1]["prompt"], rows[1]["prompt_token_ids"]) == (None, None)


def test_a_column_with_the_name_of_the_tokens_is_refused(config):
    with pytest.raises(ConfigError, match="'prompt_token_ids', which the processor writes"):
        LocalRun(config, [{"prompt": "a", "prompt_token_ids": [1]}])


def test_rows_ask_for_log_probabilities_by_themselves(config):
    rows = [{"prompt": "a", "k": None}, {"prompt": "b", "k": 2}]
    run = LocalRun(config, rows, lambda row: {"sampling_params": {"logprobs": row["k"]}})
    assert [request.sampling.logprobs for request in run.requests] == [None, 2]
    assert run.table.schema.field("logprobs").type == LOGPROBS_TYPE


@pytest.mark.parametrize(
    ("is_tokenized", "token_ids"), [(True, [ord("a")]), (False, [7, 8])], ids=["with", "without"]
)
def test_the_tokenize_stage_decides_between_text_and_tokens(model, is_tokenized, token_ids):
    for stage in (is_tokenized, TokenizerStageConfig(enabled=is_tokenized)):
        run = LocalRun(
            with_options(model, tokenize_stage=stage), [{"prompt": "a", "tokenized_prompt": [7, 8]}]
        )
        assert run.requests[0].prompt_token_ids.tolist() == token_ids


def test_a_typed_stage_config_brings_its_template(model):
    stage = ChatTemplateStageConfig(chat_template="{{ messages[0].content }}{{ mark }}")
    run = LocalRun(
        with_options(model, chat_template_stage=stage),
        [{"messages": user("a")}],
        builder_kwargs={"chat_template_kwargs": {"mark": "!"}},
    )
    assert run.rows[0]["prompt"] == "a!"


def test_what_a_function_sets_in_its_row_is_merged_too(config):
    def preprocess(row):
        row["prompt"], row["seen"] = "new", True
        return {"sampling_params": {"max_tokens": 1}}

    (row,) = LocalRun(config, [{"prompt": "old"}], preprocess).rows
    assert (row["prompt"], row["seen"], row["num_generated_tokens"]) == ("new", True, 1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("request_id", "row_id names a row"), ("metrics", "not recorded"), ("nothing", "'nothing'")],
)
def test_a_column_that_only_ray_data_llm_has_says_what_is_there(config, name, reason):
    (row,) = LocalRun(config, [{"prompt": "a"}], None, lambda row: {"x": row[name]}).rows
    assert row[ERROR_COLUMN].startswith("PostprocessError: KeyError:")
    assert reason in row[ERROR_COLUMN]


def test_options_of_how_vllm_hands_tokens_over_are_named_once(config, caplog):
    warn_once.cache_clear()
    with caplog.at_level(logging.INFO):
        run = LocalRun(
            config,
            [{"prompt": "a"}, {"prompt": "b"}],
            lambda row: {"sampling_params": {"detokenize": False, "max_tokens": 1}},
        )
    assert [row[ERROR_COLUMN] for row in run.rows] == ["", ""]
    assert [r.getMessage() for r in caplog.records if "detokenize" in r.getMessage()] == [
        "the sampling option detokenize has no effect: rows always have text and tokens"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": {"1": 2.0}}, "option logit_bias is not supported"),
        ({"prompt_logprobs": 0}, "option prompt_logprobs is not supported"),
        ({"guided_decoding": {}}, "was renamed in vLLM; use structured_outputs"),
        ({"guided_json": {}}, "was renamed in vLLM; use structured_outputs={'json': ...}"),
        ({"logit_bias": {}, "spaces_between_special_tokens": True}, ""),
    ],
)
def test_options_of_vllm_that_decide_answers_are_refused_by_name(config, options, message):
    (row,) = LocalRun(config, [{"prompt": "a"}], lambda row: {"sampling_params": options}).rows
    assert message in row[ERROR_COLUMN]
    assert bool(message) == bool(row[ERROR_COLUMN])


def test_a_second_processor_takes_the_place_of_the_first_ones_columns(config):
    first = LocalRun(config, [{"messages": user("a")}], lambda row: {})
    second = LocalRun(config, first.table, lambda row: {"messages": user("b")})
    assert second.rows[0]["prompt"] == "<|user|>b<|assistant|>"


def test_messages_beside_the_prompt_made_of_the_first_ones_are_asked(config):
    first = LocalRun(config, [{"messages": user("a")}], lambda row: {})
    second = LocalRun(config, first.table, lambda row: {**row, "messages": user("b")})
    assert second.rows[0]["prompt"] == "<|user|>b<|assistant|>"


def test_a_prompt_changed_beside_messages_that_are_handed_through_is_refused(config):
    """Messages are asked first, as there; a new prompt would never be."""
    first = LocalRun(config, [{"messages": user("a")}], lambda row: {})
    with pytest.raises(ConfigError, match="return only the prompt to use"):
        Preprocess(lambda row: {**row, "prompt": "b"})(first.table)


def test_a_new_prompt_is_asked_where_messages_are_not_read(model):
    config = with_options(model, chat_template_stage=False)
    rows = [{"messages": user("a"), "prompt": "a"}]
    first = LocalRun(config, rows, lambda row: {})
    second = LocalRun(config, first.table, lambda row: {**row, "prompt": "b"})
    assert (second.rows[0]["prompt"], second.rows[0]["messages"]) == ("b", user("a"))


def test_null_columns_of_tokens_stay_lists(config):
    run = LocalRun(config, [{"messages": None}], None)
    assert run.table.schema.field("prompt_token_ids").type == pa.list_(pa.int32())
