"""The columns that a stage reads: templates, checks of types, and the values of each row.

The syntax of templates is that of `str.format` without attributes, indices, conversions and nested
fields, so a template can only name columns. Values of rows are never templates.
"""

import datetime
import decimal
import math
import re
import string
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat, starmap
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.batches import is_any_type, is_objects, nested_values, python_rows, python_values
from raybatch.rows.options import StageConfig
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

_LISTS = "list large_list fixed_size_list list_view large_list_view"

# sources of a prompt: text of a template, query and document, a text per message of the stage,
# token ids, messages, or the whole row, from which a function makes messages
PromptForm = Literal["text", "pair", "contents", "ids", "messages", "row"]
_CONVENTIONS: Mapping[str, PromptForm] = {
    "prompt": "text",
    "tokenized_prompt": "ids",
    "messages": "messages",
}


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


class RowInputs(NamedTuple):
    """The values of a row for its prompt: None without a column, an exception if unreadable.

    Args:
        prompt: the text of each template, else the one value of the prompt's column.
    """

    prompt: tuple[Any, ...]
    template_options: Any
    tools: Any
    images: Any
    pooling: Any
    adapter: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RowReader:
    """Read the inputs of prompts from row batches of one schema: `open` it once, `read` batches.

    Args:
        column: the column that holds the prompts, if it is one column.
        special_tokens: handling of special tokens in the text of a template.
    """

    schema: pa.Schema
    config: StageConfig
    form: PromptForm
    column: str | None
    templates: tuple[PromptTemplate, ...]
    images: str | None
    special_tokens: SpecialTokens

    @classmethod
    def open(cls, schema: pa.Schema, config: StageConfig) -> "RowReader":
        """Resolve the columns that options name; ConfigError: see `check_inputs`."""
        check_inputs(schema, config)
        form, column = prompt_form(schema, config)
        assert form is not None, "check_inputs refuses a table without prompts"
        texts, special_tokens, images = prompt_texts(config), config.special_tokens, config.images
        if form == "text" and column is not None:
            texts = [f"{{{column}}}"]
            special_tokens = config.prompt_column_special_tokens or special_tokens
        has_images = form in ("text", "ids", "messages")
        if images is None and has_images and config.conventional_images in schema.names:
            images = config.conventional_images
        return cls(
            schema=schema,
            config=config,
            form=form,
            column=column,
            templates=tuple(map(PromptTemplate, texts)),
            images=images,
            special_tokens=special_tokens,
        )

    def read(self, table: pa.Table) -> Iterator[RowInputs]:
        """Yield the inputs of each row of a batch."""

        def values(
            column: object, read: Callable[[pa.ChunkedArray], list[Any]] = python_values
        ) -> Iterable[Any]:
            is_column = isinstance(column, str)
            return read(table.column(column)) if is_column else repeat(None, table.num_rows)

        prompts: Iterable[tuple[Any, ...]]
        if self.templates:
            texts = (template.render_column(table) for template in self.templates)
            prompts = zip(*texts, strict=True)
        elif self.form == "row":
            prompts = zip(python_rows(table), strict=True)
        else:
            read = nested_values if self.form == "messages" else python_values
            prompts = zip(values(self.column, read), strict=True)
        # a list of tools is for all rows, and a pair has no tools
        tools = self.config.tools if self.form == "messages" else None
        columns = (
            values(self.config.chat_template_kwargs_column, nested_values),
            values(tools, nested_values),
            values(self.images),
            values(self.config.pooling_column),
            values(self.config.lora_column),
        )
        return starmap(RowInputs, zip(prompts, *columns, strict=True))


def prompt_form(schema: pa.Schema, config: StageConfig) -> tuple[PromptForm | None, str | None]:
    """Return (form of the prompts, the column that holds them if it is one column).

    If no option names the prompts, the first existing conventional column is used; without one
    both are None.
    """
    if config.prompt is not None:
        return "text", None
    if config.query is not None:
        return "pair", None
    if config.tokenized_prompt is not None:
        return "ids", config.tokenized_prompt
    if isinstance(config.messages, str):
        return "messages", config.messages
    if config.messages is not None:
        return ("row" if callable(config.messages) else "contents"), None
    column = next((name for name in config.conventional_columns if name in schema.names), None)
    return (None, None) if column is None else (_CONVENTIONS[column], column)


