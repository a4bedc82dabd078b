"""Comparison of Python values that are to be the same in Arrow: 1, 1.0 and True are three."""

import datetime
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# bool is an int and a datetime is a date for Python: what is special comes first
_KINDS = (bool, int, float, str, bytes, datetime.datetime, datetime.date)
# whose comparison says all, where their types are the same
_PLAIN = frozenset({*_KINDS, type(None)})


def is_nested(value: object) -> bool:
    """Return whether a value is one that a function can change in place."""
    return isinstance(value, list | Mapping)


def copied(value: Any) -> Any:  # noqa: ANN401 - data of a row
    """Return a value with copies of the lists and mappings in it; all else is shared."""
    if isinstance(value, Mapping):
        return {key: copied(item) for key, item in value.items()}
    if isinstance(value, list):
        # token ids and texts are many, and need no look each
        is_flat = _PLAIN.issuperset(set(map(type, value)))
        return value.copy() if is_flat else [copied(item) for item in value]
    return value


def is_same(value: Any, held: Any) -> bool:  # noqa: ANN401 - data of a row
    """Return whether a value is what Arrow holds, of the same kinds at every depth.

    Tuples count as lists, NaN as NaN, a subclass as its base, and a mapping as the pairs of an
    Arrow map; a key that is not there counts as None.

    Args:
        value: of a function.
        held: as read from Arrow. Keys that only this has must be None.
    """
    if value is None or held is None or value is held:
        return value is held
    if isinstance(value, Mapping):
        if isinstance(held, Mapping):
            return _has_same_items(value, held)
        return isinstance(held, list) and is_same(list(value.items()), held)
    if isinstance(value, list | tuple):
        return isinstance(held, list | tuple) and _are_same(value, held)
    if isinstance(value, np.ndarray) or isinstance(held, np.ndarray):
        return _is_same_array(value, held)
    if _kind(value) is not _kind(held):
        return False
    try:
        return bool(value == held) or bool(value != value and held != held)
    except (ValueError, RuntimeError):  # a comparison that is no truth value
        return False


def _has_same_items(value: Mapping[Any, Any], held: Mapping[Any, Any]) -> bool:
    if any(held[key] is not None for key in held.keys() - value.keys()):
        return False
    return all(key in held and is_same(item, held[key]) for key, item in value.items())


def _are_same(values: Sequence[Any], held: Sequence[Any]) -> bool:
    if len(values) != len(held):
        return False
    # long lists of tokens are compared without a look at each
    if all(map(operator.is_, values, held)):
        return True
    types = set(map(type, values))
    is_plain = len(types) == 1 and _PLAIN.issuperset(types) and types == set(map(type, held))
    if is_plain and type(values) is type(held) and values == held:
        return True
    return all(map(is_same, values, held))


def _is_same_array(value: Any, held: Any) -> bool:  # noqa: ANN401 - data of a row
    if not isinstance(value, np.ndarray) or not isinstance(held, np.ndarray):
        return False
    if value.dtype != held.dtype or value.shape != held.shape:
        return False
    if value.dtype == object:
        return _are_same(value.tolist(), held.tolist())
    return bool(np.array_equal(value, held, equal_nan=value.dtype.kind in "fc"))


def _kind(value: object) -> type:
    return next((kind for kind in _KINDS if isinstance(value, kind)), type(value))
