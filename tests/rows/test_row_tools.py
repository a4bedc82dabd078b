"""Tools of a stage or of a row: in the prompt, and in the options of a parser."""

import json

import pyarrow as pa
import pytest

from raybatch.errors import ConfigError
from raybatch.records.types import Request, Sampling
from raybatch.rows.render import PromptReader
from raybatch.rows.stage_model import find_model, load_tokenizer
from raybatch.stages.feeder import LLMStage
from raybatch.text.tokenizer import Tokenizer
from raybatch_openai.endpoint.body import body_of
from raybatch_openai.endpoint.options import openai_options
from tests.stages.support import make_tokenizer

TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}"
)
PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
HI = json.dumps([{"role": "user", "content": "hi"}])


def tool(name):
    parameters = {"type": "object", "properties": {name: {"type": "string"}}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("tools") / "model")


def read(model, table, *, kind="fake", options=(), **stage):
    stage = {"messages": "messages", "chat_template": TEMPLATE, **stage}
    backend = {"kind": kind, "options": dict(options)}
    config = LLMStage(str(model), backend=backend, **stage).config
    return PromptReader(config, Tokenizer.load(model)).read(pa.table(table))


def texts(model, prompts):
    decode = Tokenizer.load(model).decode
    return [prompt.error or decode(prompt.token_ids) for prompt in prompts]


@pytest.mark.parametrize("prompt", [{}, {"prompt": "{text}", "messages": None}], ids=str)
def test_tools_of_the_stage_are_in_every_prompt(model, prompt):
    table = {"messages": [HI, HI], "text": ["hi", "hi"]}
    found = read(model, table, tools=[tool("add")], **prompt)
    assert texts(model, found) == ["[add]hi", "[add]hi"]


def test_tools_of_a_row_are_in_its_prompt(model):
    lists = [json.dumps([tool("add")]), None, "", json.dumps([tool("sub"), tool("mul")])]
    found = read(model, {"messages": [HI] * 4, "tools": lists}, tools="tools")
    assert texts(model, found) == ["[add]hi", "hi", "hi", "[sub][mul]hi"]


def test_structs_of_arrow_lose_the_nulls_that_other_rows_have_put_in(model):
    lists = [[tool("add")], [tool("sub")]]
    found = read(
        model, {"messages": [HI] * 2, "tools": lists}, tools="tools", kind="vllm", options=PARSERS
    )
    tool_lists = [json.loads(prompt.payload)["chat"]["tools"] for prompt in found]
    assert tool_lists == lists


def test_a_row_whose_tools_are_none_is_an_error_row(model):
    found = read(model, {"messages": [HI] * 2, "tools": ["[", '{"a": 1}']}, tools="tools")
    assert [prompt.error.partition(":")[0] for prompt in found] == ["InvalidPrompt"] * 2


def test_a_parser_is_told_tools_and_options_of_the_row(model):
    found = read(
        model,
        {"messages": [HI], "more": ['{"enable_thinking": false}']},
        tools=[tool("add")],
        chat_template_kwargs={"enable_thinking": True},
        chat_template_kwargs_column="more",
        kind="vllm",
        options=PARSERS,
    )
    tool_lists = {"enable_thinking": False, "tools": [tool("add")]}
    assert json.loads(found[0].payload) == {"chat": tool_lists}


def test_without_a_parser_nothing_is_told(model):
    found = read(model, {"messages": [HI]}, tools=[tool("add")], kind="vllm")
    assert [prompt.payload for prompt in found] == [None]


def test_a_template_without_a_place_for_tools_is_refused(model):
    with pytest.raises(ConfigError, match="does not support tools"):
        read(model, {"messages": [HI]}, tools=[tool("add")], chat_template="{{ messages }}")


def test_options_of_a_struct_lose_the_nulls_that_other_rows_have_put_in_at_every_depth(model):
    options = [{"tools": [tool("add")]}, {"tools": [tool("sub")]}]
    found = read(
        model,
        {"messages": [HI] * 2, "options": options},
        messages="messages",
        chat_template_kwargs_column="options",
        kind="vllm",
        options=PARSERS,
    )
    tool_lists = [json.loads(prompt.payload)["chat"]["tools"] for prompt in found]
    assert tool_lists == [[tool("add")], [tool("sub")]]


def test_a_column_of_tools_beside_a_conventional_prompt_is_refused(model):
    with pytest.raises(ConfigError, match="dataset has 'prompt'; set messages"):
        read(model, {"prompt": ["hi"], "tools": ["[]"]}, tools="tools", messages=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": 5, "messages": "m"}, "must be a list of tools"),
        ({"tools": ["add"], "messages": "m"}, "must be a list of tools"),
        ({"tools": "tools", "prompt": "{text}"}, "needs a column of messages"),
        ({"tools": [{}], "prompt": "{text}", "chat": False}, "need a chat template"),
        ({"tools": [{}], "tokenized_prompt": "ids"}, "need a chat template"),
    ],
    ids=["number", "name", "column", "no-chat", "ids"],
)
def test_tools_that_cannot_be_told_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LLMStage("m", **options)


def test_an_endpoint_is_sent_the_tools_of_a_row():
    url = {"base_url": "http://localhost/v1"}
    backend = {"kind": "openai", "options": url}
    config = LLMStage("served", messages="messages", tools="tools", backend=backend).config
    reader = PromptReader(config, load_tokenizer(config, find_model(config)))
    table = pa.table({"messages": [HI, HI], "tools": [json.dumps([tool("add")]), None]})
    bodies = []
    for prompt in reader.read(table):
        request = Request(
            request_id=0,
            row_id="r",
            prompt_token_ids=prompt.token_ids,
            sampling=Sampling(),
            payload=json.loads(prompt.payload),
        )
        bodies.append(body_of(request, openai_options(url), "m")[1])
    assert [body.get("tools") for body in bodies] == [[tool("add")], None]
    assert [body["messages"] for body in bodies] == [json.loads(HI)] * 2


THINKS = TEMPLATE + "{% if enable_thinking is not false %}<think>{% endif %}"


@pytest.mark.parametrize(
    ("stage", "is_told"),
    [
        ({"chat_template": THINKS}, True),
        ({"chat_template": THINKS, "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template": TEMPLATE}, False),
        ({"chat_template": THINKS, "kind": "vllm", "options": PARSERS}, False),
        ({"chat_template": THINKS, "sampling": Sampling()}, False),
    ],
    ids=["thinks", "off", "thinks not", "vllm parses", "no constraint"],
)
def test_a_constraint_that_leaves_no_thinking_is_told(model, caplog, stage, is_told):
    constrained = Sampling(structured_outputs={"choice": ["a"]})
    read(model, {"messages": [HI]}, **{"sampling": constrained, **stage})
    assert is_told == ("apply from the first token" in caplog.text)


def test_a_constraint_of_rows_that_leaves_no_thinking_is_told(model, caplog):
    of_rows = {"messages": [HI], "wanted": [json.dumps({"choice": ["a"]})]}
    read(model, of_rows, chat_template=THINKS, overrides={"structured_outputs": "wanted"})
    assert "apply from the first token" in caplog.text


@pytest.mark.parametrize("writes", [False, True])
def test_calls_that_a_template_leaves_out_are_told_once(model, caplog, writes):
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    silent = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "a"},
    ]
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    if writes:
        template = template.replace("{{ m.content }}", "{{ m.content }}{{ m.tool_calls }}")
    read(model, {"messages": [json.dumps(silent)] * 2}, chat_template=template)
    assert caplog.text.count("drops the tool_calls") == (not writes)
