"""The columns of parsed fields: names, types, samples, error rows."""

import numpy as np
import pyarrow as pa
import pytest

from raybatch.actors.wire.columns import combine_results, encode_completions
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import fingerprint, output_columns, output_schema
from raybatch.records.parsed_text import ParsedText, ToolCall
from raybatch.records.structured_outputs import structured_text
from raybatch.records.types import Completion, Sampling
from raybatch.rows.finish import finish_rows
from raybatch.rows.prepare import Prepared
from raybatch.rows.schema import PARSED_COLUMNS, OutputSchema
from raybatch.stages.feeder import LLMStage
from raybatch.text.tokenizer import Prompt
from raybatch_openai.endpoint.options import openai_options
from raybatch_openai.endpoint.prompts import EndpointTokenizer

TOKENIZER = EndpointTokenizer(openai_options({"base_url": "http://localhost/v1"}))
CALL = ToolCall(id="c1", name="add", arguments="{}")
FUNCTION = {"name": "add", "arguments": "{}"}
PARSED = ParsedText(reasoning="hm", tool_calls=(CALL,), error="ValueError: no")


def finish(
    completions, *, num_samples=1, parsed=tuple(PARSED_COLUMNS), constraint=None, answers=None, **kw
):
    sampling = Sampling(n=num_samples, structured_outputs=constraint)
    prepared = Prepared(
        table=pa.table({"text": ["a"]}),
        row_ids=["0"],
        prompts=[Prompt(np.zeros(1, np.int32))],
        rows=[0],
        copies={},
        requests=pa.table({}),
        samplings=[sampling],
        request_samplings=[sampling],
    )
    results = combine_results(
        [encode_completions([0] * len(completions), completions)], np.ones(1, np.int16)
    )
    output = OutputSchema(num_samples=num_samples, parsed=parsed, answers=answers)
    (row,) = finish_rows(prepared, results, tokenizer=TOKENIZER, output=output, **kw).to_pylist()
    return row


def sample(index=0, **fields):
    return Completion(request_id=0, sample_idx=index, **{"text": f"t{index}", **fields})


def test_what_was_found_is_in_columns_beside_the_text():
    row = finish([sample(parsed=PARSED)])
    assert row["generated_text"] == "t0"
    assert row["reasoning"] == "hm"
    assert row["tool_calls"] == [{"id": "c1", "type": "function", "function": FUNCTION}]
    assert row["parse_error"] == "ValueError: no"


def test_a_row_with_nothing_found_has_no_calls_and_no_error():
    row = finish([sample()])
    assert (row["reasoning"], row["tool_calls"], row["parse_error"]) == (None, [], "")


def test_each_sample_has_its_own():
    row = finish([sample(parsed=PARSED), sample(1)], num_samples=2)
    assert row["reasoning"] == ["hm", None]
    assert [len(calls) for calls in row["tool_calls"]] == [1, 0]
    assert row["parse_error"] == ["ValueError: no", ""]


def test_an_error_row_has_none_of_it():
    row = finish([sample(finish_reason="error", error="X: y", text=None)])
    assert [row[name] for name in PARSED_COLUMNS] == [None] * 3


def test_columns_are_there_only_where_they_are_asked_for():
    assert not set(PARSED_COLUMNS) & set(finish([sample(parsed=PARSED)], parsed=()))


def config_of(kind, **options):
    return LLMStage("m", prompt="{text}", backend={"kind": kind, "options": options}).config


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (config_of("vllm"), ()),
        (config_of("vllm", reasoning_parser="qwen3"), ("reasoning", "parse_error")),
        (config_of("vllm", tool_call_parser="hermes"), ("tool_calls", "parse_error")),
        (config_of("openai", base_url="http://h/v1"), ()),
        (
            config_of(
                "openai", base_url="http://h/v1", return_reasoning=True, return_tool_calls=True
            ),
            ("reasoning", "tool_calls"),
        ),
        (config_of("fake"), ()),
    ],
    ids=["none", "reasoning", "calls", "endpoint", "endpoint-both", "fake"],
)
def test_options_of_the_backend_say_which_columns_there_are(config, expected):
    assert config.output.parsed == expected


