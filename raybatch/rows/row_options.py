"""Options that columns set per row: for sampling, chat templates, pooling and adapters.

Sampling options replace the stage's, with the names of vLLM's `SamplingParams`; options without
effect are dropped, unsupported ones refused. The others travel in the payload of requests.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pyarrow as pa

from raybatch.backends.registry import type_of
from raybatch.errors import ConfigError, did_you_mean
from raybatch.models.source import adapter_source, check_adapter, plain_name
from raybatch.records.payload import CHAT, LORA, POOLING, add_payload
from raybatch.records.pooling import pooling_of
from raybatch.records.structured_outputs import structured_text
from raybatch.records.types import FLAG_OPTIONS, WHOLE_OPTIONS, Sampling
from raybatch.rows.batches import python_values
from raybatch.rows.options import FIXED_PER_STAGE, StageConfig
from raybatch.rows.prompt_inputs import RowInputs
from raybatch.rows.schema import describe_error
from raybatch.text.chat import InvalidPrompt, without_nulls
from raybatch.text.tokenizer import Prompt

# option of a chat template, and field of a request to an endpoint
TOOLS = "tools"
_OPTIONS = "options of the chat template"

_NAMES = tuple(f.name for f in fields(Sampling))
# base options to check one option alone
_ALONE = Sampling()
_NO_BOUND = 1 << 62
logger = logging.getLogger(__name__)

# options for vLLM's handling of tokens and texts, which the stage does here
_NO_EFFECT = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "output_kind",
        "output_text_buffer_length",
        "skip_clone",
        "skip_reading_prefix_cache",
        "stream_interval",
    }
)
# unsupported options that decide an answer, with the value that has no effect
_REFUSED: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": [],
    "extra_args": {},
    "logit_bias": {},
    "logprob_token_ids": [],
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprobs": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "spaces_between_special_tokens": True,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
    "watermarking": False,
}
_GUIDED = ("json", "regex", "choice", "grammar")
RENAMED = {
    "guided_decoding": "structured_outputs",
    **{f"guided_{kind}": f"structured_outputs={{{kind!r}: ...}}" for kind in _GUIDED},
}


def row_samplings(
    table: pa.Table,
    sampling: Sampling,
    *,
    overrides: Mapping[str, str],
    sampling_column: str | None,
    fixed: Sequence[str] = FIXED_PER_STAGE,
) -> list[Sampling | str]:
    """Return the sampling options of each row, or the error text of a row with a bad value.

    Args:
        sampling: options of the stage; null uses its value. Equal rows share one record.
        overrides: sampling option to the typed column that replaces it.
        sampling_column: a column of JSON texts or structs with several options. Arrow structs turn
            absent options into null and ints into floats, so null is the default, and a whole
            number is an int.
        fixed: options that no row may change.
    """
    readers: list[tuple[str, str | None]] = [(column, name) for name, column in overrides.items()]
    if sampling_column is not None:
        readers.insert(0, (sampling_column, None))
    if not readers:
        return [sampling] * table.num_rows
    known: dict[str, Sampling | str] = {}
    samplings = []
    for row in zip(*(python_values(table.column(column)) for column, _ in readers), strict=True):
        key = repr(row)
        if key not in known:
            known[key] = _replaced(sampling, readers, row, fixed)
        samplings.append(known[key])
    return samplings


def _replaced(
    sampling: Sampling,
    readers: Sequence[tuple[str, str | None]],
    values: Sequence[Any],
    fixed: Sequence[str],
) -> Sampling | str:
    """Return the stage's options with those of one row, the typed columns last."""
    changes: dict[str, Any] = {}
    for (column, name), value in zip(readers, values, strict=True):
        try:
            changes.update(_changes(sampling, name, value, fixed))
        except (ConfigError, ValueError, TypeError) as error:
            return describe_error("InvalidSampling", f"column {column!r}: {error}")
    try:
        return replace(sampling, **changes) if changes else sampling
    except ConfigError as error:  # two incompatible options
        columns = ", ".join(repr(column) for column, _ in readers)
        return describe_error("InvalidSampling", f"columns {columns}: {error}")


def _changes(
    sampling: Sampling, name: str | None, value: object, fixed: Sequence[str]
) -> dict[str, Any]:
    """Return the options that one value of a row sets; `name` is None for a JSON value."""
    if name is None:
        given = _json_options(value, "sampling options")
        options = _supported({n: option for n, option in given.items() if option is not None})
    else:
        options = {} if value is None else {name: value}
    changes = {option: _coerce(option, item) for option, item in options.items()}
    for option in fixed:
        if option in changes and changes[option] != getattr(sampling, option):
            raise ConfigError(
                f"{option} must be the same for all rows, in this stage "
                f"{getattr(sampling, option)!r}, got {changes[option]!r}; set it in the sampling "
                "of the stage"
            )
    for option, item in changes.items():
        replace(_ALONE, **{"max_tokens": _NO_BOUND, option: item})
    return changes


