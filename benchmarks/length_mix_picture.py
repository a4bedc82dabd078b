"""Draws the curves of length_mix.py: factors over the variation of lengths."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _BORDER = 520, 320, 48
_COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2")
# factors that CascadeInfer measured on an H100
_PUBLISHED = (1.1, 2.1)
_STEP = 0.25


def picture(curves: Sequence[Mapping[str, Any]]) -> str:
    """Return an SVG of all curves; the grey band shows the published factors."""
    right = max(max(curve["variation"]) for curve in curves) or 1.0
    factors = [factor for curve in curves for factor in curve["factor"]]
    low, high = min(0.75, *factors), max(2.25, *factors)

    def x(variation: float) -> float:
        return _BORDER + (_WIDTH - 2 * _BORDER) * variation / right

    def y(factor: float) -> float:
        return _HEIGHT - _BORDER - (_HEIGHT - 2 * _BORDER) * (factor - low) / (high - low)

    top, bottom = y(_PUBLISHED[1]), y(_PUBLISHED[0])
    band = f'x="{_BORDER}" y="{top:.1f}" width="{_WIDTH - 2 * _BORDER}" height="{bottom - top:.1f}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'width="{_WIDTH}">',
        "<style>text{font:11px system-ui,sans-serif;fill:#5b6470}line{stroke:#d5dae1}</style>",
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<rect {band} fill="#f1f3f6"/>',
        f'<text x="{_BORDER + 6}" y="{top + 14:.1f}">published for an H100: 1.1 to 2.1</text>',
    ]
    for i in range(round(low / _STEP), round(high / _STEP) + 1):
        line = f'x1="{_BORDER}" y1="{y(i * _STEP):.1f}" x2="{_WIDTH - _BORDER}"'
        parts.append(f'<line {line} y2="{y(i * _STEP):.1f}"/>')
        parts.append(f'<text x="12" y="{y(i * _STEP) + 4:.1f}">{i * _STEP:.2f}</text>')
    for i in range(int(2 * right) + 1):
        parts.append(f'<text x="{x(i / 2) - 8:.1f}" y="{_HEIGHT - 28}">{i / 2:.1f}</text>')
    label = "standard deviation of lengths over their mean; the factor of the time upwards"
    parts.append(f'<text x="{_BORDER}" y="{_HEIGHT - 10}">{label}</text>')
    for i, curve in enumerate(curves):
        color = _COLORS[i % len(_COLORS)]
        pairs = zip(curve["variation"], curve["factor"], strict=True)
        places = " ".join(f"{x(v):.1f},{y(f):.1f}" for v, f in pairs)
        parts.append(
            f'<polyline points="{places}" fill="none" stroke="{color}" stroke-width="1.6"/>'
        )
        name = f"{curve['rows']} rows of {curve['mean_length']}, head dim {curve['head_dim']}"
        place = f'x="{_WIDTH - 190}" y="{16 + 14 * i}"'
        parts.append(f'<text {place} style="fill:{color}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