def test_the_columns_of_an_output_are_known_from_its_fingerprint(tmp_path):
    config = config_of(
        "openai", base_url="http://h/v1", return_reasoning=True, return_tool_calls=True
    )
    schema = output_schema(pa.schema([("text", pa.string())]), config)
    assert output_columns(fingerprint(config, schema)) == config.output


@pytest.mark.parametrize("kind", ["native", "fake", "transformers"])
def test_backends_without_parsers_refuse_them(kind):
    with pytest.raises(ConfigError, match="backend='vllm'"):
        config_of(kind, reasoning_parser="qwen3")


def test_an_option_of_the_backend_is_named_with_its_place():
    with pytest.raises(ConfigError, match=r"did you mean 'backend\.options\.tool_call_parser'"):
        LLMStage("m", prompt="{text}", tool_call_parser="hermes")


EVEN = {"type": "number", "multipleOf": 2}
WRONG = (
    "InvalidAnswer: the answer violates multipleOf of its JSON schema at $: "
    "3 is not a multiple of 2"
)


@pytest.mark.parametrize("option", [{}, {"on_unsupported": "check"}], ids=["left to it", "checked"])
def test_an_answer_that_breaks_its_schema_is_an_error_with_its_text(option):
    row = finish([sample(text="3", finish_reason="stop")], constraint={"json": EVEN, **option})
    assert (row["generated_text"], row["__inference_error__"]) == ("3", WRONG)


def test_one_wrong_sample_marks_the_row_and_all_stay():
    texts = ["2", "3"]
    answers = [sample(i, text=text, finish_reason="stop") for i, text in enumerate(texts)]
    row = finish(answers, num_samples=2, constraint={"json": EVEN})
    assert (row["generated_text"], row["__inference_error__"]) == (texts, WRONG)


@pytest.mark.parametrize(
    ("answer", "options"),
    [
        ({"text": "4", "finish_reason": "stop"}, {}),
        ({"text": "3", "finish_reason": "length"}, {}),
        ({"text": "", "finish_reason": "stop", "parsed": PARSED}, {}),
        ({"text": "3", "finish_reason": "stop"}, {"checks_answers": False}),
        ({"text": "3", "finish_reason": "stop"}, {"constraint": {"json": {"type": "number"}}}),
    ],
    ids=["right", "cut", "a call", "fake backend", "the grammar tells"],
)
def test_other_answers_are_taken(answer, options):
    row = finish([sample(**answer)], **{"constraint": {"json": EVEN}, **options})
    assert row["__inference_error__"] == ""


SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}}
AGE = structured_text({"json": SCHEMA})


def test_answers_are_typed_by_their_schema():
    row = finish([sample(text='{"age": 7}')], answers=AGE)
    assert (row["parsed"], row["parsed_error"]) == ({"age": 7}, None)
    row = finish([sample(text='{"age": ')], answers=AGE)
    assert row["parsed"] is None
    assert row["parsed_error"].startswith("InvalidJSON")


def test_each_sample_is_typed():
    row = finish([sample(text='{"age": 7}'), sample(1, text="7")], num_samples=2, answers=AGE)
    assert row["parsed"] == [{"age": 7}, None]
    assert row["parsed_error"][1].startswith("OtherType")


def test_error_rows_have_neither_a_value_nor_a_reason():
    row = finish([sample(error="ReplicaCrash: it died")], answers=AGE)
    assert (row["parsed"], row["parsed_error"]) == (None, None)


def test_a_stage_that_parses_keeps_its_columns_in_the_fingerprint():
    sampling = Sampling(structured_outputs={"json": SCHEMA})
    config = LLMStage("demo", prompt="{a}", sampling=sampling, parse=True, backend="native").config
    schema = output_schema(pa.schema([("a", pa.string())]), config)
    assert schema.field("parsed").type == pa.struct([("age", pa.int64())])
    assert output_columns(fingerprint(config, schema)) == config.output


@pytest.mark.parametrize("constraint", [None, {"regex": "a"}])
def test_parse_needs_a_schema(constraint):
    with pytest.raises(ConfigError, match=r"sampling\.structured_outputs"):
        LLMStage("demo", prompt="{a}", sampling=Sampling(structured_outputs=constraint), parse=True)
