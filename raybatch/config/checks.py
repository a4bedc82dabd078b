"""Checks of options that all configs share, and configs from plain mappings."""

import dataclasses
import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, TypeVar

from raybatch.errors import ConfigError, did_you_mean, told_range

_T = TypeVar("_T")

# such as 8GiB, 8 MB, 1.5g or 1e9
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmgtp]?)(i?)b?", re.IGNORECASE)


def from_mapping(cls: type[_T], mapping: Mapping[str, Any], *, where: str) -> _T:
    """Build the config dataclass `cls` from `mapping`.

    Args:
        cls: a dataclass of this library.
        mapping: field names to values; nested configs are built by the caller.
        where: what the mapping is, for error messages, such as "job.yaml: engine".

    Raises:
        ConfigError: an unknown key (with a suggestion), a missing one, or a value out of range.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in mapping:
        if key not in fields:
            raise ConfigError(f"{where}: unknown option {key!r}{did_you_mean(str(key), fields)}")
    for name, field_ in fields.items():
        is_needed = field_.default is field_.default_factory is dataclasses.MISSING
        if is_needed and name not in mapping:
            raise ConfigError(f"{where}: the option {name!r} is missing")
    try:
        return cls(**mapping)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def option_name(config: object, name: str) -> str:
    """Return an option as users write it in job files, flags and mappings: "engine.dtype".

    A config says in `WHERE` below which name its options stand; those without stand alone.
    """
    return f"{getattr(config, 'WHERE', '')}{name}"


def check_min(config: object, name: str, minimum: float) -> None:
    """Raise ConfigError unless the field is a finite number of at least `minimum`."""
    value = getattr(config, name)
    # also NaN, of which nothing is true
    if not is_number(value) or not minimum <= value < math.inf:
        raise ConfigError(
            f"{option_name(config, name)} must be {told_range(f'at least {minimum}', value)}, "
            f"got {value!r}{_bytes_hint(name, value)}"
        )


def check_whole(config: object, name: str, minimum: int, *, others: str = "") -> None:
    """Raise ConfigError unless the field is a whole number of at least `minimum`.

    Args:
        config: whose field it is.
        name: of the field.
        minimum: of the number.
        others: what else it may be, for the message; the caller has looked for that.
    """
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        told = f", {others}" if others else ""
        raise ConfigError(
            f"{option_name(config, name)} must be a whole number of at least {minimum}{told}, "
            f"got {value!r}{_bytes_hint(name, value)}"
        )


def check_bool(config: object, name: str, *, others: str = "") -> None:
    """Raise ConfigError unless the field is true or false.

    Args:
        config: whose field it is.
        name: of the field.
        others: what else it may be, for the message; the caller has looked for that.
    """
    value = getattr(config, name)
    if not isinstance(value, bool):
        told = f", {others}" if others else ""
        raise ConfigError(f"{option_name(config, name)} must be true or false{told}, got {value!r}")


def check_fraction(config: object, name: str, *, is_zero_allowed: bool = True) -> None:
    """Raise ConfigError unless the field is a number between 0 and 1."""
    value = getattr(config, name)
    if not is_number(value) or not 0 <= value <= 1 or not (value or is_zero_allowed):
        lowest = "from 0 to 1" if is_zero_allowed else "above 0 and at most 1"
        raise ConfigError(
            f"{option_name(config, name)} must be {told_range(lowest, value)}, such as 0.01, "
            f"got {value!r}"
        )


def check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    """Raise ConfigError unless the field is one of `choices`."""
    value = getattr(config, name)
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ConfigError(
            f"{option_name(config, name)} must be one of {', '.join(choices)}, got {value!r}{hint}"
        )


def is_number(value: object) -> bool:
    """Return whether a value is a number, which truth values are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _bytes_hint(name: str, value: object) -> str:
    """Return what to write for a size with a unit, where an option counts bytes; else ""."""
    if not name.endswith("_bytes") or not isinstance(value, str | float):
        return ""
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        return ""
    number, unit, is_binary = match.groups()
    factor = (1024 if is_binary else 1000) ** " kmgtp".index(unit.lower() or " ")
    size = Decimal(number) * factor
    return f"; it counts bytes: write {int(size)}" if size >= 1 and size == int(size) else ""
