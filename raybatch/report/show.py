"""What a report says, as facts of a text and as sections of a page."""

from typing import TYPE_CHECKING

from raybatch.backends.choice import told_backend
from raybatch.errors import shell_path
from raybatch.explanation.outcome import PlanOutcome
from raybatch.pictures.charts import Card, draw_cards
from raybatch.pictures.document import Figure, Section, Table
from raybatch.pictures.wording import amount, duration, full, percent
from raybatch.policy.limits import amount_of_money
from raybatch.report.history.lanes import lanes_of
from raybatch.report.history.show import end_of, idle_facts
from raybatch.report.paths import report_path

if TYPE_CHECKING:
    from raybatch.report.record import ErrorCount, RunReport

_MAX_MESSAGE = 120
# files that are named in the text; the page names more
_NUM_SKIPPED, _MAX_SKIPPED = 3, 100


def rate(count: int, seconds: float) -> float:
    """Return how many there were in a second, 0 where there was no time."""
    return count / seconds if seconds > 0 else 0.0


def facts_of(report: "RunReport") -> list[tuple[str, str]]:
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
    facts += _special_facts(report)
    cached = 100 * rate(report.cached_tokens, report.prompt_tokens)
    tokens = (
        f"{report.prompt_tokens} prompt ({cached:.1f} % from the prefix cache), "
        f"{report.generated_tokens} generated"
    )
    seconds = (
        f"{report.total_s:.1f} s (start-up {report.startup_s:.1f} s, "
        f"engines {report.engines_s:.1f} s, rest of the writing {report.write_s:.1f} s)"
    )
    where = " on one host without Ray" if report.executor == "local" else ""
    runs = report.history.runs
    if len(runs) > 1:
        seconds += f" in {len(runs)} runs"
    measured = [
        *((("cost", amount_of_money(report.cost)),) if report.cost else ()),
        ("speed", _speed(report)),
        ("time", seconds),
        *idle_facts(lanes_of(report.history)),
        *(("  run", f"{duration(run.seconds)}, {end_of(run)}") for run in runs if len(runs) > 1),
        ("replicas", f"{report.replicas}{where}, {_count(report.restarts, 'restart')}"),
    ]
    backend = told_backend(report.backend, report.backend_reason)
    unmeasured = [("note", "made from plan and parts; no run has left a log")]
    is_measured = runs or not report.is_rebuilt
    return [
        *facts,
        *(("  problem", problem) for problem in report.problems),
        *_skipped_facts(report.skipped),
        *((("stopped", report.stopped),) if report.stopped else ()),
        ("tokens", tokens),
        *_hit_rates(report),
        *(measured if is_measured else unmeasured),
        *((("backend", backend),) if report.backend else ()),
        ("output", f"{shell_path(report.sink)} ({_count(len(report.output_files), 'file')})"),
        ("report", "none yet" if report.is_rebuilt else shell_path(report_path(report.sink))),
    ]


def audit_section(report: "RunReport") -> Section:
    """Return what was counted in the output, large."""
    todo = Card(name="still to do", value=full(report.rows_todo), is_good=not report.rows_todo)
    cards = (
        Card(name="rows expected", value=full(report.rows_in)),
        Card(
            name="written", value=full(report.rows_out), is_good=report.rows_out == report.rows_in
        ),
        todo,
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


def run_facts(report: "RunReport") -> Section:
    """Return what is said in the text."""
    # what begins with a blank has a table of its own
    shown = tuple(fact for fact in facts_of(report) if not fact[0].startswith(" "))
    return Section(title="Run", facts=shown)


def error_section(errors: "tuple[ErrorCount, ...]") -> Section:
    """Return the table of errors."""
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


def plan_facts(outcome: PlanOutcome | None) -> list[tuple[str, str]]:
    """Return what a plan foretold and what came of it; nothing where there was none."""
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


def skipped_section(skipped: tuple[tuple[str, str], ...]) -> tuple[Section, ...]:
    """Return the table of files that were left out; nothing where there were none."""
    if not skipped:
        return ()
    more = len(skipped) - _MAX_SKIPPED
    return (
        Section(
            title="Files left out",
            table=Table(header=("file", "what is wrong with it"), rows=skipped[:_MAX_SKIPPED]),
            notes=(f"{full(more)} more are in report.json",) if more > 0 else (),
        ),
    )


def _skipped_facts(skipped: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    if not skipped:
        return []
    number = "1 file that" if len(skipped) == 1 else f"{len(skipped)} files that"
    more = ", ..." if len(skipped) > _NUM_SKIPPED else ""
    named = [(f"  {name}", reason) for name, reason in skipped[:_NUM_SKIPPED]]
    return [("left out", f"{number} cannot be read{more}"), *named]


def _special_facts(report: "RunReport") -> list[tuple[str, str]]:
    if not report.special_tokens:
        return []
    found = _count(report.special_tokens, "special token")
    return [("texts", f"{found} of the model in {_count(report.special_rows, 'row')}")]


def _hit_rates(report: "RunReport") -> list[tuple[str, str]]:
    if report.planned_hit_rate is None or report.plan is not None:
        return []
    measured = rate(report.cached_tokens, report.prompt_tokens)
    said = f"hit rate {percent(report.planned_hit_rate)} planned, {percent(measured)} actual"
    return [("plan", said)]


def _speed(report: "RunReport") -> str:
    if not report.engines_s:
        return "not measured, too little work"
    return (
        f"{report.prompt_tokens_per_s:.0f} prompt tokens/s, "
        f"{report.generated_tokens_per_s:.0f} output tokens/s"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
