"""Options that columns set for single rows and that travel in the payload of their requests.

Tools and other options of the chat template, options of pooling, and the LoRA adapter.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError
from raybatch.models.source import adapter_source, check_adapter
from raybatch.records.payload import CHAT, LORA, POOLING, add_payload
from raybatch.records.pooling import Pooling, pooling_of
from raybatch.rows.batches import json_value, python_values
from raybatch.rows.options import StageConfig
from raybatch.rows.prompt import Prompt
from raybatch.rows.prompt_inputs import column_of
from raybatch.rows.schema import describe_error
from raybatch.text.chat import InvalidPrompt

# option of a chat template, and field of a request to an endpoint
TOOLS = "tools"


def template_columns(config: StageConfig) -> dict[str, str]:
    """Return the columns with options of the chat template, by what they hold."""
    columns = {"options": config.chat_template_kwargs_column, TOOLS: config.tools}
    return {name: column for name, column in columns.items() if isinstance(column, str)}


def stage_template_options(config: StageConfig) -> dict[str, Any]:
    """Return the options of the chat template that are tools of the stage."""
    return {} if config.tools is None or isinstance(config.tools, str) else {TOOLS: config.tools}


def read_template_options(
    table: pa.Table, config: StageConfig
) -> Sequence[Mapping[str, Any] | Exception]:
    """Return the options of the chat template that come with each row, or what is wrong with them.

    Raises:
        ConfigError: a column is not there.
    """
    options: list[dict[str, Any] | Exception] = [{} for _ in range(table.num_rows)]
    for kind, column in template_columns(config).items():
        parse = _parse_tools if kind == TOOLS else _parse_options
        for row, value in enumerate(python_values(column_of(table, column))):
            of_row = options[row]
            if isinstance(of_row, Exception):
                continue
            try:
                if isinstance(value, Exception):
                    raise value
                of_row |= parse(value)
            except Exception as error:  # a value that Ray has pickled may raise anything
                options[row] = error
    return options


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
    tools = _parse_json(value, "tools")
    if tools is None:
        return {}
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidPrompt(f"tools must be a list of objects, got {value!r:.200}")
    return {TOOLS: tools} if tools else {}


def _parse_options(value: Any) -> dict[str, Any]:  # noqa: ANN401 - data of a row
    options = _parse_json(value, "options of the chat template")
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise InvalidPrompt(f"options of the chat template are no JSON object: {value!r}")
    return {name: option for name, option in options.items() if option is not None}


def _parse_json(value: object, what: str) -> Any:  # noqa: ANN401 - data of a row
    try:
        parsed = json_value(value)
    except ValueError as error:
        raise InvalidPrompt(f"{what} are no JSON: {error}") from error
    return parsed if isinstance(value, str | bytes) else _without_nulls(parsed)


def _without_nulls(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return structs of Arrow without the keys that other rows have."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def with_pooling(
    prompts: Sequence[Prompt], table: pa.Table, *, pooling: Pooling, column: str | None
) -> Sequence[Prompt]:
    """Return the prompts of rows with their options of pooling; a bad value makes an error row.

    Args:
        column: of JSON texts or structs with options that win over them; None for none.
    """
    if column is None:
        options = pooling.given()
        return [_with_options(prompt, options) for prompt in prompts] if options else prompts
    parsed: dict[str, Mapping[str, Any] | str] = {}
    pooled = []
    for prompt, value in zip(prompts, python_values(column_of(table, column)), strict=True):
        key = repr(value)
        if key not in parsed:
            parsed[key] = _parse_pooling(value, pooling, column)
        pooled.append(_with_options(prompt, parsed[key]))
    return pooled


def _parse_pooling(value: object, pooling: Pooling, column: str) -> Mapping[str, Any] | str:
    """Return the options of a row, or the text of its error; without any it has the stage's."""
    try:
        options = json_value(value)
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise ConfigError(f"pooling options must be a JSON object, got {value!r}")
        return pooling_of(options, default=pooling).given()
    except (ConfigError, ValueError) as error:
        return describe_error("InvalidPooling", f"column {column!r}: {error}")


def _with_options(prompt: Prompt, options: Mapping[str, Any] | str) -> Prompt:
    if prompt.error or not options:
        return prompt
    if isinstance(options, str):
        return prompt._replace(error=options)
    return prompt._replace(payload=add_payload(prompt.payload, {POOLING: options}))


class Adapters:
    """Looks up the adapters of rows: one that exists once, others once per row batch."""

    def __init__(self, config: StageConfig) -> None:
        self._config = config
        kwargs = config.backend.options.get("engine_kwargs") or {}
        has_ranks = type_of(config.backend).takes_vllm_options
        self._max_rank = kwargs.get("max_lora_rank", 16) if has_ranks else None
        self._sources: dict[str, str] = {}

    def on(self, prompts: Sequence[Prompt], table: pa.Table) -> Sequence[Prompt]:
        """Return the prompts of rows with their adapters; an unknown one makes an error row."""
        column = self._config.lora_column
        if column is None:
            return prompts
        # what failed may be there for the next row batch
        errors: dict[str, str] = {}
        names = python_values(column_of(table, column))
        return [
            prompt
            if prompt.error or name in (None, "", self._config.model)
            else self._with_adapter(prompt, name, errors)
            for prompt, name in zip(prompts, names, strict=True)
        ]

    def _with_adapter(self, prompt: Prompt, name: object, errors: dict[str, str]) -> Prompt:
        if not isinstance(name, str):
            error = describe_error("UnknownAdapter", f"a name must be a text, got {name!r:.100}")
            return prompt._replace(error=error)
        if name not in self._sources and name not in errors:
            try:
                source = adapter_source(name, self._config.lora_path)
                check_adapter(source, max_rank=self._max_rank)
                self._sources[name] = source
            except ConfigError as error:
                errors[name] = describe_error("UnknownAdapter", error)
        if name in errors:
            return prompt._replace(error=errors[name])
        return prompt._replace(payload=add_payload(prompt.payload, {LORA: self._sources[name]}))
