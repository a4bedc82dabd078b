"""The account of a job: what went in, what came out, what failed, how fast it was.

`RunReport` is the frozen result as text, JSON and HTML. Nothing here decides whether rows are
complete; it states what was counted (see `raybatch.planning.tally`).
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
from raybatch.durable.stores.store import open_store
from raybatch.durable.units import UnitCounts
from raybatch.errors import ConfigError
from raybatch.explanation.outcome import PlanOutcome
from raybatch.explanation.plain import from_plain
from raybatch.pictures.document import Section, to_fragment, to_page
from raybatch.pictures.wording import printable
from raybatch.prefix.histogram import Histogram
from raybatch.report.history.records import History
from raybatch.report.history.show import length_section, run_section, time_sections
from raybatch.report.paths import PAGE_PATH, REPORT_PATH, report_path
from raybatch.report.show import (
    audit_section,
    error_section,
    facts_of,
    plan_facts,
    rate,
    run_facts,
    skipped_section,
)
from raybatch.rows.schema import GOOD_STATUSES


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCount:
    """How often one class of row error happened.

    Args:
        error_class: the part of `__inference_error__` before the colon.
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
        backend: kind of the backend that answered; "" where that is not known.
        backend_reason: why it was that one; "" where the user named it.
        rows_out: rows of the sink, error rows included.
        rows_lost: source rows that are not in the sink.
        rows_duplicated: sink rows beyond the first of the same row.
        rows_todo: source rows of units that no run has written yet; not lost, a run goes on there.
        statuses: row status (see `raybatch.rows.schema.row_status`) to number of rows.
        errors: by class, the most frequent first.
        prompt_tokens: of all rows that reached the engines.
        cached_tokens: prompt tokens whose KV came from another request.
        cost: of all answers, over all runs, where they have prices of their own; answers that a run
            threw away are counted.
        startup_s: from the call to the first row handed to a ready engine; like the other times
            the sum over all runs, where there were several.
        engines_s: from there to the last row that came back.
        write_s: what was left to write after that.
        executor: of the engines of the last run: "ray", or "local" without it; "" where no log
            says so.
        output_files: paths below the sink.
        plan: the plan of the run and what became of it; None where there was none, or where it is
            not known any more.
        planned_hit_rate: share of the prompt tokens that the plan was not to compute; None where
            there was none.
        problems: what the audit found wrong with the output.
        prompt_lengths: prompt tokens of the rows that were asked.
        skipped: name and reason of each file that was left out because it could not be read.
        special_rows: rows whose texts held special tokens of the model.
        special_tokens: found in them; text or control tokens as the job had asked.
        stopped: the limit, or SIGTERM, that ended the last run early; "" where none did.
        is_rebuilt: no such report lies below the sink: it was made after a run that left none, or
            could not be written.
    """

    source: str
    sink: str
    model: str
    rows_in: int
    rows_out: int
    backend: str = ""
    backend_reason: str = ""
    rows_lost: int = 0
    rows_duplicated: int = 0
    rows_todo: int = 0
    rows_resumed: int = 0
    statuses: Mapping[str, int] = field(default_factory=dict)
    errors: tuple[ErrorCount, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    cost: float = 0.0
    startup_s: float = 0.0
    engines_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0
    replicas: int = 0
    restarts: int = 0
    executor: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    output_files: tuple[str, ...] = ()
    plan: PlanOutcome | None = None
    planned_hit_rate: float | None = None
    num_units: int = 0
    problems: tuple[str, ...] = ()
    skipped: tuple[tuple[str, str], ...] = ()
    special_rows: int = 0
    special_tokens: int = 0
    stopped: str = ""
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
        return rate(self.prompt_tokens, self.engines_s)

    @property
    def generated_tokens_per_s(self) -> float:
        """Generated tokens per second of engine time."""
        return rate(self.generated_tokens, self.engines_s)

    def exit_code(self) -> int:
        """Return 0 for a finished run, 2 with error rows in it, 1 while the output is not clean."""
        if self.rows_lost or self.rows_duplicated or self.rows_todo or self.problems:
            return 1
        return 2 if self.rows_failed else 0

    def to_text(self) -> str:
        """Return the summary for people: one fact per line, printable ASCII only."""
        lines = [f"{name}: {value}" for name, value in (*facts_of(self), *plan_facts(self.plan))]
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
        errors = () if not self.errors else (error_section(self.errors),)
        runs = (run_section(self.history),) if self.history.runs else ()
        return (
            audit_section(self),
            run_facts(self),
            *errors,
            *skipped_section(self.skipped),
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
        store = open_store(folder)
        for path, content in ((PAGE_PATH, self.to_html()), (REPORT_PATH, self.to_json())):
            # whole or as it was, also on a disk that is full
            store.replace(path, content.encode("utf-8", "backslashreplace"))
        return report_path(folder)


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
        stored["skipped"] = tuple((file, reason) for file, reason in stored.get("skipped", ()))
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
