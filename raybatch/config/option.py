"""Declares options: type and range, description, and what the option decides.

    @options("engine.")
    @dataclass(frozen=True, kw_only=True, slots=True, config=CHECKED)
    class EngineConfig:
        max_num_seqs: Speed[Positive] = 1024  # a docstring below it describes it

Everything else derives from the declaration: checks and messages, flags, job files, the reference
in the docs, the schema for editors, and the fingerprint that a resumed job compares. pydantic
checks types and ranges; `__post_init__` checks combinations.
"""

import ast
import dataclasses
import functools
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Collection, Mapping
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Le
from pydantic import BeforeValidator, ConfigDict, SkipValidation, ValidationError
from pydantic.fields import FieldInfo

from raybatch.errors import ConfigError, did_you_mean, range_text

_T = TypeVar("_T")

# removed choices, by option, and what to do; a suggestion by spelling would mislead
_GONE_CHOICES = dict.fromkeys(
    (("order", name) for name in ("ascending", "shuffle", "depth_first", "dual_scan")),
    ", which was removed: auto is as fast or faster; leave order out, also to resume an output "
    "that was started with it",
)
# removed options, and what to do; a suggestion by spelling would mislead
_GONE = {
    "admission": "rows start in the order of arrival; leave it out",
    "kv_admission_fraction": "the scheduler decides when rows wait for KV memory; leave it out",
    "attn_batch_tokens": "a step with KV on the device is not faster in parts; leave it out",
    "moe_batch_tokens": "feed-forward layers run over all rows of a step; leave it out",
}


class Decides(Enum):
    """What an option decides; ANSWERS if its declaration does not say."""

    ANSWERS = "answers"
    SPEED = "speed"  # also cost, and when a job ends
    PLACE = "place"


Answers = Annotated[_T, Decides.ANSWERS]
Speed = Annotated[_T, Decides.SPEED]
Place = Annotated[_T, Decides.PLACE]

Positive = Annotated[int, Ge(1)]
NonNegative = Annotated[int, Ge(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Ge(0), Le(1)]

# checked in `__post_init__`, which has a more specific message
Unchecked = Annotated[_T, SkipValidation]
# set by processors and batch files, never by users
_HIDDEN = object()
Hidden = Annotated[_T, _HIDDEN]
_SECRET = object()
# a mapping whose values never appear in messages; None is an empty one
SecretMapping = Annotated[
    Mapping[str, Any], BeforeValidator(lambda value: {} if value is None else value), _SECRET
]

# pydantic config of the dataclasses below `options`
CHECKED = ConfigDict(
    use_attribute_docstrings=True,
    extra="forbid",
    strict=True,
    allow_inf_nan=False,
    arbitrary_types_allowed=True,
)
# such as 8GiB, 8 MB, 1.5g or 1e9
_SIZE = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d{1,2})?)\s*([kmgtp]?)(i)?b?", re.IGNORECASE)


def options(where: str) -> Callable[[type[_T]], type[_T]]:
    """Return a decorator that makes a dataclass check its options when it is built.

    The dataclass then raises ConfigError in place of pydantic's error, with the option, the allowed
    values and the value; `where` is the prefix that users write, such as "engine.".
    """

    def decorate(cls: type[_T]) -> type[_T]:
        checked: Any = cls
        checked.WHERE = where
        build = checked.__init__

        @functools.wraps(build)
        def init(self: object, **values: Any) -> None:  # noqa: ANN401
            try:
                build(self, **values)
            except ValidationError as error:
                raise _refusal(checked, error) from None

        checked.__init__ = init
        return cls

    return decorate


