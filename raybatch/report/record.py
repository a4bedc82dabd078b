"""The report of a job: input, output, errors, and speed.

`RunReport` is the frozen result as text, JSON and HTML. It does not decide whether rows are
complete; it reports the counts of `raybatch.planning.tally`.
"""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from raybatch.backends.choice import backend_text
from raybatch.durable.storage import open_store
from raybatch.durable.units import UnitCounts
from raybatch.errors import shell_path
from raybatch.explanation.outcome import PlanOutcome
from raybatch.pictures.charts import (
    Cell,
    ChartBand,
    GanttBar,
    Step,
    draw_bands,
    draw_cards,
    draw_gantt,
    draw_histogram,
    draw_lanes,
)
from raybatch.pictures.document import Figure, Section, Table, to_fragment, to_page
from raybatch.pictures.wording import amount, count, duration, full, percent, printable
from raybatch.policy.deadline import amount_of_money
from raybatch.prefix.histogram import Histogram
from raybatch.records.pool_stats import PoolCounts
from raybatch.report.history import History, RunRecord, RunSample
from raybatch.rows.schema import GOOD_STATUSES

_REPORT_PATH = "_raybatch/report.json"
_PAGE_PATH = "_raybatch/report.html"
_MAX_MESSAGE = 120
# files listed in the text; the page lists more
_NUM_SKIPPED, _MAX_SKIPPED = 3, 100
# in the order of the seconds of a cell
_PARTS = ("at work", "cold start", "starvation", "tail")
_MAX_LANES = 16
_MAX_CELLS = 160
# minimum outputs for meaningful shares
_MIN_PREDICTED = 100
# over 3 times the duration of nearly all units
_SLOW_FACTOR, _SLOW_S = 3.0, 1.0


def report_path(sink: str) -> str:
    return f"{sink.rstrip('/')}/{_REPORT_PATH}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorCount:
    """Number of rows with one class of error, with first row ids and the first message.

    The class is the part of `__inference_error__` before the colon.
    """

    error_class: str
    rows: int
    row_ids: tuple[str, ...] = ()
    message: str = ""


