"""A document in sections, as text for a terminal or as one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader

from raybatch.pictures.wording import printable

# most characters of a cell on one line; a longer cell is text and may take several lines
_MAX_CELL = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells of text: names in the first column, words in the last, numbers between them."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A drawing with a sentence on how to read it; the caller escapes `svg`.

    The title is "" where that of the section suffices.
    """

    title: str
    svg: str
    caption: str = ""
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Facts, a table, notes below it and drawings; all texts may hold user data."""

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = ()


def to_text(title: str, sections: Sequence[Section]) -> str:
    """Return the sections without drawings, in aligned lines of printable ASCII."""
    names = [name for section in sections for name, _ in section.facts]
    width = max(map(len, names), default=0) + 2
    lines = [title]
    for section in sections:
        lines += [f"{name:<{width}}{value}" for name, value in section.facts]
        if section.table is not None:
            lines += _table_lines(section.table)
        lines += [f"{'':<{width if section.facts else 0}}{note}" for note in section.notes]
    return "\n".join(printable(line.rstrip()) for line in lines)


def to_page(title: str, sections: Sequence[Section]) -> str:
    """Return one HTML page with everything in it: no script, no font, no image from elsewhere."""
    return _render(title, sections, is_page=True)


def to_fragment(title: str, sections: Sequence[Section]) -> str:
    """Return HTML for a notebook: facts, tables, notes and narrow drawings, without wide ones."""
    return _render(title, sections, is_page=False)


def _render(title: str, sections: Sequence[Section], *, is_page: bool) -> str:
    template = _environment().get_template("page.html")
    return template.render(title=title, sections=sections, is_page=is_page, max_cell=_MAX_CELL)


@cache
def _environment() -> Environment:
    loader = PackageLoader("raybatch", "pictures")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    sheet = Path(__file__).with_name("style.css").read_text("utf-8")
    style = "".join(map(str.strip, sheet.splitlines()))
    environment.globals.update(zip=zip, style=style)
    return environment


def _table_lines(table: Table) -> list[str]:
    cells = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
