"""Finds keywords of a JSON schema that XGrammar does not enforce, and checks finished answers.

This module does not import XGrammar; its behaviour was found by experiment, and tests compare it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias
from urllib.parse import unquote

from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import install_command
from raybatch.records.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

JSON: TypeAlias = Any
# a gap is closed by a check of answers, by that check if the user wants it, or by nothing
Remedy = Literal["check", "refuse or check", "refuse"]

# where a schema contains schemas: by name, in lists, single
_MAPS = ("properties", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_ALONE = ("items", "additionalProperties", "unevaluatedItems", "unevaluatedProperties")
# in the order in which XGrammar looks for them; it uses the first and ignores the others
_COMBINERS = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
_OPEN = ("additionalProperties", "unevaluatedProperties")
_NEVER = frozenset(
    (
        *("not", "if", "contains", "dependentRequired", "dependentSchemas", "dependencies"),
        *("$dynamicRef", "$recursiveRef"),
    )
)
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    "string": ("format", "pattern", "minLength", "maxLength"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    "array": ("items", "prefixItems", "unevaluatedItems", "minItems", "maxItems", "uniqueItems"),
    "object": (*(*_MAPS, *_OPEN, "required", "propertyNames", "minProperties", "maxProperties"),),
}
_LIMITING = frozenset(("type", *_COMBINERS, *(key for keys in _OF_TYPE.values() for key in keys)))
# keywords from which XGrammar infers the type of a schema without one
_IMPLYING = {
    "object": ("properties", *_OPEN),
    "array": ("items", "prefixItems", "unevaluatedItems"),
}
_IN_NAMES = frozenset(("type", "enum", "const", *_OF_TYPE["string"]))
_TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_FORMATS = frozenset(
    (
        *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"),
        *("uri", "uri-reference", "uri-template"),
    )
)
# XGrammar checks neither the lengths of months nor leading zeros in addresses
_LOOSE_FORMATS = ("date", "date-time", "ipv4")
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
# above it XGrammar ignores it
_MAX_MULTIPLE = 1000
# numbers are written with six digits behind the point
_MIN_RANGE = 1e-5
_ATOM = re.compile(
    r"\\u\{[^}]*\}|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}|\\c.|\\.|\[\^?(?:\\.|[^\\\]])*\]|\(\?.|.",
    re.DOTALL,
)
# a quote, a backslash or a control character, in a class with ranges or alone: XGrammar writes it
# unescaped, but JSON text needs it escaped
_ESCAPED_IN_JSON = re.compile(
    r"[\"\x00-\x1f]|\\(?:[^dDwWsSux\W]|[\"\\]|x(?:[01]|22|5[cC])|u(?:\{|00(?:[01]|22|5[cC])|[dD][89a-fA-F]))"
)


class Gap(NamedTuple):
    """A keyword of a JSON schema that the grammar does not enforce, so answers may violate it."""

    keyword: str
    why: str
    remedy: Remedy = "refuse or check"
    path: str = ""

    def message(self) -> str:
        way = "change the schema"
        if self.remedy != "refuse":
            way += ", or set structured_outputs.on_unsupported to 'check' (answers are checked "
            way += "afterwards)"
        where = f"{self.keyword!r} at {self.path or '/'} of the JSON schema"
        return f"{where} cannot be enforced: {self.why}; {way}"


@dataclass(frozen=True, slots=True)
class _Schema:
    """A schema with the definitions and types that its parts refer to."""

    root: JSON
    validator: Validator
    _seen: set[str] = field(default_factory=set)

    def gaps(self, node: JSON, path: str = "") -> Iterator[Gap]:
        if not isinstance(node, dict):
            return
        for gap in self._gaps_of(node, is_root=not path):
            yield gap._replace(path=path)
        for key in _MAPS:
            for name, part in (node.get(key) or {}).items():
                yield from self.gaps(part, f"{path}/{key}/{name}")
        for key in _LISTS:
            for i, part in enumerate(node.get(key) or ()):
                yield from self.gaps(part, f"{path}/{key}/{i}")
        for key in _ALONE:
            yield from self.gaps(node.get(key), f"{path}/{key}")
        pointer = node.get("$ref")
        if isinstance(pointer, str) and pointer.startswith("#/") and pointer not in self._seen:
            self._seen.add(pointer)
            yield from self.gaps(self._target(pointer), pointer[1:])

    def _gaps_of(self, node: dict[str, JSON], *, is_root: bool) -> Iterator[Gap]:
        for key in sorted(_NEVER & node.keys()):
            yield Gap(key, "grammars cannot express it")
        if "$id" in node and not is_root:
            yield Gap("$id", "references inside would be read from the root")
        combiner = next((key for key in _COMBINERS if key in node), None)
        if combiner is not None:
            yield from self._gaps_beside(combiner, node)
            return
        types = _declared_types(node)
        if not types:
            for name in sorted(_LIMITING & node.keys()):
                yield Gap(name, "it needs a type")
        for name in types:
            yield from _GAPS_OF_TYPE[name](node) if name in _GAPS_OF_TYPE else ()

    def _gaps_beside(self, key: str, node: dict[str, JSON]) -> Iterator[Gap]:
        value = node[key]
        if key in ("const", "enum"):
            if value == [] and key == "enum":
                yield Gap(key, "it is empty, so that no value is allowed", "refuse")
            for each in [value] if key == "const" else value:
                if not self._allows(node, each):
                    yield Gap(key, f"{_shown(each)} is not allowed by the other keywords")
            return
        parts = value if isinstance(value, list) else [value]
        for name in sorted(_LIMITING & node.keys() - {key}):
            is_type_union = key in ("anyOf", "oneOf") and name == "type"
            if is_type_union and all(
                map(_expanded(_declared_types(node)).issuperset, map(self.types, parts))
            ):
                continue
            yield Gap(name, f"it is ignored next to {key}")
        if key == "$ref" and not str(value).startswith("#"):
            why = "only references inside the schema (#/...) work; copy the definition into $defs"
            yield Gap(key, why, "refuse")
        elif key == "$ref" and not re.fullmatch("#(/.*)?", value):
            yield Gap(key, "references must be #, or paths that begin with #/")
        elif key == "$ref" and self._followed(node) is None:
            yield Gap(key, f"{_shown(value)} does not exist, or refers back to itself", "refuse")
        if key == "allOf" and len(parts) > 1:
            yield Gap(key, "none of several parts is enforced; merge them into one")
        if key == "oneOf":
            pairs = ((i, k) for k in range(len(parts)) for i in range(k))
            for i, k in pairs:
                if not self._are_disjoint(parts[i], parts[k]):
                    why = f"an answer may match both {i} and {k}, by types, values and required"
                    yield Gap(key, f"{why} properties (anyOf allows that)")
                    return

    def types(self, node: JSON, depth: int = 0) -> frozenset[str]:
        """Return the types that values of a part may have; an integer is a number too."""
        node = self._resolved(node)
        if not isinstance(node, dict) or depth > 8:
            return _TYPES
        key = next((key for key in _COMBINERS if key in node), None)
        if key in ("const", "enum"):
            values = [node[key]] if key == "const" else node[key]
            return frozenset(_type_of(value) for value in values)
        if key in ("anyOf", "oneOf", "allOf"):
            return frozenset().union(*(self.types(part, depth + 1) for part in node[key]))
        return _expanded(_declared_types(node)) or _TYPES

    def _are_disjoint(self, one: JSON, other: JSON, depth: int = 0) -> bool:
        """Return whether both schemas are known to share no value."""
        one, other = self._resolved(one), self._resolved(other)
        if not self.types(one) & self.types(other):
            return True
        if not (isinstance(one, dict) and isinstance(other, dict)) or depth > 8:
            return False
        for this, that in ((one, other), (other, one)):
            values = [this["const"]] if "const" in this else this.get("enum")
            if values is not None:
                return not any(self._allows(that, value) for value in values)
        if {"object"} != self.types(one) | self.types(other):
            return False
        names = {*one.get("required", ())} & {*other.get("required", ())}
        mine, theirs = one.get("properties", {}), other.get("properties", {})
        return any(
            self._are_disjoint(mine.get(name, True), theirs.get(name, True), depth + 1)
            for name in names
        )

    def _allows(self, node: JSON, value: JSON) -> bool:
        try:
            return bool(self.validator.evolve(schema=node).is_valid(value))
        except Exception:  # as `_wrong_with`
            return False

    def has_finite_answer(self) -> bool:
        """Return whether an answer can be finite; valid after `gaps` has visited all parts."""
        ending = set[str]()
        while more := {
            pointer
            for pointer in {"#", *self._seen} - ending
            if self._ends(self._target(pointer), ending)
        }:
            ending |= more
        return self._ends(self.root, ending)

    def _ends(self, node: JSON, ending: Collection[str]) -> bool:
        """Return whether an answer to a part can be finite, given the references that can."""
        if not isinstance(node, dict):
            return True
        if (pointer := node.get("$ref")) is not None:
            return pointer in ending
        for key, number in (("anyOf", any), ("oneOf", any), ("allOf", all)):
            if key in node:
                return number(self._ends(part, ending) for part in node[key])
        given = _declared_types(node)
        needed: list[JSON] = []
        if given == ("object",):
            # names that nothing is said of are none of the grammar's beside those that are given
            is_closed = {"properties", "patternProperties"} & node.keys()
            parts, others = (
                node.get("properties", {}),
                node.get("additionalProperties", not is_closed),
            )
            required = node.get("required", ())
            needed = [parts.get(name, others) for name in required]
            ends = [self._ends(part, ending) for n, part in parts.items() if n not in required]
            open_parts = [others, *node.get("patternProperties", {}).values()]
            is_open = any(part is not False and self._ends(part, ending) for part in open_parts)
            if not is_open and node.get("minProperties", 0) > len(required) + sum(ends):
                return False
        elif given == ("array",):
            few, least = node.get("prefixItems", []), node.get("minItems", 0)
            needed = [*few[:least], *[node.get("items", True)] * (least > len(few))]
        return all(self._ends(part, ending) for part in needed)

    def _resolved(self, node: JSON) -> JSON:
        """Follow references; one that is broken or circular allows anything."""
        followed = self._followed(node)
        return True if followed is None else followed

    def _followed(self, node: JSON) -> JSON | None:
        """Return the schema at the end of references; None if they are broken or circular."""
        seen = set[str]()
        while isinstance(node, dict) and "$ref" in node:
            if node["$ref"] in seen:
                return None
            seen.add(node["$ref"])
            node = self._target(node["$ref"])
        return node

    def _target(self, pointer: str) -> JSON | None:
        node = self.root
        for name in str(pointer).split("/")[1:]:
            name = unquote(name).replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and name.isdigit() and int(name) < len(node):
                node = node[int(name)]
            else:
                node = node.get(name) if isinstance(node, dict) else None
        return node


def gaps(schema: JSON) -> list[Gap]:
    """Return the keywords that XGrammar does not enforce, of a schema that is `completed`.

    Raises:
        ConfigError: it is not a JSON schema.
    """
    read = _Schema(schema, _validator(schema))
    found = list(read.gaps(schema))
    # an anchor cannot be followed, and is a gap
    if all(gap.keyword != "$ref" for gap in found) and not read.has_finite_answer():
        why = "each answer would contain another one, without end"
        found.append(Gap("required", why, "refuse"))
    return found


def completed(schema: JSON) -> JSON:
    """Return a schema with explicit keywords where XGrammar and JSON Schema differ.

    XGrammar would make lists without `items` and objects without `properties` empty if they have a
    number limit, would allow no more items or names than listed, and would ignore a required name
    that is not among the properties.
    """
    if not isinstance(schema, dict):
        return schema
    node = dict(schema)
    for key in (*_MAPS, "$defs", "definitions"):
        if isinstance(node.get(key), dict):
            node[key] = {name: completed(part) for name, part in node[key].items()}
    for key in _LISTS:
        if isinstance(node.get(key), list):
            node[key] = [completed(part) for part in node[key]]
    for key in _ALONE:
        if key in node:
            node[key] = completed(node[key])
    types = _declared_types(node)
    if "array" in types:
        if not {"items", "prefixItems", "unevaluatedItems"} & node.keys():
            node["items"] = True
        if node.get("minItems", 0) > len(node.get("prefixItems", ())):
            node.setdefault("items", node.get("unevaluatedItems", True))
    if types == ("integer",):
        # for whole numbers x > 1.5 is x > 1, and x >= 1.5 is x >= 2
        for key, whole in zip(_BOUNDS, (math.ceil, math.floor, math.floor, math.ceil), strict=True):
            if isinstance(node.get(key), float):
                node[key] = whole(node[key])
    if "contains" not in node:
        node.pop("minContains", None)
    if "object" in types and not {"patternProperties", "propertyNames"} & node.keys():
        if not {"properties", *_OPEN} & node.keys():
            node["additionalProperties"] = True
        names = node.get("properties", {})
        others = node.get("additionalProperties", node.get("unevaluatedProperties", True))
        missing = [name for name in node.get("required", ()) if name not in names]
        if missing and others is not False:
            node["properties"] = names | dict.fromkeys(missing, others)
        is_open = {"patternProperties", "propertyNames", *_OPEN} & node.keys()
        if node.get("minProperties", 0) > len(node.get("properties", {})) and not is_open:
            node["additionalProperties"] = True
    return node


def wrong_with(text: str, constraint: str) -> str:
    """Return what is wrong with a finished answer; "" if nothing is, or nothing is checked."""
    check = _check(constraint)
    return "" if check is None else check(text)


@lru_cache(256)
def _check(constraint: str) -> Callable[[str], str] | None:
    wanted = StructuredOutputs.parse(constraint)
    if wanted.json is None:
        return None
    schema = json.loads(wanted.json)
    try:
        if wanted.on_unsupported != "check" and not gaps(completed(schema)):
            return None
        validator = _validator(schema)
    except (ConfigError, RecursionError):
        # the engine refuses it
        return None
    return lambda text: _wrong_with(text, validator)


def _wrong_with(text: str, validator: Validator) -> str:
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return f"the answer is not JSON: {error}"
    try:
        found = next(iter(validator.iter_errors(value)), None)
    except Exception as failure:  # numbers beyond all floats, patterns that Python cannot compile
        return f"the answer cannot be checked: {type(failure).__name__}: {failure}"
    if found is None:
        return ""
    where = f"the answer violates {found.validator} of its JSON schema at {found.json_path}"
    return f"{where}: {_short(found.message)}"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _validator(schema: JSON) -> Validator:
    try:
        from jsonschema import Draft202012Validator, FormatChecker, SchemaError
        from jsonschema.validators import validator_for
        from referencing import Registry
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"JSON schemas are checked by jsonschema: {install_command('structured')}"
        ) from error

    kind = validator_for(schema, default=Draft202012Validator)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        where = "".join(f"/{part}" for part in error.absolute_path) or "/"
        raise ConfigError(
            f"structured_outputs: json is not a JSON schema: {_short(error.message)} at {where}"
        ) from None
    formats = FormatChecker(())
    formats.checkers = dict(kind.FORMAT_CHECKER.checkers)
    if "date-time" not in formats.checkers:
        formats.checkers["date-time"] = (
            lambda value: not isinstance(value, str) or formats.conforms(value[:10], "date"),
            (),
        )
    # an empty registry: nothing is fetched
    return kind(schema, format_checker=formats, registry=Registry())


def _declared_types(node: Mapping[str, JSON]) -> tuple[str, ...]:
    """Return the types that XGrammar generates for a schema; empty if any value."""
    given = node.get("type")
    if given is not None:
        return (given,) if isinstance(given, str) else tuple(given)
    return tuple(kind for kind, keys in _IMPLYING.items() if any(key in node for key in keys))


def _expanded(types: tuple[str, ...]) -> frozenset[str]:
    return frozenset((*types, "integer")) if "number" in types else frozenset(types)


def _type_of(value: JSON) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _empty_range(node: Mapping[str, JSON], least: str, most: str) -> Iterator[Gap]:
    if node.get(least, 0) > node.get(most, math.inf):
        yield Gap(least, f"{least} {node[least]} and {most} {node[most]} leave no value", "refuse")


def _string_gaps(node: Mapping[str, JSON]) -> Iterator[Gap]:
    yield from _empty_range(node, "minLength", "maxLength")
    kept = next((key for key in _OF_TYPE["string"] if key in node), None)
    if kept in ("format", "pattern"):
        for key in _OF_TYPE["string"]:
            if key in node and key != kept:
                yield Gap(key, f"it is ignored next to {kept}")
    form = node.get("format")
    if form in _LOOSE_FORMATS:
        yield Gap("format", f"only the shape of a {form} is enforced", "check")
    elif form is not None and form not in _FORMATS:
        yield Gap("format", f"the format {_shown(form)} is not supported")
    elif "pattern" in node:
        yield from _pattern_gaps("pattern", node["pattern"])


def _pattern_gaps(keyword: str, pattern: str) -> Iterator[Gap]:
    """Yield the parts of a pattern for which XGrammar generates other strings."""
    depth, before = 0, "|"
    atoms = _ATOM.findall(pattern)
    for place, atom in enumerate(atoms):
        after = atoms[place + 1] if place + 1 < len(atoms) else "|"
        depth += atom.startswith("(") - (atom == ")")
        # ranges and negated classes exclude such characters
        inside = re.sub(r"(\\.|[^\\])-(\\.|[^\\\]])", "", atom[1:]) if atom[0] == "[" else atom
        is_negated = atom.startswith("[^")
        if atom.startswith("(?") and atom != "(?:":
            yield Gap(keyword, f"groups such as {atom}...) are not supported")
        elif (atom == "^" and (depth or before != "|")) or (
            atom == "$" and (depth or after != "|")
        ):
            yield Gap(keyword, f"{atom} only works at the ends")
        elif not is_negated and _ESCAPED_IN_JSON.search(inside):
            why = f"{_shown(atom)} matches characters that JSON escapes, or is unknown"
            yield Gap(keyword, why)
        elif re.search(r"\\[dws]" if is_negated else r"\\[DWS]", atom):
            yield Gap(keyword, f"{atom} only matches ASCII", "check")
        before = atom


def _has_number(bounds: Mapping[str, float], *, is_whole: bool) -> bool:
    """Return whether any number is within bounds; there is one bound at each end."""
    low, above = bounds.get("minimum", -math.inf), bounds.get("exclusiveMinimum", -math.inf)
    high, below = bounds.get("maximum", math.inf), bounds.get("exclusiveMaximum", math.inf)
    if is_whole:
        least = max(low, above + 1)
        return least <= min(high, below - 1)
    return max(low, above) < min(high, below) or (above < low <= high < below and low == high)


def _number_gaps(node: Mapping[str, JSON]) -> Iterator[Gap]:
    # what is beside them in the draft of 2013 is true or false
    given = {key: node[key] for key in _BOUNDS if not isinstance(node.get(key, True), bool)}
    low = [given[key] for key in _BOUNDS[:2] if key in given]
    high = [given[key] for key in _BOUNDS[2:] if key in given]
    is_whole = node["type"] == "integer"
    if low and high and not _has_number(given, is_whole=is_whole):
        limits = " and ".join(f"{key} {bound}" for key, bound in given.items())
        yield Gap(min(given), f"{limits} leave no value", "refuse")
    elif low and high and 0 < min(high) - max(low) < _MIN_RANGE and not is_whole:
        yield Gap("maximum", f"a range below {_MIN_RANGE} contains no number that can be written")
    multiple = node.get("multipleOf")
    if multiple is None:
        return
    types = node.get("type", ())
    bounds = [key for key in _OF_TYPE["number"] if key in node and key != "multipleOf"]
    if "number" in ([types] if isinstance(types, str) else types):
        yield Gap("multipleOf", "it is enforced only for integers")
    elif bounds:
        yield Gap("multipleOf", f"it is ignored next to {bounds[0]}")
    elif not isinstance(multiple, int) or multiple > _MAX_MULTIPLE:
        yield Gap("multipleOf", f"it is enforced for whole numbers up to {_MAX_MULTIPLE}")


def _array_gaps(node: Mapping[str, JSON]) -> Iterator[Gap]:
    yield from _empty_range(node, "minItems", "maxItems")
    if node.get("uniqueItems") and node.get("maxItems", 2) > 1:
        yield Gap("uniqueItems", "a grammar does not compare items")
    few = len(node.get("prefixItems", ()))
    if node.get("items") is False and node.get("minItems", 0) > few:
        yield Gap("minItems", f"no more than {few} items are allowed", "refuse")


def _object_gaps(node: Mapping[str, JSON]) -> Iterator[Gap]:
    yield from _empty_range(node, "minProperties", "maxProperties")
    is_open = any(node.get(key, False) is not False for key in _OPEN)
    has_patterns = bool(node.get("patternProperties"))
    missing = [name for name in node.get("required", ()) if name not in node.get("properties", {})]
    if missing:
        yield Gap("required", f"{_shown(missing[0])} is not among the properties")
    num_names, num_required = len(node.get("properties", {})), len(node.get("required", ()))
    if node.get("maxProperties", num_required) < num_required:
        yield Gap("maxProperties", f"{num_required} are required", "refuse")
    if node.get("minProperties", 0) > num_names and not (
        is_open or has_patterns or "propertyNames" in node
    ):
        yield Gap("minProperties", f"no more than {num_names} are allowed", "refuse")
    if has_patterns and ("properties" in node or len(node["patternProperties"]) > 1):
        yield Gap("patternProperties", "only one pattern is enforced, and no properties next to it")
    for pattern in node.get("patternProperties", ()):
        yield from _pattern_gaps("patternProperties", pattern)
    if "propertyNames" in node:
        yield from _name_gaps(node)
    if is_open and node.get("properties"):
        yield Gap("properties", "a name written with escapes counts as another name", "check")
    if node.get("minProperties", 0) > 1 and (is_open or has_patterns or "propertyNames" in node):
        yield Gap("minProperties", "a repeated name counts twice", "check")


def _name_gaps(node: Mapping[str, JSON]) -> Iterator[Gap]:
    names = node["propertyNames"]
    if isinstance(names, bool):
        if not names:
            yield Gap("propertyNames", "a schema that allows no name is not enforced")
        return
    beside = {"properties", "patternProperties", "unevaluatedProperties"} & node.keys()
    if beside or node.get("additionalProperties") is False:
        why = f"it is ignored next to {min(beside, default='additionalProperties')}"
        yield Gap("propertyNames", why)
    values = [names["const"]] if "const" in names else names.get("enum", ())
    others = sorted((_LIMITING | _NEVER) & names.keys() - _IN_NAMES)
    if (
        others
        or names.get("type", "string") != "string"
        or not all(isinstance(value, str) for value in values)
    ):
        why = "only the length, pattern, format and values of a name are enforced"
        yield Gap("propertyNames", why)
    elif values and {*_OF_TYPE["string"]} & names.keys():
        yield Gap("propertyNames", "only one of an enum and a pattern is enforced")
    for gap in _string_gaps(names):
        yield gap._replace(keyword=f"propertyNames/{gap.keyword}")


_GAPS_OF_TYPE: Mapping[str, Callable[[Mapping[str, JSON]], Iterator[Gap]]] = {
    "string": _string_gaps,
    "number": _number_gaps,
    "integer": _number_gaps,
    "array": _array_gaps,
    "object": _object_gaps,
}


def _shown(value: JSON) -> str:
    return _short(json.dumps(value, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
