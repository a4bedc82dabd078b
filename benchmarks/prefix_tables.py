"""Renders a prefix run as Markdown: verdicts, then counts, then times."""

from collections.abc import Callable, Mapping, Sequence

from prefix_summary import Row, Verdict, verdicts
from summary import Cell
from tables import Column, equal_rows, markdown_table, noise, show_spread, troubles

_LEGEND = """\
KV: tokens of each replica's cache, in percent of the shared prefixes. "computed": prompt tokens
that no cache had; "again": tokens of preempted sequences computed once more. "of fewest": computed
over what is left when every whole block of the prefix tree is computed once. "of best hit rate":
cached tokens over those that can be had. Times are median (lowest-highest) of the runs; engine time
counts raybatch's planning and not the sorting of others. Ratios are the other's time over
raybatch's with a plan: above 1 raybatch is faster, below 1 the other is."""


def render(rows: Sequence[Row], refused: Mapping[Cell, str], failed: Sequence[str]) -> str:
    """Return all tables, refused speeds and failures."""
    sections: list[tuple[str, str]] = []
    judged = verdicts(rows)
    if judged:
        sections.append(("With a plan, against the others", markdown_table(VERDICTS, judged)))
    counted = [row for row in rows if row.computed_tokens is not None]
    if counted:
        ordered = sorted(counted, key=_place)
        sections.append(("Computed prompt tokens", markdown_table(COUNTS, ordered)))
    for kind, title, columns in (
        ("engine", "Engine time", ENGINE_TIMES),
        ("job", "Whole jobs, from process start to exit", JOB_TIMES),
        ("pool", "Pools of warm engines", ENGINE_TIMES),
    ):
        chosen = sorted((row for row in rows if row.kind == kind), key=_place)
        if chosen:
            sections.append((title, markdown_table(columns, chosen)))
    pieces = [f"## {title}\n\n{table}" for title, table in sections]
    legend = [_LEGEND] if rows else []
    return "\n\n".join([*pieces, *legend, *troubles(refused, failed)]) + "\n"


def _place(row: Row) -> tuple[str, str, int, int]:
    return row.model, row.workload, row.kv_percent, row.contestant.replicas


def _count(name: str) -> Callable[[Row], str]:
    def cell(row: Row) -> str:
        value = getattr(row, name)
        return "-" if value is None else f"{value:,.0f}"

    return cell


def _fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _of_fewest(row: Row) -> str:
    if row.computed_tokens is None:
        return "-"
    return f"{row.computed_tokens / row.fewest_tokens:.3f}"


def _versus(read: Callable[[Verdict], tuple[str, float] | None]) -> Callable[[Verdict], str]:
    def cell(verdict: Verdict) -> str:
        other = read(verdict)
        if other is None:
            return "-"
        return f"{other[1] / verdict.planned:.2f} ({other[0]}, {other[1]:.2f} s)"

    return cell


def _unplanned(verdict: Verdict) -> tuple[str, float] | None:
    return None if verdict.unplanned is None else ("raybatch shuffled", verdict.unplanned)


VERDICTS: tuple[Column[Verdict], ...] = (
    ("model", lambda v: v.model),
    ("workload", lambda v: v.workload),
    ("KV", lambda v: f"{v.kv_percent} %"),
    ("side", lambda v: v.side),
    ("measure", lambda v: v.measure),
    ("its time", lambda v: f"{v.planned:.2f}"),
    ("best cheap baseline", _versus(lambda v: v.cheap)),
    ("best peer, shuffled", _versus(lambda v: v.shuffled)),
    ("without a plan", _versus(_unplanned)),
)

_WHO: tuple[Column[Row], ...] = (
    ("model", lambda row: row.model),
    ("workload", lambda row: row.workload),
    ("KV", lambda row: f"{row.kv_percent} % = {row.kv_tokens:,}"),
    ("replicas", lambda row: str(row.contestant.replicas)),
    ("side", lambda row: row.contestant.side),
    ("input order", lambda row: row.contestant.order),
)

COUNTS: tuple[Column[Row], ...] = (
    *_WHO,
    ("prompt tokens", _count("prompt_tokens")),
    ("computed", _count("computed_tokens")),
    ("of fewest", _of_fewest),
    ("of best hit rate", lambda row: _fraction(row.hit_fraction)),
    ("preemptions", _count("preemptions")),
    ("again", _count("recomputed_tokens")),
    ("steps", _count("steps")),
)

ENGINE_TIMES: tuple[Column[Row], ...] = (
    *_WHO,
    ("CPU s", lambda row: show_spread(row.cpu_s)),
    ("wall s", lambda row: show_spread(row.wall_s)),
    ("plan s", lambda row: _fraction(row.plan_s)),
    ("out tok/CPU s", lambda row: f"{row.output_tokens / row.cpu_s.median:.0f}"),
    ("equal rows", equal_rows),
    ("foreign cores", noise),
    ("runs", lambda row: str(row.num_repetitions)),
)

JOB_TIMES: tuple[Column[Row], ...] = (
    *_WHO,
    ("wall s", lambda row: show_spread(row.wall_s)),
    ("CPU s", lambda row: show_spread(row.cpu_s)),
    ("engine window s", lambda row: show_spread(row.window_s)),
    ("equal rows", equal_rows),
    ("foreign cores", noise),
    ("runs", lambda row: str(row.num_repetitions)),
)
