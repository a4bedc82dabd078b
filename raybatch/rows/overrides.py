"""The sampling options of each row: those of the stage, with what columns of the row replace.

Names are those of vLLM's `SamplingParams`; options without effect are dropped, others refused.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError, did_you_mean
from raybatch.records.structured_outputs import structured_text
from raybatch.records.types import FLAG_OPTIONS, WHOLE_OPTIONS, Sampling
from raybatch.rows.batches import json_value, python_values
from raybatch.rows.options import FIXED_PER_STAGE
from raybatch.rows.schema import describe_error

_NAMES = tuple(f.name for f in dataclasses.fields(Sampling))
# options beside which any other that is valid alone is valid
_ALONE = Sampling()
_NO_BOUND = 1 << 62
logger = logging.getLogger(__name__)

# how vLLM hands tokens and texts over, which is the stage's business here
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
# options that decide an answer and that nothing here does, with the value that asks for nothing
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
_RENAMED = {"guided_decoding": "structured_outputs"}


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
        table: read only; holds the columns named in `overrides` and `sampling_column`.
        sampling: of the stage; a null takes its value. Equal rows share one record.
        overrides: sampling option to the typed column that replaces it.
        sampling_column: a column of JSON texts or structs with several options at once. Arrow
            structs turn absent options into null and ints into floats: null is the default and a
            whole number is an int, therefore.
    """
    if not overrides and sampling_column is None:
        return [sampling] * table.num_rows
    readers: list[tuple[str, str | None]] = [(column, name) for name, column in overrides.items()]
    if sampling_column is not None:
        readers.insert(0, (sampling_column, None))
    values = [python_values(table.column(column)) for column, _ in readers]
    known: dict[object, Sampling | str] = {}
    samplings: list[Sampling | str] = []
    for row in zip(*values, strict=True):
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
        return dataclasses.replace(sampling, **changes) if changes else sampling
    except ConfigError as error:  # of two options that do not fit together
        columns = ", ".join(repr(column) for column, _ in readers)
        return describe_error("InvalidSampling", f"columns {columns}: {error}")


def _changes(
    sampling: Sampling, name: str | None, value: object, fixed: Sequence[str]
) -> dict[str, Any]:
    """Return the options that one value of a row sets; `name` is None for a JSON value.

    Raises:
        ConfigError: an option is unknown or out of range on its own.
    """
    options = _parse(value) if name is None else {} if value is None else {name: value}
    changes = {option: _coerce(option, item) for option, item in options.items()}
    for option in fixed:
        if option in changes and changes[option] != getattr(sampling, option):
            raise ConfigError(
                f"{option} is one value for the whole stage ({getattr(sampling, option)!r}), "
                f"the row asks for {changes[option]!r}; set it in the sampling of the stage"
            )
    for option, item in changes.items():
        bound = {} if option == "max_tokens" else {"max_tokens": _NO_BOUND}
        dataclasses.replace(_ALONE, **{**bound, option: item})
    return changes


def _parse(value: object) -> dict[str, Any]:
    options = json_value(value)
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise ConfigError(f"sampling options must be a JSON object, got {value!r}")
    return own_options({n: option for n, option in options.items() if option is not None})


def _coerce(name: str, value: Any) -> Any:  # noqa: ANN401 - any JSON value
    """Return `value` in the type of the option; raise ConfigError where it has another meaning."""
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
    if name == "stop":
        return _tuple_of(name, [value] if isinstance(value, str) else value, str)
    if name == "stop_token_ids":
        items = [_whole(name, item) for item in _tuple_of(name, value, int | float)]
        return tuple(items)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if name not in WHOLE_OPTIONS:
        return _number(name, value)
    whole = _whole(name, value)
    # vLLM writes "all tokens" as 0 or -1.
    return None if name == "top_k" and whole in (0, -1) else whole


def _number(name: str, value: float) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise ConfigError(f"{name} is larger than any number of its kind") from error


def _whole(name: str, value: float) -> int:
    if isinstance(value, bool) or value != value or not _number(name, value).is_integer():
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _tuple_of(name: str, value: object, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, kind) for item in items):
        raise ConfigError(f"{name} must be a list, got {value!r}")
    return tuple(items)


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those that change nothing here.

    Args:
        options: of one row, with the names of vLLM; none is None.

    Raises:
        ConfigError: an option of vLLM that would change the answer, and that is not supported.
    """
    kept = {}
    for name, value in options.items():
        if name in _NO_EFFECT:
            warn_once(name)
        elif name in _RENAMED:
            raise ConfigError(f"{name} has another name in vLLM now: {_RENAMED[name]}")
        elif name not in _REFUSED:
            kept[name] = value
        elif value != _REFUSED[name]:
            raise ConfigError(f"{name} is an option of vLLM that is not supported; leave it out")
    return kept


@cache
def warn_once(name: str) -> None:
    """Log that an option has no effect, once in this process."""
    logger.warning("the sampling option %s has no effect: texts and tokens are always there", name)
