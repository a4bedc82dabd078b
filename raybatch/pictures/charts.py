"""Drawings as SVG: cards, bars, histograms over token counts, and the prefix tree of prompts.

All attributes and all text are escaped. The tree is an icicle: rows from left to right, token
positions downwards. The area of a box is rows times tokens: the prompt tokens that run through it.
A box of a prefix is computed once, whatever its width, so its colour is what sharing saves and grey
is what it cannot.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from raybatch.pictures.wording import amount, count, full, percent, tick
from raybatch.prefix.histogram import Histogram
from raybatch.prefix.outline import TreeBox

_CARD_WIDTH, _CARD_HEIGHT = 180, 84
# characters of a number that fit a card in large type
_MAX_BIG = 9
_WIDTH, _LEFT, _RIGHT = 460, 62, 18
_PLOT = _WIDTH - _LEFT - _RIGHT
_TOP, _HEIGHT, _BOTTOM = 10, 130, 36
# an axis that spans a smaller factor has evenly spaced numbers on it
_NARROW = 8
_MIN_TICKS = 4
# of the prefix tree
_TREE_WIDTH, _TREE_LEFT, _TREE_RIGHT = 960, 64, 18
_TREE_PLOT = _TREE_WIDTH - _TREE_LEFT - _TREE_RIGHT
_TREE_TOP, _TREE_HEIGHT, _TREE_BOTTOM = 8, 380, 40
_NUM_SHADES = 5
_CHAR = 6.4


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One number; `is_good` is whether it is as it should be, None where that is no question."""

    name: str
    value: str
    is_good: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBar:
    """One bar of a chart of shares between 0 and 1; those in the other colour are to compare."""

    name: str
    share: float
    error: float = 0.0
    note: str = ""
    is_main: bool = False


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
    children = [element("title", children=[escape(title)])] if title else []
    return element("rect", x=x, y=y, width=width, height=height, children=children, **attributes)


def text(x: float, y: float, content: str, **attributes: object) -> str:
    return element("text", x=x, y=y, children=[escape(content)], **attributes)


def horizontal(left: float, right: float, y: float, kind: str) -> str:
    return element("line", x1=left, x2=right, y1=y, y2=y, class_=kind)


def vertical(x: float, top: float, bottom: float, kind: str) -> str:
    return element("line", x1=x, x2=x, y1=top, y2=bottom, class_=kind)


def grid_line(left: float, right: float, y: float, label: str) -> list[str]:
    named = text(left - 6, y + 4, label, class_="tick", text_anchor="end")
    return [horizontal(left, right, y, "grid"), named]


def x_tick(x: float, base: float, label: str) -> list[str]:
    named = text(x, base + 16, label, class_="tick", text_anchor="middle")
    return [vertical(x, base, base + 4, "base"), named]


def x_label(x: float, y: float, label: str) -> str:
    return text(x, y, label, class_="axis", text_anchor="middle")


def y_label(x: float, y: float, label: str) -> str:
    turned = f"rotate(-90 {x} {y:.0f})"
    return text(x, y, label, class_="axis", text_anchor="middle", transform=turned)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def draw_cards(cards: Sequence[Card], *, label: str) -> str:
    """Draw numbers beside each other; a screen reader says `label` before them."""
    drawn = []
    for card in cards:
        kind = {None: "big", True: "big good", False: "big bad"}[card.is_good]
        parts = [
            rect(0.5, 0.5, _CARD_WIDTH - 1, _CARD_HEIGHT - 1, rx=6, class_="card"),
            text(16, 28, card.name, class_="axis"),
            text(16, 64, card.value, class_=kind + " long" * (len(card.value) > _MAX_BIG)),
        ]
        drawn.append(drawing(_CARD_WIDTH, _CARD_HEIGHT, f"{card.name} {card.value}", parts))
    return f'<div class="cards" role="group" aria-label="{escape(label)}">{"".join(drawn)}</div>'


