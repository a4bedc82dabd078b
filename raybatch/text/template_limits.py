"""How much a chat template may do: steps, characters and time of one rendering.

A sandbox keeps a template from objects; this keeps it from running for ever and from filling the
memory. What may grow is refused before it is made: a product, a padded or formatted text. What is
made is counted. Steps and characters decide first, because they are the same in every run.
"""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from itertools import islice
from typing import Any

MAX_STEPS = 1_000_000
# of one value, and of all that are made; a character takes up to 4 bytes
MAX_CHARS = 1 << 25
MAX_TOTAL_CHARS = 1 << 27
MAX_ITEMS = 1 << 20
# that a text is taken apart into
MAX_PIECES = 1 << 22
# of the processor, so that a busy machine changes no answer
MAX_CPU_S = 10.0
_MAX_BITS = 1 << 16
_MAX_TIME_FORMAT = 1000
_CLOCK_EVERY = 16
_MAX_PRECISION = 100

_DIGITS = re.compile(r"\d+")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*[a-zA-Z]")
_BRACE_FIELD = re.compile(r"\{[^{}]*[{}]?")
_ESCAPED_BRACES = re.compile(r"\{\{|\}\}")
_TEXTS = (str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, dict)

_Args = tuple[Any, ...]
_Check = Callable[[_Args, Mapping[str, Any]], _Args]


class TemplateLimitError(Exception):
    """A template did more than a template of prompts has to."""


class Budget(threading.local):
    """What the rendering that runs in a thread has used.

    That is steps (rounds of loops, calls of macros, and values), and characters in values.
    """

    def __init__(self) -> None:
        self.steps = self.chars = 0
        self._end_s = float("inf")

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Give the rendering inside all there is."""
        self.steps = self.chars = 0
        self._end_s = time.thread_time() + MAX_CPU_S
        try:
            yield
        finally:
            self._end_s = float("inf")

    def step(self) -> None:
        """Count a round of a loop; raise TemplateLimitError where there are too many."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"it takes more than {MAX_STEPS:,} steps")
        if self.steps % _CLOCK_EVERY == 0 and time.thread_time() > self._end_s:
            raise TemplateLimitError(f"it takes more than {MAX_CPU_S:.0f} s")

    def spend(self, value: Any) -> Any:  # noqa: ANN401 - whatever a template makes
        """Return a value that was made, counted; raise TemplateLimitError where it is too much."""
        self.step()
        self.chars += len(value) if type(value) is str and len(value) <= MAX_CHARS else _size(value)
        if self.chars > MAX_TOTAL_CHARS:
            raise TemplateLimitError(f"it makes more than {MAX_TOTAL_CHARS:,} characters")
        return value


def _size(value: object) -> int:
    """Return the characters and items in a value, each time that they would be written."""
    if isinstance(value, _TEXTS):
        _fits(len(value))
        return len(value)
    if not isinstance(value, _CONTAINERS):
        return 1
    chars = items = 0
    open_values: list[object] = [value]
    while open_values:
        one = open_values.pop()
        items += 1
        if items > MAX_ITEMS:
            raise TemplateLimitError(f"a value holds more than {MAX_ITEMS:,} items")
        if isinstance(one, Mapping):
            open_values.extend(one.keys())
            open_values.extend(one.values())
        elif isinstance(one, _CONTAINERS):
            open_values.extend(one)
        elif isinstance(one, _TEXTS):
            chars += len(one)
    _fits(chars)
    return chars + items


