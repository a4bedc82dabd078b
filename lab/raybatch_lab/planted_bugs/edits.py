"""The small edits that make a bug of a source file, most of them; found in its syntax tree."""

import ast
import re
from dataclasses import dataclass

from raybatch_lab.planted_bugs.records import count_lines

__all__ = ["Edit", "edited_lines", "edits_of"]

_OTHER_COMPARISON: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_OTHER_OPERATOR: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_OTHER_CALL = {"min": "max", "max": "min", "all": "any", "any": "all"}
# what only people read, or says how fast or how strictly and not what
_SILENT_CALLS = re.compile(r"^(_?log(ger)?|warnings)\b|^reach$|\.cast$|^cast$")
_SILENT_KEYWORDS = {"strict", "copy", "zero_copy_only", "dtype", "daemon", "use_threads"}
_SILENT_FUNCTIONS = re.compile(r"__(str|repr)__|_logged$|_text$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A bug as an edit: it replaces bytes `start` to `end` of a UTF-8 file by `text`."""

    start: int
    end: int
    text: str
    kind: str
    function: str


def edits_of(source: str) -> list[Edit]:
    """Return all edits that can plant a bug in a function of a file, by position."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    return sorted(finder.edits, key=lambda e: (e.start, e.end, e.text))


def edited_lines(source: str, edit: Edit) -> tuple[str, str]:
    """Return the lines around an edit, before and after it.

    There are as many lines as needed to occur only once in the source.
    """
    whole = source.encode()
    lines = source.split("\n")
    first = whole[: edit.start].count(b"\n")
    last = whole[: edit.end].count(b"\n")
    # a neighbour more on either side in turn, until the place is unique
    is_above = True
    while count_lines(source, "\n".join(lines[first : last + 1])) != 1:
        if is_above and first:
            first -= 1
        else:
            last = min(last + 1, len(lines) - 1)
        is_above = not is_above
    num_behind = len(lines) - last - 1
    after = _apply(whole, edit).split("\n")
    return "\n".join(lines[first : last + 1]), "\n".join(after[first : len(after) - num_behind])


def _apply(whole: bytes, edit: Edit) -> str:
    return (whole[: edit.start] + edit.text.encode() + whole[edit.end :]).decode()


class _Finder(ast.NodeVisitor):
    """Walks through functions and collects what can be edited."""

    def __init__(self, source: str) -> None:
        self.edits: list[Edit] = []
        self._whole = source.encode()
        self._lines = [0, *(m.end() for m in re.finditer(b"\n", self._whole))]
        self._names: list[str] = []
        self._depth = 0

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._inside(node.name, node.body)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if _SILENT_FUNCTIONS.search(node.name):
            return
        self._depth += 1
        self._inside(node.name, [*filter(None, node.args.kw_defaults), *node.args.defaults])
        self._inside(node.name, node.body)
        self._depth -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "pass", "dropped")

    def visit_Assert(self, node: ast.Assert) -> None:
        """Plant no bugs in assertions, which no test checks."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Plant no bugs in f-strings."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(called, ast.Call) and not self._is_silent(called):
            self._add(node, "pass", "dropped")
            self.visit(called)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "pass", "dropped")
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets):
            self._add(node, "pass", "dropped")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "pass", "dropped")

    def visit_If(self, node: ast.If) -> None:
        for value in ("True", "False"):
            self._add(node.test, value, "branch")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        for value in ("True", "False"):
            self._add(node.test, value, "branch")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        old, new = _OTHER_COMPARISON[type(node.ops[0])]
        self._between(node.left, node.comparators[0], old, new, "comparison")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        if len(node.values) == 2:
            self._between(node.values[0], node.values[1], old, new, "logic")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.Invert):
            self._add(node, self._text(node.operand), "logic")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_other = any(
            isinstance(side, ast.JoinedStr | ast.List | ast.Tuple | ast.Set)
            or (isinstance(side, ast.Constant) and isinstance(side.value, str))
            for side in (node.left, node.right)
        )
        if type(node.op) in _OTHER_OPERATOR and not is_other:
            self._between(node.left, node.right, *_OTHER_OPERATOR[type(node.op)], "arithmetic")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self._add(node, str(not value), "constant")
        elif isinstance(value, int):
            self._add(node, str(value + 1), "constant")
        elif isinstance(value, float):
            self._add(node, str(value * 2 or 1.0), "constant")

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self._add(bound, "", "slice")
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _SILENT_KEYWORDS:
            self.visit(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        if self._is_silent(node):
            return
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in _OTHER_CALL:
            self._add(node.func, _OTHER_CALL[name], "call")
        if name == "isinstance":
            # a type that is no type has its name as text
            self.visit(node.args[0])
            return
        self.generic_visit(node)

    def _is_silent(self, node: ast.Call) -> bool:
        return bool(_SILENT_CALLS.search(self._text(node.func)))

    def _inside(self, name: str, body: list[ast.stmt] | list[ast.expr]) -> None:
        self._names.append(name)
        for node in body:
            self.visit(node)
        self._names.pop()

    def _between(self, left: ast.expr, right: ast.expr, old: str, new: str, kind: str) -> None:
        start, end = self._span(left)[1], self._span(right)[0]
        gap = self._whole[start:end].decode()
        words = re.escape(old).replace(r"\ ", r"\s+")
        found = re.search(rf"(?<![\w<>=!]){words}(?![\w=])", gap)
        if found:
            self._note(start + found.start(), start + found.end(), new, kind)

    def _add(self, node: ast.stmt | ast.expr, text: str, kind: str) -> None:
        self._note(*self._span(node), text, kind)

    def _note(self, start: int, end: int, text: str, kind: str) -> None:
        if self._depth:
            function = ".".join(self._names)
            self.edits.append(Edit(start=start, end=end, text=text, kind=kind, function=function))

    def _span(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._lines[node.lineno - 1] + node.col_offset
        return start, self._lines[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self._whole[start:end].decode()
