"""Answers in JSON as typed values: what Arrow makes of them is what JSON says."""

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.text.typed_answers import AnswerType, answer_type, read_answer

SCALARS = {
    "string": st.text(st.characters(exclude_categories=["Cs"])),
    "integer": st.integers(-(1 << 63), (1 << 63) - 1),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
}
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


def type_of(schema) -> AnswerType:
    kind = answer_type(json.dumps({"json": json.dumps(schema)}))
    assert kind is not None
    return kind


@st.composite
def pairs(draw, depth: int = 2):
    """Draw a schema, and a strategy for the values that it allows."""
    names = [*SCALARS, "array", "object"] if depth else [*SCALARS]
    name = draw(st.sampled_from(names))
    if name == "array":
        items, values = draw(pairs(depth=depth - 1))
        return {"type": "array", "items": items}, st.lists(values, max_size=3)
    if name == "object":
        parts = draw(
            st.dictionaries(st.text("abc", min_size=1), pairs(depth=depth - 1), min_size=1)
        )
        schema = {"type": "object", "properties": {key: part for key, (part, _) in parts.items()}}
        return schema, st.fixed_dictionaries({key: values for key, (_, values) in parts.items()})
    return {"type": name}, SCALARS[name]


@given(st.data())
def test_what_a_schema_allows_comes_back_as_it_was(data):
    schema, values = data.draw(pairs())
    value, kind = data.draw(values), type_of(schema)
    found, error = read_answer(json.dumps(value), kind)
    assert error == ""
    assert pa.array([found], kind.arrow).to_pylist() == [value]


@pytest.mark.parametrize(
    ("schema", "arrow"),
    [
        ({"enum": ["a", "b"]}, pa.string()),
        ({"enum": [1, None]}, pa.int64()),
        ({"const": True}, pa.bool_()),
        ({"type": ["integer", "null"]}, pa.int64()),
        ({"type": ["integer", "number"]}, pa.float64()),
        ({"anyOf": [WHOLE, {"type": "null"}]}, pa.int64()),
        ({"oneOf": [WHOLE, {"type": "number"}]}, pa.float64()),
        ({"allOf": [TEXT]}, pa.string()),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": WHOLE}}, pa.int64()),
        (
            {"type": "object", "properties": {"a": {"type": "array", "items": TEXT}}},
            pa.struct([("a", pa.list_(pa.string()))]),
        ),
        (
            {"properties": {"a": WHOLE}, "anyOf": [{"required": ["a"]}]},
            pa.struct([("a", pa.int64())]),
        ),
    ],
)
def test_a_schema_has_a_type(schema, arrow):
    assert type_of(schema).arrow == arrow


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {"type": ["string", "integer"]},
        {"enum": ["a", 1]},
        {"anyOf": [TEXT, {"type": "object", "properties": {"a": WHOLE}}]},
        {"type": "array", "prefixItems": [TEXT]},
        {"$ref": "https://example.org/schema"},
        {"$ref": "#/nowhere"},
    ],
)
def test_what_has_no_single_type_stays_json(schema):
    kind = type_of(schema)
    assert kind.arrow == pa.string()
    assert read_answer('{"a": [1, "ä"]}', kind) == ('{"a": [1, "ä"]}', "")


def test_a_type_ends_where_a_reference_leads_back():
    tree = {"type": "object", "properties": {"name": TEXT, "next": {"$ref": "#"}}}
    inner = pa.struct([("name", pa.string()), ("next", pa.string())])
    assert type_of(tree).arrow == pa.struct([("name", pa.string()), ("next", inner)])


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"a": 1', "InvalidJSON"),
        ('{"a": NaN}', "InvalidJSON"),
        ("[" * 100_000, "InvalidJSON"),
        ('{"a": "1"}', r"OtherType: $.a "),
        ('{"a": true}', r"OtherType: $.a "),
        ('{"a": 9223372036854775808}', r"OtherType: $.a "),
        ('{"b": ["\\ud800"]}', r"OtherType: $.b[0] "),
        ("[1]", r"OtherType: $ "),
        ('{"c": 1' + "0" * 400 + "}", r"OtherType: "),
    ],
)
def test_what_does_not_fit_has_no_value_and_a_reason(text, error):
    parts = {"a": WHOLE, "b": {"type": "array", "items": TEXT}, "c": {"type": "number"}}
    value, reason = read_answer(text, type_of({"type": "object", "properties": parts}))
    assert value is None
    assert reason.startswith(error)


def test_whole_floats_are_integers_and_what_is_missing_is_null():
    kind = type_of({"type": "object", "properties": {"a": WHOLE, "b": TEXT}})
    assert read_answer('{"a": 2.0, "c": 1}', kind) == ({"a": 2, "b": None}, "")


def test_a_constraint_without_a_schema_has_no_type():
    assert answer_type('{"regex": "a"}') is None
