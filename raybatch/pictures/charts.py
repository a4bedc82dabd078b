"""Bars: histograms over token counts, and shares of several orders or runs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raybatch.pictures.svg import drawing, element, rect, text
from raybatch.pictures.wording import full, percent, tick
from raybatch.prefix.histogram import Histogram

_WIDTH, _LEFT, _RIGHT = 460, 62, 18
_PLOT = _WIDTH - _LEFT - _RIGHT
_TOP, _HEIGHT, _BOTTOM = 10, 130, 36
# an axis that spans a smaller factor has evenly spaced numbers on it
_NARROW = 8
_MIN_TICKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBar:
    """One bar of a chart of shares.

    Args:
        name: what it stands for.
        share: between 0 and 1.
        error: half width of its interval.
        note: written behind the percentage.
        is_main: drawn in the main colour; the others are for comparison.
    """

    name: str
    share: float
    error: float = 0.0
    note: str = ""
    is_main: bool = False


def draw_histogram(histogram: Histogram, *, x_label: str, y_label: str = "rows") -> str:
    """Draw a histogram over a logarithmic axis."""
    edges = histogram.edges()
    filled = np.flatnonzero(histogram.counts)
    if not len(filled):
        return ""
    first, last = int(filled[0]), int(filled[-1])
    # a bin on each side, so that a single one is still a bar among others
    first, last = max(0, first - 1), last + 1
    shown = [*edges, edges[-1] + max(1, edges[-1] // 4)][first : last + 2]
    scale = _log_scale(shown[0], shown[-1])
    highest = max(histogram.counts)
    y_ticks = ticks(highest)
    top = max(highest, y_ticks[-1])
    parts = [_grid_line(value, top) for value in y_ticks]
    for index in range(first, min(last + 1, len(histogram.counts))):
        if number := histogram.counts[index]:
            # a bin is no wider than the numbers in it
            start = max(edges[index], histogram.lowest)
            stop = min(edges[index + 1], histogram.highest + 1)
            title = f"{_range(start, stop)} {x_label}: {full(number)} {y_label}"
            parts.append(_bar(scale(start), scale(stop), number / top, title))
    parts += _x_axis(shown[0], shown[-1], scale, x_label)
    parts.append(_y_label(y_label))
    label = f"Histogram of {x_label}: {full(histogram.num_values)} {y_label}"
    return drawing(_WIDTH, _TOP + _HEIGHT + _BOTTOM, label, parts)


def draw_shares(bars: Sequence[ShareBar], *, label: str) -> str:
    """Draw horizontal bars from 0 to 100 %, the first one on top."""
    step, left, right = 26, 150, 230
    plot = 2 * _WIDTH - left - right
    bottom = 4 + step * len(bars)
    parts = []
    for tenth in range(0, 101, 25):
        x = left + plot * tenth / 100
        parts.append(element("line", x1=x, x2=x, y1=4, y2=bottom, class_="grid"))
        parts.append(text(x, bottom + 15, f"{tenth} %", class_="tick", text_anchor="middle"))
    for i, bar in enumerate(bars):
        y = 4 + step * i
        length = plot * min(max(bar.share, 0.0), 1.0)
        kind = "bar" if bar.is_main else "bar other"
        value = percent(bar.share) + (f" +- {100 * bar.error:.1f}" if bar.error else "")
        parts.append(text(left - 8, y + 17, bar.name, class_="name", text_anchor="end"))
        parts.append(rect(left, y + 4, max(length, 1.0), step - 8, title=value, class_=kind))
        parts.append(
            text(
                left + plot + 10, y + 17, ", ".join(filter(None, (value, bar.note))), class_="name"
            )
        )
    parts.append(text(left + plot / 2, bottom + 32, label, class_="axis", text_anchor="middle"))
    said = "; ".join(f"{bar.name} {percent(bar.share)}" for bar in bars)
    return drawing(2 * _WIDTH, bottom + 40, f"{label}: {said}", parts)


def ticks(highest: float, count: int = 4) -> list[int]:
    """Return round numbers from 0 to about `highest`."""
    raw = max(1.0, highest / count)
    size = 10 ** int(np.floor(np.log10(raw)))
    step = next(int(size * m) for m in (1, 2, 5, 10) if size * m >= raw)
    return list(range(0, int(highest) + step, step))


def _bar(left: float, right: float, share: float, title: str) -> str:
    height = max(1.0, _HEIGHT * share)
    width = max(1.0, right - left - 1)
    return rect(left + 0.5, _TOP + _HEIGHT - height, width, height, title=title, class_="bar")


def _range(first: int, stop: int) -> str:
    return full(first) if stop == first + 1 else f"{full(first)} to {full(stop - 1)}"


class _log_scale:  # noqa: N801 - used as a function
    """Maps numbers from 0 to x; 0 lies where one half would."""

    def __init__(self, first: int, stop: int) -> None:
        self._first = np.log(max(first, 0.5))
        self._span = max(np.log(max(stop, 1)) - self._first, 1e-9)

    def __call__(self, number: int) -> float:
        return float(_LEFT + _PLOT * (np.log(max(number, 0.5)) - self._first) / self._span)


def _x_axis(first: int, stop: int, scale: _log_scale, label: str) -> list[str]:
    base = _TOP + _HEIGHT
    parts = [element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=base, y2=base, class_="base")]
    for number in _round_numbers(first, stop):
        x = scale(number)
        parts.append(element("line", x1=x, x2=x, y1=base, y2=base + 4, class_="base"))
        parts.append(text(x, base + 16, tick(number), class_="tick", text_anchor="middle"))
    x = _LEFT + _PLOT / 2
    parts.append(text(x, base + 32, label, class_="axis", text_anchor="middle"))
    return parts


def _round_numbers(first: int, stop: int) -> list[int]:
    """Return about six round numbers between two, for a logarithmic axis."""
    if stop < _NARROW * max(first, 1):
        step = ticks(stop - first)[1]
        return list(range(-(-first // step) * step, stop + 1, step))
    for steps in ((1,), (1, 3), (1, 2, 5)):
        found = [
            step * 10**power
            for power in range(14)
            for step in steps
            if first <= step * 10**power <= stop
        ]
        if len(found) >= _MIN_TICKS:
            break
    return found[:: -(-len(found) // 6)]


def _grid_line(value: int, top: float) -> str:
    y = _TOP + _HEIGHT * (1 - value / top)
    return element("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, class_="grid") + text(
        _LEFT - 6, y + 4, tick(value), class_="tick", text_anchor="end"
    )


def _y_label(label: str) -> str:
    y = _TOP + _HEIGHT / 2
    return text(
        11, y, label, class_="axis", text_anchor="middle", transform=f"rotate(-90 11 {y:.0f})"
    )
