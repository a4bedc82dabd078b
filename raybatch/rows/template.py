"""Prompt templates with named fields from columns; values of rows are never templates.

The syntax is that of `str.format` without attributes, indices, conversions and nested fields, so a
template can only name columns.
"""

import datetime
import decimal
import math
import re
import string
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.batches import is_any_type, python_values
from raybatch.text.chat import InvalidPrompt, PromptError

_DATES = (datetime.datetime, datetime.date, datetime.time)
_CONVERTIBLE = (str, bool, int, float, decimal.Decimal, *_DATES)
_TEXTS = "string large_string string_view integer floating boolean decimal date time timestamp null"

# format spec of a number or a text: fill, align, sign, width, grouping, precision, type
_FORMAT_SPEC = re.compile(
    r"(?:.?[<>=^])?[-+ ]?#?0?(?P<width>\d*)[,_]?(?:\.(?P<precision>\d+))?"
    r"[bcdeEfFgGnosxX%]?"
)
_MAX_FORMAT_DIGITS = 4


class _TemplatePiece(NamedTuple):
    """Literal text, then a field, except at the end of the template."""

    literal: str
    field: str | None
    format_spec: str


class PromptTemplate:
    """A prompt with fields, such as `PromptTemplate("{document} Q: {question}")`.

    Doubled braces are literal. A format spec after a colon works on numbers and strings.

    Raises:
        ConfigError: the template is malformed, or a field is more than the name of a column.

    Example:
        >>> table = pa.table({"name": ["a"], "score": [0.25]})
        >>> PromptTemplate("{name}: {score:.1f}").render_column(table)
        ['a: 0.2']
    """

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise ConfigError(f"prompt template must be a string, got {type(text).__name__}")
        self.text = text
        self._pieces = _parse(text)
        self.fields = tuple(dict.fromkeys(piece.field for piece in self._pieces if piece.field))

    def check(self, columns: Iterable[str]) -> None:
        """Raise ConfigError if a field is not a column of the dataset."""
        known = list(columns)
        for name in self.fields:
            if name not in known:
                raise ConfigError(
                    f"prompt template: no column {name!r}{did_you_mean(name, known)}; "
                    f"the dataset has {', '.join(known) or 'no columns'}"
                )

    def render_column(self, table: pa.Table) -> list[str | PromptError]:
        """Return the prompt of every row of a table, or its error."""
        return [
            row if isinstance(row, PromptError) else self._filled(iter(row))
            for row in self.field_texts(table)
        ]

    @property
    def layout(self) -> tuple[tuple[str, str | None], ...]:
        """(text before a field, name of the field) for each; then the last text with None."""
        ends = () if not self._pieces or self._pieces[-1].field is None else (("", None),)
        return tuple((piece.literal, piece.field) for piece in self._pieces) + ends

    def field_texts(self, table: pa.Table) -> Iterator[list[str] | PromptError]:
        """Yield for each row of a table the texts of its fields, in order, or the row's error."""
        self.check(table.column_names)
        pieces = [piece for piece in self._pieces if piece.field]
        needed = {(str(piece.field), piece.format_spec == "") for piece in pieces}
        columns = {key: _read_column(table[key[0]], as_text=key[1]) for key in needed}
        read = [columns[str(piece.field), piece.format_spec == ""] for piece in pieces]
        # without fields zip() would yield no rows
        for values in zip(*read, strict=True) if read else [()] * table.num_rows:
            try:
                yield [
                    _format(str(piece.field), value, piece.format_spec)
                    for piece, value in zip(pieces, values, strict=True)
                ]
            except PromptError as error:
                yield error

    def _filled(self, texts: Iterator[str]) -> str:
        return "".join(p.literal + (next(texts) if p.field else "") for p in self._pieces)


class _Unread(NamedTuple):
    """Placeholder for a value of a type that is never decoded."""

    type_name: str


def _read_column(column: pa.ChunkedArray, *, as_text: bool) -> list[object]:
    """Return a column's values; one that Python cannot represent becomes its exception.

    With `as_text` Arrow formats floats and decimals, in their own precision. Only plain types are
    decoded: decoding a value of an extension type can run code.
    """
    if pa.types.is_dictionary(column.type) and is_text_like(column.type.value_type):
        column = column.cast(column.type.value_type)
    if not is_text_like(column.type):
        unread = _Unread(str(column.type))
        return [unread if is_valid else None for is_valid in column.is_valid().to_pylist()]
    if as_text and is_any_type(column.type, "floating decimal"):
        texts = pc.cast(column, pa.string()).to_pylist()
        return [math.nan if text == "nan" else text for text in texts]
    return python_values(column)


def is_text_like(kind: pa.DataType) -> bool:
    """Return whether values of this type can be formatted into a prompt."""
    return not isinstance(kind, pa.BaseExtensionType) and is_any_type(kind, _TEXTS)


def _check_value(name: str, value: object) -> object:
    if value is None:
        raise InvalidPrompt(f"column {name!r} is null")
    if isinstance(value, UnicodeDecodeError):
        raise InvalidPrompt(f"column {name!r} is not valid UTF-8")
    if isinstance(value, Exception):
        raise InvalidPrompt(f"column {name!r} cannot be read: {value}")
    if isinstance(value, float) and math.isnan(value):
        # numpy and pandas batches turn null into NaN
        raise InvalidPrompt(f"column {name!r} is null (NaN)")
    if not isinstance(value, _CONVERTIBLE):
        kind = value.type_name if isinstance(value, _Unread) else type(value).__name__
        raise InvalidPrompt(
            f"column {name!r} has type {kind}, but a prompt needs text, numbers or dates: convert "
            "it before this stage"
        )
    return value


def _format(name: str, value: object, format_spec: str) -> str:
    value = _check_value(name, value)
    if not format_spec:
        return str(value)
    try:
        return format(value, format_spec)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidPrompt(
            f"column {name!r}: cannot format a {type(value).__name__} with {format_spec!r}: {error}"
        ) from error


def _parse(text: str) -> list[_TemplatePiece]:
    try:
        parsed = list(string.Formatter().parse(text))
    except ValueError as error:
        raise ConfigError(
            f"prompt template {text!r}: {error}; write {{{{ and }}}} for braces in the text"
        ) from error
    for _, field, format_spec, conversion in parsed:
        if field is not None:
            where = f"prompt template {text!r}: field {field!r}"
            _check_field(where, field, format_spec or "", conversion)
    return [_TemplatePiece(literal, field, spec or "") for literal, field, spec, _ in parsed]


def _check_field(where: str, field: str, format_spec: str, conversion: str | None) -> None:
    if not field or field.isdigit():
        raise ConfigError(f"{where} must be a column name; write {{{{ }}}} for braces")
    if "." in field or "[" in field or conversion:
        raise ConfigError(
            f"{where} may only name a column; attributes, indices and conversions are not allowed"
        )
    match = _FORMAT_SPEC.fullmatch(format_spec)
    if match is None:
        raise ConfigError(f"{where} has an invalid format {format_spec!r}")
    if any(len(digits or "") > _MAX_FORMAT_DIGITS for digits in match.groups()):
        raise ConfigError(f"{where} has the format {format_spec!r}, which is too wide")
