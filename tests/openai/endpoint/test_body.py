"""What an endpoint is asked and what its answers say, as plain JSON."""

import json

import numpy as np
import pytest

from raybatch.records.types import UNBOUNDED_TOKENS, Request, Sampling
from raybatch_openai.endpoint.body import BadAnswer, body_of, completions_of
from raybatch_openai.endpoint.options import OpenAIOptions

MESSAGES = [{"role": "user", "content": "hi"}]
URL = "http://localhost:8000/v1"


def options(**changes):
    return OpenAIOptions(base_url=URL, **changes)


def request(payload=None, *, seed=5, **sampling):
    return Request(
        request_id=3,
        row_id="r",
        prompt_token_ids=np.array([7, 8], np.int32),
        sampling=Sampling(**sampling),
        seed=seed,
        payload={} if payload is None else payload,
    )


def chat_answer(*texts, usage=None, **choice):
    choices = [
        {"index": i, "message": {"content": text}, "finish_reason": "stop", **choice}
        for i, text in enumerate(texts)
    ]
    return {"choices": choices, "usage": usage}


def one(answer, **sampling):
    (sample,) = completions_of(request(**sampling), answer, options())
    return sample


@pytest.mark.parametrize(
    ("payload", "path", "field", "value"),
    [
        ({"messages": MESSAGES}, "/chat/completions", "messages", MESSAGES),
        ({"prompt": "say"}, "/completions", "prompt", "say"),
        ({}, "/completions", "prompt", [7, 8]),
    ],
    ids=["messages", "text", "token-ids"],
)
def test_a_prompt_decides_where_it_is_asked(payload, path, field, value):
    found, body = body_of(request(payload), options(), "m")
    assert (found, body[field], body["model"]) == (path, value, "m")


@pytest.mark.parametrize(
    ("payload", "sent"),
    [({"messages": MESSAGES}, {}), ({"prompt": "say"}, {"max_tokens": None})],
    ids=["chat", "text"],
)
def test_no_bound_of_the_output_is_none_for_the_endpoint_as_well(payload, sent):
    _, body = body_of(request(payload, max_tokens=UNBOUNDED_TOKENS), options(), "m")
    assert {name: value for name, value in body.items() if name == "max_tokens"} == sent


def test_defaults_send_nothing_that_openai_does_not_know():
    _, body = body_of(request({"messages": MESSAGES}), options(), "m")
    assert body == {"model": "m", "messages": MESSAGES, "max_tokens": 256, "temperature": 0.0}


def test_options_of_the_row_are_sent_where_they_are_set():
    sampling = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "stop": ("x",),
        "stop_token_ids": (3,),
        "n": 2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 1,
    }
    _, body = body_of(request({"prompt": "p"}, **sampling), options(), "m")
    expected = {**sampling, "stop": ["x"], "stop_token_ids": [3], "seed": 5, "max_tokens": 256}
    assert body == {"model": "m", "prompt": "p", **expected}


@pytest.mark.parametrize(
    ("constraint", "fields"),
    [
        (
            {"json": {"type": "object"}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "strict": True, "schema": {"type": "object"}},
                }
            },
        ),
        ({"json_object": True}, {"response_format": {"type": "json_object"}}),
        ({"choice": ["a", "b"]}, {"structured_outputs": {"choice": ["a", "b"]}}),
        ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ],
    ids=["schema", "object", "choice", "regex"],
)
def test_a_constraint_is_sent_in_the_words_of_openai_where_it_has_any(constraint, fields):
    constrained = request({"messages": MESSAGES}, structured_outputs=constraint)
    _, body = body_of(constrained, options(), "m")
    assert {name: body.get(name) for name in fields} == fields


def test_a_seed_fits_into_31_bits_and_can_be_left_out():
    sampled = request({"prompt": "p"}, seed=(1 << 63) + 5, temperature=1.0)
    assert body_of(sampled, options(), "m")[1]["seed"] == 5
    assert "seed" not in body_of(sampled, options(send_seed=False), "m")[1]


def test_extra_fields_win_and_null_takes_a_field_out():
    extra = {"temperature": None, "reasoning_effort": "low", "max_tokens": 9}
    _, body = body_of(request({"messages": MESSAGES}), options(extra_body=extra), "m")
    expected = {"reasoning_effort": "low", "max_tokens": 9}
    assert body == {"model": "m", "messages": MESSAGES, **expected}


def test_the_output_limit_of_chats_has_the_name_that_is_asked_for():
    named = options(max_tokens_field="max_completion_tokens")
    assert "max_completion_tokens" in body_of(request({"messages": MESSAGES}), named, "m")[1]
    assert "max_tokens" in body_of(request({"prompt": "p"}), named, "m")[1]


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("stop", "stop"),
        ("length", "length"),
        ("tool_calls", "stop"),
        (None, "stop"),
        ("eos", "stop"),
    ],
)
def test_finish_reasons_are_those_of_every_backend(output, reason):
    assert one(chat_answer("a", finish_reason=output)).finish_reason == reason


def test_an_answer_that_a_filter_has_cut_is_an_error():
    sample = one(chat_answer("a", finish_reason="content_filter"))
    assert sample.error.startswith("ContentFilter: ")


