"""From bodies to rows, and what is refused by the name of its key."""

import json
from dataclasses import replace

import pytest

from raybatch_openai.batch.requests import CHAT, EMBEDDINGS, Form, Refusal, Reply, read_request
from tests.openai.batch.support import RULES, chat, completion, embedding, line

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def parsed(request, **rules):
    return read_request(request, replace(RULES, **rules))


def refused(request, **rules):
    with pytest.raises(Refusal) as caught:
        parsed(request, **rules)
    return caught.value


def test_chat_request_becomes_one_row_of_messages():
    found = parsed(chat("a", temperature=0.5, stop="x", user="me", store=True, top_p=None))
    assert found.form == Form("messages", 1, False)
    assert [json.loads(text) for text in found.prompts] == [[{"role": "user", "content": "hello"}]]
    assert found.sampling == {"temperature": 0.5, "stop": ["x"], "max_tokens": 4}
    assert found.reply == Reply(CHAT, "m", None)


def test_newer_name_of_the_output_length_wins():
    assert parsed(chat("a", max_completion_tokens=9)).sampling == {"max_tokens": 9}


def test_samples_and_logprobs_decide_the_form():
    found = parsed(chat("a", n=3, logprobs=True, top_logprobs=2))
    assert (found.form, found.reply.num_logprobs) == (Form("messages", 3, True), 2)


@pytest.mark.parametrize(
    ("prompt", "kind", "prompts"),
    [
        ("a", "prompt", ["a"]),
        (["a", "b"], "prompt", ["a", "b"]),
        ([1, 2], "tokens", [[1, 2]]),
        ([[1], [2, 3]], "tokens", [[1], [2, 3]]),
    ],
)
def test_prompts_of_a_completion_are_rows(prompt, kind, prompts):
    found = parsed(completion("a", prompt))
    assert (found.form.kind, found.prompts) == (kind, prompts)


@pytest.mark.parametrize(
    "prompt", [None, [], [[]], [1, "a"], [True], [-1], [[1], 2], {}, 3, "\ud800"]
)
def test_prompts_of_no_form_are_refused(prompt):
    assert refused(completion("a", prompt)).param == "prompt"


def test_arguments_of_calls_are_objects_for_the_template():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    (text,) = parsed(chat("a", messages=messages)).prompts
    assert json.loads(text)[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}


def test_a_last_message_of_the_assistant_begins_a_new_turn():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ends = {"add_generation_prompt": True, "continue_final_message": False}
    assert parsed(chat("a", messages=messages)).template_options == ends


def test_a_body_may_ask_that_the_last_message_is_continued():
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    found = parsed(chat("a", messages=messages, continue_final_message=True))
    ends = {"add_generation_prompt": False, "continue_final_message": True}
    assert found.template_options == ends


@pytest.mark.parametrize(
    ("effort", "reads", "options"),
    [
        ("none", False, {"enable_thinking": False}),
        ("low", False, {"enable_thinking": True}),
        ("none", True, {"enable_thinking": False, "reasoning_effort": "none"}),
    ],
)
def test_the_effort_none_turns_thinking_off(effort, reads, options):
    found = parsed(chat("a", reasoning_effort=effort), reads_reasoning_effort=reads)
    assert found.template_options == options


def test_an_option_of_the_template_wins_over_the_effort():
    kwargs = {"enable_thinking": True}
    found = parsed(chat("a", reasoning_effort="none", chat_template_kwargs=kwargs))
    assert found.template_options == kwargs


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_an_answer_longer_than_the_context_is_refused(key):
    parsed(chat("a", **{key: 64}), context=64)
    found = refused(chat("a", **{key: 65}), context=64)
    assert (found.param, found.status) == (key, 400)


def test_a_completion_longer_than_the_context_is_refused():
    assert refused(completion("a", max_tokens=65), context=64).param == "max_tokens"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": None}, r"messages[0].content is null"),
        ({"role": "assistant", "tool_calls": [{"type": "custom"}]}, "must be a function call"),
        ({"role": "assistant", "tool_calls": {"name": "f"}}, "tool_calls must be a list"),
        ("hi", "messages[0] must be a dict"),
    ],
)
def test_messages_that_are_none_are_refused_by_their_place(message, expected):
    found = refused(chat("a", messages=[message]))
    assert (found.param, found.status) == ("messages", 400)
    assert expected in found.message


def test_tools_go_to_a_template_that_reads_them():
    assert parsed(chat("a", tools=[TOOL]), reads_tools=True).template_options == {"tools": [TOOL]}


def test_tools_that_may_not_be_called_are_not_shown():
    request = chat("a", tools=[TOOL], tool_choice="none")
    assert parsed(request, reads_tools=True).template_options == {}


def test_tools_are_refused_where_no_template_reads_them():
    found = refused(chat("a", tools=[TOOL]))
    assert (found.param, found.code) == ("tools", "unsupported_parameter")


