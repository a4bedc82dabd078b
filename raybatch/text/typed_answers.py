"""Answers in JSON as typed Arrow values: the type that a JSON schema gives, and its values."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from raybatch.records.structured_outputs import StructuredOutputs

JSON = Any

_INT64 = range(-(1 << 63), 1 << 63)
_SCALARS: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}


class _MismatchError(ValueError):
    pass


class AnswerType(NamedTuple):
    """The Arrow type of answers, and how to make a value of it.

    `convert` takes a value that `json.loads` returns, and its JSON path for errors.
    """

    arrow: pa.DataType
    convert: Callable[[JSON, str], Any]


@lru_cache(16)
def answer_type(constraint: str) -> AnswerType | None:
    """Return the type of answers under a constraint (JSON text); None without a JSON schema.

    Objects with properties are structs, and arrays with items lists; every value may be null.
    What has no single type (several, an object without properties, a recursive reference) is a
    string with JSON.

    Example:
        >>> schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        >>> answer_type(json.dumps({"json": json.dumps(schema)})).arrow
        StructType(struct<a: int64>)
    """
    schema = StructuredOutputs.parse(constraint).json
    if schema is None:
        return None
    root = json.loads(schema)
    return _type_of(root, root, ())


def read_answer(text: str, kind: AnswerType) -> tuple[Any, str]:
    """Return (value of an answer in this type, ""), or (None, "Class: reason it has none")."""
    try:
        return kind.convert(json.loads(text, parse_constant=_refuse), "$"), ""
    except _MismatchError as error:
        return None, f"OtherType: {error}"
    except (ValueError, RecursionError) as error:
        return None, f"InvalidJSON: {error}"
    except OverflowError:
        return None, "OtherType: a number is beyond 64 bits"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _type_of(node: JSON, root: JSON, references: tuple[str, ...]) -> AnswerType:
    node = node if isinstance(node, dict) else {}
    reference = node.get("$ref")
    if reference is not None:
        target = _target(root, reference)
        if reference in references or target is None:
            return _AS_JSON
        return _type_of(target, root, (*references, reference))
    if "properties" in node and _names(node) <= {"object"}:
        return _struct(
            {name: _type_of(part, root, references) for name, part in node["properties"].items()}
        )
    if isinstance(node.get("items"), dict) and _names(node) <= {"array"}:
        return _list(_type_of(node["items"], root, references))
    parts = node.get("anyOf") or node.get("oneOf") or node.get("allOf")
    if parts:
        kinds = [_type_of(part, root, references) for part in parts if not _is_null(part)]
        return _common(kinds)
    values = [node["const"]] if "const" in node else node.get("enum", [])
    names = _names(node) or {_name_of(value) for value in values} - {"null"}
    return _common([_scalar(name) for name in sorted(names)])


def _target(root: JSON, reference: str) -> JSON:
    node = root
    if not reference.startswith("#"):
        return None
    for step in filter(None, reference.removeprefix("#").split("/")):
        step = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(node, dict) or step not in node:
            return None
        node = node[step]
    return node


def _names(node: Mapping[str, JSON]) -> set[str]:
    names = node.get("type", [])
    return set([names] if isinstance(names, str) else names) - {"null"}


def _is_null(node: JSON) -> bool:
    return isinstance(node, dict) and (node.get("type") == "null" or node.get("const", "") is None)


def _name_of(value: JSON) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null"}
    return names.get(type(value), "")


def _common(kinds: list[AnswerType]) -> AnswerType:
    types = {kind.arrow for kind in kinds}
    if types == {pa.int64(), pa.float64()}:
        return _scalar("number")
    is_plain = len(types) == 1 and not any(kind is _AS_JSON for kind in kinds)
    # structs that look alike may differ inside, where one holds JSON as text
    return kinds[0] if is_plain and (len(kinds) == 1 or types <= {*_SCALARS.values()}) else _AS_JSON


def _scalar(name: str) -> AnswerType:
    if name not in _SCALARS:
        return _AS_JSON

    def convert(value: JSON, path: str) -> Any:  # noqa: ANN401
        if value is None:
            return None
        found = _name_of(value)
        if name == "integer" and found == "number" and value.is_integer():
            value, found = int(value), "integer"
        if name == "number" and found == "integer":
            value, found = float(value), "number"
        if found != name:
            raise _MismatchError(f"{path} is not of the type {name}")
        if name == "integer" and value not in _INT64:
            raise _MismatchError(f"{path} is beyond 64 bits")
        if name == "string":
            _check_text(value, path)
        return value

    return AnswerType(_SCALARS[name], convert)


def _struct(fields: Mapping[str, AnswerType]) -> AnswerType:
    if not fields:
        return _AS_JSON  # Parquet has no struct without fields

    def convert(value: JSON, path: str) -> Any:  # noqa: ANN401
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _MismatchError(f"{path} is not of the type object")
        return {
            name: kind.convert(value.get(name), f"{path}.{name}") for name, kind in fields.items()
        }

    return AnswerType(pa.struct([(name, kind.arrow) for name, kind in fields.items()]), convert)


def _list(item: AnswerType) -> AnswerType:
    def convert(value: JSON, path: str) -> Any:  # noqa: ANN401
        if value is None:
            return None
        if not isinstance(value, list):
            raise _MismatchError(f"{path} is not of the type array")
        return [item.convert(one, f"{path}[{i}]") for i, one in enumerate(value)]

    return AnswerType(pa.list_(item.arrow), convert)


def _to_text(value: JSON, path: str) -> str | None:
    if value is None:
        return None
    text = json.dumps(value, ensure_ascii=False)
    _check_text(text, path)
    return text


def _check_text(text: str, path: str) -> None:
    if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
        raise _MismatchError(f"{path} has half of a surrogate pair, which UTF-8 cannot hold")


_AS_JSON = AnswerType(pa.string(), _to_text)
