"""Answers that follow a grammar, on every backend that runs a model by itself."""

import json
import re

import numpy as np
import pytest

from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.engine.sampling.grammars import check_grammar
from raybatch.models.source import resolve_model
from raybatch.records.structured_outputs import structured_text
from raybatch.records.types import Request, Sampling
from raybatch.text.tokenizer import Tokenizer

ENGINE = EngineConfig(dtype="float32", device="cpu", kv_cache_bytes=32 << 20, max_num_seqs=8)
SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "is_old": {"type": "boolean"},
    },
    "required": ["kind", "age", "is_old"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(resolve_model("demo"))


@pytest.fixture(params=["native", "transformers"])
def make(request, tmp_path, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path))
    return lambda: create_backend("demo", BackendConfig(kind=request.param), ENGINE)


def request_of(request_id, constraint, **options):
    sampling = {"temperature": 2.0, "max_tokens": 64, "structured_outputs": constraint} | options
    return Request(
        request_id=request_id,
        row_id=str(request_id),
        prompt_token_ids=np.array([5, 6, 7, 8], np.int32),
        sampling=Sampling(**sampling),
        seed=request_id,
    )


def run(backend):
    found = {}
    while backend.num_unfinished():
        found |= {(c.request_id, c.sample_idx): c for c in backend.poll()}
    return found


def texts_of(found, tokenizer):
    assert {"stop"} == {c.finish_reason for c in found.values()}
    return [tokenizer.decode(c.token_ids) for c in found.values()]


def test_answers_are_valid_against_the_schema(make, tokenizer):
    backend = make()
    backend.submit([request_of(i, {"json": SCHEMA}, n=2, max_tokens=400) for i in range(4)])
    for text in texts_of(run(backend), tokenizer):
        answer = json.loads(text)
        assert list(SCHEMA["properties"]) == list(answer)
        assert answer["kind"] in ("cat", "dog")
        assert type(answer["is_old"]) is bool
        assert 0 <= answer["age"] <= 99


def test_answers_match_the_regular_expression(make, tokenizer):
    backend = make()
    backend.submit([request_of(i, {"regex": r"[a-f]{3}-\d{2,4}(x|yz)"}) for i in range(6)])
    texts = texts_of(run(backend), tokenizer)
    assert all(re.fullmatch(r"[a-f]{3}-\d{2,4}(x|yz)", text) for text in texts)
    assert len(set(texts)) > 1


def test_answers_are_among_the_choices(make, tokenizer):
    choices = ["yes", "no", 'a "quoted" one', "tab\there", "über"]
    backend = make()
    backend.submit([request_of(i, {"choice": choices}) for i in range(12)])
    texts = texts_of(run(backend), tokenizer)
    assert set(texts) <= set(choices)
    assert len(set(texts)) > 1


def test_answers_follow_the_grammar(make, tokenizer):
    grammar = 'root ::= "(" inner ")"\ninner ::= [ab] | "(" inner ")"'
    backend = make()
    backend.submit([request_of(i, {"grammar": grammar}, max_tokens=200) for i in range(4)])
    for text in texts_of(run(backend), tokenizer):
        assert re.fullmatch(r"\(+[ab]\)+", text)
        assert text.count("(") == text.count(")")


def test_any_object_will_do_where_no_schema_is_given(make, tokenizer):
    backend = make()
    # greedy, because at a high temperature an object hardly ends
    backend.submit([request_of(1, {"json_object": True}, max_tokens=12)])
    text = tokenizer.decode(run(backend)[1, 0].token_ids).lstrip()
    assert text.startswith("{")


def test_blanks_in_an_answer_are_bounded(make, tokenizer):
    backend = make()
    backend.submit([request_of(i, {"json": SCHEMA}, max_tokens=100) for i in range(3)])
    texts = [tokenizer.decode(c.token_ids) for c in run(backend).values()]
    longest = [max(len(blanks) for blanks in re.findall(r"\s+", text)) for text in texts]
    assert 2 < max(longest) <= 32