@pytest.mark.parametrize(
    ("wanted", "constraint"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
            {"json": {"type": "object"}},
        ),
    ],
    ids=str,
)
def test_formats_are_constraints_of_the_answer(wanted, constraint):
    found = parsed(chat("a", response_format=wanted))
    assert found.sampling.get("structured_outputs") == constraint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("bogus", 1),
        ("temperature", "hot"),
        ("temperature", -1),
        ("temperature", 3),
        ("reasoning_effort", "much"),
        ("continue_final_message", "yes"),
        ("temperature", float("nan")),
        ("n", 0),
        ("n", 1.5),
        ("n", 1000),
        ("max_tokens", 0),
        ("max_tokens", 1 << 40),
        ("top_logprobs", 2),
        ("top_k", 10**30),
        ("seed", 10**30),
        ("stop_token_ids", [10**30]),
        ("stop_token_ids", [-5]),
        ("stop_token_ids", [True]),
        ("stop", [1]),
        ("stream", True),
        ("logit_bias", {"1": 5}),
        ("modalities", []),
        ("modalities", ["text", "text"]),
        ("modalities", ["audio"]),
        ("logprobs", 3),
        ("response_format", {"type": "xml"}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", "json"),
        ("structured_outputs", {"xml": "x"}),
        ("tools", [{}]),
        ("tool_choice", "required"),
        ("messages", []),
        ("messages", "hello"),
        ("chat_template_kwargs", []),
    ],
)
def test_value_that_cannot_be_met_is_refused_by_its_key(key, value):
    found = refused(chat("a", **{key: value}))
    assert (found.param, found.status) == (key, 400)
    assert key in found.message


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"n": 129}, "n must be a whole number from 1 to 128, got 129"),
        ({"n": True}, "n must be a whole number from 1 to 128, got True"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs must be a whole number from 0 to"),
        ({"tools": [3]}, "tools.0 must be an object, got 3"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs must be an object, got 'x'"),
        ({"user_api_key": "sk-mine"}, "unknown key 'user_api_key' of the body"),
    ],
)
def test_a_refusal_says_what_the_key_takes(change, expected):
    assert refused(chat("a", **change)).message.startswith(expected)


def test_unknown_key_has_a_suggestion():
    assert "did you mean 'temperature'" in refused(chat("a", temperatur=1)).message


@pytest.mark.parametrize("key", ["echo", "suffix", "best_of"])
def test_options_of_old_completions_are_refused(key):
    assert refused(completion("a", **{key: {"suffix": "x"}.get(key, 5)})).param == key


def test_other_model_is_not_found():
    found = refused(chat("a", model="gpt"))
    assert (found.status, found.code, found.param) == (404, "model_not_found", "model")


def test_embeddings_are_refused_by_name():
    found = refused(line("a", "/v1/embeddings", {"model": "m", "input": "x"}))
    assert "makes no embeddings" in found.message


@pytest.mark.parametrize("url", ["/v1/nothing", None, 3, EMBEDDINGS])
def test_unknown_url_is_refused(url):
    found = refused(line("a", url, {}))
    assert (found.param, found.code) == ("url", "invalid_url")


def test_line_for_another_endpoint_than_the_batch_is_refused():
    found = refused(completion("a"), endpoint=CHAT)
    assert (found.param, found.code) == ("url", "invalid_url")


def test_what_is_continued_does_not_begin_anew():
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(chat("a", **both)).param == "continue_final_message"


@pytest.mark.parametrize(
    ("change", "param"),
    [({"method": "GET"}, "method"), ({"body": []}, "body"), ({"more": 1}, "more")],
)
def test_request_of_another_shape_is_refused(change, param):
    assert refused({**chat("a"), **change}).param == param


@pytest.mark.parametrize(
    ("given", "kind", "prompts"),
    [
        ("a", "prompt", ["a"]),
        (["a", "b"], "prompt", ["a", "b"]),
        ([[1], [2, 3]], "tokens", [[1], [2, 3]]),
    ],
)
def test_inputs_of_embeddings_become_rows(given, kind, prompts):
    found = parsed(embedding("a", given, dimensions=4, user="me"), task="embed")
    assert (found.form, found.prompts) == (Form(kind, 1, False), prompts)
    assert (found.sampling, found.reply) == ({"dimensions": 4}, Reply(EMBEDDINGS, "m"))


def test_the_form_of_embeddings_is_told():
    found = parsed(embedding("a", encoding_format="base64", normalize=False), task="embed")
    assert (found.reply.encoding, found.sampling) == ("base64", {"use_activation": False})


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": "4"}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"temperature": 0}, "temperature"),
        ({"text": []}, "input"),
        ({"text": {"a": 1}}, "input"),
    ],
)
def test_bad_values_of_embeddings_are_refused_by_name(body, param):
    assert refused(embedding("a", **body), task="embed").param == param


def test_texts_are_refused_where_embeddings_are_made():
    assert "url must be one of /v1/embeddings" in refused(chat("a"), task="embed").message


@pytest.mark.parametrize(
    ("key", "newer"), [("functions", "tools"), ("guided_json", "structured_outputs={'json': ...}")]
)
def test_a_key_of_an_older_api_is_refused_by_the_newer_one(key, newer):
    assert refused(chat("a", **{key: []})).message.endswith(f"; use {newer}")
