"""A document in sections, as text for a terminal or as one HTML page that needs nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

from raybatch.pictures.style import PAGE_STYLE, STYLE
from raybatch.pictures.wording import printable

# characters of a cell on one line; a longer one is no number and takes several
_MAX_CELL = 30
_LONG = ' class="long"'


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Cells of text: names in the first column, words in the last, numbers between them.

    Args:
        header: names of the columns.
        rows: as many cells each.
    """

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A drawing with a heading and a sentence on how to read it.

    Args:
        title: heading; "" where that of the section says it.
        svg: escaped already.
        caption: below it.
        is_wide: takes the whole width.
    """

    title: str
    svg: str
    caption: str = ""
    is_wide: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Facts, a table and drawings under one heading; all texts may hold user data.

    Args:
        title: heading.
        facts: names with what is to be said.
        table: below the facts.
        notes: sentences below the table.
        figures: for pages alone.
    """

    title: str
    facts: tuple[tuple[str, str], ...] = ()
    table: Table | None = None
    notes: tuple[str, ...] = ()
    figures: tuple[Figure, ...] = field(default=())


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
    body = "".join(_section_html(section) for section in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{PAGE_STYLE}{STYLE}</style></head>"
        f'<body><main class="raybatch"><h1>{escape(title)}</h1>{body}</main></body></html>\n'
    )


def to_fragment(title: str, sections: Sequence[Section]) -> str:
    """Return what a notebook shows: the facts and tables, without drawings of the whole width."""
    plain = "".join(_section_html(section, has_wide=False) for section in sections)
    return f'<div class="raybatch"><style>{STYLE}</style><h3>{escape(title)}</h3>{plain}</div>'


def _table_lines(table: Table) -> list[str]:
    cells = [table.header, *table.rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(table.header))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if i in (0, last) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]


def _section_html(section: Section, *, has_wide: bool = True) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"]
    if section.facts:
        rows = "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in section.facts
        )
        parts.append(f"<dl>{rows}</dl>")
    if section.table is not None:
        parts.append(_table_html(section.table))
    parts += [f"<p>{escape(note)}</p>" for note in section.notes]
    figures = [figure for figure in section.figures if figure.svg]
    narrow = "".join(_figure_html(figure) for figure in figures if not figure.is_wide)
    if has_wide:
        parts += [_figure_html(figure) for figure in figures if figure.is_wide]
    if narrow:
        parts.append(f'<div class="pair">{narrow}</div>')
    return f"<section>{''.join(parts)}</section>"


def _table_html(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    # a narrow window has no room for columns and writes the name before each cell
    names = [escape(cell) for cell in table.header]
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-name="{name}"{_LONG if len(cell) > _MAX_CELL else ""}>{escape(cell)}</td>'
            for name, cell in zip(names, row, strict=True)
        )
        + "</tr>"
        for row in table.rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _figure_html(figure: Figure) -> str:
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    kind = "wide" if figure.is_wide else "narrow"
    title = f"<h3>{escape(figure.title)}</h3>" if figure.title else ""
    return f'<figure class="{kind}">{title}{figure.svg}{caption}</figure>'