def test_rows_without_a_constraint_are_as_alone(make):
    plain = [request_of(i, None, max_tokens=9) for i in range(3)]
    alone, mixed = make(), make()
    alone.submit(plain)
    mixed.submit([request_of(7, {"choice": ["yes"]}), *plain, request_of(8, {"regex": "[0-9]+x"})])
    expected = {key: c.token_ids.tolist() for key, c in run(alone).items()}
    found = {key: c.token_ids.tolist() for key, c in run(mixed).items() if key[0] < 7}
    assert expected == found


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        ({"regex": "(a"}, "parenthesis"),
        ({"json": {"type": "strng"}}, "strng"),
        ({"json": {"$ref": "#"}}, "refers back to itself"),
        ({"grammar": "root ::= root"}, "no answer can match it"),
    ],
    ids=["regex", "schema", "endless schema", "endless grammar"],
)
def test_a_bad_constraint_is_an_error_row_and_harms_no_other(make, constraint, words):
    backend = make()
    backend.submit([request_of(1, constraint), request_of(2, {"choice": ["yes"]})])
    found = run(backend)
    assert found[1, 0].error.startswith("InvalidSampling: structured_outputs: ")
    assert words in found[1, 0].error
    assert "/project" not in found[1, 0].error
    assert found[2, 0].finish_reason == "stop"


@pytest.mark.parametrize(
    "constraint",
    [{"grammar": 'root ::= root "a"'}, {"regex": r"[^\s\S]"}],
    ids=lambda constraint: next(iter(constraint)),
)
def test_a_constraint_that_no_answer_can_follow_is_found_without_a_tokenizer(constraint):
    assert check_grammar(structured_text(constraint)) == (
        "structured_outputs: no answer can match it"
    )


NAMED = {"$ref": "#/$defs/name"}
NAMES = {"name": {"type": "string"}}


@pytest.mark.parametrize(
    ("schema", "what"),
    [
        ({"allOf": [NAMED, {"maxLength": 2}], "$defs": NAMES}, "allOf at /"),
        ({"allOf": [NAMED], "maxLength": 2, "$defs": NAMES}, "maxLength at /"),
        ({"type": "object", "properties": {"a": {"allOf": [{}, {}]}}}, "allOf at /properties/a"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"items": {"not": {}}}}}, "not at /$defs/a/items"),
        ({"type": "string", "pattern": "^(?=a)"}, "pattern at /"),
        ({"anyOf": [{"oneOf": [{}, NAMED]}], "$defs": NAMES}, "oneOf at /anyOf/0"),
    ],
)
def test_what_a_grammar_does_not_enforce_is_refused_with_keyword_and_place(schema, what):
    found = check_grammar(structured_text({"json": schema}))
    keyword, place = what.split(" at ")
    what = f"{keyword!r} at {place}"
    assert found.startswith(f"structured_outputs: {what} of the JSON schema cannot be enforced: ")
    assert found.endswith(
        "; change the schema, or set structured_outputs.on_unsupported to 'check' (answers are "
        "checked afterwards)"
    )


def test_a_reference_out_of_the_schema_is_refused_in_any_case():
    constraint = {"json": {"$ref": "http://a/b"}, "on_unsupported": "check"}
    found = check_grammar(structured_text(constraint))
    assert "'$ref' at / of the JSON schema cannot be enforced: only references inside" in found
    assert "on_unsupported" not in found


def test_what_is_no_schema_says_where():
    found = check_grammar(structured_text({"json": {"items": {"anyOf": []}}}))
    assert found.startswith("structured_outputs: json is not a JSON schema: [] ")
    assert found.endswith(" at /items/anyOf")


def test_a_text_follows_a_structural_tag(make, tokenizer):
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
    backend = make()
    backend.submit([request_of(1, {"structural_tag": json.dumps(tag)})])
    assert ["yes"] == texts_of(run(backend), tokenizer)


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [NAMED], "title": "T", "description": "as pydantic writes it", "$defs": NAMES},
        {"type": "object", "properties": {"allOf": {"type": "integer"}}},
        {"enum": [{"allOf": [1, 2]}]},
    ],
    ids=["one", "a property", "a value"],
)
def test_what_only_looks_like_several_schemas_is_taken(schema):
    assert check_grammar(structured_text({"json": schema})) == ""


def test_an_answer_goes_on_elsewhere_where_it_was_in_its_grammar(make, tokenizer):
    alone, first, second = make(), make(), make()
    item = request_of(3, {"json": SCHEMA})
    alone.submit([item])
    first.submit([item])
    for _ in range(4):
        first.poll()
    second.restore(first.export([3]))
    assert run(alone)[3, 0].token_ids.tolist() == run(second)[3, 0].token_ids.tolist()


def test_penalties_and_constraints_go_together(make, tokenizer):
    backend = make()
    options = {"repetition_penalty": 1.3, "presence_penalty": 1.0, "logprobs": 2}
    backend.submit([request_of(i, {"choice": ["yes yes yes", "no no"]}, **options) for i in (1, 2)])
    assert set(texts_of(run(backend), tokenizer)) <= {"yes yes yes", "no no"}