def error_counts(counts: UnitCounts) -> tuple[ErrorCount, ...]:
    errors = sorted(counts.errors.items(), key=lambda item: (-item[1].num_rows, item[0]))
    return tuple(
        ErrorCount(error_class=name, rows=one.num_rows, row_ids=one.row_ids, message=one.message)
        for name, one in errors
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport(PoolCounts):
    """The result of a job: counts of its output, and all its runs.

    Args:
        backend: kind of the backend; "" if unknown.
        backend_reason: why it was chosen; "" if the user set it.
        rows_out: rows of the sink, error rows included.
        rows_lost: source rows that are missing from the sink.
        rows_duplicated: sink rows beyond the first of the same row.
        rows_todo: source rows of units that are not written yet; a run can resume them.
        statuses: number of rows by status (see `raybatch.rows.schema.row_status`).
        errors: error rows by class, the most frequent class first.
        cost: cost of answers of all runs, also of discarded ones, if the backend has prices.
        startup_s: from the call until a ready engine got the first row; like the other times a sum
            over all runs.
        engines_s: from then to the last finished row.
        write_s: time of the remaining writes.
        executor: of the last run, "ray" or "local"; "" if unknown.
        output_files: paths below the sink.
        plan: the plan of the run and its outcome; None if there was none, or it is unknown.
        planned_hit_rate: planned share of prompt tokens that need no computing.
        problems: problems found by the audit of the output.
        skipped: (name, reason) of each unreadable source file that was left out.
        special_rows: rows with special tokens of the model in their texts, escaped or not.
        stopped: the limit, or SIGTERM, that ended the last run early; "" for none.
        is_rebuilt: the report is not stored below the sink.
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
    cost: float = 0.0
    startup_s: float = 0.0
    engines_s: float = 0.0
    write_s: float = 0.0
    total_s: float = 0.0
    replicas: int = 0
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
        return sum(n for status, n in self.statuses.items() if status not in GOOD_STATUSES)

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens, also cached ones, per second of `engines_s`."""
        return self.prompt_tokens / self.engines_s if self.engines_s > 0 else 0.0

    @property
    def generated_tokens_per_s(self) -> float:
        """Generated tokens per second of `engines_s`."""
        return self.generated_tokens / self.engines_s if self.engines_s > 0 else 0.0

    @property
    def is_complete(self) -> bool:
        """Return whether every row is there once, and nothing is wrong with the output."""
        rows = self.rows_lost or self.rows_duplicated or self.rows_todo
        return not (rows or self.problems)

    def exit_code(self) -> int:
        """Return 1 if rows are missing or repeated, or with problems; 2 with error rows; else 0."""
        if not self.is_complete:
            return 1
        return 2 if self.rows_failed else 0

    def to_text(self) -> str:
        """Return the summary for people: one fact per line, printable ASCII only."""
        facts = _facts(self) + ([] if self.plan is None else self.plan.facts())
        return "\n".join(printable(f"{name}: {value}") for name, value in facts)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return to_fragment(f"raybatch report: {self.sink}", self._sections())

    def to_html(self) -> str:
        """Return a self-contained page: output, time, errors, runs, and the plan."""
        planned = () if self.plan is None else (*self.plan.sections(), *self.plan.plan.sections())
        return to_page(f"raybatch report: {self.sink}", (*self._sections(), *planned))

    def _sections(self) -> tuple[Section, ...]:
        # facts that begin with a blank are in separate tables
        shown = tuple(fact for fact in _facts(self) if not fact[0].startswith(" "))
        sections = [_audit_section(self), Section(title="Run", facts=shown)]
        if self.errors:
            rows = []
            for error in self.errors:
                text = error.message[:_MAX_MESSAGE] + "..." * (len(error.message) > _MAX_MESSAGE)
                rows.append((error.error_class, full(error.rows), ", ".join(error.row_ids), text))
            columns = ("class", "rows", "row ids", "first message")
            table = Table(header=columns, rows=tuple(rows))
            sections.append(Section(title="Errors", table=table))
        if self.skipped:
            more = len(self.skipped) - _MAX_SKIPPED
            header = ("file", "reason")
            table = Table(header=header, rows=self.skipped[:_MAX_SKIPPED])
            notes = (f"{full(more)} more are in report.json",) if more > 0 else ()
            sections.append(Section(title="Files left out", table=table, notes=notes))
        sections += time_sections(self.history)
        sections += length_section(self.prompt_lengths, self.output_lengths, self.history)
        if self.history.runs:
            sections.append(run_section(self.history))
        return tuple(sections)

    def to_json(self) -> str:
        """Return every field and the derived rates as a JSON object."""
        values = {
            **dataclasses.asdict(dataclasses.replace(self, plan=None)),
            "plan": None if self.plan is None else self.plan.to_mapping(),
            "rows_failed": self.rows_failed,
            "prompt_tokens_per_s": self.prompt_tokens_per_s,
            "generated_tokens_per_s": self.generated_tokens_per_s,
            "exit_code": self.exit_code(),
        }
        return json.dumps(values, indent=2, sort_keys=True)

    def write(self, sink: str | None = None) -> str:
        """Write JSON and HTML below `sink`, by default the report's own; return the JSON's path."""
        folder = (self.sink if sink is None else sink).rstrip("/")
        store = open_store(folder)
        for path, content in ((_PAGE_PATH, self.to_html()), (_REPORT_PATH, self.to_json())):
            # atomic, also on a full disk
            store.replace(path, content.encode("utf-8", "backslashreplace"))
        return report_path(folder)


def _facts(report: RunReport) -> list[tuple[str, str]]:
    rows = f"{report.rows_in} in, {report.rows_out} out, {report.rows_lost} lost"
    if report.rows_duplicated:
        rows += f", {report.rows_duplicated} duplicated"
    if report.rows_todo:
        rows += f", {report.rows_todo} still to do"
    if report.rows_resumed:
        rows += f"; {report.rows_resumed} of them were written by earlier runs"
    facts = [("model", report.model), ("source", report.source), ("rows", rows)]
    if report.statuses:
        ranked = sorted(report.statuses.items(), key=lambda one: (-one[1], one[0]))
        facts.append(("status", ", ".join(f"{n} {name}" for name, n in ranked)))
    facts.append(("errors", str(report.rows_failed)))
    for error in report.errors:
        more = ", ..." if error.rows > len(error.row_ids) else ""
        examples = f"rows {', '.join(error.row_ids)}{more}"
        facts.append((f"  {error.error_class}", f"{error.rows} ({examples})"))
    if report.special_tokens:
        tokens = _count(report.special_tokens, "special token")
        facts.append(("texts", f"{tokens} of the model in {_count(report.special_rows, 'row')}"))
    facts += [("  problem", problem) for problem in report.problems]
    if report.skipped:
        files = "1 file that" if len(report.skipped) == 1 else f"{len(report.skipped)} files that"
        more = ", ..." if len(report.skipped) > _NUM_SKIPPED else ""
        facts.append(("skipped", f"{files} cannot be read{more}"))
        facts += [(f"  {name}", reason) for name, reason in report.skipped[:_NUM_SKIPPED]]
    if report.stopped:
        facts.append(("stopped", report.stopped))
    cached = report.cached_fraction
    prompts = f"{report.prompt_tokens} prompt"
    if report.prompt_tokens:
        prompts += f" ({100 * cached:.1f} % from the prefix cache)"
    facts.append(("tokens", f"{prompts}, {report.generated_tokens} generated"))
    if report.planned_hit_rate is not None and report.plan is None:
        planned = percent(report.planned_hit_rate)
        facts.append(("plan", f"hit rate {planned} planned, {percent(cached)} actual"))
    if report.history.runs or not report.is_rebuilt:
        facts += _measured_facts(report)
    else:
        facts.append(("note", "rebuilt from plan and parts; there is no log of a run"))
    if report.backend:
        facts.append(("backend", backend_text(report.backend, report.backend_reason)))
    num_files = _count(len(report.output_files), "file")
    facts.append(("output", f"{shell_path(report.sink)} ({num_files})"))
    path = "none yet" if report.is_rebuilt else shell_path(report_path(report.sink))
    return [*facts, ("report", path)]


def _measured_facts(report: RunReport) -> list[tuple[str, str]]:
    facts = [("cost", amount_of_money(report.cost))] if report.cost else []
    speed = "not measured, too little work"
    if report.engines_s:
        prompts = f"{report.prompt_tokens_per_s:.0f} prompt tokens/s"
        speed = f"{prompts}, {report.generated_tokens_per_s:.0f} output tokens/s"
    seconds = (
        f"{report.total_s:.1f} s (start-up {report.startup_s:.1f} s, "
        f"engines {report.engines_s:.1f} s, final writing {report.write_s:.1f} s)"
    )
    runs = report.history.runs if len(report.history.runs) > 1 else ()
    if runs:
        seconds += f" in {len(runs)} runs"
    last = next((run for run in reversed(report.history.runs) if run.modes), None)
    where = " on one host without Ray" if report.executor == "local" else ""
    restarts = _count(report.restarts, "restart")
    if report.hung:
        restarts += f", {report.hung} of an engine that hung"
    return [
        *facts,
        ("speed", speed),
        ("time", seconds),
        *idle_facts(lanes_of(report.history)),
        *coverage_facts(report.history),
        *(("  run", f"{duration(run.seconds)}, {end_of(run)}") for run in runs),
        ("replicas", f"{report.replicas}{where}, {restarts}{_shared_work(report)}"),
        *(("engine", line) for line in ([] if last is None else _modes_of(last))),
    ]


def _modes_of(run: RunRecord) -> list[str]:
    """Return the last execution modes of engines, one line per mode."""
    lines = [f"{mode} ({_count(num, 'engine')})" for mode, num in run.modes]
    if run.mode_changes:
        lines[-1] += f"; chosen or forecast {run.mode_changes:,} times before"
    return lines


def _shared_work(report: RunReport) -> str:
    moves = groups = copies = ""
    if report.moved:
        kv = f" with {amount(report.moved_kv_bytes)}B of KV" if report.moved_kv_bytes else ""
        moves = f", {_count(report.moved, 'running row')} moved between them{kv}"
    if report.teams:
        formed, steps = _count(report.teams, "TP group"), _count(report.team_steps, "step")
        groups = f", {formed} of them computed {steps} of last rows"
    if report.duplicates:
        rows = _count(report.duplicates, "row")
        copies = f", {rows} run by two of them ({report.won_duplicates} ended at the second first)"
    return moves + groups + copies


def _audit_section(report: RunReport) -> Section:
    numbers = (
        ("rows expected", report.rows_in, None),
        ("written", report.rows_out, report.rows_out == report.rows_in),
        ("still to do", report.rows_todo, not report.rows_todo),
        ("lost", report.rows_lost, not report.rows_lost),
        ("duplicated", report.rows_duplicated, not report.rows_duplicated),
    )
    cards = [(name, full(number), is_good) for name, number, is_good in numbers]
    figure = Figure(title="", svg=draw_cards(cards, label="Audit"), is_wide=True)
    problems = tuple((f"problem {i}", problem) for i, problem in enumerate(report.problems, 1))
    return Section(title="Audit of the output", facts=problems, figures=(figure,))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def end_of(run: RunRecord) -> str:
    return run.end or "its log has no end: killed, or still running"


def lanes_of(history: History) -> dict[int, list[Cell]]:
    """Return how each rank spent its time, up to the last work of each run: cells by rank.

    A cell is (begin, end, seconds of four kinds). A rank may have been several engines in
    sequence. The kinds are: in steps; cold start (not ready, or no engine of the run has rows yet);
    starvation (ready without a step, with rows still to come); tail (after its last row, while
    other engines work).
    """
    lanes: dict[int, list[Cell]] = {}
    for run, start_s in zip(history.runs, _run_starts(history), strict=False):
        if run.work_span is None:
            continue
        first_s, last_s = run.work_span
        samples = [sample for sample in run.samples if sample.end_s <= last_s]
        for rank in {rank for sample in run.samples for rank, _, _ in sample.engines}:
            lanes.setdefault(rank, []).extend(_cells(samples, rank, first_s, start_s))
    return dict(sorted(lanes.items()))


def _cells(
    samples: Sequence[RunSample], rank: int, first_work_s: float, start_s: float
) -> list[Cell]:
    of_rank = [
        next(((busy, ready) for r, busy, ready in sample.engines if r == rank), (0.0, 0.0))
        for sample in samples
    ]
    worked = [place for place, (busy_s, _) in enumerate(of_rank) if busy_s > 0]
    last = worked[-1] if worked else len(samples)
    cells = []
    for place, (sample, (busy_s, ready_s)) in enumerate(zip(samples, of_rank, strict=True)):
        busy_s, ready_s = min(busy_s, sample.seconds), min(ready_s, sample.seconds)
        cold_s, starved_s, tail_s = sample.seconds - max(busy_s, ready_s), 0.0, 0.0
        idle_s = max(0.0, ready_s - busy_s)
        begin_s = sample.end_s - sample.seconds
        if begin_s <= first_work_s:
            cold_s += idle_s
        elif place >= last:
            tail_s = idle_s
        else:
            starved_s = idle_s
        parts = (busy_s, cold_s, starved_s, tail_s)
        cells.append((start_s + begin_s, start_s + sample.end_s, parts))
    return cells


def _run_starts(history: History) -> list[float]:
    """Return the start of each run on an axis of consecutive runs, and the end."""
    return list(accumulate((run.seconds for run in history.runs), initial=0.0))


def _totals(cells: Sequence[Cell]) -> tuple[float, float, float, float]:
    busy, cold, starved, tail = map(sum, zip(*(seconds for _, _, seconds in cells), strict=True))
    return busy, cold, starved, tail


def idle_facts(lanes: dict[int, list[Cell]]) -> tuple[tuple[str, str], ...]:
    cells = [cell for lane in lanes.values() for cell in lane]
    totals = _totals(cells) if cells else ()
    whole = sum(totals)
    if not whole:
        return ()
    shares = ", ".join(
        f"{name} {percent(seconds / whole)}" for name, seconds in zip(_PARTS, totals, strict=True)
    )
    return (("time of engines", f"{shares} (of {duration(whole)}, up to the last work)"),)


def run_section(history: History) -> Section:
    rows = tuple(
        (
            time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(run.started)),
            duration(run.seconds),
            full(run.units_resumed),
            full(run.units_written),
            full(run.rows_written),
            full(run.units_found),
            full(run.last.restarts),
            f"{end_of(run)} ({run.host})" if run.host else end_of(run),
        )
        for run in history.runs
    )
    header = ("began (UTC)", "took", "units there", "written", "rows", "others", "restarts", "end")
    notes = (
        "units there: written by earlier runs, not run again; others: units that another run "
        "wrote while this one was running them.",
    )
    return Section(title="Runs", table=Table(header=header, rows=rows), notes=notes)


