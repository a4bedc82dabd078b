"""Renders chat templates: jinja2 in a sandbox, with an end to what one rendering may do.

Templates see what transformers shows them. What differs: loops, values and time are limited (see
`raybatch.text.template_limits`), and a few filters for web pages are not there.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes, pass_context
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from raybatch.text.template_limits import (
    MAX_CHARS,
    Budget,
    TemplateLimitError,
    check_call,
    check_operator,
    checked_filters,
)

_MAX_INDENT = 32
_NULL_CONTENT = re.compile(r"""\bcontent['"\]]*\s*(is\s+(not\s+)?|[!=]=\s*)none\b""", re.IGNORECASE)
# stands at the end of a message that is to be continued; no filter changes its letters
_END = "\ue004\ue005 "

# filters that count a round of a loop, and a value
STEP, SPEND = "__raybatch_step", "__raybatch_spend"
# a value of these kinds is counted when it is made
_MADE = (nodes.Call, nodes.Concat, nodes.Dict, nodes.Filter, nodes.List)


class ChatTemplate:
    """A chat template, parsed once.

    Raises:
        TemplateError: it is no template.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.knows_developer = "'developer'" in text or '"developer"' in text
        self.asks_for_null = _NULL_CONTENT.search(text) is not None
        environment = _Environment()
        # by the filters `STEP` and `SPEND` it counts what it does
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
            add_generation_prompt: end with the begin of a new message.
            continue_final_message: end inside the last message; a text names its field, which is
                "content" else.
            **variables: that the template may read.

        Raises:
            TemplateLimitError: the template does too much.
            Exception: whatever else a template raises.
        """
        last: str | None = None
        if continue_final_message and add_generation_prompt:
            raise ValueError("a message is continued or a new one begun, not both")
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
        """Return the messages with a mark at the end of the last one, and the text of that one."""
        marked = deepcopy([dict(message) for message in messages])
        value = marked[-1].get(field)
        if value is None or field not in self.text:
            raise ValueError(
                f"the last message is to be continued, and has no {field!r}, or the template "
                "leaves it out; end with a user or tool message"
            )
        if isinstance(value, str):
            marked[-1][field] = value + _END
            return marked, value
        for part in reversed(value):
            if "text" in part:
                text = str(part["text"])
                part["text"] = text + _END
                return marked, text
        raise ValueError("the last message has no text to continue")


def _cut_at_end(rendered: str, last: str) -> str:
    """Return what stands before the mark; blanks before it go where the template trims."""
    place = rendered.rfind(_END.strip())
    if place < 0 or last.strip() not in rendered:
        raise ValueError("the template does not show the message that is to be continued")
    before = rendered[:place]
    return before if rendered.startswith(_END, place) else before.rstrip()


class _Generation(Extension):
    """`{% generation %}` marks the answers of a model, which is for training."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _QuietNamespace(Namespace):
    """Shows nothing of what it holds: shown inside itself it would be endless."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            # nothing of a template runs before its budget is there
            optimized=False,
            extensions=[_Generation, loopcontrols],
        )
        self.budget = Budget()
        self.filters = checked_filters(self.filters)
        self.filters |= {"tojson": _to_json, **_counting(self.budget)}
        self.globals |= {
            "namespace": _QuietNamespace,
            "raise_exception": _raise,
            "strftime_now": strftime_now,
        }
        del self.globals["lipsum"]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401
        check_operator(operator, left, right)
        return self.budget.spend(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401, N805
        # names that no keyword of a template can have
        check_call(__obj, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)


def _counting(budget: Budget) -> dict[str, Callable[..., Any]]:
    """Return the filters that count; one that wants the context is never run while compiling."""

    @pass_context
    def step(_context: Context, value: Any) -> Any:  # noqa: ANN401
        budget.step()
        return value

    @pass_context
    def spend(_context: Context, value: Any) -> Any:  # noqa: ANN401
        return budget.spend(value)

    return {STEP: step, SPEND: spend}


def strftime_now(format: str) -> str:
    """Return the time of now in a format, for templates that say the date."""
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
        raise TemplateLimitError(f"tojson takes an indent up to {_MAX_INDENT}")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Guarding(NodeTransformer):
    """Puts filters that count around what a template does."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit(self, node: nodes.Node) -> Any:  # noqa: ANN401 - a node of the same use
        if isinstance(node, nodes.CallBlock):
            self.generic_visit(node.call)  # which has to stay a call
            node.defaults = [self.visit(default) for default in node.defaults]
            node.body = self._counted([self.visit(one) for one in node.body], node.lineno)
            return node
        if isinstance(node, nodes.FilterBlock | nodes.AssignBlock):
            # the filter of a block has no value before it that could be counted
            node.body = [self.visit(one) for one in node.body]
            return node
        if isinstance(node, nodes.Output):
            node.nodes = [self._through(SPEND, self._shown(one)) for one in node.nodes]
            return node
        self.generic_visit(node)
        if isinstance(node, nodes.For | nodes.Macro):
            node.body = self._counted(node.body, node.lineno)
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = self._through(STEP, node.test)
        is_tuple = isinstance(node, nodes.Tuple) and node.ctx == "load"
        is_part = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
        is_made = is_tuple or is_part or isinstance(node, _MADE)
        return self._through(SPEND, node) if is_made else node

    def _shown(self, node: nodes.Expr) -> nodes.Expr:
        if isinstance(node, nodes.TemplateData):
            return nodes.Const(node.data, lineno=node.lineno, environment=self._environment)
        return self.visit(node)  # type: ignore[no-any-return]

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        place = {"lineno": node.lineno, "environment": self._environment}
        return nodes.Filter(node, name, [], [], None, None, **place)

    def _counted(self, body: Sequence[nodes.Node], line: int) -> list[nodes.Node]:
        place = {"lineno": line, "environment": self._environment}
        return [nodes.ExprStmt(self._through(STEP, nodes.Const(0, **place)), **place), *body]
