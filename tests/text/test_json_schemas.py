"""What is said of a JSON schema agrees with XGrammar and jsonschema, by experiment."""

import json
import random
import sys
from functools import cache

import jsonschema
import numpy as np
import pytest

from raybatch.engine.sampling.grammars import _grammar
from raybatch.errors import ConfigError, MissingDependency
from raybatch.records.structured_outputs import structured_text
from raybatch.text.json_schemas import completed, gaps, wrong_with

TEXTS = {"type": "string"}
NUMBERS = {"type": "integer"}
# values of one keyword, by the type that it belongs to; each is tried alone, in pairs and nested
PARTS = {
    "string": [
        *({"minLength": 2}, {"maxLength": 1}, {"pattern": "^a+$"}, {"pattern": "a"}),
        *({"pattern": "^(?!a).$"}, {"pattern": 'b"'}, {"pattern": "a$b"}, {"pattern": "[^a]"}),
        *({"pattern": r"^\W$"}, {"pattern": r"^\\$"}, {"pattern": "^[ -~]+$"}, {"pattern": r"\n"}),
        *({"pattern": "^a$|^b$"}, {"pattern": "(a|^b)x"}, {"pattern": r"^[\t!]$"}),
        *({"format": name} for name in ("date", "date-time", "ipv4", "ipv6", "uuid", "email")),
        *({"format": name} for name in ("idn-email", "json-pointer", "regex", "made-up")),
    ],
    "integer": [
        *({"minimum": 3}, {"maximum": 3}, {"exclusiveMinimum": -2}, {"exclusiveMaximum": 12}),
        *({"multipleOf": 5}, {"multipleOf": 2.5}, {"multipleOf": 5000}),
    ],
    "number": [
        *({"minimum": 0.5}, {"maximum": 1e-7}, {"exclusiveMinimum": 0}, {"multipleOf": 0.5}),
        {"exclusiveMaximum": 2},
    ],
    "array": [
        *({"items": NUMBERS}, {"prefixItems": [NUMBERS]}, {"minItems": 2}, {"maxItems": 1}),
        *({"uniqueItems": True}, {"contains": NUMBERS}, {"items": False}, {"minContains": 2}),
        *({"unevaluatedItems": False}, {"unevaluatedItems": TEXTS}, {"maxContains": 1}),
    ],
    "object": [
        *({"properties": {"a": NUMBERS}}, {"properties": {"a": {}, "x": TEXTS}}),
        *({"required": ["a"]}, {"required": ["b", "a"]}, {"minProperties": 2}),
        *({"maxProperties": 1}, {"additionalProperties": False}, {"additionalProperties": True}),
        *({"additionalProperties": NUMBERS}, {"unevaluatedProperties": False}),
        *({"unevaluatedProperties": TEXTS}, {"patternProperties": {"^x": NUMBERS}}),
        *({"patternProperties": {"^x": TEXTS, "a$": NUMBERS}}, {"propertyNames": {"maxLength": 1}}),
        *({"propertyNames": {"pattern": "^x+$"}}, {"propertyNames": {"enum": ["x", 1]}}),
        *({"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"required": ["b"]}}}),
    ],
}
ANY = [
    *({"const": 1}, {"const": "a"}, {"enum": [1, "a", None]}, {"enum": ["aa", [1, 1], {"a": 1}]}),
    *({"anyOf": [TEXTS, NUMBERS]}, {"anyOf": [{"maxLength": 1}, {"type": "null"}]}),
    *({"oneOf": [NUMBERS, {"type": "number"}]}, {"oneOf": [TEXTS, {"type": ["null", "array"]}]}),
    {"oneOf": [{"enum": [1, 2]}, {"const": 2.0}]},
    {"oneOf": [{"type": "object", "properties": {"a": {"const": c}}} for c in "ab"]},
    {
        "oneOf": [
            {"type": "object", "properties": {"a": {"const": c}}, "required": ["a"]} for c in "ab"
        ]
    },
    *({"allOf": [TEXTS]}, {"allOf": [TEXTS, {"maxLength": 1}]}, {"not": TEXTS}),
    *({"if": NUMBERS, "then": {"minimum": 3}}, {"$ref": "#/$defs/n"}, {"$ref": "#/$defs/o"}),
    *({"$ref": "#n"}, {"$dynamicRef": "#d"}, {"type": ["string", "null"]}, {"type": "boolean"}),
]
DEFS = {
    "n": {"type": "integer", "$anchor": "n", "minimum": 3},
    "o": {"type": "object", "properties": {"a": {"$ref": "#/$defs/o"}}, "$dynamicAnchor": "d"},
}
VALUES = [
    *(1, 2, 3, 5, 7, 10, -1, 0, 1.5, 0.25, "", "a", "aa", "b", "ab", "x", "é", True, None),
    *([], [1], [1, 1], ["a"], [1, "a"], {}, {"a": 1}, {"a": "x"}, {"b": 1}, {"a": 1, "b": 2}),
    *({"x": 1}, {"x": "a"}, {"xa": 1}, {"a": {"a": 1}}, "2024-01-01", "2024-02-31", "7.1.1.01"),
]
ANSWERS = [
    *(json.dumps(value, ensure_ascii=False) for value in VALUES),
    *('{"a": 1, "a": "x"}', '{"x": 1, "x": 2}', '{"\\u0061": "x"}', '"2024-02-30T01:01:01Z"'),
    *('"\\u0061"', '"\\n"', '"\\""', "1.0", "1e999", '"""', '"\\"', '"\n"'),
]
PIECES = [
    *'{}[]",:.-+0123456789 abxzTZé\\\n\t',
    *("true", "false", "null", '"a"', '"x": ', '"a": ', "2024-", "02-", "30", "@b.de", "aa"),
]


def all_schemas():
    """Return schemas of one keyword, of two, and of those inside others."""
    found = [*ANY]
    for kind, parts in PARTS.items():
        found += [*parts, *({"type": kind, **part} for part in parts)]
        found += [{"type": kind, **a, **b} for a in parts for b in parts if a.keys() != b.keys()]
        found += [{"type": kind, **part, **more} for part in parts[::3] for more in ANY[::2]]
    found += [{**a, **b} for a in ANY for b in ANY[::3] if a.keys() != b.keys()]
    inner = found[:: max(1, len(found) // 40)]
    found += [{"type": "array", "items": each} for each in inner]
    found += [{"type": "object", "properties": {"a": e}, "required": ["a"]} for e in inner]
    found += [{"anyOf": [each, {"type": "null"}]} for each in inner]
    return [{**each, "$defs": DEFS} for each in found]


@cache
def compiler():
    import xgrammar

    info = xgrammar.TokenizerInfo(
        [*(piece.encode() for piece in PIECES), b"</s>"],
        vocab_type=xgrammar.VocabType.RAW,
        stop_token_ids=[len(PIECES)],
    )
    return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def walk(compiled, seed):
    """Return an answer of tokens drawn among those that the grammar allows, None for no end."""
    import xgrammar

    matcher, rng, text = xgrammar.GrammarMatcher(compiled), random.Random(seed), ""
    mask = xgrammar.allocate_token_bitmask(1, len(PIECES) + 1)
    for place in range(60):
        matcher.fill_next_token_bitmask(mask)
        bits = np.unpackbits(mask.numpy().view(np.uint8), bitorder="little")[: len(PIECES) + 1]
        allowed = np.flatnonzero(bits).tolist()
        if not allowed:
            return None
        ends = [i for i in allowed if i == len(PIECES) or PIECES[i] in '"}]']
        token = rng.choice(ends if ends and rng.random() < 0.2 + place / 60 else allowed)
        matcher.accept_token(token)
        if token == len(PIECES):
            return text
        text += PIECES[token]
    return None


def is_valid(text, schema):
    """Return whether an answer is one by JSON Schema, formats included."""
    kind = jsonschema.Draft202012Validator
    try:
        return kind(schema, format_checker=kind.FORMAT_CHECKER).is_valid(json.loads(text))
    except (ValueError, OverflowError):
        return False


def wrong_answers(schemas, *, num_walks, option):
    """Return the schemas that were taken, and each answer that is called valid and is not."""
    from xgrammar.testing import _is_grammar_accept_string

    taken, wrong = 0, []
    for schema in schemas:
        text = structured_text({"json": schema, **option})
        try:
            grammar = _grammar(text)
        except ValueError:
            continue  # XGrammar's own refusals, RuntimeErrors, would name no path
        taken += 1
        answers = [a for a in ANSWERS if _is_grammar_accept_string(grammar, a)]
        compiled = compiler().compile_grammar(grammar)
        answers += [walk(compiled, seed) for seed in range(num_walks)]
        wrong += [
            (schema, a)
            for a in answers
            if a is not None and not wrong_with(a, text) and not is_valid(a, schema)
        ]
    return taken, wrong


def test_no_answer_to_a_schema_that_was_taken_is_wrong_and_called_valid():
    schemas = all_schemas()
    taken, wrong = wrong_answers(schemas, num_walks=4, option={})
    assert wrong[:3] == []
    assert len(schemas) > 900
    assert taken > 250


def test_no_wrong_answer_is_called_valid_where_answers_are_checked():
    schemas = all_schemas()[::4]
    taken, wrong = wrong_answers(schemas, num_walks=3, option={"on_unsupported": "check"})
    assert wrong[:3] == []
    assert taken > len(schemas) * 0.7


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "required": ["a"]},
        {"type": "array", "minItems": 2},
        {"type": "object", "minProperties": 1},
    ],
    ids=lambda schema: next(reversed(schema)),
)
def test_what_is_left_open_stays_open(schema):
    taken, _ = wrong_answers([schema], num_walks=0, option={})
    assert taken == 1
    assert completed(schema) == completed(completed(schema))


def test_as_pydantic_writes_it_nothing_is_refused_or_checked():
    pets = [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}]
    kinds = {
        name: {
            "type": "object",
            "properties": {"kind": {"const": name, "type": "string"}, "age": NUMBERS},
            "required": ["kind"],
        }
        for name in ("Cat", "Dog")
    }
    schema = {
        "$defs": kinds,
        "title": "Owner",
        "type": "object",
        "properties": {
            "pet": {"discriminator": {"propertyName": "kind"}, "oneOf": pets},
            "name": {
                "anyOf": [{"type": "string", "maxLength": 9}, {"type": "null"}],
                "default": None,
            },
            "of": {"allOf": [{"$ref": "#/$defs/Cat"}], "description": "first"},
            "tags": {"type": "object", "additionalProperties": NUMBERS},
            "pair": {
                "type": "array",
                "prefixItems": [NUMBERS, TEXTS],
                "minItems": 2,
                "maxItems": 2,
            },
        },
        "required": ["pet"],
    }
    assert gaps(completed(schema)) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"a": 7}', "violates multipleOf of its JSON schema at $.a: 7 is not a multiple of 5"),
        ('{"a"', "is not JSON: "),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ('{"a": 5}', ""),
    ],
)
def test_a_checked_answer_says_what_is_wrong(answer, words):
    schema = {"type": "object", "properties": {"a": {"type": "number", "multipleOf": 5}}}
    found = wrong_with(answer, structured_text({"json": schema, "on_unsupported": "check"}))
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.parametrize(
    ("kind", "parts", "message"),
    [
        (
            "integer",
            {"minimum": 5, "maximum": 1},
            "'maximum' at /a .*: minimum 5 and maximum 1 leave no value",
        ),
        (
            "number",
            {"minimum": 1, "exclusiveMaximum": 1},
            "'exclusiveMaximum' at /a .* and exclusiveMaximum 1 leave",
        ),
        ("string", {"minLength": 2, "maxLength": 1}, "'minLength' at /a "),
        ("string", {"enum": []}, "'enum' at /a .*it is empty"),
        (None, {"$ref": "#/$defs/b"}, r"'\$ref' at /a .*#/\$defs/b\" does not exist"),
        (None, {"$ref": "#/properties/a"}, r"'\$ref' at /a .*or refers back to itself"),
        (
            "object",
            {"required": ["a", "b"], "maxProperties": 1},
            "maxProperties' .*: 2 are required",
        ),
        ("object", {"additionalProperties": False, "minProperties": 1}, "no more than 0 are"),
        (
            "array",
            {"items": False, "minItems": 1},
            "minItems' .*: no more than 0 items are allowed",
        ),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_a_part_that_no_value_matches_is_refused_by_its_path(kind, parts, message):
    part = parts if kind is None else {"type": kind, **parts}
    schema = {"type": "object", "properties": {"a": part}}
    for way in ({}, {"on_unsupported": "check"}):
        with pytest.raises(ValueError, match=message.replace("/a ", "/properties/a ")):
            _grammar(structured_text({"json": schema, **way}))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minimum": 5, "maximum": 1},
        {"type": "object", "minItems": 5, "maxItems": 1},
        {"type": "integer", "minimum": 1.5, "maximum": 2.5},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 3},
        {"type": "number", "minimum": 1, "maximum": 1},
        {"$ref": "#/$defs/0", "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(12)}},
    ],
    ids=str,
)
def test_what_says_nothing_of_a_type_refuses_nothing(schema):
    if "$defs" in schema:
        schema["$defs"]["12"] = TEXTS
    _grammar(structured_text({"json": schema}))