def fields_of(cls: type) -> dict[str, FieldInfo]:
    """Return the options, by name, of a class decorated with `options`."""
    found: dict[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return found


def decided_by(field: FieldInfo) -> Decides:
    return next((each for each in field.metadata if isinstance(each, Decides)), Decides.ANSWERS)


def is_hidden(field: FieldInfo) -> bool:
    """Return whether users cannot set an option."""
    return any(each is _HIDDEN for each in field.metadata)


@functools.cache
def documented(cls: type) -> dict[str, str]:
    """Return the description of each option of a class, by name of the option."""
    known = {
        name: field.description or ""
        for name, field in getattr(cls, "__pydantic_fields__", {}).items()
    }
    # such as `Sampling`, which is no pydantic dataclass
    if not any(known.values()):
        [of_class] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(of_class, ast.ClassDef), "the source of a class"
        known = {
            field.target.id: str(text.value.value)
            for field, text in itertools.pairwise(of_class.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        }
    return {name: " ".join(text.split()) for name, text in known.items()}


def signature_of(
    function: Callable[..., object], cls: type, *, without: Collection[str] = ()
) -> inspect.Signature:
    """Return the signature of `function` with the options of `cls` in place of `**options`."""
    known = inspect.signature(function)
    named = [p for p in known.parameters.values() if p.kind is not p.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.get_default(call_default_factory=True),
            annotation=field.annotation,
        )
        for name, field in fields_of(cls).items()
        if name not in (*known.parameters, *without) and not is_hidden(field)
    ]
    return known.replace(parameters=[*named, *options])


def is_default(config: object, name: str) -> bool:
    default = fields_of(type(config))[name].get_default(call_default_factory=True)
    return bool(getattr(config, name) == default)


def from_mapping(cls: type[_T], mapping: Mapping[str, Any], *, where: str) -> _T:
    """Build a config from a mapping, such as a part of a job file; nested configs must be built.

    `where` names the mapping, such as "job.yaml: engine". ConfigError: an unknown option (with a
    suggestion), a missing one, or a value out of range.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in mapping:
        if name not in fields:
            raise ConfigError(f"{where}: {_unknown(name, fields)}")
    for name, field in fields.items():
        is_needed = field.default is field.default_factory is dataclasses.MISSING
        if is_needed and name not in mapping:
            raise ConfigError(f"{where}: the option {name!r} is missing")
    try:
        return cls(**mapping)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error


def from_plain(cls: type[_T], value: Mapping[str, Any], *, where: str) -> _T:
    """Build the dataclass `cls` from nested mappings and lists, as `dataclasses.asdict` gives them.

    Fields may be plain values, other such dataclasses, tuples, and any of these or None.
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
    if get_origin(hint) is not tuple:
        return value
    if not isinstance(value, list | tuple):
        raise ConfigError(f"{where} must be a list, got {value!r}")
    item, *rest = get_args(hint)
    if rest != [...] and len(value) != len(get_args(hint)):
        raise ConfigError(f"{where} must have {len(get_args(hint))} values, got {value!r}")
    return tuple(_convert(item, inner, f"{where}[{i}]") for i, inner in enumerate(value))


def _unknown(name: str, known: Collection[str]) -> str:
    if name in _GONE:
        return f"the option {name!r} was removed: {_GONE[name]}"
    return f"unknown option {name!r}{did_you_mean(name, known)}"


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refusal(cls: type, error: ValidationError) -> ConfigError:
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # raised by __post_init__
        return cause
    name = str(first["loc"][0])
    field, value = fields_of(cls).get(name), first["input"]
    if field is None:
        return ConfigError(_unknown(name, fields_of(cls)))
    if first["type"] == "missing":
        return ConfigError(f"the option {name!r} is missing")
    if len(first["loc"]) > 1:
        # pydantic's input is the wrong part alone; users want to see the whole value
        wholes = (e["input"] for e in error.errors(include_url=False) if e["loc"] == (name,))
        value = next(wholes, value)
    shown = f"a {type(value).__name__}" if _SECRET in field.metadata else f"{value!r:.200}"
    if field.examples:
        allowed = f"a name such as {' or '.join(field.examples)}"
    else:
        allowed = _allowed(field.annotation, field.metadata, value)
    return ConfigError(
        f"{getattr(cls, 'WHERE', '')}{name} must be {allowed}, got {shown}"
        f"{_hint(field.annotation, name, value)}"
    )


def _allowed(kind: Any, limits: list[Any], value: object) -> str:  # noqa: ANN401
    if get_origin(kind) is Annotated:
        kind, *more = get_args(kind)
        return _allowed(kind, [*limits, *more], value)
    if get_origin(kind) in (Union, types.UnionType):
        named = [each for each in get_args(kind) if each is not type(None)]
        *parts, last = (_allowed(each, limits, value) for each in named)
        has_none = len(named) < len(get_args(kind))
        if not parts:
            return f"{last}, or none" if named == [bool] else last
        if has_none:
            return f"{', '.join([*parts, last])} or none"
        return f"{', '.join(parts)}, or {last}"
    if get_origin(kind) is Literal:
        choices = [str(each) for each in get_args(kind)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else f'"{choices[0]}"'
    least = next((limit.ge for limit in limits if hasattr(limit, "ge")), None)
    if kind is int:
        return "a whole number" + ("" if least is None else f" of at least {least}")
    if kind is float:
        above = next((limit.gt for limit in limits if hasattr(limit, "gt")), None)
        most = next((limit.le for limit in limits if hasattr(limit, "le")), None)
        if most is not None:
            lowest = f"from {least} to" if above is None else f"above {above} and at most"
            return f"{range_text(f'{lowest} {most}', value)}, such as 0.01"
        return range_text(f"at least {least}" if above is None else f"above {above}", value)
    names = {bool: "true or false", str: "a text"}
    if get_origin(kind) is tuple and get_args(kind)[0] is str:
        return "a list of texts"
    is_mapping = dataclasses.is_dataclass(kind) or get_origin(kind) in (dict, Mapping)
    return names.get(kind, "a mapping" if is_mapping else "a list")


def _hint(kind: Any, name: str, value: object) -> str:  # noqa: ANN401
    """Return a suggestion: the nearest choice, or the bytes of a size with a unit."""
    parts = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    choices = [str(c) for p in parts if get_origin(p) is Literal for c in get_args(p)]
    if isinstance(value, str) and (name, value) in _GONE_CHOICES:
        return _GONE_CHOICES[name, value]
    is_size = name.endswith("_bytes") and isinstance(value, str | float)
    match = _SIZE.fullmatch(str(value).strip()) if is_size else None
    if match is None:
        return did_you_mean(value, choices) if isinstance(value, str) and choices else ""
    number, unit, is_binary = match.groups()
    factor = (1024 if is_binary else 1000) ** " kmgtp".index(unit.lower() or " ")
    size = Decimal(number) * factor
    return f"; the unit is bytes: write {int(size)}" if size >= 1 and size == int(size) else ""
