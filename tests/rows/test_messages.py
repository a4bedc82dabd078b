"""Messages have one form whatever way they come in, and what is sent to an API is of that form."""

import json
import logging
from random import Random

import pyarrow as pa
import pytest

from raybatch.rows.render import PromptReader
from raybatch.rows.stage_model import find_model, load_tokenizer
from raybatch.stages.feeder import LLMStage
from raybatch.text import chat
from raybatch.text.tokenizer import Tokenizer
from raybatch_openai.batch.export import Export, export_rows
from tests.openai.batch.support import chat as chat_request
from tests.openai.batch.test_requests import parsed
from tests.rows.chat_families import FAMILIES, documented, history, in_the_wild
from tests.stages.support import make_tokenizer
from tests.tiers import examples

NUM_HISTORIES = examples(40, full=2000)
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {}}}
SHOW = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %};{% endfor %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("messages") / "model")


def read(model, column, template=SHOW, **stage):
    """Return the prompt or the error of each row of a column of messages."""
    config = LLMStage(str(model), messages="m", chat_template=template, backend="fake", **stage)
    tokenizer = Tokenizer.load(model)
    prompts = PromptReader(config.config, tokenizer).read(pa.table({"m": column}))
    return [
        prompt.error or tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        for prompt in prompts
    ]


def is_plain(messages) -> bool:
    """Return whether a column of Arrow can hold messages: its values have one type each."""
    values = [
        value
        for message in messages
        for call in message.get("tool_calls") or []
        for value in call["function"]["arguments"].values()
    ]
    is_text = all(isinstance(message["content"], str | None) for message in messages)
    return is_text and all(type(value) is str for value in values)


@pytest.mark.timeout(600)  # seconds of work
@pytest.mark.parametrize("name", FAMILIES)
def test_structs_json_and_bodies_have_the_same_prompt(model, name):
    template = FAMILIES[name].template
    found = (history(Random(seed)) for seed in range(10 * NUM_HISTORIES))
    plain = [messages for messages in found if is_plain(messages)][:NUM_HISTORIES]
    expected = read(model, [json.dumps(messages) for messages in plain], template)
    # one column, so that each struct has nulls for the keys of all others
    assert expected == read(model, plain, template)
    dressed = [in_the_wild(Random(seed), messages) for seed, messages in enumerate(plain)]
    assert expected == read(model, [json.dumps(messages) for messages in dressed], template)
    bodies = [parsed(chat_request("a", messages=messages)).prompts[0] for messages in dressed]
    assert expected == read(model, bodies, template)
    canonical = [json.dumps(documented(FAMILIES[name], messages)) for messages in plain]
    assert expected == read(model, canonical, template)


def test_a_column_of_maps_is_read(model):
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": json.dumps([CALL])},
        {"role": "tool", "content": "5"},
    ]
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    column = pa.array([[list(message.items()) for message in messages]], kind)
    assert read(model, column) == ["user:q;assistant:{};tool:5;"]


def test_arguments_that_are_maps_are_objects(model):
    kind = pa.map_(pa.string(), pa.int64())
    function = pa.struct([("name", pa.string()), ("arguments", kind)])
    message = pa.struct(
        [
            ("role", pa.string()),
            ("content", pa.string()),
            ("tool_calls", pa.list_(pa.struct([("function", function)]))),
        ]
    )
    calls = [{"function": {"name": "f", "arguments": pairs}} for pairs in ([("a", 3)], [], None)]
    row = [{"role": "assistant", "tool_calls": calls}, {"role": "user", "content": "q"}]
    column = pa.array([row], pa.list_(message))
    assert read(model, column) == ['assistant:{"a": 3}{}{};user:q;']


def test_a_key_that_a_map_repeats_is_an_error_of_the_row(model):
    kind = pa.list_(pa.map_(pa.string(), pa.string()))
    column = pa.array([[[("role", "user"), ("role", "tool")]]], kind)
    assert "role" in read(model, column)[0]


def test_nulls_of_structs_are_gone_at_every_depth_and_those_of_json_stay(model):
    deep = [{"a": {"b": 1}}, {"a": {"c": [{"d": 2}, {"e": 3}]}}]
    rows = [
        [
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": each}}]},
            {"role": "user", "content": "q"},
        ]
        for each in deep
    ]
    expected = [f"assistant:{json.dumps(each)};user:q;" for each in deep]
    assert read(model, rows) == expected
    text = json.dumps(rows[0]).replace('{"b": 1}', "null")
    assert read(model, [text]) == ['assistant:{"a": null};user:q;']


@pytest.mark.parametrize("arguments", ["[1]", "no", "7", [1], "[" * 100_000])
def test_arguments_that_are_no_object_are_an_empty_one_with_a_warning(model, caplog, arguments):
    chat._warn_of_arguments.cache_clear()
    call = {"function": {"name": "f", "arguments": arguments}}
    row = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "q"}]
    with caplog.at_level(logging.WARNING):
        assert read(model, [json.dumps(row)]) == ["assistant:{};user:q;"]
    assert "not a JSON object" in caplog.text


def test_a_null_at_the_end_is_not_continued(model):
    row = [{"role": "user", "content": "q"}, {"role": "assistant", "content": None}]
    assert "cannot continue the last message" in read(model, [json.dumps(row)])[0]


def test_a_role_is_left_to_the_template(model):
    row = [{"role": "critic", "content": "c"}, {"role": "user", "content": "q"}]
    assert read(model, [json.dumps(row)]) == ["critic:c;user:q;"]


@pytest.mark.parametrize("role", ["<|eos|>", "a\n<|user|>", "", None, 3])
def test_a_role_that_is_no_word_is_an_error_of_the_row(model, role):
    row = [{"role": role, "content": "c"}]
    assert "messages[0].role must be a word" in read(model, [json.dumps(row)])[0]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_of_the_row_replace_those_of_the_stage(model, role):
    row = [{"role": role, "content": "row"}, {"role": "user", "content": "q"}]
    assert read(model, [json.dumps(row)], system="stage") == ["system:row;user:q;"]


def test_an_endpoint_is_sent_what_the_api_of_openai_takes():
    backend = {"kind": "openai", "options": {"base_url": "http://localhost/v1"}}
    config = LLMStage("served", messages="m", backend=backend).config
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    row = [
        {"role": "developer", "content": [{"type": "input_text", "text": "i"}]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": []},
        {"role": "user", "content": ["q"]},
    ]
    reader = PromptReader(config, load_tokenizer(config, find_model(config)))
    (prompt,) = reader.read(pa.table({"m": [json.dumps(row)]}))
    text = {"name": "f", "arguments": '{"a": 1}'}
    assert json.loads(prompt.payload)["messages"] == [
        {"role": "developer", "content": [{"type": "text", "text": "i"}]},
        {"role": "assistant", "content": None, "tool_calls": [{**call, "function": text}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "text", "text": "q"}]},
    ]


def test_an_exported_batch_has_arguments_as_texts(tmp_path):
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    row = [{"role": "assistant", "tool_calls": [call]}, {"role": "user", "content": "q"}]
    (tmp_path / "in.jsonl").write_text(json.dumps({"m": json.dumps(row)}) + "\n")
    output = str(tmp_path / "out.jsonl")
    export_rows(Export(source=f"{tmp_path}/in.jsonl", output=output, model="m", messages="m"))
    (sent, _) = json.loads((tmp_path / "out.jsonl").read_text())["body"]["messages"]
    assert sent["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
