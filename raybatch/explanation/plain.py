"""Frozen records from the plain values that JSON gives back."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from raybatch.config import from_mapping
from raybatch.errors import ConfigError

_T = TypeVar("_T")


def from_plain(cls: type[_T], value: Mapping[str, Any], *, where: str) -> _T:
    """Build the dataclass `cls` from nested mappings and lists, as `dataclasses.asdict` gives them.

    Fields may be plain values, other such dataclasses, tuples, and any of these or None.

    Raises:
        ConfigError: the value does not have the shape of the record.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must hold the fields of {cls.__name__}, got {value!r}")
    hints = get_type_hints(cls)
    fields = {
        key: _convert(hints[key], inner, f"{where}.{key}") if key in hints else inner
        for key, inner in value.items()
    }
    return from_mapping(cls, fields, where=where)


def _convert(hint: Any, value: Any, where: str) -> Any:  # noqa: ANN401 - data of a file
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        (hint,) = (arg for arg in get_args(hint) if arg is not type(None))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value, where=where)
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, got {value!r}")
        item, *rest = get_args(hint)
        if rest != [...] and len(value) != len(get_args(hint)):
            raise ConfigError(f"{where} must have {len(get_args(hint))} values, got {value!r}")
        return tuple(_convert(item, inner, f"{where}[{i}]") for i, inner in enumerate(value))
    return value
