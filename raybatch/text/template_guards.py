"""Puts counts into a parsed template: into loops and macros, and around every value it makes."""

from collections.abc import Callable, Sequence
from typing import Any

from jinja2 import Environment, nodes
from jinja2.visitor import NodeTransformer

# filters that count a round of a loop, and a value
STEP, SPEND = "__raybatch_step", "__raybatch_spend"


def guarded(tree: nodes.Template, environment: Environment) -> nodes.Template:
    """Return a parsed template that counts what it does, by the filters `STEP` and `SPEND`."""
    found = _Guarding(environment).visit(tree)
    assert isinstance(found, nodes.Template), "a template stays one"
    return found


class _Guarding(NodeTransformer):
    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def get_visitor(self, node: nodes.Node) -> Callable[..., Any] | None:
        """Return what changes a node of this kind."""
        name = _METHODS.get(type(node))
        return None if name is None else getattr(self, name)

    def _through(self, name: str, node: nodes.Node) -> nodes.Filter:
        return nodes.Filter(
            node, name, [], [], None, None, lineno=node.lineno, environment=self._environment
        )

    def _counted(self, body: Sequence[nodes.Node], line: int) -> list[nodes.Node]:
        place = {"lineno": line, "environment": self._environment}
        return [nodes.ExprStmt(self._through(STEP, nodes.Const(0, **place)), **place), *body]

    def _loop(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body = self._counted(node.body, node.lineno)
        if node.test is not None:
            node.test = self._through(STEP, node.test)
        return node

    def _macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body = self._counted(node.body, node.lineno)
        return node

    def _call_block(self, node: nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node.call)  # which has to stay a call
        node.defaults = [self.visit(default) for default in node.defaults]
        node.body = self._counted([self.visit(one) for one in node.body], node.lineno)
        return node

    def _block(self, node: nodes.FilterBlock | nodes.AssignBlock) -> nodes.Node:
        # the filter of a block has no value before it that could be counted
        node.body = [self.visit(one) for one in node.body]
        return node

    def _output(self, node: nodes.Output) -> nodes.Node:
        shown: list[nodes.Expr] = []
        for one in node.nodes:
            made = self.visit(one)
            if isinstance(one, nodes.TemplateData):
                place = {"lineno": one.lineno, "environment": self._environment}
                made = nodes.Const(one.data, **place)
            shown.append(self._through(SPEND, made))
        node.nodes = shown
        return node

    def _made(self, node: nodes.Node) -> nodes.Node:
        self.generic_visit(node)
        return self._through(SPEND, node)

    def _tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._made(node) if node.ctx == "load" else self.generic_visit(node)

    def _item(self, node: nodes.Getitem) -> nodes.Node:
        is_part = isinstance(node.arg, nodes.Slice)
        return self._made(node) if is_part else self.generic_visit(node)


_METHODS: dict[type[nodes.Node], str] = {
    nodes.AssignBlock: "_block",
    nodes.Call: "_made",
    nodes.CallBlock: "_call_block",
    nodes.Concat: "_made",
    nodes.Dict: "_made",
    nodes.Filter: "_made",
    nodes.FilterBlock: "_block",
    nodes.For: "_loop",
    nodes.Getitem: "_item",
    nodes.List: "_made",
    nodes.Macro: "_macro",
    nodes.Output: "_output",
    nodes.Tuple: "_tuple",
}
