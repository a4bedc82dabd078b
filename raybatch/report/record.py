"""The account of a job: what went in, what came out, what failed, how fast it was.

`RunReport` is the frozen result as text, JSON and HTML. Nothing here decides whether rows are
complete; it states what was counted (see `raybatch.stages.tally`).
"""

import dataclasses
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import fsspec

from raybatch.config import from_mapping
from raybatch.durable.units import UnitCounts
from raybatch.errors import ConfigError
from raybatch.explanation.outcome import PlanOutcome
from raybatch.explanation.plain import from_plain
from raybatch.history.lanes import lanes_of
from raybatch.history.records import History
from raybatch.history.show import end_of, idle_facts, length_section, run_section, time_sections
from raybatch.pictures.cards import Card, draw_cards
from raybatch.pictures.document import Figure, Section, Table, to_fragment, to_page
from raybatch.pictures.wording import amount, duration, full, percent, printable
from raybatch.prefix.histogram import Histogram
from raybatch.stages.schema import GOOD_STATUSES

__all__ = [
    "PAGE_PATH",
    "REPORT_PATH",
    "ErrorCount",
    "RunReport",
    "error_counts",
    "installed_versions",
    "read_report",
    "report_path",
]

REPORT_PATH = "_raybatch/report.json"
PAGE_PATH = "_raybatch/report.html"

_MAX_MESSAGE = 120


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCount:
    """How often one class of row error happened.

    Args:
        error_class: the part of `__inference_error__` before the colon.
        rows: rows that carry it.
        row_ids: the first few of them.
        message: the whole error of the first one.
    """

    error_class: str
    rows: int
    row_ids: tuple[str, ...] = ()
    message: str = ""


