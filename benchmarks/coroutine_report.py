"""Prints tables and verdicts of the results of `coroutines.py`, and draws them; runs no engine."""

from collections.abc import Mapping, Sequence
from html import escape
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

# targets of the benchmark
_REGRET, _COMPLETION = 0.05, 0.10
# sizes of the picture, in points
_SIZE, _BORDER = 420, 54
_COLORS = {
    "recompute": "#c4483c",
    "swap": "#c28a1d",
    "offload": "#2f8f57",
    "ample": "#3b6fe0",
    "auto": "#7a4fd0",
}


def judge(
    seconds: Mapping[str, float], expected_s: Mapping[str, float], *, is_host: bool
) -> dict[str, Any]:
    """Compare the measured seconds of each execution mode with the forecast and with the choice.

    An engine with host memory that keeps KV on the device runs like "swap", which recomputes KV if
    that is faster. "ample" has more memory and is not a choice. "auto" is an engine that chooses
    its mode itself, for rows whose lengths it has to learn.
    """
    judged: dict[str, Any] = {
        "error": {way: round(expected_s[way] / s - 1, 3) for way, s in seconds.items()}
    }
    choices = {way: s for way, s in seconds.items() if way not in ("ample", "auto")}
    if choices and "auto" in seconds:
        judged["auto_regret"] = round(seconds["auto"] / min(choices.values()) - 1, 3)
    taken = "offload" if is_host else "swap" if "swap" in choices else "recompute"
    if taken not in choices:
        return judged
    judged |= {"taken": taken, "completion_error": judged["error"][taken]}
    if len(choices) > 1:
        judged["regret"] = round(choices[taken] / min(choices.values()) - 1, 3)
    others = [s for way, s in choices.items() if way != "offload"]
    if others and "offload" in choices:
        judged["best_other / offload"] = round(min(others) / choices["offload"], 2)
    if {"swap", "offload"} <= choices.keys():
        # this ratio decides the choice, and a busy host changes it least
        ratio = choices["swap"] / choices["offload"]
        judged["ratio_error"] = round(expected_s["swap"] / expected_s["offload"] / ratio - 1, 3)
    return judged


