"""Figures over time, below each other on one axis, and boxes in lanes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raybatch.pictures.charts import (
    drawing,
    element,
    grid_line,
    horizontal,
    rect,
    text,
    ticks,
    vertical,
    x_label,
    x_tick,
)
from raybatch.pictures.wording import amount, count, duration, full, tick

_WIDTH, _LEFT, _RIGHT = 960, 118, 18
_PLOT = _WIDTH - _LEFT - _RIGHT
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
# logs hold milliseconds
_SAME_S = 0.01


# begin and end, and the seconds of each kind: at work, cold start, starvation, tail
Cell = tuple[float, float, tuple[float, float, float, float]]


class Step(NamedTuple):
    start_s: float
    end_s: float
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """One figure over time, `steps` in time order, up to `top` or to the highest value."""

    name: str
    steps: tuple[Step, ...]
    top: float | None = None
    suffix: str = ""
    is_main: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """Something that took time, in a lane of that name, with a title under the pointer: user data.

    What is slow has the colour of a warning.
    """

    lane: str
    start_s: float
    end_s: float
    title: str
    is_slow: bool = False


def draw_bands(bands: Sequence[Band], *, total_s: float, marks: Sequence[float]) -> str:
    """Draw figures over time, from top to bottom; a vertical line stands at each of `marks`."""
    bottom = 8 + len(bands) * (_BAND + _GAP) - _GAP
    x = _scale(total_s)
    parts = [vertical(x(mark), 4, bottom, "mark") for mark in marks]
    for i, band in enumerate(bands):
        parts += _band(band, 8 + i * (_BAND + _GAP), x)
    parts += _time_axis(total_s, x, bottom)
    summary = "; ".join(
        f"{band.name} up to {amount(max((s.value for s in band.steps), default=0))}{band.suffix}"
        for band in bands
    )
    return drawing(_WIDTH, bottom + _AXIS, f"Over {duration(total_s)}: {summary}", parts)


def draw_lanes(
    rows: Mapping[str, Sequence[Cell]], *, total_s: float, marks: Sequence[float]
) -> str:
    """Draw how engines shared out their time: the height of a colour is its share of a moment."""
    if not rows:
        return ""
    bottom = 26 + len(rows) * (_LANE + _LANE_GAP)
    x = _scale(total_s)
    parts, left = [], float(_LEFT)
    for kind, name in _KINDS:
        parts += [rect(left, 4, 12, 12, class_=kind), text(left + 17, 14, name, class_="tick")]
        left += 32 + 7 * len(name)
    for i, (name, cells) in enumerate(rows.items()):
        y: float = 26 + i * (_LANE + _LANE_GAP)
        parts.append(text(_LEFT - 8, y + 15, name, class_="name", text_anchor="end"))
        for start_s, end_s, seconds in cells:
            length, top = sum(seconds), y + _LANE
            # a little wider than it is, so that no line is seen between neighbours
            width = max(0.6, x(end_s) - x(start_s) + 0.3)
            for (kind, _), part in zip(_KINDS, seconds, strict=True):
                if length > 0 and part / length > 0.005:
                    height = _LANE * part / length
                    top -= height
                    parts.append(rect(x(start_s), top, width, height, class_=kind))
    parts += [vertical(x(mark), 22, bottom, "mark") for mark in marks]
    parts += _time_axis(total_s, x, bottom)
    label = f"What {count(len(rows), 'engine')} did over {duration(total_s)}"
    return drawing(_WIDTH, bottom + _AXIS, label, parts)


def draw_boxes(boxes: Sequence[Box], *, total_s: float, marks: Sequence[float]) -> str:
    """Draw what took time, in lanes; boxes that overlap lie below each other."""
    if not boxes:
        return ""
    x = _scale(total_s)
    parts: list[str] = []
    y = 6
    for lane in dict.fromkeys(box.lane for box in boxes):
        placed = _packed(sorted((b for b in boxes if b.lane == lane), key=lambda b: b.start_s))
        height = _BOX * (1 + max(place for _, place in placed))
        parts.append(text(_LEFT - 8, y + 10, lane, class_="name", text_anchor="end"))
        for box, place in placed:
            left, top = x(box.start_s), y + place * _BOX
            kind = "starved" if box.is_slow else "bar"
            width = max(1.0, x(box.end_s) - left - 1)
            parts.append(rect(left, top, width, _BOX - 2, title=box.title, class_=kind))
        y += max(height, 14) + 8
    parts += [vertical(x(mark), 2, y, "mark") for mark in marks]
    parts += _time_axis(total_s, x, y)
    return drawing(_WIDTH, y + _AXIS, f"{full(len(boxes))} boxes in time", parts)


def _packed(boxes: Sequence[Box]) -> list[tuple[Box, int]]:
    """Return each box with the first line in which it overlaps no other."""
    ends: list[float] = []
    placed = []
    for box in boxes:
        place = next((i for i, end in enumerate(ends) if end <= box.start_s), len(ends))
        ends[place : place + 1] = [box.end_s]
        placed.append((box, place))
    return placed


def _band(band: Band, y: float, x: Callable[[float], float]) -> list[str]:
    highest = max((step.value for step in band.steps), default=0.0)
    marks = ticks(band.top or highest, num=2)
    top = max(band.top or 0.0, highest, marks[-1] if band.top is None else 0.0, 1e-9)
    parts = [text(_LEFT - 50, y + 12, band.name, class_="name", text_anchor="end")]
    for value in marks:
        if value <= top:
            line = y + _BAND * (1 - value / top)
            parts += grid_line(_LEFT, _WIDTH - _RIGHT, line, tick(value) + band.suffix)
    kind = "area" if band.is_main else "area other"
    base = y + _BAND
    runs: list[list[Step]] = []
    for step in band.steps:
        # where time passes between two steps, the area ends
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
    parts.append(horizontal(_LEFT, _WIDTH - _RIGHT, base, "base"))
    return parts


def _scale(total_s: float) -> Callable[[float], float]:
    return lambda seconds: _LEFT + _PLOT * seconds / max(total_s, 1e-9)


def _time_axis(total_s: float, x: Callable[[float], float], bottom: float) -> list[str]:
    step = next((one for one in _STEPS_S if total_s / one <= _MAX_TIME_TICKS), _STEPS_S[-1])
    parts: list[str] = []
    for i in range(int(total_s / step) + 1):
        parts += x_tick(x(i * step), bottom, _time_label(i * step))
    label = "time since the start, all runs one after the other"
    return [*parts, x_label(_LEFT + _PLOT / 2, bottom + 33, label)]


def _time_label(seconds: float) -> str:
    hours, minutes = divmod(round(seconds / 60), 60)
    if seconds < 120 or not hours:
        return f"{seconds:g} s" if seconds < 120 else f"{minutes} min"
    if minutes:
        return f"{hours} h {minutes:02d}"
    return f"{hours / 24:g} d" if hours >= 48 else f"{hours} h"