def draw_histogram(histogram: Histogram, *, x_name: str, y_name: str = "rows") -> str:
    edges = histogram.edges()
    filled = np.flatnonzero(histogram.counts)
    if not len(filled):
        return ""
    # a bin on each side, so that a single one is still a bar among others
    first, last = max(0, int(filled[0]) - 1), int(filled[-1]) + 1
    shown = [*edges, edges[-1] + max(1, edges[-1] // 4)][first : last + 2]
    scale = _log_scale(shown[0], shown[-1])
    y_ticks, base = ticks(max(histogram.counts)), _TOP + _HEIGHT
    top = max(*histogram.counts, y_ticks[-1])
    parts: list[str] = []
    for value in y_ticks:
        parts += grid_line(_LEFT, _WIDTH - _RIGHT, _TOP + _HEIGHT * (1 - value / top), tick(value))
    for index in range(first, min(last + 1, len(histogram.counts))):
        if number := histogram.counts[index]:
            # a bin is no wider than the numbers in it
            start = max(edges[index], histogram.lowest)
            stop = min(edges[index + 1], histogram.highest + 1)
            numbers = full(start) if stop == start + 1 else f"{full(start)} to {full(stop - 1)}"
            title = f"{numbers} {x_name}: {full(number)} {y_name}"
            height, left = max(1.0, _HEIGHT * number / top), scale(start)
            width = max(1.0, scale(stop) - left - 1)
            parts.append(rect(left + 0.5, base - height, width, height, title=title, class_="bar"))
    parts.append(horizontal(_LEFT, _WIDTH - _RIGHT, base, "base"))
    for number in _round_numbers(shown[0], shown[-1]):
        parts += x_tick(scale(number), base, tick(number))
    parts.append(x_label(_LEFT + _PLOT / 2, base + 32, x_name))
    parts.append(y_label(11, _TOP + _HEIGHT / 2, y_name))
    label = f"Histogram of {x_name}: {full(histogram.num_values)} {y_name}"
    return drawing(_WIDTH, base + _BOTTOM, label, parts)


def draw_shares(bars: Sequence[ShareBar], *, label: str) -> str:
    """Draw horizontal bars from 0 to 100 %, the first one on top."""
    step, left, right = 26, 150, 230
    plot = 2 * _WIDTH - left - right
    bottom = 4 + step * len(bars)
    parts = []
    for tenth in range(0, 101, 25):
        x = left + plot * tenth / 100
        parts.append(vertical(x, 4, bottom, "grid"))
        parts.append(text(x, bottom + 15, f"{tenth} %", class_="tick", text_anchor="middle"))
    for i, bar in enumerate(bars):
        y = 4 + step * i
        length = plot * min(max(bar.share, 0.0), 1.0)
        kind = "bar" if bar.is_main else "bar other"
        value = percent(bar.share) + (f" +- {100 * bar.error:.1f}" if bar.error else "")
        parts.append(text(left - 8, y + 17, bar.name, class_="name", text_anchor="end"))
        parts.append(rect(left, y + 4, max(length, 1.0), step - 8, title=value, class_=kind))
        noted = f"{value}, {bar.note}" if bar.note else value
        parts.append(text(left + plot + 10, y + 17, noted, class_="name"))
    parts.append(x_label(left + plot / 2, bottom + 32, label))
    shares = "; ".join(f"{bar.name} {percent(bar.share)}" for bar in bars)
    return drawing(2 * _WIDTH, bottom + 40, f"{label}: {shares}", parts)


def ticks(highest: float, num: int = 4) -> list[int]:
    """Return round numbers from 0 to about `highest`."""
    raw = max(1.0, highest / num)
    size = 10 ** int(np.floor(np.log10(raw)))
    step = next(int(size * m) for m in (1, 2, 5, 10) if size * m >= raw)
    return list(range(0, int(highest) + step, step))


def draw_icicle(boxes: Sequence[TreeBox], *, num_rows: int) -> str:
    """Draw the boxes of an outline, whose texts are user data; `num_rows` are the whole width."""
    if not boxes or not num_rows:
        return ""
    highest = max(box.token_stop for box in boxes)
    deepest, base, right = highest * 1.01, _TREE_TOP + _TREE_HEIGHT, _TREE_WIDTH - _TREE_RIGHT
    parts: list[str] = []
    for value in ticks(highest, num=6):
        if value <= deepest:
            y = _TREE_TOP + _TREE_HEIGHT * value / deepest
            parts += grid_line(_TREE_LEFT, right, y, tick(value))
    for box in boxes:
        parts += _tree_box(box, num_rows, deepest)
    parts.append(horizontal(_TREE_LEFT, right, base, "base"))
    for number in ticks(num_rows, num=6):
        if number <= num_rows:
            parts += x_tick(_TREE_LEFT + _TREE_PLOT * number / num_rows, base, tick(number))
    parts.append(x_label(_TREE_LEFT + _TREE_PLOT / 2, base + 33, "rows, wide prefixes first"))
    parts.append(y_label(13, _TREE_TOP + _TREE_HEIGHT / 2, "position in the prompt, tokens"))
    return drawing(_TREE_WIDTH, base + _TREE_BOTTOM, "Prefix tree of the prompts", parts)


def _tree_box(box: TreeBox, num_rows: int, deepest: float) -> list[str]:
    x = _TREE_LEFT + _TREE_PLOT * box.row_start / num_rows
    width = _TREE_PLOT * box.num_rows / num_rows
    y = _TREE_TOP + _TREE_HEIGHT * box.token_start / deepest
    height = _TREE_HEIGHT * (box.token_stop - box.token_start) / deepest
    kind = f"level{min(box.level, _NUM_SHADES)}"
    if not box.num_nodes:
        color, words = "own", ""
    elif box.num_nodes > 1:
        color, words = f"{kind} many", f"{amount(box.num_nodes)} prefixes"
    else:
        tokens = full(box.token_stop - box.token_start)
        color, words = kind, f"{amount(box.num_rows)} rows x {tokens}"
    # a gap of a pixel tells neighbours apart, where there is room for one
    drawn_width = max(width - (1.0 if width > 3 else 0.3), 0.3)
    drawn_height = max(height - (0.6 if height > 3 else 0.0), 0.4)
    title = _tree_title(box, num_rows)
    parts = [rect(x, y, drawn_width, drawn_height, title=title, class_=color)]
    room = int((width - 10) / _CHAR)
    if not words or height < 16 or width < 70 or len(words) > room:
        return parts
    lines = [words]
    # what the prefix says: its first words, as far as they fit
    snippet = " ".join(box.text.split())
    if snippet and height > 34 and room > 12:
        lines.append(snippet if len(snippet) <= room else snippet[: room - 3] + "...")
    for i, line in enumerate(lines):
        parts.append(text(x + 5, y + 14 + 15 * i, line, class_=f"inbox on{kind}"))
    return parts


def _tree_title(box: TreeBox, num_rows: int) -> str:
    rows = f"{count(box.num_rows, 'row')} ({percent(box.num_rows / num_rows)})"
    tokens = f"tokens {full(box.token_start)} to {full(box.token_stop)}"
    if not box.num_nodes:
        return f"{rows}\n{tokens} on average\nshared with no other row"
    saved = f"sharing saves {amount(box.saved_tokens)} tokens"
    if box.num_nodes > 1:
        return f"{full(box.num_nodes)} prefixes of {rows}\n{tokens} on average\n{saved}"
    return f"prefix of {rows}\n{tokens}\n{saved}" + (f"\n{box.text}" if box.text else "")


def _log_scale(first: int, stop: int) -> Callable[[int], float]:
    begin = np.log(max(first, 0.5))
    span = max(np.log(max(stop, 1)) - begin, 1e-9)
    return lambda number: float(_LEFT + _PLOT * (np.log(max(number, 0.5)) - begin) / span)


def _round_numbers(first: int, stop: int) -> list[int]:
    """Return about six round numbers between two, for a logarithmic axis."""
    if stop < _NARROW * max(first, 1):
        step = ticks(stop - first)[1]
        return list(range(-(-first // step) * step, stop + 1, step))
    for steps in ((1,), (1, 3), (1, 2, 5)):
        known = (step * 10**power for power in range(14) for step in steps)
        numbers = [number for number in known if first <= number <= stop]
        if len(numbers) >= _MIN_TICKS:
            break
    return numbers[:: -(-len(numbers) // 6)]