def test_one_filtered_sample_makes_an_error_of_the_row_and_keeps_its_cost():
    answer = chat_answer("a", "b", usage={"prompt_tokens": 10, "completion_tokens": 4})
    answer["choices"][1]["finish_reason"] = "content_filter"
    priced = options(price_per_million_input_tokens=1e6)
    samples = completions_of(request(n=2), answer, priced)
    assert all(sample.error for sample in samples)
    assert [10, None] == [sample.cost for sample in samples]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "plain"}, "plain"),
        (
            {"content": [{"type": "text", "text": "in "}, {"type": "text", "text": "parts"}]},
            "in parts",
        ),
        ({"content": None, "tool_calls": [{"id": 1}]}, '[{"id": 1}]'),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": None}, ""),
    ],
    ids=["text", "parts", "tool-calls", "refusal", "nothing"],
)
def test_the_text_of_a_message(message, text):
    assert one({"choices": [{"message": message, "finish_reason": "stop"}]}).text == text


def test_usage_is_told_with_the_first_sample_and_split_by_length():
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    prices = {
        "price_per_million_input_tokens": 2e6,
        "price_per_million_cached_input_tokens": 1e6,
        "price_per_million_output_tokens": 3e6,
    }
    answer = chat_answer("a" * 20, "b" * 41, usage=usage)
    first, second = completions_of(request(n=2), answer, options(**prices))
    assert (first.num_input_tokens, first.num_cached_tokens) == (100, 64)
    assert first.cost == 2 * 36 + 64 + 3 * 9
    assert (second.num_input_tokens, second.num_cached_tokens, second.cost) == (None, 0, None)
    assert [3, 6] == [first.num_generated_tokens, second.num_generated_tokens]


def test_without_usage_nothing_is_counted():
    sample = one(chat_answer("a"))
    counts = (sample.num_input_tokens, sample.num_generated_tokens, sample.cost)
    assert counts == (None, None, None)


def test_cached_tokens_without_a_price_of_their_own_cost_what_others_do():
    assert options(price_per_million_input_tokens=2.0).cost(1_000_000, 500_000, 7) == 2.0


def test_choices_in_another_order_are_put_in_theirs():
    answer = chat_answer("a", "b")
    answer["choices"].reverse()
    assert ["a", "b"] == [s.text for s in completions_of(request(n=2), answer, options())]


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {},
        {"choices": None},
        {"choices": []},
        {"choices": [None]},
        {"choices": [{}]},
        chat_answer("a", "b"),
        {"choices": [{"index": 5, "text": "a"}]},
    ],
    ids=["list", "empty", "null", "none", "no-object", "no-text", "too-many", "wrong-index"],
)
def test_answers_without_what_was_asked_for_are_refused(answer):
    with pytest.raises(BadAnswer):
        one(answer)


def test_log_probabilities_of_a_chat_begin_with_the_sampled_token():
    content = [
        {
            "token": "token_id:5",
            "logprob": -0.5,
            "top_logprobs": [
                {"token": "token_id:6", "logprob": -0.25},
                {"token": "token_id:5", "logprob": -0.5},
            ],
        }
    ]
    answer = chat_answer("a", logprobs={"content": content})
    ((ids, logs),) = one(answer, logprobs=2).logprobs
    assert (ids.tolist(), logs.tolist()) == ([5, 6], [-0.5, -0.25])


def test_tokens_that_are_named_by_text_have_no_ids():
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"b": -2.0}]}
    answer = {"choices": [{"text": "a", "finish_reason": "stop", "logprobs": logprobs}]}
    ((ids, logs),) = one(answer, logprobs=1).logprobs
    assert (ids.tolist(), logs.tolist()) == ([], [-1.0, -2.0])


@pytest.mark.parametrize(
    ("payload", "fields"),
    [
        ({"messages": MESSAGES}, {"logprobs": True, "top_logprobs": 3}),
        ({"prompt": "p"}, {"logprobs": 3}),
    ],
    ids=["chat", "completions"],
)
def test_log_probabilities_are_asked_for_in_the_words_of_the_api(payload, fields):
    _, body = body_of(request(payload, logprobs=3), options(), "m")
    assert {name: body.get(name) for name in fields} == fields


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def reported(message, **changes):
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    (sample,) = completions_of(request(), answer, options(**changes))
    return sample


def test_a_message_that_is_a_call_has_no_text_where_calls_are_told_apart():
    sample = reported({"content": None, "tool_calls": [CALL]}, return_tool_calls=True)
    assert (sample.text, sample.error, sample.finish_reason) == ("", "", "stop")
    assert [call.to_openai() for call in sample.parsed.tool_calls] == [CALL]


def test_without_a_column_the_calls_are_the_text():
    sample = reported({"content": None, "tool_calls": [CALL]})
    assert (json.loads(sample.text), sample.parsed) == ([CALL], None)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_told_under_either_name(name):
    sample = reported({"content": "so", name: "hm"}, return_reasoning=True)
    assert (sample.text, sample.parsed.reasoning) == ("so", "hm")


def test_reasoning_that_nobody_asks_for_is_left_out():
    assert reported({"content": "so", "reasoning": "hm"}).parsed is None


@pytest.mark.parametrize(
    ("call", "name", "arguments"),
    [
        ({"id": 7, "function": {"name": "add", "arguments": {"a": 1}}}, "add", '{"a": 1}'),
        ({"id": "c", "function": {"name": "add"}}, "add", "{}"),
        ({"type": "custom", "custom": {"input": "x"}}, "custom", None),
        ("add()", "", "add()"),
    ],
    ids=["object", "none", "custom", "text"],
)
def test_a_call_of_another_form_is_kept(call, name, arguments):
    sample = reported({"content": None, "tool_calls": [call]}, return_tool_calls=True)
    (found,) = sample.parsed.tool_calls
    expected = json.dumps(call) if arguments is None else arguments
    assert (found.name, found.arguments) == (name, expected)
