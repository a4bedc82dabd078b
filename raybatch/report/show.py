"""What a report says, as facts of a text and as sections of a page."""

from raybatch.explanation.outcome import PlanOutcome
from raybatch.pictures.document import Section, Table
from raybatch.pictures.wording import amount, full, percent

# files that are named in the text; the page names more
_NUM_SKIPPED, _MAX_SKIPPED = 3, 100


def rate(count: int, seconds: float) -> float:
    """Return how many there were in a second, 0 where there was no time."""
    return count / seconds if seconds > 0 else 0.0


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
    return facts + [("  differs", text) for text in outcome.deviations()]


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


def skipped_facts(skipped: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    if not skipped:
        return []
    number = "1 file that" if len(skipped) == 1 else f"{len(skipped)} files that"
    more = ", ..." if len(skipped) > _NUM_SKIPPED else ""
    named = [(f"  {name}", reason) for name, reason in skipped[:_NUM_SKIPPED]]
    return [("left out", f"{number} cannot be read{more}"), *named]


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