def error_counts(counts: UnitCounts) -> tuple[ErrorCount, ...]:
    """Return the classes of errors, the most frequent first."""
    found = [
        ErrorCount(error_class=name, rows=one.num_rows, row_ids=one.row_ids, message=one.message)
        for name, one in counts.errors.items()
    ]
    return tuple(sorted(found, key=lambda error: (-error.rows, error.error_class)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a job has come to: its output, counted, and all runs that made it.

    Args:
        source: input path or URI.
        sink: output path or URI.
        model: as the user named it.
        rows_in: rows of the source.
        rows_out: rows of the sink, error rows included.
        rows_lost: source rows that are not in the sink.
        rows_duplicated: sink rows beyond the first of the same row.
        rows_todo: source rows of units that no run has written yet; not lost, a run goes on there.
        rows_resumed: rows that earlier runs had written.
        statuses: row status (see `raybatch.stages.schema.row_status`) to number of rows.
        errors: by class, the most frequent first.
        prompt_tokens: of all rows that reached the engines.
        cached_tokens: prompt tokens whose KV came from another request.
        generated_tokens: of all rows.
        startup_s: from the call to the first row handed to a ready engine; like the other times
            the sum over all runs, where there were several.
        engines_s: from there to the last row that came back.
        write_s: what was left to write after that.
        total_s: the whole call.
        replicas: engine actors of the pool.
        restarts: replicas started again after a death.
        versions: package to version.
        output_files: paths below the sink.
        plan: the plan of the run and what became of it; None where there was none, or where it is
            not known any more.
        planned_hit_rate: share of the prompt tokens that the plan was not to compute; None where
            there was none.
        num_units: units of the plan.
        problems: what the audit found wrong with the output.
        prompt_lengths: prompt tokens of the rows that were asked.
        output_lengths: generated tokens, of each sample.
        history: all runs of the job.
        is_rebuilt: made after a run that left no report of its own.
    """

    source: str
    sink: str
    model: str
    rows_in: int
    rows_out: int
    rows_lost: int = 0
    rows_duplicated: int = 0
    rows_todo: int = 0
    rows_resumed: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[ErrorCount, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    startup_s: float = 0.0
    engines_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0
    replicas: int = 0
    restarts: int = 0
    versions: Mapping[str, str] = field(default_factory=dict)
    output_files: tuple[str, ...] = ()
    plan: PlanOutcome | None = None
    planned_hit_rate: float | None = None
    num_units: int = 0
    problems: tuple[str, ...] = ()
    prompt_lengths: Histogram = field(default_factory=Histogram)
    output_lengths: Histogram = field(default_factory=Histogram)
    history: History = field(default_factory=History)
    is_rebuilt: bool = False

    @property
    def rows_failed(self) -> int:
        """Rows whose status is an error."""
        return sum(n for status, n in self.statuses.items() if status not in GOOD_STATUSES)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens per second of engine time, cached ones included."""
        return _rate(self.prompt_tokens, self.engines_s)

    @property
    def generated_tokens_per_s(self) -> float:
        """Generated tokens per second of engine time."""
        return _rate(self.generated_tokens, self.engines_s)

    def exit_code(self) -> int:
        """Return 0 for a finished run, 2 with error rows in it, 1 while the output is not clean."""
        if self.rows_lost or self.rows_duplicated or self.rows_todo or self.problems:
            return 1
        return 2 if self.rows_failed else 0

    def to_text(self) -> str:
        """Return the summary for people: one fact per line, printable ASCII only."""
        lines = [f"{name}: {value}" for name, value in (*_facts(self), *_plan_facts(self.plan))]
        return "\n".join(printable(line) for line in lines)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return to_fragment(self._title, self._sections())

    def to_html(self) -> str:
        """Return one page that holds all it needs: output, time, errors, runs, and the plan."""
        planned = () if self.plan is None else (*self.plan.sections(), *self.plan.plan.sections())
        return to_page(self._title, (*self._sections(), *planned))

    @property
    def _title(self) -> str:
        return f"raybatch report: {self.sink}"

    def _sections(self) -> tuple[Section, ...]:
        errors = () if not self.errors else (_error_section(self.errors),)
        runs = (run_section(self.history),) if self.history.runs else ()
        return (
            _audit_section(self),
            _run_facts(self),
            *errors,
            *time_sections(self.history),
            *length_section(self.prompt_lengths, self.output_lengths),
            *runs,
        )

    def to_json(self) -> str:
        """Return every field and the derived rates as a JSON object."""
        values: dict[str, Any] = dataclasses.asdict(dataclasses.replace(self, plan=None))
        values["plan"] = None if self.plan is None else self.plan.to_mapping()
        values["rows_failed"] = self.rows_failed
        values["prompt_tokens_per_s"] = self.prompt_tokens_per_s
        values["generated_tokens_per_s"] = self.generated_tokens_per_s
        values["exit_code"] = self.exit_code()
        return json.dumps(values, indent=2, sort_keys=True)

    def write(self, sink: str | None = None) -> str:
        """Write JSON and page below `sink` (the report's own by default); return the first path."""
        folder = (self.sink if sink is None else sink).rstrip("/")
        for path, content in ((PAGE_PATH, self.to_html()), (REPORT_PATH, self.to_json())):
            fs, name = fsspec.core.url_to_fs(f"{folder}/{path}")
            fs.makedirs(name.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(name, content.encode("utf-8", "backslashreplace"))
        return report_path(folder)


def report_path(sink: str) -> str:
    """Return where the report of `sink` lies."""
    return f"{sink.rstrip('/')}/{REPORT_PATH}"


def read_report(sink: str) -> RunReport:
    """Read the report that a run wrote below `sink`.

    Raises:
        ConfigError: there is none, or it is not a report of this version.
    """
    path = report_path(sink)
    fs, name = fsspec.core.url_to_fs(path)
    if not fs.exists(name):
        raise ConfigError(f"{sink}: no report here; expected {path}, written when a job ends")
    try:
        values = json.loads(fs.cat_file(name))
        derived = ("rows_failed", "prompt_tokens_per_s", "generated_tokens_per_s", "exit_code")
        stored = {key: value for key, value in values.items() if key not in derived}
        stored["errors"] = tuple(
            ErrorCount(**{**error, "row_ids": tuple(error["row_ids"])})
            for error in stored["errors"]
        )
        stored["output_files"] = tuple(stored["output_files"])
        stored["problems"] = tuple(stored.get("problems", ()))
        for name in ("prompt_lengths", "output_lengths"):
            stored[name] = from_plain(Histogram, stored[name], where=f"{path}: {name}")
        stored["history"] = History.from_mapping(stored["history"], where=f"{path}: history")
        if stored.get("plan") is not None:
            stored["plan"] = PlanOutcome.from_mapping(stored["plan"], where=f"{path}: plan")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a report of this version of raybatch ({error})") from error
    return from_mapping(RunReport, stored, where=path)


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, raybatch and the packages that decide results."""
    versions = {"python": platform.python_version()}
    for name in ("raybatch", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def _facts(report: RunReport) -> list[tuple[str, str]]:
    """Return names with what there is to say, in the order of the text."""
    rows = f"{report.rows_in} in, {report.rows_out} out, {report.rows_lost} lost"
    if report.rows_duplicated:
        rows += f", {report.rows_duplicated} duplicated"
    if report.rows_todo:
        rows += f", {report.rows_todo} still to do"
    if report.rows_resumed:
        rows += f"; {report.rows_resumed} of them were written by earlier runs"
    facts = [("model", report.model), ("source", report.source), ("rows", rows)]
    if report.statuses:
        facts.append(("status", ", ".join(f"{n} {name}" for name, n in report.statuses.items())))
    facts.append(("errors", str(report.rows_failed)))
    for error in report.errors:
        more = ", ..." if error.rows > len(error.row_ids) else ""
        told = f"{error.rows} (rows {', '.join(error.row_ids)}{more})"
        facts.append((f"  {error.error_class}", told))
    cached = 100 * _rate(report.cached_tokens, report.prompt_tokens)
    tokens = (
        f"{report.prompt_tokens} prompt ({cached:.1f} % from the prefix cache), "
        f"{report.generated_tokens} generated"
    )
    seconds = (
        f"{report.total_s:.1f} s (start-up {report.startup_s:.1f} s, "
        f"engines {report.engines_s:.1f} s, rest of the writing {report.write_s:.1f} s)"
    )
    runs = report.history.runs
    if len(runs) > 1:
        seconds += f" in {len(runs)} runs"
    measured = [
        ("speed", _speed(report)),
        ("time", seconds),
        *idle_facts(lanes_of(report.history)),
        *(("  run", f"{duration(run.seconds)}, {end_of(run)}") for run in runs if len(runs) > 1),
        ("replicas", f"{report.replicas}, {_count(report.restarts, 'restart')}"),
    ]
    unmeasured = [("note", "made from plan and parts; no run has left a log")]
    is_measured = runs or not report.is_rebuilt
    return [
        *facts,
        *(("  problem", problem) for problem in report.problems),
        ("tokens", tokens),
        *_hit_rates(report),
        *(measured if is_measured else unmeasured),
        ("output", f"{report.sink} ({_count(len(report.output_files), 'file')})"),
        ("report", "none yet" if report.is_rebuilt else report_path(report.sink)),
    ]


def _audit_section(report: RunReport) -> Section:
    cards = (
        Card(name="rows expected", value=full(report.rows_in)),
        Card(
            name="written", value=full(report.rows_out), is_good=report.rows_out == report.rows_in
        ),
        Card(name="lost", value=full(report.rows_lost), is_good=not report.rows_lost),
        Card(
            name="duplicated",
            value=full(report.rows_duplicated),
            is_good=not report.rows_duplicated,
        ),
    )
    figure = Figure(title="", svg=draw_cards(cards, label="Audit"), is_wide=True)
    problems = tuple((f"problem {i}", said) for i, said in enumerate(report.problems, 1))
    return Section(title="Audit of the output", facts=problems, figures=(figure,))


def _run_facts(report: RunReport) -> Section:
    # what begins with a blank has a table of its own
    shown = tuple(fact for fact in _facts(report) if not fact[0].startswith(" "))
    return Section(title="Run", facts=shown)


def _error_section(errors: tuple[ErrorCount, ...]) -> Section:
    rows = tuple(
        (
            error.error_class,
            full(error.rows),
            ", ".join(error.row_ids),
            error.message[:_MAX_MESSAGE] + ("..." if len(error.message) > _MAX_MESSAGE else ""),
        )
        for error in errors
    )
    header = ("class", "rows", "row ids", "the first one says")
    return Section(title="Errors", table=Table(header=header, rows=rows))


def _plan_facts(outcome: PlanOutcome | None) -> list[tuple[str, str]]:
    if outcome is None:
        return []
    plan, actual = outcome.plan, outcome.actual
    order = f"order {plan.order}" if plan.is_reordered else "input order"
    facts = [
        (
            "plan",
            f"{order}; hit rate {percent(plan.hit_rate)} planned, {percent(actual.hit_rate)} "
            f"actual; {amount(plan.saved_tokens)} prompt tokens saved planned, "
            f"{amount(actual.saved_tokens)} actual",
        )
    ]
    if plan.time is not None:
        facts += [
            (name, f"{planned} planned, {took} actual")
            for name, planned, took in outcome.rows()
            if "time" in name
        ]
    return facts + [("  differs", said) for said in outcome.deviations()]


def _hit_rates(report: RunReport) -> list[tuple[str, str]]:
    if report.planned_hit_rate is None or report.plan is not None:
        return []
    measured = _rate(report.cached_tokens, report.prompt_tokens)
    said = f"hit rate {percent(report.planned_hit_rate)} planned, {percent(measured)} actual"
    return [("plan", said)]


def _speed(report: RunReport) -> str:
    if not report.engines_s:
        return "not measured, too little work"
    return (
        f"{report.prompt_tokens_per_s:.0f} prompt tokens/s, "
        f"{report.generated_tokens_per_s:.0f} output tokens/s"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