@pytest.mark.parametrize(
    "part",
    [
        {"minItems": 1},
        {"anyOf": [{"type": "array"}, {"type": "null"}], "minItems": 1},
        {"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2},
        {"type": "integer", "minimum": 1.2, "maximum": 1.8},
    ],
    ids=str,
)
def test_what_is_refused_is_a_keyword_that_the_user_wrote(part):
    (gap,) = gaps(completed({"type": "object", "properties": {"a": part}}))
    assert gap.keyword in part


DATES = {"type": "string", "format": "date"}
ENDLESS = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("node", "is_endless"),
    [
        (ENDLESS, True),
        ({**ENDLESS, "required": []}, False),
        ({"anyOf": [ENDLESS, {"type": "null"}]}, False),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}, True),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, False),
        ({"type": "object", "properties": {"a": ENDLESS}, "required": ["a"]}, True),
        ({**ENDLESS, "type": ["object", "null"]}, False),
        ({**ENDLESS, "properties": ENDLESS["properties"] | {"d": DATES}}, True),
        ({"type": "object", "additionalProperties": {"$ref": "#"}, "minProperties": 1}, True),
        ({"type": "object", "patternProperties": {"a": {"$ref": "#"}}, "minProperties": 1}, True),
        ({**ENDLESS, "required": [], "minProperties": 1}, True),
        ({**ENDLESS, "required": [], "minProperties": 1, "additionalProperties": True}, False),
    ],
)
def test_a_schema_whose_answers_never_end_is_refused(node, is_endless):
    text = structured_text({"json": {"$ref": "#/$defs/n", "$defs": {"n": node}}})
    if is_endless:
        with pytest.raises(ValueError, match="each answer would contain another one, without end"):
            _grammar(text)
    else:
        _grammar(text)


def test_the_schema_false_is_refused():
    with pytest.raises(ConfigError, match="which no answer can satisfy"):
        structured_text({"json": False})


def test_a_host_without_the_package_is_told_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(MissingDependency, match=r"jsonschema: .*\[structured\]"):
        gaps({"type": "object"})
