"""The sampling options of each row: the stage's own, with what the row's columns replace."""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from raybatch.errors import ConfigError, did_you_mean
from raybatch.stages.batches import python_values
from raybatch.stages.options import FIXED_PER_STAGE
from raybatch.stages.schema import describe_error
from raybatch.types import FLAG_OPTIONS, WHOLE_OPTIONS, Sampling

_NAMES = tuple(f.name for f in dataclasses.fields(Sampling))


def row_samplings(
    table: pa.Table,
    sampling: Sampling,
    *,
    overrides: Mapping[str, str],
    sampling_column: str | None,
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
    known: dict[object, Sampling | str] = {}
    samplings: list[Sampling | str] = []
    for changes in _row_changes(table, overrides, sampling_column):
        key = repr(changes)
        if key not in known:
            known[key] = _replace(sampling, changes)
        samplings.append(known[key])
    return samplings


def _row_changes(
    table: pa.Table, overrides: Mapping[str, str], sampling_column: str | None
) -> Iterator[list[Any]]:
    """Yield per row the JSON value first and then (option, value) pairs of the typed columns."""
    columns = [python_values(table.column(column)) for column in overrides.values()]
    texts = (
        [None] * table.num_rows
        if sampling_column is None
        else python_values(table.column(sampling_column))
    )
    for row, text in enumerate(texts):
        typed = zip(overrides, (values[row] for values in columns), strict=True)
        yield [text, *typed]


def _replace(sampling: Sampling, changes: Sequence[Any]) -> Sampling | str:
    text, *typed = changes
    try:
        merged = {**_parse(text), **{name: v for name, v in typed if v is not None}}
        values = {name: _coerce(name, value) for name, value in merged.items()}
        for name in FIXED_PER_STAGE:
            if name in values and values[name] != getattr(sampling, name):
                raise ConfigError(
                    f"{name} is one value for the whole stage ({getattr(sampling, name)!r}), "
                    f"the row asks for {values[name]!r}"
                )
        return dataclasses.replace(sampling, **values) if values else sampling
    except (ConfigError, ValueError, TypeError) as error:
        return describe_error("InvalidSampling", error)


def _parse(value: object) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, Exception):
        raise ConfigError(f"the value cannot be read: {value}")
    options = json.loads(value) if isinstance(value, str | bytes) else value
    if not isinstance(options, Mapping):
        raise ConfigError(f"sampling options must be a JSON object, got {value!r}")
    return {name: option for name, option in options.items() if option is not None}


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
    if name == "stop":
        return _tuple_of(name, [value] if isinstance(value, str) else value, str)
    if name == "stop_token_ids":
        items = [_whole(name, item) for item in _tuple_of(name, value, int | float)]
        return tuple(items)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    if name not in WHOLE_OPTIONS:
        return float(value)
    whole = _whole(name, value)
    # vLLM writes "all tokens" as 0 or -1.
    return None if name == "top_k" and whole in (0, -1) else whole


def _whole(name: str, value: float) -> int:
    if isinstance(value, bool) or value != value or not float(value).is_integer():
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _tuple_of(name: str, value: object, kind: Any) -> tuple[Any, ...]:  # noqa: ANN401
    items = list(value) if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, kind) for item in items):
        raise ConfigError(f"{name} must be a list, got {value!r}")
    return tuple(items)
