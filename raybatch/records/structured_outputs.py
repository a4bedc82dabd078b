"""Structured outputs: a JSON schema, a regular expression, a choice or a grammar for answers.

Names and meanings are those of vLLM's `structured_outputs`. A constraint travels as one JSON text,
so that options with it can be compared, hashed and stored like all others.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from raybatch.errors import ConfigError, did_you_mean

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputs:
    """One constraint on the text of answers; exactly one of the kinds is set."""

    json: str | None = None
    """A JSON schema as text; the order of its properties is that of the answer."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole answer matches."""
    choice: tuple[str, ...] = ()
    """Texts of which the answer is one."""
    grammar: str | None = None
    """A grammar in the EBNF of llama.cpp and XGrammar; the answer is a `root`."""
    structural_tag: str | None = None
    """XGrammar's structural tag, tags with schemas between them, as JSON text."""
    on_unsupported: Literal["refuse", "check"] = "refuse"
    """Handling of a JSON schema whose grammar would allow wrong answers."""

    @classmethod
    def parse(cls, text: str) -> "StructuredOutputs":
        values = json.loads(text)
        if "choice" in values:
            values["choice"] = tuple(values["choice"])
        return cls(**values)


_ON_UNSUPPORTED = "on_unsupported"
# vLLM accepts these in a request, but only uses those of the engine's config
_WITHOUT_EFFECT = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


_TEXT = (
    _is_text,
    "a regex, grammar or structural_tag of structured_outputs must be a text that is not empty",
)
# by option: whether a value is valid, and the message if it is not
_CHECKS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "json_object": (lambda value: value is True, "structured_outputs.json_object must be true"),
    "choice": (
        lambda value: isinstance(value, list | tuple) and any(value) and all(map(_is_text, value)),
        "structured_outputs.choice must be a list of at least one text, none of them empty",
    ),
    **dict.fromkeys(("regex", "grammar", "structural_tag"), _TEXT),
}


def structured_text(value: object) -> str:
    """Return a constraint as one JSON text; ConfigError: it has none or several of the options.

    The value is a mapping with one of the options of `StructuredOutputs`, or a JSON text of one; a
    schema may be a mapping, a JSON text or a pydantic model.
    """
    if isinstance(value, str):
        value = _loaded(value, "structured_outputs")
    if not isinstance(value, Mapping):
        raise ConfigError(
            "structured_outputs must be a mapping such as {'choice': ['yes', 'no']}, got "
            f"{value!r:.200}"
        )
    known = [field.name for field in fields(StructuredOutputs)]
    for name in value:
        if name not in (*known, *_WITHOUT_EFFECT):
            raise ConfigError(
                f"structured_outputs: unknown option {name!r}{did_you_mean(str(name), known)}"
            )
    chosen = {
        name: option
        for name, option in value.items()
        if option is not None and (option is not False or name == "json")
    }
    for name in _WITHOUT_EFFECT:
        if chosen.pop(name, None) is not None:
            _warn_once(name)
    unsupported = chosen.pop(_ON_UNSUPPORTED, "refuse")
    if unsupported not in ("refuse", "check") or (unsupported == "check" and "json" not in chosen):
        raise ConfigError(
            f"structured_outputs.{_ON_UNSUPPORTED} must be 'refuse', or 'check' if json is set, "
            f"got {unsupported!r}"
        )
    if len(chosen) != 1:
        kinds = ", ".join(name for name in known if name != _ON_UNSUPPORTED)
        raise ConfigError(
            f"structured_outputs must have exactly one of {kinds}, got {list(chosen) or 'none'}"
        )
    name, option = next(iter(chosen.items()))
    if name == "json":
        option = _checked_schema(option)
    elif not (check := _CHECKS[name])[0](option):
        raise ConfigError(f"{check[1]}, got {option!r:.200}")
    if name == "choice":
        option = list(dict.fromkeys(option))
    others = {} if unsupported == "refuse" else {_ON_UNSUPPORTED: unsupported}
    return json.dumps({name: option, **others}, ensure_ascii=False)


def engine_constraint(text: str) -> dict[str, Any]:
    """Return a constraint in vLLM's form, without raybatch's own options."""
    values = json.loads(text)
    values.pop(_ON_UNSUPPORTED, None)
    return values  # type: ignore[no-any-return]


@cache
def _warn_once(name: str) -> None:
    logger.warning(
        "structured_outputs.%s has no effect, as vLLM does not take it per request; leave it out",
        name,
    )


def _loaded(text: str, what: str) -> object:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{what} is not valid JSON: {error}") from error


def _checked_schema(value: Any) -> str:  # noqa: ANN401 - anything a user may pass
    if hasattr(value, "model_json_schema"):
        value = value.model_json_schema()
    if isinstance(value, str):
        value = _loaded(value, "structured_outputs.json")
    if not isinstance(value, Mapping | bool):
        raise ConfigError(
            f"structured_outputs.json must be a JSON schema, an object, got {value!r:.200}"
        )
    if value is False:
        raise ConfigError("structured_outputs.json is false, which no answer can satisfy")
    try:
        # keep the order of the schema, which is that of properties in answers
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"structured_outputs.json is not a JSON value: {error}") from error
