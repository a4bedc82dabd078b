"""A few SVG elements as text. All attributes and all text are escaped."""

from collections.abc import Iterable
from html import escape


def element(name: str, *, children: Iterable[str] = (), **attributes: object) -> str:
    """Return one element; "_" in the name of an attribute stands for "-", a last one for nothing.

    Children are escaped already. Numbers are written with two digits.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
    ]
    inner = "".join(children)
    return f"<{name}{''.join(parts)}>{inner}</{name}>"


def drawing(width: float, height: float, label: str, children: Iterable[str]) -> str:
    """Return an SVG that fills the width of the page; `label` is what a screen reader says."""
    view = f"0 0 {_number(width)} {_number(height)}"
    return element("svg", viewBox=view, role="img", aria_label=label, children=children)


def rect(
    x: float, y: float, width: float, height: float, *, title: str = "", **attributes: object
) -> str:
    """Return a rectangle, with `title` shown under the pointer."""
    children = [element("title", children=[escape(title)])] if title else []
    return element("rect", x=x, y=y, width=width, height=height, children=children, **attributes)


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Return a line of text whose baseline begins at (x, y)."""
    return element("text", x=x, y=y, children=[escape(content)], **attributes)


def horizontal(left: float, right: float, y: float, kind: str) -> str:
    """Return a line from left to right."""
    return element("line", x1=left, x2=right, y1=y, y2=y, class_=kind)


def vertical(x: float, top: float, bottom: float, kind: str) -> str:
    """Return a line from top to bottom."""
    return element("line", x1=x, x2=x, y1=top, y2=bottom, class_=kind)


def grid_line(left: float, right: float, y: float, label: str) -> list[str]:
    """Return a line across a plot, and what its height stands for."""
    named = text(left - 6, y + 4, label, class_="tick", text_anchor="end")
    return [horizontal(left, right, y, "grid"), named]


def x_tick(x: float, base: float, label: str) -> list[str]:
    """Return a mark below a plot, and what its place stands for."""
    named = text(x, base + 16, label, class_="tick", text_anchor="middle")
    return [vertical(x, base, base + 4, "base"), named]


def x_label(x: float, y: float, label: str) -> str:
    """Return the name of a horizontal axis."""
    return text(x, y, label, class_="axis", text_anchor="middle")


def y_label(x: float, y: float, label: str) -> str:
    """Return the name of a vertical axis."""
    turned = f"rotate(-90 {x} {y:.0f})"
    return text(x, y, label, class_="axis", text_anchor="middle", transform=turned)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
