"""The prefix tree as an icicle: rows from left to right, token positions downwards.

The area of a box is rows times tokens: the prompt tokens that run through it. A box of a prefix is
computed once, whatever its width, so its colour is what sharing saves and grey is what it cannot.
"""

from collections.abc import Sequence

from raybatch.pictures.charts import ticks
from raybatch.pictures.svg import (
    drawing,
    grid_line,
    horizontal,
    rect,
    text,
    x_label,
    x_tick,
    y_label,
)
from raybatch.pictures.wording import amount, count, full, percent, tick
from raybatch.prefix.outline import TreeBox

_WIDTH, _LEFT, _RIGHT = 960, 64, 18
_PLOT = _WIDTH - _LEFT - _RIGHT
_TOP, _HEIGHT, _BOTTOM = 8, 380, 40
NUM_SHADES = 5
_CHAR = 6.4


def draw_icicle(boxes: Sequence[TreeBox], *, num_rows: int) -> str:
    """Draw the boxes of an outline, whose texts are user data; `num_rows` are the whole width."""
    if not boxes or not num_rows:
        return ""
    y_ticks = ticks(max(box.token_stop for box in boxes), count=6)
    deepest = max(box.token_stop for box in boxes) * 1.01
    parts: list[str] = []
    for value in y_ticks:
        if value <= deepest:
            y = _TOP + _HEIGHT * value / deepest
            parts += grid_line(_LEFT, _WIDTH - _RIGHT, y, tick(value))
    for box in boxes:
        parts += _box(box, num_rows, deepest)
    parts += _axes(num_rows)
    return drawing(_WIDTH, _TOP + _HEIGHT + _BOTTOM, "Prefix tree of the prompts", parts)


def _box(box: TreeBox, num_rows: int, deepest: float) -> list[str]:
    x = _LEFT + _PLOT * box.row_start / num_rows
    width = _PLOT * box.num_rows / num_rows
    y = _TOP + _HEIGHT * box.token_start / deepest
    height = _HEIGHT * (box.token_stop - box.token_start) / deepest
    # a gap of a pixel tells neighbours apart, where there is room for one
    gap = 1.0 if width > 3 else 0.3
    kind = f"level{min(box.level, NUM_SHADES)}" if box.num_nodes else "own"
    if box.num_nodes > 1:
        kind += " many"
    drawn = rect(
        x,
        y,
        max(width - gap, 0.3),
        max(height - (0.6 if height > 3 else 0.0), 0.4),
        title=_title(box, num_rows),
        class_=kind,
    )
    return [drawn, *_label(box, x, y, width, height)]


def _title(box: TreeBox, num_rows: int) -> str:
    rows = f"{count(box.num_rows, 'row')} ({percent(box.num_rows / num_rows)})"
    tokens = f"tokens {full(box.token_start)} to {full(box.token_stop)}"
    if not box.num_nodes:
        return f"{rows}\n{tokens} on average\nshared with no other row"
    saved = f"sharing saves {amount(box.saved_tokens)} tokens"
    if box.num_nodes > 1:
        return f"{full(box.num_nodes)} prefixes of {rows}\n{tokens} on average\n{saved}"
    return f"prefix of {rows}\n{tokens}\n{saved}" + (f"\n{box.text}" if box.text else "")


def _label(box: TreeBox, x: float, y: float, width: float, height: float) -> list[str]:
    if height < 16 or width < 70 or not box.num_nodes:
        return []
    if box.num_nodes > 1:
        words = f"{amount(box.num_nodes)} prefixes"
    else:
        words = f"{amount(box.num_rows)} rows x {full(box.token_stop - box.token_start)}"
    room = int((width - 10) / _CHAR)
    kind = f"onlevel{min(box.level, NUM_SHADES)}"
    lines = [words] if len(words) <= room else []
    # what the prefix says: its first words, as far as they fit
    snippet = " ".join(box.text.split())
    if snippet and lines and height > 34 and room > 12:
        lines.append(snippet if len(snippet) <= room else snippet[: room - 3] + "...")
    return [
        text(x + 5, y + 14 + 15 * i, line, class_=f"inbox {kind}") for i, line in enumerate(lines)
    ]


def _axes(num_rows: int) -> list[str]:
    base = _TOP + _HEIGHT
    parts = [horizontal(_LEFT, _WIDTH - _RIGHT, base, "base")]
    for number in ticks(num_rows, count=6):
        if number <= num_rows:
            parts += x_tick(_LEFT + _PLOT * number / num_rows, base, tick(number))
    parts.append(x_label(_LEFT + _PLOT / 2, base + 33, "rows, wide prefixes first"))
    parts.append(y_label(13, _TOP + _HEIGHT / 2, "position in the prompt, tokens"))
    return parts
