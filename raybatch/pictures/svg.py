"""A few SVG elements as text. All attributes and all text are escaped."""

from collections.abc import Iterable
from html import escape


def element(name: str, *, children: Iterable[str] = (), **attributes: object) -> str:
    """Return one element; "_" in the name of an attribute stands for "-", a last one for nothing.

    Args:
        name: of the element.
        children: elements that are escaped already.
        attributes: numbers are written with two digits; None leaves the attribute out.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    inner = "".join(children)
    return f"<{name}{''.join(parts)}>{inner}</{name}>"


def drawing(width: float, height: float, label: str, children: Iterable[str]) -> str:
    """Return an SVG that fills the width of the page; `label` is what a screen reader says."""
    return element(
        "svg",
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_label=label,
        children=children,
    )


def rect(
    x: float, y: float, width: float, height: float, *, title: str = "", **attributes: object
) -> str:
    """Return a rectangle, with `title` shown under the pointer."""
    children = [element("title", children=[escape(title)])] if title else []
    return element("rect", x=x, y=y, width=width, height=height, children=children, **attributes)


def text(x: float, y: float, content: str, **attributes: object) -> str:
    """Return a line of text whose baseline begins at (x, y)."""
    return element("text", x=x, y=y, children=[escape(content)], **attributes)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
