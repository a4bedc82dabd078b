import datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError, error_text
from raybatch.rows.batches import python_values
from raybatch.rows.prompt_inputs import PromptTemplate
from raybatch.text.chat import InvalidPrompt
from tests.stages.support import answer, fake_stage, local

FLOATS = (pa.float16(), pa.float32(), pa.float64())


class Payload(pa.ExtensionType):
    """A type whose values must never be decoded."""

    def __init__(self):
        super().__init__(pa.binary(), "raybatch.test.payload")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()

    def __arrow_ext_scalar_class__(self):
        return PayloadScalar


class PayloadScalar(pa.ExtensionScalar):
    def as_py(self, **kwargs):
        raise RuntimeError("a value was decoded")


def invalid_utf8(values, arrow_type):
    return pa.array(
        values, pa.large_binary() if arrow_type == pa.large_string() else pa.binary()
    ).view(arrow_type)


def render(text, row):
    """Return the prompt of one row."""
    values = {name: [value] for name, value in {"other": 0, **row}.items()}
    [prompt] = PromptTemplate(text).render_column(pa.table(values))
    if isinstance(prompt, Exception):
        raise prompt
    return prompt


def test_fields_are_filled_from_columns():
    template = "{document}\n\nQ: {question}"
    assert render(template, {"document": "D", "question": "?", "id": 1}) == "D\n\nQ: ?"


def test_fields_are_listed_once_in_order():
    assert PromptTemplate("{b} {a} {b} text").fields == ("b", "a")


def test_double_braces_stand_for_braces():
    assert render('{{"x": {x}}} {{}}', {"x": 1}) == '{"x": 1} {}'


def test_a_template_without_fields_is_the_same_for_every_row():
    assert render("hello", {}) == "hello"


def test_a_value_is_never_a_template():
    assert render("{a}{b}", {"a": "{b} {{", "b": "x"}) == "{b} {{x"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (True, "True"),
        (2**62, "4611686018427387904"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        ("", ""),
    ],
    ids=str,
)
def test_plain_values_become_text_as_str_does(value, expected):
    assert render("{x}", {"x": value}) == expected


@pytest.mark.parametrize(
    ("template", "value", "expected"),
    [
        ("{x:.2f}", 1 / 3, "0.33"),
        ("{x:05d}", 42, "00042"),
        ("{x:,}", 1234567, "1,234,567"),
        ("{x:>6}", "abc", "   abc"),
        ("{x:.1%}", 0.256, "25.6%"),
        ("{x:*^7}", "abc", "**abc**"),
        ("{x:.3}", "abcdef", "abc"),
    ],
)
def test_format_specs_work_on_numbers_and_text(template, value, expected):
    assert render(template, {"x": value}) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{x.__class__}", "attributes, indices and conversions"),
        ("{x[0]}", "attributes, indices and conversions"),
        ("{x!r}", "attributes, indices and conversions"),
        ("{}", "must be a column name"),
        ("{0}", "must be a column name"),
        ("{x:{y}}", "invalid format"),
        ("{x:hello}", "invalid format"),
        ("{x:9999999999}", "too wide"),
        ("{x:.99999999f}", "too wide"),
        ("{x", "braces in the text"),
        ("x}", "braces in the text"),
    ],
)
def test_a_template_may_only_name_columns(template, message):
    with pytest.raises(ConfigError, match=message):
        PromptTemplate(template)


def test_a_template_that_is_no_string_is_refused():
    with pytest.raises(ConfigError, match="must be a string, got NoneType"):
        PromptTemplate(None)


def test_an_unknown_column_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"no column 'documnt' \(did you mean 'document'\?\)"):
        PromptTemplate("{documnt}").check(["document", "question"])


def test_known_columns_pass_the_check():
    PromptTemplate("{a} {b}").check(["b", "a", "c"])


def test_a_row_without_the_column_is_a_config_error():
    with pytest.raises(ConfigError, match="did you mean 'question'"):
        render("{queston}", {"question": "?"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "column 'x' is null"),
        (float("nan"), "column 'x' is null"),
        (["a"], "column 'x' has type list"),
        ({"a": 1}, "column 'x' has type struct"),
        (b"abc", "column 'x' has type binary"),
    ],
    ids=str,
)
def test_a_value_that_is_no_text_is_a_row_error(value, message):
    with pytest.raises(InvalidPrompt, match=message):
        render("{x}", {"x": value})


NUMBERS = {
    **{kind: st.floats(width=w) for kind, w in zip(FLOATS, (16, 32, 64), strict=True)},
    pa.decimal128(20, 5): st.decimals(-(10**14), 10**14, places=5),
    pa.decimal128(9, 9): st.decimals(Decimal(-1) / 2, Decimal(1) / 2, places=9),
    pa.decimal256(50, 0): st.integers(-(10**40), 10**40).map(Decimal),
    pa.int8(): st.integers(-128, 127),
    pa.uint64(): st.integers(0, 2**64 - 1),
}


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(list(NUMBERS)))
def test_numbers_are_written_as_arrow_writes_them(data, kind):
    values = data.draw(st.lists(NUMBERS[kind] | st.none(), min_size=1, max_size=5))
    if pa.types.is_float16(kind):
        values = [None if value is None else np.float16(value) for value in values]
    column = pa.array(values, kind)
    written = [
        None if text is None or text == "nan" else f"{text} {value:.3f} {text}"
        for text, value in zip(
            column.cast(pa.string()).to_pylist(), column.to_pylist(), strict=True
        )
    ]
    prompts = PromptTemplate("{x} {x:.3f} {x}").render_column(pa.table({"x": column}))
    assert [None if isinstance(prompt, Exception) else prompt for prompt in prompts] == written
    encoded = PromptTemplate("{x}").render_column(pa.table({"x": column.dictionary_encode()}))
    assert [isinstance(prompt, str) for prompt in encoded] == [text is not None for text in written]


