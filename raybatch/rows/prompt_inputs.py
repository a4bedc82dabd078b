"""The columns that a stage reads: which ones, checks of their types, and their values per row."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import repeat, starmap
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from raybatch.config import SpecialTokens
from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.batches import is_any_type, is_objects, nested_values, python_rows, python_values
from raybatch.rows.options import StageConfig
from raybatch.rows.template import PromptTemplate, is_text_like

_LISTS = "list large_list fixed_size_list list_view large_list_view"

# sources of a prompt: text of a template, query and document, a text per message of the stage,
# token ids, messages, or the whole row, from which a function makes messages
PromptForm = Literal["text", "pair", "contents", "ids", "messages", "row"]
_CONVENTIONS: Mapping[str, PromptForm] = {
    "prompt": "text",
    "tokenized_prompt": "ids",
    "messages": "messages",
}


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
