"""Which columns a stage reads, and whether their types can be what they are taken for."""

from collections.abc import Callable, Iterable

import pyarrow as pa

from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.options import StageConfig
from raybatch.rows.template import PromptTemplate, is_text_like

# What Ray makes of values without a common Arrow type: another batch may hold plain ones.
_OBJECTS = "ray.data.arrow_pickled_object"


def check_inputs(schema: pa.Schema, config: StageConfig) -> None:
    """Raise ConfigError where no row can be read, whatever its values are.

    Raises:
        ConfigError: a column is missing, or of a type that is no prompt; says which and the way
            out.
    """
    prompt_column = conventional_column(schema, config)
    if not _names_prompt(config) and prompt_column is None:
        raise ConfigError(
            "the stage has no prompt: set prompt=, messages= or tokenized_prompt= "
            "(--prompt or --messages-column in a shell), or name a column so, or return one from "
            "preprocess; "
            f"the dataset has {_listed(schema.names)}"
        )
    if isinstance(config.tools, str) and prompt_column not in (None, "messages"):
        raise ConfigError(
            "tools as a column are read beside a column of messages, and the dataset has "
            f"{prompt_column!r}; set messages to the name of one, or list the tools of all rows"
        )
    for name in referenced_columns(config):
        check_column(schema.names, name)
    for name in _text_columns(config, prompt_column):
        _check_type(
            schema.field(name),
            is_text_like,
            "a prompt takes text, numbers, booleans and dates: "
            f"{_way_to_text(schema.field(name).type)}",
        )
    for name in _id_columns(config, prompt_column):
        _check_type(schema.field(name), _is_ids, "token ids are a list of whole numbers")
    for name in _message_columns(config, prompt_column):
        _check_type(
            schema.field(name),
            _is_messages,
            "messages are a list of structs with role and content, or a JSON text of such a list",
        )


def conventional_column(schema: pa.Schema, config: StageConfig) -> str | None:
    """Return the column that is taken by its name where no option names the prompts."""
    if _names_prompt(config):
        return None
    return next((name for name in config.conventional_columns if name in schema.names), None)


def _names_prompt(config: StageConfig) -> bool:
    options = (config.prompt, config.messages, config.tokenized_prompt, config.query)
    return any(option is not None for option in options)


def referenced_columns(config: StageConfig) -> list[str]:
    """Return the columns that the options name, as far as they can be known before the data."""
    names = _text_columns(config, None)
    if isinstance(config.messages, str):
        names.append(config.messages)
    if config.tokenized_prompt is not None:
        names.append(config.tokenized_prompt)
    names.extend(config.overrides.values())
    of_rows: tuple[object, ...] = (
        config.sampling_column,
        config.chat_template_kwargs_column,
        config.tools,
        config.images,
        config.pooling_column,
        config.lora_column,
        config.id_column,
    )
    names.extend(column for column in of_rows if isinstance(column, str))
    return list(dict.fromkeys(names))


def column_of(table: pa.Table, name: str) -> pa.ChunkedArray:
    """Return a column; raise ConfigError with the known names where there is none."""
    check_column(table.column_names, name)
    return table.column(name)


def check_column(known: Iterable[str], name: str) -> None:
    """Raise ConfigError with the known names if `name` is none of them."""
    known = list(known)
    if name not in known:
        raise ConfigError(
            f"no column {name!r}{did_you_mean(name, known)}; the dataset has {_listed(known)}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no columns"


def _text_columns(config: StageConfig, prompt_column: str | None) -> list[str]:
    """Return the columns that templates fill in."""
    names: list[str] = []
    for template in (config.query, config.document):
        if template is not None:
            names.extend(PromptTemplate(template).fields)
    if config.prompt is not None:
        names.extend(PromptTemplate(config.prompt).fields)
    elif prompt_column == "prompt":
        names.append(prompt_column)
    messages = config.messages
    if messages is not None and not isinstance(messages, str) and not callable(messages):
        for message in messages:
            names.extend(PromptTemplate(message["content"]).fields)
    return names


def _id_columns(config: StageConfig, prompt_column: str | None) -> list[str]:
    if config.tokenized_prompt is not None:
        return [config.tokenized_prompt]
    return [prompt_column] if prompt_column == "tokenized_prompt" else []


def _message_columns(config: StageConfig, prompt_column: str | None) -> list[str]:
    if isinstance(config.messages, str):
        return [config.messages]
    return [prompt_column] if prompt_column == "messages" else []


def _check_type(field: pa.Field, is_usable: Callable[[pa.DataType], bool], need: str) -> None:
    if getattr(field.type, "extension_name", "") == _OBJECTS or is_usable(_plain(field.type)):
        return
    raise ConfigError(f"column {field.name!r} is of type {field.type}, and {need}")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _way_to_text(kind: pa.DataType) -> str:
    plain = _plain(kind)
    if _is_binary(plain):
        return "cast it to string, if it holds UTF-8, before this stage"
    if _is_ids(plain):
        return "make text of it before this stage; if it is token ids, set tokenized_prompt"
    if _is_messages(plain):
        return "make text of it before this stage; if it is a conversation, set messages"
    return "make text of it before this stage"


def _is_binary(kind: pa.DataType) -> bool:
    return _is_any(kind, "binary", "large_binary", "binary_view", "fixed_size_binary")


def _is_list(kind: pa.DataType) -> bool:
    return _is_any(kind, "list", "large_list", "fixed_size_list", "list_view", "large_list_view")


def _is_any(kind: pa.DataType, *names: str) -> bool:
    return any(getattr(pa.types, f"is_{name}")(kind) for name in names)


def _is_ids(kind: pa.DataType) -> bool:
    """Floats are what a numpy batch makes of ids beside a null."""
    if pa.types.is_null(kind) or isinstance(kind, pa.BaseExtensionType):
        return True  # Ray's tensors among them, whose rows are checked
    return _is_list(kind) and _is_any(kind.value_type, "integer", "floating", "null")


def _is_messages(kind: pa.DataType) -> bool:
    if _is_list(kind):
        return _is_any(kind.value_type, "struct", "map", "null")
    return _is_any(kind, "null", "string", "large_string", "string_view")
