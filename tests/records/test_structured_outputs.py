"""Constraints of answers: what is taken, what is refused, and that they travel as texts."""

import json
import logging

import pytest

from raybatch import Sampling
from raybatch.errors import ConfigError
from raybatch.records.structured_outputs import (
    StructuredOutputs,
    engine_constraint,
    structured_text,
)

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


class Model:
    @staticmethod
    def model_json_schema():
        return SCHEMA


@pytest.mark.parametrize(
    "schema", [SCHEMA, json.dumps(SCHEMA), Model], ids=["map", "text", "model"]
)
def test_a_schema_keeps_the_order_of_its_properties(schema):
    found = StructuredOutputs.parse(structured_text({"json": schema}))
    assert ["b", "a"] == list(json.loads(found.json)["properties"])


def test_options_with_a_constraint_can_be_compared_and_hashed():
    one = Sampling(structured_outputs={"choice": ["yes", "no"]})
    other = Sampling(structured_outputs='{"choice": ["yes", "no"]}')
    assert (one, hash(one)) == (other, hash(other))


def test_the_text_of_a_text_is_itself():
    text = structured_text({"regex": "[a-ü]+"})
    assert text == structured_text(text)


def test_values_that_say_nothing_are_left_out():
    found = structured_text({"json": None, "choice": ["a"], "json_object": False})
    assert structured_text({"choice": ["a"]}) == found


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({}, "must have exactly one of"),
        ({"regex": "a", "choice": ["b"]}, r"got \['regex', 'choice'\]"),
        ({"choise": ["a"]}, "did you mean 'choice'"),
        ({"choice": []}, "choice must be a list"),
        ({"choice": "yes"}, "choice must be a list"),
        ({"choice": ["a", 1]}, "choice must be a list"),
        ({"regex": ""}, "not empty"),
        ({"json": "{"}, "json is not valid JSON"),
        ({"json": 3}, "must be a JSON schema"),
        ({"json": {"a": {1, 2}}}, "not a JSON value"),
        ({"json_object": "yes"}, "must be true"),
        ({"structural_tag": {}}, "must be a text"),
        (
            {"json": {}, "on_unsupported": "ignore"},
            "'refuse', or 'check' if json is set, got 'ignore'",
        ),
        ({"regex": "a", "on_unsupported": "check"}, "'check' if json is set"),
        ({"on_unsupported": "refuse"}, "must have exactly one of json, .*structural_tag, got none"),
        ("{", "not valid JSON"),
        ("[1]", "must be a mapping"),
        (3, "must be a mapping"),
    ],
)
def test_what_is_no_constraint_is_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        Sampling(structured_outputs=value)


@pytest.mark.parametrize("option", [{"ignore_eos": True}, {"min_tokens": 2}])
def test_options_against_the_end_of_an_answer_are_refused(option):
    with pytest.raises(ConfigError, match="no effect with structured_outputs"):
        Sampling(structured_outputs={"choice": ["a"]}, **option)


def test_what_is_done_with_answers_is_kept_here_and_not_told_to_engines():
    text = structured_text({"json": SCHEMA, "on_unsupported": "check"})
    assert StructuredOutputs.parse(text).on_unsupported == "check"
    assert engine_constraint(text) == json.loads(structured_text({"json": json.dumps(SCHEMA)}))
    assert structured_text({"json": {}}) == structured_text(
        {"json": {}, "on_unsupported": "refuse"}
    )


def test_options_that_vllm_reads_of_its_config_alone_are_taken_and_logged(caplog):
    caplog.set_level(logging.WARNING)
    extra = {"disable_any_whitespace": True, "whitespace_pattern": " "}
    assert structured_text({"regex": "a", **extra}) == structured_text({"regex": "a"})
    assert ["whitespace_pattern" in r.message for r in caplog.records].count(True) == 1