def test_a_float_of_32_bits_has_its_own_digits_in_prompts_and_messages(chat_model):
    table = pa.table({"x": pa.array([0.1, 3.0], pa.float32())})
    for options in ({"prompt": "{x}"}, {"messages": [{"role": "user", "content": "{x}"}]}):
        stage = local(fake_stage(chat_model, **options))
        answer(stage, table)
        prompts = [bytes(r.prompt_token_ids[1:-1].tolist()) for r in stage.pool.requests]
        assert prompts == [b"0.1", b"3"]


def test_a_format_that_does_not_fit_the_value_is_a_row_error():
    with pytest.raises(InvalidPrompt, match=r"cannot format a str with '\.2f'"):
        render("{x:.2f}", {"x": "abc"})


def rendered(text, table):
    """Return the prompts of a table, None for a bad row; and the errors, "" for a good one."""
    values = PromptTemplate(text).render_column(table)
    is_bad = [isinstance(value, InvalidPrompt) for value in values]
    return (
        [None if bad else value for value, bad in zip(values, is_bad, strict=True)],
        [error_text(value) if bad else "" for value, bad in zip(values, is_bad, strict=True)],
    )


def test_a_table_renders_row_by_row():
    table = pa.table({"a": ["x", None, "z"], "n": [1, 2, 3]})
    assert rendered("{a}{n}", table) == (
        ["x1", None, "z3"],
        ["", "InvalidPrompt: column 'a' is null", ""],
    )


@pytest.mark.parametrize("arrow_type", [pa.string(), pa.large_string()], ids=str)
def test_invalid_utf8_is_an_error_of_its_row_alone(arrow_type):
    column = invalid_utf8([b"good", b"b\xffd", None, "ü".encode()], arrow_type)
    prompts, errors = rendered("{x}", pa.table({"x": column}))
    assert prompts == ["good", None, None, "ü"]
    assert errors == [
        "",
        "InvalidPrompt: column 'x' is not valid UTF-8",
        "InvalidPrompt: column 'x' is null",
        "",
    ]


def test_a_dictionary_encoded_column_is_text():
    table = pa.table({"x": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert rendered("{x}", table)[0] == ["a", "b", "a"]


def test_invalid_utf8_in_a_dictionary_is_an_error_of_its_rows():
    values = invalid_utf8([b"ok", b"\xff"], pa.string())
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0], pa.int32()), values)
    prompts, _ = rendered("{x}", pa.table({"x": column}))
    assert prompts == ["ok", None, "ok"]


def test_a_column_of_lists_gives_row_errors():
    table = pa.table({"x": pa.array([[1], None])})
    assert rendered("{x}", table)[1] == [
        "InvalidPrompt: column 'x' has type list<item: int64>, but a prompt needs text, numbers or "
        "dates: convert it before this stage",
        "InvalidPrompt: column 'x' is null",
    ]


def test_values_of_an_extension_type_are_never_decoded():
    column = pa.ExtensionArray.from_storage(Payload(), pa.array([b"a", None], pa.binary()))
    _, errors = rendered("{x}", pa.table({"x": column}))
    assert [error.split(":")[0] for error in errors] == ["InvalidPrompt", "InvalidPrompt"]


def test_a_table_without_the_column_is_a_config_error():
    with pytest.raises(ConfigError, match="no column 'x'"):
        rendered("{x}", pa.table({"y": [1]}))


def test_an_empty_table_renders_to_nothing():
    table = pa.table({"x": pa.array([], pa.string())})
    assert rendered("{x}", table) == ([], [])


def test_a_column_in_several_chunks_keeps_its_order():
    column = pa.chunked_array([["a"], [], ["b", "c"]], pa.string())
    assert rendered("{x}", pa.table({"x": column}))[0] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "column",
    [pa.array([0, 2**31 - 1], pa.date32()), pa.array([0, 2**62], pa.timestamp("s"))],
    ids=["date", "timestamp"],
)
def test_a_date_that_python_cannot_hold_is_the_rows_error(column):
    prompts, errors = rendered("{x}", pa.table({"x": column}))
    assert (prompts[0] is None, prompts[1], errors[0]) == (False, None, "")
    assert errors[1].startswith("InvalidPrompt: column 'x' cannot be read")


class Zoned(pa.ExtensionType):
    """A type whose values cannot be read, as a time in a zone that this host does not know."""

    def __init__(self):
        super().__init__(pa.int64(), "raybatch.test.zoned")

    def __arrow_ext_serialize__(self):
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type, serialized):
        return cls()

    def __arrow_ext_scalar_class__(self):
        return ZonedScalar


class ZonedScalar(pa.ExtensionScalar):
    def as_py(self, **kwargs):
        raise KeyError("No time zone found with key Nowhere/City")


def test_a_zone_that_the_host_does_not_know_is_an_error_of_the_value():
    column = pa.ExtensionArray.from_storage(Zoned(), pa.array([1], pa.int64()))
    (value,) = python_values(pa.chunked_array([column]))
    assert isinstance(value, KeyError)
