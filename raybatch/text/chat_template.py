"""Renders chat templates: jinja2 in a sandbox, with limits for each rendering.

Templates get the environment of transformers, without a few filters for web pages. The sandbox
restricts access to objects; the limits here bound run time and memory. Operations that may blow up
(products, padded or formatted texts) are refused in advance; created values are counted. Limits on
steps and characters come first, because they are deterministic.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000
# maximum characters of one value, and of all values; a character has up to 4 bytes
MAX_CHARS = 1 << 25
MAX_TOTAL_CHARS = 1 << 27
# maximum items of a value, or pieces that it is split into
MAX_ITEMS = 1 << 20
# maximum letters that a text is iterated by
MAX_PIECES = 1 << 22
# CPU seconds, so that a busy machine does not change answers
MAX_CPU_S = 10.0
_MAX_BITS = 1 << 16
_MAX_TIME_FORMAT = 1000
_CLOCK_EVERY = 16
_MAX_PRECISION = 100
_MAX_INDENT = 32

_NULL_CONTENT = re.compile(r"""\bcontent['"\]]*\s*(is\s+(not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE)
# mark at the end of a message to continue; no filter changes its letters
_END = "\ue004\ue005 "

_DIGITS = re.compile(r"\d+")
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[^a-zA-Z%]*[a-zA-Z]")
_BRACE_FIELD = re.compile(r"\{[^{}]*[{}]?")
_ESCAPED_BRACES = re.compile(r"\{\{|\}\}")
_TEXTS = (str, bytes)
_CONTAINERS = (list, tuple, set, frozenset, dict)

# names of filters that count loop iterations, count values, and concatenate and count texts
_STEP, _SPEND, _CONCAT = "__raybatch_step", "__raybatch_spend", "__raybatch_concat"
# kinds of expressions whose values are counted
_MADE = (nodes.Call, nodes.Dict, nodes.Filter, nodes.List)


class TemplateLimitError(Exception):
    """A template exceeded a limit of rendering."""


class ChatTemplate:
    """A parsed chat template; call `render`.

    Raises:
        TemplateError: it cannot be parsed.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.knows_developer = "'developer'" in text or '"developer"' in text
        self.asks_for_null = _NULL_CONTENT.search(text) is not None
        environment = _Environment()
        # inserts the counting filters
        code = environment.compile(_Guarding(environment).visit(environment.parse(text)))
        self._budget = environment.budget
        self._template = Template.from_code(
            environment, code, environment.make_globals(None), uptodate=None
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool | str = False,
        **variables: Any,  # noqa: ANN401 - of the template
    ) -> str:
        """Return the text of messages.

        Args:
            add_generation_prompt: end with the beginning of a new message.
            continue_final_message: end inside the last message; a text names its field, by default
                "content".
            **variables: variables of the template.

        Raises:
            TemplateLimitError: the template exceeds a limit.
            Exception: any error of the template.
        """
        last: str | None = None
        if continue_final_message and add_generation_prompt:
            raise ValueError("set only one of continue_final_message and add_generation_prompt")
        if continue_final_message:
            field = "content" if continue_final_message is True else str(continue_final_message)
            messages, last = self._marked(messages, field)
        variables = {"tools": None, "documents": None, **variables, "messages": messages}
        variables["add_generation_prompt"] = add_generation_prompt
        pieces, chars = [], 0
        with self._budget.renewed():
            for piece in self._template.generate(**variables):
                chars += len(piece)
                if chars > MAX_CHARS:
                    raise TemplateLimitError(f"it writes more than {MAX_CHARS:,} characters")
                pieces.append(piece)
        rendered = "".join(pieces)
        return rendered if last is None else _cut_at_end(rendered, last)

    def _marked(
        self, messages: Sequence[Mapping[str, Any]], field: str
    ) -> tuple[list[dict[str, Any]], str]:
        """Return the messages with a mark at the end of the last one, and its text."""
        marked = deepcopy([dict(message) for message in messages])
        value = marked[-1].get(field)
        if value is None or field not in self.text:
            raise ValueError(
                f"cannot continue the last message: it has no {field!r}, or the template drops it; "
                "end with a user or tool message"
            )
        if isinstance(value, str):
            marked[-1][field] = value + _END
            return marked, value
        for part in reversed(value):
            if "text" in part:
                text = str(part["text"])
                part["text"] = text + _END
                return marked, text
        raise ValueError("cannot continue the last message: it has no text part")


def _cut_at_end(rendered: str, last: str) -> str:
    """Return the text before the mark, without blanks before it if the template trims."""
    place = rendered.rfind(_END.strip())
    if place < 0 or last.strip() not in rendered:
        raise ValueError("cannot continue the last message: the template changes or drops it")
    before = rendered[:place]
    return before if rendered.startswith(_END, place) else before.rstrip()


class _Budget(threading.local):
    """The usage of the rendering in a thread, compared with its limits.

    It counts steps (loop iterations, macro calls and values) and characters of values.
    """

    def __init__(self) -> None:
        self.steps = self.chars = 0
        self._end_s = float("inf")

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Reset the usage for the rendering inside the context."""
        self.steps = self.chars = 0
        self._end_s = time.thread_time() + MAX_CPU_S
        try:
            yield
        finally:
            self._end_s = float("inf")

    def step(self) -> None:
        """Count an iteration of a loop; raise TemplateLimitError above the limit."""
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise TemplateLimitError(f"rendering takes more than {MAX_STEPS:,} steps")
        if self.steps % _CLOCK_EVERY == 0 and time.thread_time() > self._end_s:
            raise TemplateLimitError(f"rendering takes more than {MAX_CPU_S:.0f} s")

    def spend(self, value: Any) -> Any:  # noqa: ANN401 - whatever a template makes
        """Count the size of a new value and return it; TemplateLimitError above the limit."""
        self.step()
        self.chars += len(value) if type(value) is str and len(value) <= MAX_CHARS else _size(value)
        if self.chars > MAX_TOTAL_CHARS:
            raise TemplateLimitError(f"its values have more than {MAX_TOTAL_CHARS:,} characters")
        return value


def _size(value: object) -> int:
    """Return the number of characters and items in a value, repeated ones counted each time."""
    chars = items = 0
    open_values: list[object] = [value]
    while open_values:
        one = open_values.pop()
        items += 1
        if items > MAX_ITEMS:
            raise TemplateLimitError(f"a value holds more than {MAX_ITEMS:,} items")
        if isinstance(one, _TEXTS):
            chars += len(one)
        elif isinstance(one, int):
            chars += one.bit_length() // 3
        elif isinstance(one, Mapping):
            open_values.extend(one.keys())
            open_values.extend(one.values())
        elif isinstance(one, _CONTAINERS):
            open_values.extend(one)
    _fits(chars)
    return chars + items


def _measure(value: object) -> int:
    """Return how many characters a value may add to a text; a number counts as its value."""
    return abs(value) if isinstance(value, int) else _size(value)


def _fits(chars: int) -> None:
    if chars > MAX_CHARS:
        raise TemplateLimitError(f"a text has more than {MAX_CHARS:,} characters")


def _check_operator(operator: str, left: object, right: object) -> None:
    """Raise TemplateLimitError if the result of an operator would be too large."""
    if operator == "%":
        if isinstance(left, _TEXTS):
            _check_format(left, _PERCENT_FIELD, [right])
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


def _checked_call(
    function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments of a call; TemplateLimitError if its result would be too large."""
    name = str(getattr(function, "__name__", ""))
    # the sandbox wraps formatting functions
    owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
    values = (*args, *kwargs.values())
    if name in ("strftime", "strftime_now"):
        if any(isinstance(value, str) and len(value) > _MAX_TIME_FORMAT for value in values):
            raise TemplateLimitError(
                f"the format of strftime has more than {_MAX_TIME_FORMAT:,} characters"
            )
    elif isinstance(owner, str) and name in ("format", "format_map"):
        _check_format(_ESCAPED_BRACES.sub("", owner), _BRACE_FIELD, values)
    elif isinstance(owner, (*_TEXTS, int)):
        if name == "join" and args:
            args = values = (_listed(args[0]), *args[1:])
        _check_made(name, owner, values)
    return args


def _listed(values: Any) -> Any:  # noqa: ANN401 - what is to be joined
    """Return an iterator's values as a list, so that they can be counted."""
    if isinstance(values, Iterable) and not isinstance(values, _CONTAINERS):
        return list(islice(values, MAX_ITEMS + 1))
    return values


def _check_made(name: str, first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    """Raise TemplateLimitError if the result of a method or filter would be too large.

    Args:
        name: the name of the method or filter.
        first: the value that it is applied to.
        others: its arguments.
    """
    rule = _RULES.get(name)
    most = MAX_ITEMS if rule is _check_letters else MAX_CHARS
    # a number that is written or added asks for nothing
    for value in others if name not in ("format", "sum") else ():
        if isinstance(value, int) and abs(value) > most:
            raise TemplateLimitError(f"{name} gets a number above {most:,}")
    if rule is not None:
        rule(first, others)


def _check_format(format: str | bytes, field: re.Pattern[str], values: Sequence[object]) -> None:
    """Raise TemplateLimitError if a formatted text may be too long for any values."""
    text = format.decode("latin-1") if isinstance(format, bytes) else format
    fields = field.findall(text)
    if any("*" in one or "{" in one[1:] for one in fields):
        raise TemplateLimitError("a format must have its width as a number, not from a value")
    widths = sum(int(digits[:9]) for one in fields for digits in _DIGITS.findall(one))
    largest = max(map(_size, values), default=0)
    _fits(len(text) + widths + len(fields) * largest)


def _check_percent(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    if isinstance(first, str):
        _check_format(first, _PERCENT_FIELD, others)


def _check_replace(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    old, new, *_ = [*(one for one in others if isinstance(one, _TEXTS)), "", ""]
    are_texts = isinstance(first, _TEXTS) and type(first) is type(old)
    if are_texts and len(new) > len(old):
        _fits(len(first) + first.count(old) * (len(new) - len(old)))


def _check_join(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    # the separator is first in the method, and behind the values in the filter
    values = (first, *others)
    pieces = next((one for one in values if isinstance(one, _CONTAINERS)), ())
    _fits(_size(pieces) + len(pieces) * sum(len(one) for one in values if isinstance(one, _TEXTS)))


def _check_product(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    _fits(len(first) * max(map(_measure, others), default=8))


def _check_indent(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    lines = first.count("\n") + 1 if isinstance(first, str) else 1
    _fits(lines * max(4, sum(map(_measure, others))))


def _check_split(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    separator = next((one for one in others if isinstance(one, _TEXTS) and one), None)
    pieces = len(str(first)) // 2 if separator is None else first.count(separator)
    if pieces > MAX_PIECES:
        raise TemplateLimitError("the template splits a text into too many pieces")


def _check_letters(first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    if any(isinstance(one, _TEXTS) and len(one) > MAX_PIECES for one in (first, *others)):
        raise TemplateLimitError("the template splits a text into too many pieces")


def _check_precision(_first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    if any(isinstance(one, int) and abs(one) > _MAX_PRECISION for one in others):
        raise TemplateLimitError("a number has too many digits")


def _check_sum(_first: Any, others: Sequence[Any]) -> None:  # noqa: ANN401
    if any(isinstance(one, _CONTAINERS) for one in others):
        raise TemplateLimitError("the filter sum does not support lists; write a loop")


# checks of methods and filters whose results may be larger than the numbers in the call
_RULES: Mapping[str, Callable[[Any, Sequence[Any]], None]] = {
    **dict.fromkeys(("expandtabs", "translate"), _check_product),
    **dict.fromkeys(("rsplit", "split", "splitlines", "title", "wordcount"), _check_split),
    **dict.fromkeys(
        ("batch", "groupby", "list", "map", "reverse", "slice", "sort", "unique"), _check_letters
    ),
    "format": _check_percent,
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "round": _check_precision,
    "sum": _check_sum,
}
# removed filters: for web pages, or with random results
_REMOVED = ("pprint", "random", "urlize", "wordwrap", "xmlattr")


def _checked_filters(filters: Mapping[str, Callable[..., Any]]) -> dict[str, Callable[..., Any]]:
    """Return filters with checks of their results, without those for web pages."""

    def checked(name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        # filters may request jinja2's context as the first argument
        place = int(hasattr(made, "jinja_pass_arg"))

        # attributes of a filter tell jinja2 which further arguments to pass
        @wraps(made)
        def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - of any filter
            values = list(args)
            if name == "join":
                values[place] = _listed(values[place])
            _check_made(name, values[place], [*values[place + 1 :], *kwargs.values()])
            return made(*values, **kwargs)

        return run

    names = ("center", "truncate", *_RULES)
    kept = {name: made for name, made in filters.items() if name not in _REMOVED}
    return kept | {name: checked(name, kept[name]) for name in names if name in kept}


class _Generation(Extension):
    """Support for `{% generation %}`, which marks model answers for training."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _QuietNamespace(Namespace):
    """A namespace with an empty repr, since one that contains itself would be endless."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # no part of a template may run before its budget is set
            optimized=False,
            finalize=self.shown,
            extensions=[_Generation, loopcontrols],
        )
        self.budget = _Budget()
        self.filters = _checked_filters(self.filters)
        self.filters |= {"tojson": _to_json, **_counting(self)}
        self.globals |= {
            "namespace": _QuietNamespace,
            "raise_exception": _raise,
            "strftime_now": strftime_now,
        }
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        _check_operator(operator, left, right)
        return self.budget.spend(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805
        # parameter names that cannot clash with keywords of a template
        args = _checked_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def shown(self, value: Any) -> Any:  # noqa: ANN401
        """Return a value to be output; counted if it is converted to text."""
        return value if type(value) is str else self.budget.spend(value)

    def concat(self, pieces: Iterable[str]) -> str:
        """Return the text of a block or macro from its pieces."""
        pieces = list(pieces)
        _fits(sum(map(len, pieces)))
        return str(self.budget.spend("".join(pieces)))


def _counting(environment: "_Environment") -> dict[str, Callable[..., Any]]:
    """Return the counting filters; with a context argument they are not run at compile time."""
    budget = environment.budget

    @pass_context
    def step(_context: Context, value: Any) -> Any:  # noqa: ANN401
        budget.step()
        return value

    @pass_context
    def spend(_context: Context, value: Any) -> Any:  # noqa: ANN401
        return budget.spend(value)

    @pass_context
    def concat(_context: Context, values: Sequence[Any]) -> str:
        return environment.concat([str(environment.shown(value)) for value in values])

    return {_STEP: step, _SPEND: spend, _CONCAT: concat}


def strftime_now(format: str) -> str:
    """Return the formatted current time, for templates that state the date."""
    return datetime.now().astimezone().strftime(format)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if isinstance(indent, str) or (indent is not None and not 0 <= indent <= _MAX_INDENT):
        raise TemplateLimitError(f"the indent of tojson must be a number from 0 to {_MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Guarding(NodeTransformer):
    """Wraps expressions of a template in counting filters."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit(self, node: nodes.Node) -> Any:  # noqa: ANN401 - a node of the same use
        if isinstance(node, nodes.CallBlock):
            self.generic_visit(node.call)  # which has to stay a call
            node.defaults = [self.visit(default) for default in node.defaults]
            node.body = self._counted([self.visit(one) for one in node.body], node.lineno)
            return node
        self.generic_visit(node)
        if isinstance(node, nodes.For | nodes.Macro):
            node.body = self._counted(node.body, node.lineno)
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = self._through(_STEP, node.test)
        if isinstance(node, nodes.Concat):
            return self._through(_CONCAT, nodes.List(node.nodes, lineno=node.lineno))
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        is_part = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_made = is_tuple or is_part or isinstance(node, _MADE)
        return self._through(_SPEND, node) if is_made else node

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        place = {"lineno": node.lineno, "environment": self._environment}
        return nodes.Filter(node, name, [], [], None, None, **place)

    def _counted(self, body: Sequence[nodes.Node], line: int) -> list[nodes.Node]:
        place = {"lineno": line, "environment": self._environment}
        return [nodes.ExprStmt(self._through(_STEP, nodes.Const(0, **place)), **place), *body]