def _supported(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those of no effect; ConfigError for unsupported ones."""
    kept = {}
    for name, value in options.items():
        if name in _NO_EFFECT:
            warn_once(name)
        elif name in RENAMED:
            raise ConfigError(f"{name} was renamed in vLLM; use {RENAMED[name]}")
        elif name not in _REFUSED:
            kept[name] = value
        elif value != _REFUSED[name]:
            raise ConfigError(f"the vLLM option {name} is not supported; leave it out")
    return kept


@cache
def warn_once(name: str) -> None:
    """Log that an option has no effect, once in this process."""
    logger.warning("the sampling option %s has no effect: rows always have text and tokens", name)


def _coerce(name: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return `value` in the type of the option; ConfigError: it has no such meaning."""
    if name not in _NAMES:
        raise ConfigError(f"unknown sampling option {name!r}{did_you_mean(name, _NAMES)}")
    if isinstance(value, Exception):
        raise ConfigError(f"{name} cannot be read: {value}")
    if name in FLAG_OPTIONS:
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, got {value!r}")
        return value
    if name == "structured_outputs":
        return structured_text(value)
    if name in ("stop", "stop_token_ids"):
        items = list(value) if isinstance(value, list | tuple) else [value]
        if not all(isinstance(item, str if name == "stop" else int | float) for item in items):
            kind = "texts" if name == "stop" else "token ids"
            raise ConfigError(f"{name} must be a list of {kind}, got {value!r}")
        return tuple(items if name == "stop" else [_whole(name, item) for item in items])
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if name not in WHOLE_OPTIONS:
        return _number(name, value)
    whole = _whole(name, value)
    # 0 and -1 mean "all tokens" in vLLM
    return None if name == "top_k" and whole in (0, -1) else whole


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{name} is too large for a float") from error


def _whole(name: str, value: float) -> int:
    if isinstance(value, bool) or value != value or not _number(name, value).is_integer():
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _json_options(value: object, what: str) -> Mapping[str, Any]:
    options = _json_value(value)
    if not isinstance(options, Mapping | None):
        raise ConfigError(f"{what} must be a JSON object, got {value!r}")
    return options or {}


def _json_value(value: object) -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a cell, parsed if it is JSON text; None for null or an empty text."""
    if isinstance(value, Exception):
        raise ConfigError(f"the value is not valid UTF-8 or Arrow data: {value}")
    if not isinstance(value, str | bytes):
        return value
    try:
        return json.loads(value) if value else None
    except RecursionError as error:
        raise ConfigError("the JSON is nested too deeply") from error


def read_template_options(row: RowInputs) -> dict[str, Any]:
    """Return the chat template options of a row, and its tools; a bad value raises any error."""
    options: dict[str, Any] = {}
    for kind, value in ((_OPTIONS, row.template_options), (TOOLS, row.tools)):
        if isinstance(value, Exception):
            raise value
        options |= _parse_template_options(value, kind)
    return options


def chat_payload(options: Mapping[str, Any]) -> str:
    """Return the payload that an output parser needs for a chat, as JSON."""
    try:
        return json.dumps({CHAT: dict(options)})
    except (TypeError, ValueError) as error:
        raise InvalidPrompt(f"{_OPTIONS} are not valid JSON: {error}") from error


def _parse_template_options(value: Any, kind: str) -> dict[str, Any]:  # noqa: ANN401 - data of a row
    try:
        parsed = _json_value(value)
    except ValueError as error:
        raise InvalidPrompt(f"{kind} are not valid JSON: {error}") from error
    if not isinstance(value, str | bytes):
        parsed = without_nulls(parsed)
    if kind == TOOLS:
        tools = [] if parsed is None else parsed
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise InvalidPrompt(f"tools must be a list of objects, got {value!r:.200}")
        return {TOOLS: tools} if tools else {}
    if not isinstance(parsed, Mapping | None):
        raise InvalidPrompt(f"{kind} must be a JSON object, got {value!r}")
    return {name: option for name, option in (parsed or {}).items() if option is not None}


class PoolingOptions:
    """Add pooling options to prompts: those of a row, else those of the stage."""

    def __init__(self, config: StageConfig) -> None:
        self._config = config
        self._of_stage = {} if config.task == "generate" else config.pooling.given()

    def on(self, prompt: Prompt, value: object, known: dict[str, dict[str, Any] | str]) -> Prompt:
        """Return a prompt with the pooling options of its row; a bad value makes an error row.

        `known` caches options, or the error, by value within a row batch; modified in place.
        """
        if prompt.error or self._config.task == "generate":
            return prompt
        options: dict[str, Any] | str = self._of_stage
        if value is not None:
            key = repr(value)
            if key not in known:
                known[key] = self._read(value)
            options = known[key]
        if isinstance(options, str):
            return prompt._replace(error=options)
        if not options:
            return prompt
        return prompt._replace(payload=add_payload(prompt.payload, {POOLING: options}))

    def _read(self, value: object) -> dict[str, Any] | str:
        try:
            of_row = _json_options(value, "pooling options")
            return pooling_of(of_row, default=self._config.pooling).given()
        except (ConfigError, ValueError) as error:
            cause = f"column {self._config.pooling_column!r}: {error}"
            return describe_error("InvalidPooling", cause)


class Adapters:
    """Look up the adapters of rows: existing ones once, missing ones once per row batch."""

    def __init__(self, config: StageConfig) -> None:
        self._config = config
        kwargs = config.backend.options.get("engine_kwargs") or {}
        has_ranks = type_of(config.backend).takes_vllm_options
        self._max_rank = kwargs.get("max_lora_rank", 16) if has_ranks else None
        self._sources: dict[str, str] = {}
        self._own_names = (None, "", config.model, plain_name(config.model))

    def on(self, prompt: Prompt, name: object, errors: dict[str, str]) -> Prompt:
        """Return the prompt of a row with its adapter; an unknown one makes an error row.

        `errors` has the adapters that were not found in this row batch; modified in place. They
        are looked up again in the next batch.
        """
        if prompt.error or name in self._own_names:
            return prompt
        if not isinstance(name, str):
            error = describe_error("UnknownAdapter", f"the name must be a text, got {name!r:.100}")
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
