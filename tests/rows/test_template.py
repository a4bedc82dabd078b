import datetime

import numpy as np
import pyarrow as pa
import pytest

from raybatch.errors import ConfigError, error_text
from raybatch.rows.batches import python_values
from raybatch.rows.template import PromptTemplate
from raybatch.text.chat import InvalidPrompt


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


def test_fields_are_filled_from_columns():
    template = PromptTemplate("{document}\n\nQ: {question}")
    assert template.render({"document": "D", "question": "?", "id": 1}) == "D\n\nQ: ?"


def test_fields_are_listed_once_in_order():
    assert PromptTemplate("{b} {a} {b} text").fields == ("b", "a")


def test_double_braces_stand_for_braces():
    assert PromptTemplate('{{"x": {x}}} {{}}').render({"x": 1}) == '{"x": 1} {}'


def test_a_template_without_fields_is_the_same_for_every_row():
    assert PromptTemplate("hello").render({}) == "hello"


def test_a_value_is_never_a_template():
    assert PromptTemplate("{a}{b}").render({"a": "{b} {{", "b": "x"}) == "{b} {{x"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (3, "3"),
        (0.5, "0.5"),
        (True, "True"),
        (np.int64(4), "4"),
        (np.float32(0.5), "0.5"),
        (np.str_("text"), "text"),
        (datetime.date(2024, 2, 29), "2024-02-29"),
        ("", ""),
    ],
    ids=str,
)
def test_plain_values_become_text_as_str_does(value, expected):
    assert PromptTemplate("{x}").render({"x": value}) == expected


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
    assert PromptTemplate(template).render({"x": value}) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{x.__class__}", "attributes, indices and conversions"),
        ("{x[0]}", "attributes, indices and conversions"),
        ("{x!r}", "attributes, indices and conversions"),
        ("{}", "must be the name of a column"),
        ("{0}", "must be the name of a column"),
        ("{x:{y}}", "not understood"),
        ("{x:hello}", "not understood"),
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
        PromptTemplate("{queston}").render({"question": "?"})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "column 'x' is null"),
        (float("nan"), "column 'x' is null"),
        (["a"], "column 'x' holds a list"),
        ({"a": 1}, "column 'x' holds a dict"),
        (b"\xff", "column 'x' is not valid UTF-8"),
        (b"abc", "column 'x' holds a bytes"),
        (np.array([1, 2]), "column 'x' holds a ndarray"),
    ],
    ids=str,
)
def test_a_value_that_is_no_text_is_a_row_error(value, message):
    with pytest.raises(InvalidPrompt, match=message):
        PromptTemplate("{x}").render({"x": value})


def test_a_format_that_does_not_fit_the_value_is_a_row_error():
    with pytest.raises(InvalidPrompt, match=r"cannot format a str with '\.2f'"):
        PromptTemplate("{x:.2f}").render({"x": "abc"})


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
        "InvalidPrompt: column 'x' holds a list<item: int64>; a prompt takes text, numbers and "
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