def _fits(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateLimitError(f"a text has more than {MAX_CHARS:,} characters")


def check_operator(operator: str, left: object, right: object) -> None:
    """Raise TemplateLimitError where an operator would make too much."""
    if operator == "%":
        if isinstance(left, _TEXTS):
            text = left.decode("latin-1") if isinstance(left, bytes) else left
            _check_format(text, _PERCENT_FIELD, [right])
    elif operator == "+":
        # of two texts that fit the sum is counted when it is made
        if not isinstance(left, str | int | float):
            _fits(_size(left) + _size(right))
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if operator == "**":
            bits = left.bit_length() * max(1, right)
        if bits > _MAX_BITS:
            raise TemplateLimitError("a number has too many digits")
    elif isinstance(left, int) or isinstance(right, int):
        times, repeated = (left, right) if isinstance(left, int) else (right, left)
        count = max(0, times) if isinstance(times, int) else 0
        if isinstance(repeated, _TEXTS):
            _fits(count * len(repeated))
        elif isinstance(repeated, list | tuple) and count * _size(repeated) > MAX_ITEMS:
            raise TemplateLimitError(f"a value holds more than {MAX_ITEMS:,} items")


def check_call(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TemplateLimitError where a method of a text or number would make too much."""
    name = str(getattr(function, "__name__", ""))
    # the sandbox puts a function of its own around formatting
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    values = [*args, *kwargs.values()]
    if name in ("strftime", "strftime_now"):
        if any(isinstance(value, str) and len(value) > _MAX_TIME_FORMAT for value in values):
            raise TemplateLimitError("the format of a time is too long")
    elif isinstance(owner, str) and name in ("format", "format_map"):
        _check_format(_ESCAPED_BRACES.sub("", owner), _BRACE_FIELD, values)
    elif isinstance(owner, (*_TEXTS, int)):
        _numbers_fit(args, kwargs)
        if isinstance(owner, str):
            _check_text_method(owner, name, values)


def _check_text_method(owner: str, name: str, values: list[Any]) -> None:
    if name == "replace" and len(values) >= 2:
        _check_replace(owner, values[0], values[1])
    elif name == "join" and values:
        _check_join(owner, values[0])
    elif name == "expandtabs":
        size = next((value for value in values if isinstance(value, int)), 8)
        _fits(len(owner) + owner.count("\t") * abs(size))
    elif name == "translate" and values and isinstance(values[0], Mapping):
        longest = max((_size(value) for value in values[0].values()), default=1)
        _fits(len(owner) * longest)
    elif name in ("split", "rsplit", "splitlines"):
        separator = values[0] if values and isinstance(values[0], str) else None
        pieces = owner.count(separator) if separator else len(owner) // 2
        if pieces > MAX_PIECES:
            raise TemplateLimitError("a text is split into too many pieces")


def _check_replace(text: object, old: object, new: object) -> None:
    if isinstance(text, str) and isinstance(old, str) and isinstance(new, str):
        count = text.count(old) if len(new) > len(old) else 0
        _fits(len(text) + count * (len(new) - len(old)))


def _check_join(separator: str, values: object) -> None:
    if isinstance(values, _CONTAINERS):
        _fits(_size(values) + len(separator) * len(values))


def _check_format(text: str, field: re.Pattern[str], values: list[Any]) -> None:
    """Raise TemplateLimitError where a formatted text may be too long, whatever a field holds."""
    fields = field.findall(text)
    if any("*" in one or "{" in one[1:] for one in fields):
        raise TemplateLimitError("a format takes its width from a value")
    widths = sum(int(digits[:9]) for one in fields for digits in _DIGITS.findall(one))
    largest = max(map(_size, values), default=0)
    _fits(len(text) + widths + len(fields) * largest)


def checked_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return filters that are refused where they would make too much; those of pages are gone."""

    def checked(made: Callable[..., Any], check: _Check) -> Callable[..., Any]:
        # jinja2 reads from a filter's attributes what else to pass to it
        @wraps(made)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any filter
            return made(*check(args, kwargs), **kwargs)

        return run

    kept = {name: made for name, made in filters.items() if name not in _REMOVED}
    return kept | {name: checked(kept[name], check) for name, check in _CHECKS.items()}


def _numbers_fit(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int):
            _fits(abs(value))
    return args


def _few_items(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > MAX_ITEMS:
            raise TemplateLimitError(f"more than {MAX_ITEMS:,} items are asked for")
        if isinstance(value, _TEXTS) and len(value) > MAX_PIECES:
            raise TemplateLimitError("a text is split into too many pieces")
    return args


def _rounds(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    _numbers_fit(args[1:2], kwargs)
    precision = kwargs.get("precision", args[1] if len(args) > 1 else 0)
    if isinstance(precision, int) and abs(precision) > _MAX_PRECISION:
        raise TemplateLimitError("a number has too many digits")
    return args


def _sums(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    start = kwargs.get("start", args[3] if len(args) > 3 else 0)
    if isinstance(start, _CONTAINERS):
        raise TemplateLimitError("lists are not added up; write a loop")
    return args


def _indents(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    width = kwargs.get("width", args[1] if len(args) > 1 else 4)
    size = len(width) if isinstance(width, str) else int(width)
    lines = args[0].count("\n") + 1 if isinstance(args[0], str) else 1
    _fits(abs(size) * lines)
    return args


def _replaces(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    strings = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    if len(strings) >= 3:
        _check_replace(*strings[:3])
    return args


def _joins(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    # jinja2 passes its context first
    context, pieces, *rest = args
    if not isinstance(pieces, Iterable):
        return args
    values = list(islice(pieces, MAX_PIECES + 1))
    _check_join(str(kwargs.get("d", rest[0] if rest else "")), values)
    return (context, values, *rest)


def _formats(args: _Args, kwargs: Mapping[str, Any]) -> _Args:
    if args and isinstance(args[0], str):
        _check_format(args[0], _PERCENT_FIELD, [*args[1:], *kwargs.values()])
    return args


# for pages, or whose result depends on chance
_REMOVED = ("pprint", "random", "urlize", "wordwrap", "xmlattr")
_TAKE_APART = ("batch", "groupby", "list", "map", "reverse", "slice", "sort", "unique")
_CHECKS: dict[str, _Check] = {
    **dict.fromkeys(_TAKE_APART, _few_items),
    "center": _numbers_fit,
    "format": _formats,
    "indent": _indents,
    "join": _joins,
    "replace": _replaces,
    "round": _rounds,
    "sum": _sums,
    "truncate": _numbers_fit,
}