def check_inputs(
    schema: pa.Schema, config: StageConfig, *, of_folders: Collection[str] = ()
) -> None:
    """Raise ConfigError if no row can be read: a column is missing, or has an unsuitable type.

    `of_folders` are columns from partition folders; they are no prompts unless an option names
    them.
    """
    form, column = prompt_form(schema, config)
    conventional = None if column in (config.tokenized_prompt, config.messages) else column
    if conventional in of_folders:
        raise ConfigError(
            f"the column {conventional!r} comes from folders named {conventional}=..., which are "
            "not used as prompts by default; set prompt=, messages= or tokenized_prompt= "
            f"(prompt='{{{conventional}}}' for the names of the folders)"
        )
    if form is None:
        raise ConfigError(
            "the stage has no prompt: set prompt=, messages= or tokenized_prompt= "
            "(--prompt or --messages-column in a shell), or give a column one of these names; the "
            f"dataset has {_listed(schema.names)}"
        )
    if isinstance(config.tools, str) and conventional not in (None, "messages"):
        raise ConfigError(
            f"a column of tools needs a column of messages, but the dataset has {conventional!r}; "
            "set messages to its name, or list the tools of all rows"
        )
    for name in referenced_columns(config):
        _check_column(schema.names, name)
    for name in _template_columns(config) if conventional != "prompt" else ["prompt"]:
        field = schema.field(name)
        need = f"a prompt needs text, numbers, booleans or dates: {_hint_at_text(field.type)}"
        _check_type(field, is_text_like, need)
    if form == "ids":
        _check_type(schema.field(column), _is_ids, "token ids need a list of whole numbers")
    if form == "messages":
        need = "messages need a list of structs with role and content, or a JSON text of one"
        _check_type(schema.field(column), _is_messages, need)


def referenced_columns(config: StageConfig) -> list[str]:
    """Return the columns that options name, without conventional ones."""
    of_rows: tuple[object, ...] = (
        config.messages,
        config.tokenized_prompt,
        *config.overrides.values(),
        config.sampling_column,
        config.chat_template_kwargs_column,
        config.tools,
        config.images,
        config.pooling_column,
        config.lora_column,
        config.id_column,
    )
    names = [*_template_columns(config), *(name for name in of_rows if isinstance(name, str))]
    return list(dict.fromkeys(names))


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column; ConfigError with the names of all columns if it is missing."""
    _check_column(table.column_names, name)
    return table.column(name)


def _check_column(known: list[str], name: str) -> None:
    if name not in known:
        raise ConfigError(
            f"no column {name!r}{did_you_mean(name, known)}; the dataset has {_listed(known)}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no columns: its files have no rows, or only {}"


def prompt_texts(config: StageConfig) -> list[str]:
    """Return the templates in the options."""
    texts = [text for text in (config.prompt, config.query, config.document) if text is not None]
    messages = config.messages
    if messages is not None and not isinstance(messages, str) and not callable(messages):
        texts += [message["content"] for message in messages]
    return texts


def _template_columns(config: StageConfig) -> list[str]:
    return [name for text in prompt_texts(config) for name in PromptTemplate(text).fields]


def _check_type(field: pa.Field, is_usable: Callable[[pa.DataType], bool], need: str) -> None:
    # other batches of an object column may hold plain values
    if is_objects(field.type) or is_usable(_plain(field.type)):
        return
    raise ConfigError(f"column {field.name!r} has type {field.type}, but {need}")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _hint_at_text(kind: pa.DataType) -> str:
    plain = _plain(kind)
    if is_any_type(plain, "binary large_binary binary_view fixed_size_binary"):
        return "cast UTF-8 bytes to string before this stage"
    if _is_ids(plain):
        return "convert it to text before this stage; for token ids set tokenized_prompt"
    if _is_messages(plain):
        return "convert it to text before this stage; for a conversation set messages"
    return "convert it to text before this stage"


def _is_ids(kind: pa.DataType) -> bool:
    """Return whether rows may hold token ids; numpy batches turn ids with nulls into floats."""
    if pa.types.is_null(kind) or isinstance(kind, pa.BaseExtensionType):
        return True  # includes Ray's tensors; their rows are checked
    return is_any_type(kind, _LISTS) and is_any_type(kind.value_type, "integer floating null")


def _is_messages(kind: pa.DataType) -> bool:
    if is_any_type(kind, _LISTS):
        return is_any_type(kind.value_type, "struct map null")
    return is_any_type(kind, "null string large_string string_view")