def summary(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how often the targets are met, and the worst cases, a line each."""
    regrets = {_name(s): s["regret"] for s in settings if "regret" in s}
    errors = {_name(s): s["completion_error"] for s in settings if "completion_error" in s}
    lines = []
    own = [s["auto_regret"] for s in settings if "auto_regret" in s]
    if own:
        num_good = sum(regret <= _REGRET for regret in own)
        lines.append(f"engines that choose: {num_good} of {len(own)}, largest {max(own):.1%}")
    if regrets:
        worst = max(regrets, key=regrets.__getitem__)
        num_good = sum(regret <= _REGRET for regret in regrets.values())
        lines.append(
            f"regret at most {_REGRET:.0%} in {num_good} of {len(regrets)} settings, largest "
            f"{regrets[worst]:.1%} ({worst})"
        )
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        num_good = sum(abs(error) <= _COMPLETION for error in errors.values())
        lines.append(
            f"completion within {_COMPLETION:.0%} in {num_good} of {len(errors)} settings, worst "
            f"{errors[worst]:+.1%} ({worst})"
        )
    ratios = [abs(s["ratio_error"]) for s in settings if "ratio_error" in s]
    if ratios:
        num_good = sum(error <= _COMPLETION for error in ratios)
        lines.append(
            f"ratio of device to host within {_COMPLETION:.0%} in {num_good} of {len(ratios)} "
            f"settings, worst {max(ratios):.1%} off"
        )
    return lines


def show(settings: Sequence[Mapping[str, Any]]) -> None:
    """Print settings as Markdown; settings with limited rows at the experts are a second table."""
    plain = [s for s in settings if s["setting"]["max_num_seqs"] is None]
    bounded = [s for s in settings if s["setting"]["max_num_seqs"] is not None]
    if plain:
        ways = [way for way in _COLORS if any(way in s["median_cpu_s"] for s in plain)]
        heads = ["setting", "taken", *(f"{way}: forecast / measured tokens/s" for way in ways)]
        heads += ["regret", "error of completion"]
        if any("vllm" in s for s in plain):
            heads.append("vLLM tokens/s (equal rows)")
        _print(heads, [_cells(s, ways, len(heads)) for s in plain])
    if bounded:
        heads = ["setting", "forecast / measured tokens/s", "tokens per expert, decode steps"]
        heads += ["all steps", "bytes moved per token"]
        _print(heads, [_bounded_cells(s) for s in bounded])
    print("\n".join(summary(plain)))


def _name(setting: Mapping[str, Any]) -> str:
    fields = setting["setting"]
    rows = setting["workload"]["num_requests"]
    name = f"{fields['model']}, {fields['workload']} x {rows}, KV for {fields['device_rows']:g}"
    gate = fields["max_num_seqs"]
    return name if gate is None else f"{name}, {gate} at the experts"


def _rates(setting: Mapping[str, Any], way: str) -> str:
    if way not in setting["median_cpu_s"]:
        return "-"
    tokens = setting["generated_tokens"]
    expected, measured = setting["forecast_s"][way], setting["median_cpu_s"][way]
    return f"{tokens / max(expected, 1e-9):,.0f} / {tokens / measured:,.0f}"


def _cells(setting: Mapping[str, Any], ways: Sequence[str], width: int) -> list[str]:
    cells = [_name(setting), setting.get("taken", "-"), *(_rates(setting, way) for way in ways)]
    for name in ("regret", "completion_error"):
        cells.append(f"{setting[name]:+.1%}" if name in setting else "-")
    if len(cells) < width:
        peer = setting.get("vllm")
        cell = "-"
        if peer is not None:
            rate = setting["generated_tokens"] / peer["median_cpu_s"]
            cell = f"{rate:,.0f} ({peer['equal_rows']}/{peer['num_rows']})"
        cells.append(cell)
    return cells


def _bounded_cells(setting: Mapping[str, Any]) -> list[str]:
    run = setting["runs"]["offload"][0]
    return [
        _name(setting),
        _rates(setting, "offload"),
        *(str(run.get(f"tokens_per_expert{kind}", "-")) for kind in ("_decode", "")),
        f"{run['moved_bytes_per_token']:,}",
    ]


def _print(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    print("|", " | ".join(heads), "|")
    print("|" + "---|" * len(heads))
    for row in rows:
        print("|", " | ".join(row), "|")
    print()


def draw(settings: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Draw measured seconds against forecast ones as SVG; a ring marks the chosen mode."""
    points = [
        (way, setting["forecast_s"][way], seconds, setting.get("taken") == way, _name(setting))
        for setting in settings
        for way, seconds in setting["median_cpu_s"].items()
    ]
    out.write_text(picture(points), encoding="utf-8")


def picture(points: Sequence[tuple[str, float, float, bool, str]]) -> str:
    """Return an SVG of (mode, forecast s, measured s, was chosen, name), both axes logarithmic.

    Between the dashed lines the forecast is within 10 %.
    """
    seconds = [max(value, 1e-3) for point in points for value in point[1:3]] or [1.0]
    first = floor(log10(min(seconds)))
    num_decades = max(1, ceil(log10(max(seconds))) - first)
    low, high = _BORDER, _SIZE - _BORDER
    scale = (high - low) / num_decades

    def at(value: float) -> float:
        return low + scale * (log10(max(value, 1e-3)) - first)

    def band(error: float, dash: str) -> str:
        # a forecast that is too long by a share is further right by that share
        shift = scale * log10(1 + error)
        start, end = low + max(shift, 0.0), high + min(shift, 0.0)
        ends = f'x1="{start:.1f}" y1="{_SIZE - start + shift:.1f}" x2="{end:.1f}"'
        return f'<line {ends} y2="{_SIZE - end + shift:.1f}"{dash}/>'

    dashed = ' stroke-dasharray="4 4"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIZE} {_SIZE}" width="{_SIZE}">',
        "<style>text{font:11px system-ui,sans-serif;fill:#7d8794}line{stroke:#7d8794}</style>",
        f'<rect width="{_SIZE}" height="{_SIZE}" fill="#ffffff"/>',
        *(band(error, dashed if error else "") for error in (-_COMPLETION, 0.0, _COMPLETION)),
        *_axes(first, num_decades, low, high),
    ]
    for way, expected, measured, was_taken, name in points:
        ring = ' stroke="#1c2430" stroke-width="1.6"' if was_taken else ""
        place = f'cx="{at(expected):.1f}" cy="{_SIZE - at(measured):.1f}"'
        title = f"<title>{escape(name)}: {way}, {expected:.2f} s, {measured:.2f} s</title>"
        parts.append(f'<circle {place} r="4" fill="{_COLORS[way]}"{ring}>{title}</circle>')
    shown = [way for way in _COLORS if any(way == point[0] for point in points)]
    for i, way in enumerate(shown):
        place = f'cx="{low + 12}" cy="{low + 12 + 16 * i}"'
        parts.append(f'<circle {place} r="4" fill="{_COLORS[way]}"/>')
        parts.append(f'<text x="{low + 22}" y="{low + 16 + 16 * i}">{way}</text>')
    below = low + 16 + 16 * len(shown)
    parts.append(f'<text x="{low + 8}" y="{below}">ring: the way taken</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes(first: int, num_decades: int, low: int, high: int) -> list[str]:
    parts = [
        f'<line x1="{low}" y1="{high}" x2="{high}" y2="{high}"/>',
        f'<line x1="{low}" y1="{low}" x2="{low}" y2="{high}"/>',
        f'<text x="{high}" y="{_SIZE - 10}" text-anchor="end">forecast CPU seconds</text>',
        f'<text x="{low}" y="{low - 12}">measured CPU seconds</text>',
    ]
    for decade in range(num_decades + 1):
        place = low + (high - low) * decade / num_decades
        text = f"{10.0 ** (first + decade):g}"
        parts.append(f'<text x="{place:.0f}" y="{high + 16}" text-anchor="middle">{text}</text>')
        parts.append(
            f'<text x="{low - 6}" y="{_SIZE - place + 4:.0f}" text-anchor="end">{text}</text>'
        )
    return parts
