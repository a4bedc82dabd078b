"""Prompts for an endpoint: what is sent, ids for the plan, and what a stage may not ask for."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.actors.wire.columns import RequestReader
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import fingerprint
from raybatch.records.types import UNBOUNDED_TOKENS, Sampling
from raybatch.rows.plan_columns import prompt_columns, take_off, with_columns
from raybatch.rows.prepare import find_copies, prepare
from raybatch.rows.render import PromptReader
from raybatch.rows.stage_model import find_model, load_tokenizer, max_model_len
from raybatch.stages.feeder import LLMStage
from raybatch.text.chat import InvalidPrompt
from raybatch.text.tokenizer import Prompt, Tokenizer
from raybatch_openai.endpoint.options import openai_options
from raybatch_openai.endpoint.prompts import EndpointTokenizer, text_of_triples, triples
from tests.stages.support import make_tokenizer

URL = "http://localhost:8000/v1"


def config_of(*, options=(), **stage):
    backend = {"kind": "openai", "options": {"base_url": URL, **dict(options)}}
    return LLMStage("served", backend=backend, **stage).config


def prompts_of(table, *, options=(), **stage):
    config = config_of(options=options, **stage)
    return PromptReader(config, load_tokenizer(config, find_model(config))).read(table)


def payloads(table, **stage):
    return [json.loads(prompt.payload) for prompt in prompts_of(table, **stage)]


TEXTS = pa.table({"text": ["one", "two"]})


@given(st.text(min_size=1), st.text())
def test_triples_hold_a_text_and_begin_as_its_beginning_does(text, more):
    assert text_of_triples(triples(text)) == text
    num_whole = len(text.encode()) // 3
    assert triples(text + more)[:num_whole].tolist() == triples(text)[:num_whole].tolist()


@given(st.text(min_size=1), st.text(min_size=1))
def test_different_texts_have_different_triples(one, other):
    assert (one == other) == (triples(one).tolist() == triples(other).tolist())


def test_a_text_that_ends_in_zeros_has_triples_of_its_own():
    assert triples("ab").tolist() != triples("ab\0").tolist()


def test_a_template_becomes_a_user_message():
    assert payloads(TEXTS, prompt="Say {text}", system="Be short.") == [
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": f"Say {text}"},
            ]
        }
        for text in ("one", "two")
    ]


@pytest.mark.parametrize("stage", [{"chat": False}, {"options": {"endpoint": "completions"}}])
def test_a_template_is_a_text_where_no_chat_is_wanted(stage):
    expected = [{"prompt": "Say one"}, {"prompt": "Say two"}]
    assert expected == payloads(TEXTS, prompt="Say {text}", **stage)


def test_token_ids_are_sent_as_they_are():
    (prompt,) = prompts_of(pa.table({"ids": [[5, 9]]}), tokenized_prompt="ids")
    assert (prompt.payload, prompt.token_ids.tolist()) == (None, [5, 9])


def test_a_tokenizer_gives_its_ids_and_changes_nothing_that_is_sent(tmp_path):
    folder = make_tokenizer(tmp_path / "model")
    options = {"tokenizer": str(folder)}
    stage = {"messages": [{"role": "user", "content": "{text} <|eos|>"}]}
    plain, known = (prompts_of(TEXTS, options=o, **stage)[0] for o in ({}, options))
    assert plain.payload == known.payload
    messages = json.loads(known.payload)["messages"]
    expected = Tokenizer.load(folder).read_chat(messages, special_tokens="allow").token_ids
    assert known.token_ids.tolist() == expected.tolist()


def test_messages_with_equal_texts_and_other_borders_have_other_ids():
    tokenizer = EndpointTokenizer(openai_options({"base_url": URL}))
    one = tokenizer.read_chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    other = tokenizer.read_chat([{"role": "user", "content": "ab"}])
    assert one.token_ids.tolist() != other.token_ids.tolist()


@pytest.mark.parametrize("value", ["", "\ud800", 3], ids=["empty", "surrogate", "number"])
def test_what_is_no_text_is_an_error_of_the_row(value):
    tokenizer = EndpointTokenizer(openai_options({"base_url": URL}))
    with pytest.raises(InvalidPrompt):
        tokenizer.read(value)


def test_messages_that_are_no_json_are_an_error_of_the_row():
    tokenizer = EndpointTokenizer(openai_options({"base_url": URL}))
    message = {"role": "assistant", "content": "a", "tool_calls": [{1, 2}]}
    with pytest.raises(InvalidPrompt, match="cannot be encoded as JSON"):
        tokenizer.read_chat([message])


def test_prompts_travel_with_a_plan():
    prompts = [Prompt(triples("a"), payload='{"prompt": "a"}'), Prompt(None, "BadRow: no")]
    nothing = pa.table({"text": ["a", "b"]})
    plan = {
        f"__rb_plan_{name}": pa.array([0, 0], pa.int32())
        for name in ("group", "prefix_len", "expected")
    }
    _, planned = take_off(with_columns(nothing, {**plan, **prompt_columns(prompts)}))
    assert [p.payload for p in planned.prompts] == ['{"prompt": "a"}', None]


def test_rows_with_equal_ids_and_other_texts_are_no_copies():
    # a tokenizer that is not the endpoint's may see no difference
    ids = triples("one")
    prompts = [Prompt(ids, payload=text) for text in ("one", "two", "one")]
    assert find_copies([0, 1, 2], prompts, [Sampling()] * 3) == {2: 0}


def test_requests_carry_what_is_sent():
    config = config_of(prompt="{text}")
    reader = PromptReader(config, load_tokenizer(config, None))
    prepared = prepare(TEXTS, config=config, reader=reader, max_model_len=None)
    (one, two) = RequestReader(prepared.requests, prepared.samplings).read(0, 2, 0)
    assert one.payload == {"messages": [{"role": "user", "content": "one"}]}
    assert two.payload == {"messages": [{"role": "user", "content": "two"}]}


def test_an_output_length_beyond_any_number_is_bounded_where_no_model_says_one():
    table = TEXTS.append_column("s", pa.array(['{"max_tokens": 1' + "0" * 23 + "}", None]))
    config = config_of(prompt="{text}", sampling_column="s")
    reader = PromptReader(config, load_tokenizer(config, None))
    prepared = prepare(table, config=config, reader=reader, max_model_len=None)
    (one, two) = RequestReader(prepared.requests, prepared.samplings).read(0, 2, 0)
    assert one.sampling.max_tokens == UNBOUNDED_TOKENS
    assert two.sampling == config.sampling


@pytest.mark.parametrize(
    ("options", "stage", "message"),
    [
        ({}, {"chat_template": "{{ x }}"}, "chat_template .* have no effect on an endpoint"),
        ({}, {"chat_template_kwargs": {"a": 1}}, "have no effect on an endpoint"),
        ({"endpoint": "completions"}, {"messages": "m"}, "endpoint is 'completions'"),
        ({"endpoint": "completions"}, {"system": "s"}, "endpoint is 'completions'"),
        ({"endpoint": "chat"}, {"chat": False, "prompt": "{a}"}, "endpoint is 'chat'"),
        ({"endpoint": "chat"}, {"tokenized_prompt": "ids"}, "endpoint is 'chat'"),
        ({}, {"on_too_long": "truncate_left"}, "cuts token ids"),
        ({"max_model_len": 100}, {}, "max_model_len needs backend.options.tokenizer"),
        ({}, {"engine": {"max_model_len": 100}}, "max_model_len needs backend.options.tokenizer"),
        ({"base_url": "x"}, {}, "base_url must be"),
    ],
)
def test_what_an_endpoint_cannot_do_is_refused_with_the_way_out(options, stage, message):
    with pytest.raises(ConfigError, match=message):
        config_of(options=options, **stage)


def test_lengths_are_checked_where_they_are_known():
    known = config_of(options={"max_model_len": 9}, tokenized_prompt="ids")
    assert [9, None] == [max_model_len(c, None) for c in (known, config_of())]


def test_answers_are_told_apart_by_what_decides_them():
    schema = pa.schema([])

    def of(**options):
        return fingerprint(config_of(options=options), schema)

    assert of() == of(max_concurrency=3, timeout_s=5.0, price_per_million_output_tokens=1.0)
    assert of() != of(extra_body={"reasoning_effort": "low"})
    assert of() != of(model="another")


def test_options_of_a_template_that_a_row_brings_are_an_error_of_the_row():
    tokenizer = EndpointTokenizer(openai_options({"base_url": URL}))
    with pytest.raises(InvalidPrompt, match=r"\(documents\) have no effect on an endpoint"):
        tokenizer.read_chat([{"role": "user", "content": "a"}], row_options={"documents": [{}]})
