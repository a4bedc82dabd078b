"""Tools that a model may call: of the stage or of a row, for the chat template and for parsers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from raybatch.records.payload import CHAT
from raybatch.rows.batches import json_value, python_values
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt_inputs import column_of
from raybatch.text.chat import InvalidPrompt

# option of a chat template, and field of a request to an endpoint
TOOLS = "tools"


def row_columns(config: StageConfig) -> dict[str, str]:
    """Return the columns with options of the chat template, by what they hold."""
    columns = {"options": config.chat_template_kwargs_column, TOOLS: config.tools}
    return {name: column for name, column in columns.items() if isinstance(column, str)}


def stage_options(config: StageConfig) -> dict[str, Any]:
    """Return the options of the chat template that are tools of the stage."""
    return {} if config.tools is None or isinstance(config.tools, str) else {TOOLS: config.tools}


def read_options(table: pa.Table, config: StageConfig) -> Sequence[Mapping[str, Any] | Exception]:
    """Return the options of the chat template that come with each row, or what is wrong with them.

    Raises:
        ConfigError: a column is not there.
    """
    found: list[dict[str, Any] | Exception] = [{} for _ in range(table.num_rows)]
    for kind, column in row_columns(config).items():
        for row, value in enumerate(python_values(column_of(table, column))):
            options = found[row]
            if isinstance(options, Exception):
                continue
            try:
                if isinstance(value, Exception):
                    raise value
                options |= _parse_options(value) if kind == "options" else _parse_tools(value)
            except Exception as error:  # a value that Ray has pickled may raise anything
                found[row] = error
    return found


def chat_payload(options: Mapping[str, Any]) -> str:
    """Return what a parser has to know of a chat, JSON.

    Raises:
        InvalidPrompt: an option is no JSON.
    """
    try:
        return json.dumps({CHAT: dict(options)})
    except (TypeError, ValueError) as error:
        raise InvalidPrompt(f"options of the chat template are no JSON: {error}") from error


def _parse_tools(value: Any) -> dict[str, Any]:  # noqa: ANN401 - data of a row
    tools = _value_of(value, "tools")
    if tools is None:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidPrompt(f"tools must be a list of objects, got {value!r:.200}")
    return {TOOLS: tools} if tools else {}


def _parse_options(value: Any) -> dict[str, Any]:  # noqa: ANN401 - data of a row
    options = _value_of(value, "options of the chat template")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise InvalidPrompt(f"options of the chat template are no JSON object: {value!r}")
    return {name: option for name, option in options.items() if option is not None}


def _value_of(value: object, what: str) -> Any:  # noqa: ANN401 - data of a row
    try:
        found = json_value(value)
    except ValueError as error:
        raise InvalidPrompt(f"{what} are no JSON: {error}") from error
    return found if isinstance(value, str | bytes) else _without_nulls(found)


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return structs of Arrow without the keys that other rows have."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value