def time_sections(history: History) -> tuple[Section, ...]:
    if not any(run.samples for run in history.runs):
        return ()
    starts = _run_starts(history)
    total_s, marks = starts[-1], starts[1:-1]
    lanes = lanes_of(history)
    totals = {rank: _totals(cells) for rank, cells in lanes.items()}
    # the longest idle ones
    shown = sorted(sorted(lanes, key=lambda rank: -sum(totals[rank][2:]))[:_MAX_LANES])
    drawn = {}
    for rank in shown:
        each = -(-len(lanes[rank]) // _MAX_CELLS) or 1
        parts = [lanes[rank][first : first + each] for first in range(0, len(lanes[rank]), each)]
        drawn[f"engine {rank}"] = [(some[0][0], some[-1][1], _totals(some)) for some in parts]
    rows = tuple((f"engine {rank}", *map(duration, totals[rank]), "") for rank in shown)
    engines = Section(
        title="Engines",
        facts=idle_facts(lanes),
        table=Table(header=("", *_PARTS, ""), rows=rows),
        figures=(
            Figure(
                title="Engine time",
                svg=draw_lanes(drawn, total_s=total_s, marks=marks),
                caption="The height of a colour is its share of the time. Cold start: not ready, "
                "or before the first rows. Starvation: ready and waiting for further rows. Tail: "
                "no more rows, while other engines still work.",
                is_wide=True,
            ),
        ),
    )
    bands = Figure(
        title="Tokens, KV cache and requests over time",
        svg=draw_bands(_bands(history, starts), total_s=total_s, marks=marks),
        caption="Prompt tokens count when their row is done, cached ones included."
        + (" A dashed line is the start of another run." if marks else ""),
        is_wide=True,
    )
    timeline = Section(title="Timeline", figures=(bands,))
    return (timeline, engines, *_unit_sections(history, starts))


def coverage_facts(history: History) -> tuple[tuple[str, str], ...]:
    """Return how often outputs were within predicted lengths, as (name, text); () for few rows.

    A share is a range if many rows had exactly the predicted length, such as a limit.
    """
    num_rows, below, at_most = Counter[float](), Counter[float](), Counter[float]()
    for one in (one for run in history.runs for one in run.last.length_coverage):
        num_rows[one.share] += one.num_rows
        below[one.share] += one.num_below
        at_most[one.share] += one.num_at_most
    most = max(num_rows.values(), default=0)
    if most < _MIN_PREDICTED:
        return ()
    texts = []
    for share, total in sorted(num_rows.items()):
        ends = dict.fromkeys(percent(some[share] / total) for some in (below, at_most))
        texts.append(f"of {percent(share)}: {' to '.join(ends)}")
    facts = f"of {full(most)} outputs, within the predicted length {', '.join(texts)}"
    return (("output lengths", facts),)


def length_section(prompts: Histogram, outputs: Histogram, history: History) -> tuple[Section, ...]:
    if not (prompts.counts or outputs.counts):
        return ()
    figures = (
        Figure(title="Prompts", svg=draw_histogram(prompts, x_name="prompt tokens")),
        Figure(title="Outputs", svg=draw_histogram(outputs, x_name="generated tokens")),
    )
    return (Section(title="Lengths", facts=coverage_facts(history), figures=figures),)


def _bands(history: History, starts: list[float]) -> tuple[ChartBand, ...]:
    def steps(value: Callable[[RunSample, RunSample], float]) -> tuple[Step, ...]:
        drawn = []
        for run, start_s in zip(history.runs, starts, strict=False):
            before = RunSample(end_s=0.0, seconds=0.0)
            for sample in run.samples:
                end_s = start_s + sample.end_s
                drawn.append(Step(end_s - sample.seconds, end_s, value(before, sample)))
                before = sample
        return tuple(drawn)

    def rates(name: str) -> tuple[Step, ...]:
        return steps(
            lambda before, now: (
                max(0.0, float(getattr(now, name) - getattr(before, name))) / max(now.seconds, 1e-9)
            )
        )

    kv = steps(lambda _, now: 100 * now.kv)
    return (
        ChartBand(name="prompt/s", steps=rates("prompt_tokens")),
        ChartBand(name="output/s", steps=rates("generated_tokens")),
        ChartBand(name="KV", steps=kv, top=100.0, suffix=" %", is_main=False),
        ChartBand(name="running", steps=steps(lambda _, now: now.running), is_main=False),
    )


def _unit_sections(history: History, starts: list[float]) -> tuple[Section, ...]:
    written = sum(run.units_written for run in history.runs)
    if not written:
        return ()
    boxes = [
        GanttBar(
            lane=f"{unit.host[-12:]}:{unit.pid}",
            start_s=start_s + max(0.0, unit.start_s),
            end_s=start_s + unit.start_s + unit.seconds,
            title=f"unit {unit.unit}: {count(unit.rows, 'row')} in {duration(unit.seconds)}",
            is_slow=unit.seconds > max(_SLOW_S, _SLOW_FACTOR * run.median_unit_s),
        )
        for run, start_s in zip(history.runs, starts, strict=False)
        for unit in run.units
    ]
    slowest = sorted((u for run in history.runs for u in run.slowest), key=lambda u: -u.seconds)
    rows = tuple(
        (str(one.unit), duration(one.seconds), full(one.rows), f"process {one.pid}, {one.host}")
        for one in slowest[:5]
    )
    # a run that was killed has none
    typical = max(history.runs, key=lambda run: (run.median_unit_s > 0, run.units_written))
    text = f"{full(written)} written"
    if typical.median_unit_s > 0:
        half, most = duration(typical.median_unit_s), duration(typical.p95_unit_s)
        text += f"; half took up to {half}, 95 % up to {most}"
    figure = Figure(
        title="Running units",
        svg=draw_gantt(boxes, total_s=starts[-1], marks=starts[1:-1]),
        caption="A bar is a unit, from its first row to its part, in the lane of its process.",
        is_wide=True,
    )
    table = Table(header=("slowest", "took", "rows", "where"), rows=rows)
    section = Section(title="Units", facts=(("units", text),), table=table, figures=(figure,))
    return (section,)
