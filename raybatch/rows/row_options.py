"""Tools that a model may call: of the stage or of a row, for the chat template and for parsers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from raybatch.backends.kinds import facts_of
from raybatch.errors import ConfigError
from raybatch.models.adapters import adapter_source, check_adapter
from raybatch.records.payload import CHAT, DOCUMENT_AT, LORA, POOLING, add_payload
from raybatch.records.pooling import Pooling, pooling_of
from raybatch.records.types import Sampling
from raybatch.rows.batches import json_value, python_values
from raybatch.rows.options import OnTooLong, StageConfig
from raybatch.rows.prompt import Prompt
from raybatch.rows.prompt_inputs import column_of
from raybatch.rows.schema import describe_error
from raybatch.text.prompt_errors import InvalidPrompt

# option of a chat template, and field of a request to an endpoint
TOOLS = "tools"
# of every row: a backend ends it with its one vector
POOLED = Sampling(max_tokens=1)


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


def with_pooling(
    prompts: Sequence[Prompt], table: pa.Table, *, pooling: Pooling, column: str | None
) -> Sequence[Prompt]:
    """Return the prompts of rows with their options; a bad value makes an error row.

    Args:
        table: the rows, read only.
        column: of JSON texts or structs with options that win over them; None for none.
    """
    if column is None:
        given = pooling.given()
        if not given:
            return prompts
        return [_with(prompt, given) for prompt in prompts]
    known: dict[str, Mapping[str, Any] | str] = {}
    found = []
    for prompt, value in zip(prompts, python_values(column_of(table, column)), strict=True):
        key = repr(value)
        if key not in known:
            known[key] = _options(value, pooling, column)
        found.append(_with(prompt, known[key]))
    return found


def fit_pooled(prompt: Prompt, *, max_len: int | None, on_too_long: OnTooLong) -> Prompt:
    """Return the prompt as it fits the context, which it may fill; cut or refused where it is long.

    What the tokenizer puts around a text, and the query of a document, is never cut.
    """
    ids = prompt.token_ids
    if max_len is None or ids is None or prompt.error or len(ids) <= max_len:
        return prompt
    border = json.loads(prompt.payload or "{}").get(DOCUMENT_AT, 0)
    excess = len(ids) - border - max_len
    start, stop = prompt.cuttable or (0, len(ids))
    if max(excess, border - max_len) <= 0:
        return prompt
    if on_too_long == "drop":
        return prompt._replace(is_filtered=True)
    if on_too_long == "error" or border > max_len or stop - start <= excess:
        longest = max(len(ids) - border, border)
        way_out = "set on_too_long to cut or drop such rows, or cut them before"
        if border > max_len:
            way_out = "a query is never cut: shorten it, or leave the row out"
        return prompt._replace(
            error=f"PromptTooLong: {longest} prompt tokens in a context of {max_len}; {way_out}"
        )
    cut = slice(start, start + excess) if on_too_long == "truncate_left" else None
    cut = cut or slice(stop - excess, stop)
    # its bounds are not those of the prompt that is left
    return prompt._replace(token_ids=np.delete(ids, cut), cuttable=None)


def _options(value: object, pooling: Pooling, column: str) -> Mapping[str, Any] | str:
    """Return the options of a row, or what is wrong with them."""
    try:
        given = json_value(value)
        # a row without options has those of the stage
        given = {} if given is None else given
        if not isinstance(given, Mapping):
            raise ConfigError(f"pooling options must be a JSON object, got {value!r}")
        return pooling_of(given, default=pooling).given()
    except (ConfigError, ValueError) as error:
        return describe_error("InvalidPooling", f"column {column!r}: {error}")


def _with(prompt: Prompt, options: Mapping[str, Any] | str) -> Prompt:
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
        has_ranks = facts_of(config.backend).takes_vllm_options
        self._max_rank = kwargs.get("max_lora_rank", 16) if has_ranks else None
        self._sources: dict[str, str] = {}

    def on(self, prompts: Sequence[Prompt], table: pa.Table) -> Sequence[Prompt]:
        """Return the prompts of rows with their adapters; an unknown one makes an error row."""
        column = self._config.lora_column
        if column is None:
            return prompts
        # what failed may be there for the next row batch
        refused: dict[str, str] = {}
        values = python_values(column_of(table, column))
        return [
            prompt
            if prompt.error or value in (None, "", self._config.model)
            else self._with(prompt, value, refused)
            for prompt, value in zip(prompts, values, strict=True)
        ]

    def _with(self, prompt: Prompt, name: object, refused: dict[str, str]) -> Prompt:
        if not isinstance(name, str):
            error = describe_error("UnknownAdapter", f"a name must be a text, got {name!r:.100}")
            return prompt._replace(error=error)
        if name not in self._sources and name not in refused:
            self._find(name, refused)
        if name in refused:
            return prompt._replace(error=refused[name])
        return prompt._replace(payload=add_payload(prompt.payload, {LORA: self._sources[name]}))

    def _find(self, name: str, refused: dict[str, str]) -> None:
        """Note where an adapter lies, or in `refused` what is wrong with it."""
        try:
            source = adapter_source(name, self._config.lora_path)
            check_adapter(source, max_rank=self._max_rank)
        except ConfigError as error:
            refused[name] = describe_error("UnknownAdapter", error)
        else:
            self._sources[name] = source
