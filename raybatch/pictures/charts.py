"""Numbers as cards and bars: histograms over token counts, shares of several orders or runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from raybatch.pictures.svg import (
    drawing,
    grid_line,
    horizontal,
    rect,
    text,
    vertical,
    x_label,
    x_tick,
    y_label,
)
from raybatch.pictures.wording import full, percent, tick
from raybatch.prefix.histogram import Histogram

_CARD_WIDTH, _CARD_HEIGHT = 180, 84
# characters of a number that fit a card in large type
_MAX_BIG = 9
_WIDTH, _LEFT, _RIGHT = 460, 62, 18
_PLOT = _WIDTH - _LEFT - _RIGHT
_TOP, _HEIGHT, _BOTTOM = 10, 130, 36
# an axis that spans a smaller factor has evenly spaced numbers on it
_NARROW = 8
_MIN_TICKS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """One number; `is_good` is whether it is as it should be, None where that is no question."""

    name: str
    value: str
    is_good: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShareBar:
    """One bar of a chart of shares.

    Args:
        share: between 0 and 1.
        is_main: drawn in the main colour; the others are for comparison.
    """

    name: str
    share: float
    error: float = 0.0
    note: str = ""
    is_main: bool = False


def draw_cards(cards: Sequence[Card], *, label: str) -> str:
    """Draw numbers beside each other; a screen reader says `label` before them."""
    drawn = "".join(_card(card) for card in cards)
    return f'<div class="cards" role="group" aria-label="{escape(label)}">{drawn}</div>'


def _card(card: Card) -> str:
    kind = {None: "big", True: "big good", False: "big bad"}[card.is_good]
    kind += " long" if len(card.value) > _MAX_BIG else ""
    parts = [
        rect(0.5, 0.5, _CARD_WIDTH - 1, _CARD_HEIGHT - 1, rx=6, class_="card"),
        text(16, 28, card.name, class_="axis"),
        text(16, 64, card.value, class_=kind),
    ]
    return drawing(_CARD_WIDTH, _CARD_HEIGHT, f"{card.name} {card.value}", parts)


def draw_histogram(histogram: Histogram, *, x_name: str, y_name: str = "rows") -> str:
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
    parts: list[str] = []
    for value in y_ticks:
        parts += grid_line(_LEFT, _WIDTH - _RIGHT, _TOP + _HEIGHT * (1 - value / top), tick(value))
    for index in range(first, min(last + 1, len(histogram.counts))):
        if number := histogram.counts[index]:
            # a bin is no wider than the numbers in it
            start = max(edges[index], histogram.lowest)
            stop = min(edges[index + 1], histogram.highest + 1)
            title = f"{_range(start, stop)} {x_name}: {full(number)} {y_name}"
            parts.append(_bar(scale(start), scale(stop), number / top, title))
    base = _TOP + _HEIGHT
    parts.append(horizontal(_LEFT, _WIDTH - _RIGHT, base, "base"))
    for number in _round_numbers(shown[0], shown[-1]):
        parts += x_tick(scale(number), base, tick(number))
    parts.append(x_label(_LEFT + _PLOT / 2, base + 32, x_name))
    parts.append(y_label(11, _TOP + _HEIGHT / 2, y_name))
    label = f"Histogram of {x_name}: {full(histogram.num_values)} {y_name}"
    return drawing(_WIDTH, _TOP + _HEIGHT + _BOTTOM, label, parts)


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


def _log_scale(first: int, stop: int) -> Callable[[int], float]:
    """Return what maps numbers to x; 0 lies where one half would."""
    begin = np.log(max(first, 0.5))
    span = max(np.log(max(stop, 1)) - begin, 1e-9)
    return lambda number: float(_LEFT + _PLOT * (np.log(max(number, 0.5)) - begin) / span)


def _round_numbers(first: int, stop: int) -> list[int]:
    """Return about six round numbers between two, for a logarithmic axis."""
    if stop < _NARROW * max(first, 1):
        step = ticks(stop - first)[1]
        return list(range(-(-first // step) * step, stop + 1, step))
    for steps in ((1,), (1, 3), (1, 2, 5)):
        numbers = [
            step * 10**power
            for power in range(14)
            for step in steps
            if first <= step * 10**power <= stop
        ]
        if len(numbers) >= _MIN_TICKS:
            break
    return numbers[:: -(-len(numbers) // 6)]
