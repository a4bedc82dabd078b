"""Which columns a stage reads, and whether their types can be what they are taken for."""

from collections.abc import Callable, Collection, Iterable

import pyarrow as pa

from raybatch.errors import ConfigError, did_you_mean
from raybatch.rows.batches import is_any_type, is_objects
from raybatch.rows.options import StageConfig
from raybatch.rows.template import PromptTemplate, is_text_like

_LISTS = "list large_list fixed_size_list list_view large_list_view"


def check_inputs(
    schema: pa.Schema, config: StageConfig, *, of_folders: Collection[str] = ()
) -> None:
    """Raise ConfigError where no row can be read: a column is missing, or its type is no prompt.

    `of_folders` are the columns that stand for names of folders, of which none is meant by its name
    alone.
    """
    conventional = conventional_column(schema, config)
    if conventional in of_folders:
        raise ConfigError(
            f"the column {conventional!r} is made of folders named {conventional}=..., which are "
            "not prompts by themselves; set prompt=, messages= or tokenized_prompt= "
            f"(prompt='{{{conventional}}}' takes the names of the folders)"
        )
    if not _names_prompt(config) and conventional is None:
        raise ConfigError(
            "the stage has no prompt: set prompt=, messages= or tokenized_prompt= "
            "(--prompt or --messages-column in a shell), or name a column so, or return one from "
            f"preprocess; the dataset has {_listed(schema.names)}"
        )
    if isinstance(config.tools, str) and conventional not in (None, "messages"):
        raise ConfigError(
            "tools as a column are read beside a column of messages, and the dataset has "
            f"{conventional!r}; set messages to the name of one, or list the tools of all rows"
        )
    for name in referenced_columns(config):
        _check_column(schema.names, name)
    texts = [*_template_columns(config), *(["prompt"] if conventional == "prompt" else [])]
    for field in map(schema.field, texts):
        need = f"a prompt takes text, numbers, booleans and dates: {_way_to_text(field.type)}"
        _check_type(field, is_text_like, need)
    ids, messages = ids_column(config, conventional), messages_column(config, conventional)
    if ids is not None:
        _check_type(schema.field(ids), _is_ids, "token ids are a list of whole numbers")
    if messages is not None:
        need = "messages are a list of structs with role and content, or a JSON text of such a list"
        _check_type(schema.field(messages), _is_messages, need)


def conventional_column(schema: pa.Schema, config: StageConfig) -> str | None:
    """Return the column that is taken by its name where no option names the prompts."""
    if _names_prompt(config):
        return None
    return next((name for name in config.conventional_columns if name in schema.names), None)


def _names_prompt(config: StageConfig) -> bool:
    options = (config.prompt, config.messages, config.tokenized_prompt, config.query)
    return any(option is not None for option in options)


def ids_column(config: StageConfig, conventional: str | None) -> str | None:
    """Return the column of token ids that are the prompts."""
    return "tokenized_prompt" if conventional == "tokenized_prompt" else config.tokenized_prompt


def messages_column(config: StageConfig, conventional: str | None) -> str | None:
    """Return the column of messages that are the prompts."""
    named = config.messages if isinstance(config.messages, str) else None
    return "messages" if conventional == "messages" else named


def referenced_columns(config: StageConfig) -> list[str]:
    """Return the columns that the options name, as far as they can be known before the data."""
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
    """Return a column; raise ConfigError with the known names where there is none."""
    _check_column(table.column_names, name)
    return table.column(name)


def _check_column(known: list[str], name: str) -> None:
    if name not in known:
        raise ConfigError(
            f"no column {name!r}{did_you_mean(name, known)}; the dataset has {_listed(known)}"
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "no columns: its files hold no rows, or only {}"


def _template_columns(config: StageConfig) -> list[str]:
    texts = [config.query, config.document, config.prompt]
    messages = config.messages
    if messages is not None and not isinstance(messages, str) and not callable(messages):
        texts += [message["content"] for message in messages]
    return [name for text in texts if text is not None for name in PromptTemplate(text).fields]


def _check_type(field: pa.Field, is_usable: Callable[[pa.DataType], bool], need: str) -> None:
    # another batch may hold plain values
    if is_objects(field.type) or is_usable(_plain(field.type)):
        return
    raise ConfigError(f"column {field.name!r} is of type {field.type}, and {need}")


def _plain(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _way_to_text(kind: pa.DataType) -> str:
    plain = _plain(kind)
    if is_any_type(plain, "binary large_binary binary_view fixed_size_binary"):
        return "cast it to string, if it holds UTF-8, before this stage"
    if _is_ids(plain):
        return "make text of it before this stage; if it is token ids, set tokenized_prompt"
    if _is_messages(plain):
        return "make text of it before this stage; if it is a conversation, set messages"
    return "make text of it before this stage"


def _is_ids(kind: pa.DataType) -> bool:
    """Floats are what a numpy batch makes of ids beside a null."""
    if pa.types.is_null(kind) or isinstance(kind, pa.BaseExtensionType):
        return True  # Ray's tensors among them, whose rows are checked
    return is_any_type(kind, _LISTS) and is_any_type(kind.value_type, "integer floating null")


def _is_messages(kind: pa.DataType) -> bool:
    if is_any_type(kind, _LISTS):
        return is_any_type(kind.value_type, "struct map null")
    return is_any_type(kind, "null string large_string string_view")
