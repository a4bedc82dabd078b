"""Renders the rows of a run as Markdown tables and as the two result files."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from meters import QUIET_CORES
from suites import PeerKind
from summary import Cell, Row, Spread

_R = TypeVar("_R")
# head of a column, and a function that formats the cell of a row
Column = tuple[str, Callable[[_R], str]]


class HasRows(Protocol):
    """A frozen row of any table."""

    @property
    def equal_rows(self) -> tuple[int, int] | None: ...

    @property
    def foreign_cores(self) -> float: ...


def show_spread(value: Spread | None) -> str:
    if value is None:
        return "-"
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def equal_rows(row: HasRows) -> str:
    return "-" if row.equal_rows is None else f"{row.equal_rows[0]}/{row.equal_rows[1]}"


def noise(row: HasRows) -> str:
    mark = " noisy" if row.foreign_cores > QUIET_CORES else ""
    return f"{row.foreign_cores:.2f}{mark}"


def _mebibytes(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row.memory is None else f"{row.memory[name] / 2**20:.0f}"


def _head(name: str) -> Column[Row]:
    return name, lambda row: str(getattr(row, name))


ENGINE_COLUMNS: tuple[Column[Row], ...] = (
    _head("model"),
    _head("workload"),
    _head("peer"),
    ("rows", lambda row: str(row.num_requests)),
    ("engine CPU s", lambda row: show_spread(row.cpu_s)),
    ("wall s", lambda row: show_spread(row.wall_s)),
    ("out tok/CPU s", lambda row: f"{row.rate_cpu:.0f}"),
    ("out tok/s", lambda row: f"{row.rate_wall:.0f}"),
    ("ratio CPU", lambda row: _ratio(row.ratio_cpu)),
    ("ratio wall", lambda row: _ratio(row.ratio_wall)),
    ("equal rows", equal_rows),
    ("hit rate", lambda row: "-" if row.hit_rate is None else f"{row.hit_rate:.3f}"),
    ("load s", lambda row: "-" if row.load_s is None else f"{row.load_s:.1f}"),
    ("foreign cores", noise),
    ("runs", lambda row: str(row.num_repetitions)),
)

JOB_COLUMNS: tuple[Column[Row], ...] = (
    _head("model"),
    _head("workload"),
    _head("peer"),
    ("rows", lambda row: str(row.num_requests)),
    ("job wall s", lambda row: show_spread(row.wall_s)),
    ("job CPU s", lambda row: show_spread(row.cpu_s)),
    ("engine window s", lambda row: show_spread(row.window_s)),
    ("rows/s", lambda row: f"{row.num_requests / row.wall_s.median:.1f}"),
    ("ratio wall", lambda row: _ratio(row.ratio_wall)),
    ("ratio CPU", lambda row: _ratio(row.ratio_cpu)),
    ("equal rows", equal_rows),
    ("foreign cores", noise),
    ("runs", lambda row: str(row.num_repetitions)),
)

POOL_COLUMNS: tuple[Column[Row], ...] = (
    _head("model"),
    _head("workload"),
    _head("peer"),
    ("replicas", lambda row: str(row.num_replicas)),
    ("rows", lambda row: str(row.num_requests)),
    ("wall s", lambda row: show_spread(row.wall_s)),
    ("tree CPU s", lambda row: show_spread(row.cpu_s)),
    ("out tok/s", lambda row: f"{row.rate_wall:.0f}"),
    ("speed-up", lambda row: _ratio(row.ratio_wall and 1 / row.ratio_wall)),
    ("Rss MiB", _mebibytes("rss")),
    ("Pss MiB", _mebibytes("pss")),
    ("weights Rss MiB", _mebibytes("weights_rss")),
    ("weights Pss MiB", _mebibytes("weights_pss")),
    ("weights file MiB", _mebibytes("weights_file")),
    ("equal rows", equal_rows),
    ("foreign cores", noise),
    ("runs", lambda row: str(row.num_repetitions)),
)

_TITLES: tuple[tuple[PeerKind, str, tuple[Column[Row], ...]], ...] = (
    ("engine", "Engine time", ENGINE_COLUMNS),
    ("job", "Whole-job time, from process start to exit", JOB_COLUMNS),
    ("pool", "One replica per core: engines in a warm pool, weights mapped once", POOL_COLUMNS),
)

_LEGEND = """\
Median (lowest-highest) over the runs. A ratio is raybatch's rate over the peer's, by CPU seconds of
the process tree or by wall time: above 1 raybatch is faster, below 1 the peer is; jobs are compared
with raybatch's job of as many replicas. "equal rows": rows whose greedy tokens equal raybatch's.
"foreign cores": load by other processes, at most, in a run; wall times of noisy runs prove nothing.
A peer that ran fewer rows is compared by its rate. Memory is summed over the engines; Pss divides
what several share among them."""


def render(rows: Sequence[Row], refused: Mapping[Cell, str], failed: Sequence[str]) -> str:
    """Return the tables, refused speeds and failures as Markdown."""
    pieces = []
    for kind, title, columns in _TITLES:
        chosen = [row for row in rows if row.kind == kind]
        if chosen:
            pieces.append(f"## {title}\n\n{markdown_table(columns, chosen)}")
    if rows:
        pieces.append(_LEGEND)
    return "\n\n".join([*pieces, *troubles(refused, failed)]) + "\n"


def troubles(refused: Mapping[Cell, str], failed: Sequence[str]) -> list[str]:
    """Return the sections of refused speeds and failures."""
    pieces = []
    if refused:
        lines = [f"- {model}, {workload}: {why}" for (model, workload), why in refused.items()]
        pieces.append("## Refused: no speed without equal outputs\n\n" + "\n".join(lines))
    if failed:
        pieces.append("## Failed\n\n" + "\n".join(f"- {line}" for line in failed))
    return pieces


def render_conditions(conditions: Mapping[str, Any]) -> str:
    """Return the conditions as a Markdown list."""
    lines = []
    for name, value in conditions.items():
        if isinstance(value, Mapping):
            value = "; ".join(f"{key} {entry}" for key, entry in value.items())
        elif isinstance(value, list | tuple):
            value = ", ".join(map(str, value))
        lines.append(f"- {name.replace('_', ' ')}: {value}")
    return "## Conditions\n\n" + "\n".join(lines) + "\n"


def write_results(
    folder: Path,
    name: str,
    *,
    tables: str,
    rows: Sequence[HasRows],
    refused: Mapping[Cell, str],
    conditions: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
) -> tuple[Path, Path]:
    """Write `name`.json and `name`.md; return their paths. Raw numbers go to the JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "conditions": conditions,
        "refused": [[*cell, why] for cell, why in refused.items()],
        "rows": [dataclasses.asdict(row) for row in rows],
        "raw": [_without_digests(r) for r in records if _is_printable(r, refused)],
    }
    as_json, as_markdown = folder / f"{name}.json", folder / f"{name}.md"
    as_json.write_text(json.dumps(_rounded(content), indent=1) + "\n", encoding="utf-8")
    text = f"# {name}\n\n{tables}\n{render_conditions(conditions)}"
    as_markdown.write_text(text, encoding="utf-8")
    return as_json, as_markdown


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _is_printable(record: Mapping[str, Any], refused: Mapping[Cell, str]) -> bool:
    if record["kind"] in ("load", "failure"):
        return True
    return record["kind"] == "measure" and (record["model"], record["workload"]) not in refused


def _without_digests(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("row_digests", "rows")}


def markdown_table(columns: Sequence[Column[_R]], rows: Sequence[_R]) -> str:
    """Return rows as an aligned Markdown table."""
    heads = [name for name, _ in columns]
    body = [[cell(row) for _, cell in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *body, strict=True)]
    lines = [_line(heads, widths), _line(["-" * width for width in widths], widths)]
    return "\n".join([*lines, *(_line(cells, widths) for cells in body)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return f"| {' | '.join(padded)} |"
