"""Drawings as SVG: cards, bars, histograms, the prefix tree of prompts, and figures over time.

All attributes and all text are escaped. The tree is an icicle: rows from left to right, token
positions downwards. The area of a box is rows times tokens: its prompt tokens. A shared prefix is
computed once for all its rows: coloured boxes show what sharing saves, grey ones unshared tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from typing import NamedTuple

import numpy as np

from raybatch.pictures.wording import amount, count, duration, full, percent, tick
from raybatch.prefix.histogram import Histogram
from raybatch.prefix.tree import SummaryBox

_CARD_WIDTH, _CARD_HEIGHT = 180, 84
# characters of a number that fit a card in a large font
_MAX_BIG = 9
_WIDTH, _LEFT, _RIGHT = 460, 62, 18
_PLOT = _WIDTH - _LEFT - _RIGHT
_TOP, _HEIGHT, _BOTTOM = 10, 130, 36
# an axis that spans a smaller factor is linear
_NARROW = 8
_MIN_TICKS = 4
# sizes of the prefix tree
_TREE_WIDTH, _TREE_LEFT, _TREE_RIGHT = 960, 64, 18
_TREE_PLOT = _TREE_WIDTH - _TREE_LEFT - _TREE_RIGHT
_TREE_TOP, _TREE_HEIGHT, _TREE_BOTTOM = 8, 380, 40
_NUM_SHADES = 5
_CHAR = 6.4
# sizes of figures over time
_TIME_WIDTH, _TIME_LEFT, _TIME_RIGHT = 960, 118, 18
_TIME_PLOT = _TIME_WIDTH - _TIME_LEFT - _TIME_RIGHT
_BAND, _GAP = 62, 20
_AXIS = 40
_LANE, _LANE_GAP = 22, 5
_BOX = 9
_KINDS = (("busy", "at work"), ("cold", "cold start"), ("starved", "starvation"), ("tail", "tail"))
_STEPS_S = (
    *(0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200),
    *(14_400, 21_600, 43_200, 86_400, 172_800, 432_000, 864_000, 2_592_000),
)
_MAX_TIME_TICKS = 9
# shorter gaps between two steps are not drawn, because log times are rounded to milliseconds
_SAME_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBar:
    """One bar of a chart of shares between 0 and 1; the other colour marks references."""

    name: str
    share: float
    error: float = 0.0
    note: str = ""
    is_main: bool = False


# begin and end in seconds, and the seconds of each kind: at work, cold start, starvation, tail
Cell = tuple[float, float, tuple[float, float, float, float]]


class Step(NamedTuple):
    start_s: float
    end_s: float
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ChartBand:
    """One figure over time, `steps` in time order, up to `top` or to the highest value."""

    name: str
    steps: tuple[Step, ...]
    top: float | None = None
    suffix: str = ""
    is_main: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class GanttBar:
    """A time span in the lane of this name; its title, which may be user data, is a tooltip.

    Slow spans have the colour of a warning.
    """

    lane: str
    start_s: float
    end_s: float
    title: str
    is_slow: bool = False


def element(name: str, *, children: Iterable[str] = (), **attributes: object) -> str:
    """Return one element; "_" in an attribute name becomes "-", and a last "_" is dropped.

    The caller escapes children. Numbers have at most two decimals.
    """
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
    ]
    inner = "".join(children)
    return f"<{name}{''.join(parts)}>{inner}</{name}>"


def drawing(width: float, height: float, label: str, children: Iterable[str]) -> str:
    """Return an SVG that fills the width of the page; `label` is for screen readers."""
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


x_label = partial(text, class_="axis", text_anchor="middle")


def y_label(x: float, y: float, label: str) -> str:
    return x_label(x, y, label, transform=f"rotate(-90 {x} {y:.0f})")


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


def draw_cards(cards: Sequence[tuple[str, str, bool | None]], *, label: str) -> str:
    """Draw numbers in a row; `label` is for screen readers.

    A card is (name, value, whether it is as expected: None if neither good nor bad).
    """
    drawn = []
    for name, value, is_good in cards:
        kind = {None: "big", True: "big good", False: "big bad"}[is_good]
        parts = [
            rect(0.5, 0.5, _CARD_WIDTH - 1, _CARD_HEIGHT - 1, rx=6, class_="card"),
            text(16, 28, name, class_="axis"),
            text(16, 64, value, class_=kind + " long" * (len(value) > _MAX_BIG)),
        ]
        drawn.append(drawing(_CARD_WIDTH, _CARD_HEIGHT, f"{name} {value}", parts))
    return f'<div class="cards" role="group" aria-label="{escape(label)}">{"".join(drawn)}</div>'


def draw_histogram(histogram: Histogram, *, x_name: str, y_name: str = "rows") -> str:
    edges = histogram.edges()
    filled = np.flatnonzero(histogram.counts)
    if not len(filled):
        return ""
    # an empty bin on each side, so that a single bin still looks like a bar
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
            # a bin is no wider than its range of integers
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


def draw_icicle(boxes: Sequence[SummaryBox], *, num_rows: int) -> str:
    """Draw the boxes of a tree summary; their texts are user data, the width is `num_rows`."""
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


def _tree_box(box: SummaryBox, num_rows: int, deepest: float) -> list[str]:
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
    # a gap of a pixel separates neighbours, if there is room
    drawn_width = max(width - (1.0 if width > 3 else 0.3), 0.3)
    drawn_height = max(height - (0.6 if height > 3 else 0.0), 0.4)
    title = _tree_title(box, num_rows)
    parts = [rect(x, y, drawn_width, drawn_height, title=title, class_=color)]
    room = int((width - 10) / _CHAR)
    if not words or height < 16 or width < 70 or len(words) > room:
        return parts
    lines = [words]
    # the first words of the prefix that fit
    snippet = " ".join(box.text.split())
    if snippet and height > 34 and room > 12:
        lines.append(snippet if len(snippet) <= room else snippet[: room - 3] + "...")
    for i, line in enumerate(lines):
        parts.append(text(x + 5, y + 14 + 15 * i, line, class_=f"inbox on{kind}"))
    return parts


def _tree_title(box: SummaryBox, num_rows: int) -> str:
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


def draw_bands(bands: Sequence[ChartBand], *, total_s: float, marks: Sequence[float]) -> str:
    """Draw figures over time, from top to bottom, with a vertical line at each of `marks`."""
    bottom = 8 + len(bands) * (_BAND + _GAP) - _GAP
    x = _scale(total_s)
    parts = [vertical(x(mark), 4, bottom, "mark") for mark in marks]
    for i, band in enumerate(bands):
        parts += _band(band, 8 + i * (_BAND + _GAP), x)
    summary = "; ".join(
        f"{band.name} up to {amount(max((s.value for s in band.steps), default=0))}{band.suffix}"
        for band in bands
    )
    return _over_time(f"Over {duration(total_s)}: {summary}", parts, total_s, bottom)


def draw_lanes(
    rows: Mapping[str, Sequence[Cell]], *, total_s: float, marks: Sequence[float]
) -> str:
    """Draw the time of engines: the height of a colour is its share at that moment."""
    if not rows:
        return ""
    bottom = 26 + len(rows) * (_LANE + _LANE_GAP)
    x = _scale(total_s)
    parts, left = [], float(_TIME_LEFT)
    for kind, name in _KINDS:
        parts += [rect(left, 4, 12, 12, class_=kind), text(left + 17, 14, name, class_="tick")]
        left += 32 + 7 * len(name)
    for i, (name, cells) in enumerate(rows.items()):
        y: float = 26 + i * (_LANE + _LANE_GAP)
        parts.append(text(_TIME_LEFT - 8, y + 15, name, class_="name", text_anchor="end"))
        for start_s, end_s, seconds in cells:
            length, top = sum(seconds), y + _LANE
            # slightly wider, so that no gap shows between neighbours
            width = max(0.6, x(end_s) - x(start_s) + 0.3)
            for (kind, _), part in zip(_KINDS, seconds, strict=True):
                if length > 0 and part / length > 0.005:
                    height = _LANE * part / length
                    top -= height
                    parts.append(rect(x(start_s), top, width, height, class_=kind))
    parts += [vertical(x(mark), 22, bottom, "mark") for mark in marks]
    label = f"What {count(len(rows), 'engine')} did over {duration(total_s)}"
    return _over_time(label, parts, total_s, bottom)


def draw_gantt(boxes: Sequence[GanttBar], *, total_s: float, marks: Sequence[float]) -> str:
    """Draw time spans in lanes; overlapping boxes are stacked."""
    if not boxes:
        return ""
    x = _scale(total_s)
    parts: list[str] = []
    y = 6
    for lane in dict.fromkeys(box.lane for box in boxes):
        placed = _packed(sorted((b for b in boxes if b.lane == lane), key=lambda b: b.start_s))
        height = _BOX * (1 + max(place for _, place in placed))
        parts.append(text(_TIME_LEFT - 8, y + 10, lane, class_="name", text_anchor="end"))
        for box, place in placed:
            left, top = x(box.start_s), y + place * _BOX
            kind = "starved" if box.is_slow else "bar"
            width = max(1.0, x(box.end_s) - left - 1)
            parts.append(rect(left, top, width, _BOX - 2, title=box.title, class_=kind))
        y += max(height, 14) + 8
    parts += [vertical(x(mark), 2, y, "mark") for mark in marks]
    return _over_time(f"{full(len(boxes))} boxes in time", parts, total_s, y)


def _packed(boxes: Sequence[GanttBar]) -> list[tuple[GanttBar, int]]:
    """Return each box with the first line in which it overlaps no other."""
    ends: list[float] = []
    placed = []
    for box in boxes:
        place = next((i for i, end in enumerate(ends) if end <= box.start_s), len(ends))
        ends[place : place + 1] = [box.end_s]
        placed.append((box, place))
    return placed


def _band(band: ChartBand, y: float, x: Callable[[float], float]) -> list[str]:
    highest = max((step.value for step in band.steps), default=0.0)
    marks = ticks(band.top or highest, num=2)
    top = max(band.top or 0.0, highest, marks[-1] if band.top is None else 0.0, 1e-9)
    parts = [text(_TIME_LEFT - 50, y + 12, band.name, class_="name", text_anchor="end")]
    for value in marks:
        if value <= top:
            line = y + _BAND * (1 - value / top)
            parts += grid_line(
                _TIME_LEFT, _TIME_WIDTH - _TIME_RIGHT, line, tick(value) + band.suffix
            )
    kind = "area" if band.is_main else "area other"
    base = y + _BAND
    runs: list[list[Step]] = []
    for step in band.steps:
        # the area ends at a gap between two steps
        if not runs or step.start_s - runs[-1][-1].end_s >= _SAME_S:
            runs.append([])
        runs[-1].append(step)
    for run in runs:
        points = [f"M{x(run[0].start_s):.1f} {base:.1f}"]
        for step in run:
            height = base - _BAND * step.value / top
            points.append(f"L{x(step.start_s):.1f} {height:.1f}L{x(step.end_s):.1f} {height:.1f}")
        points.append(f"L{x(run[-1].end_s):.1f} {base:.1f}Z")
        parts.append(element("path", d="".join(points), class_=kind))
    parts.append(horizontal(_TIME_LEFT, _TIME_WIDTH - _TIME_RIGHT, base, "base"))
    return parts


def _scale(total_s: float) -> Callable[[float], float]:
    return lambda seconds: _TIME_LEFT + _TIME_PLOT * seconds / max(total_s, 1e-9)


def _over_time(label: str, parts: Iterable[str], total_s: float, bottom: float) -> str:
    """Return a drawing with an axis of time below its parts; `label` is for screen readers."""
    step = next((one for one in _STEPS_S if total_s / one <= _MAX_TIME_TICKS), _STEPS_S[-1])
    x, parts = _scale(total_s), list(parts)
    for i in range(int(total_s / step) + 1):
        parts += x_tick(x(i * step), bottom, _time_label(i * step))
    name = "time since the start, all runs one after the other"
    parts.append(x_label(_TIME_LEFT + _TIME_PLOT / 2, bottom + 33, name))
    return drawing(_TIME_WIDTH, bottom + _AXIS, label, parts)


def _time_label(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds < 120 or not hours:
        return f"{seconds:g} s" if seconds < 120 else f"{minutes} min"
    if minutes:
        return f"{hours} h {minutes:02d}"
    return f"{hours / 24:g} d" if hours >= 48 else f"{hours} h"
