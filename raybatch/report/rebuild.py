"""Makes the report of a job from what lies below its sink, whatever became of the runs."""

from collections.abc import Sequence
from dataclasses import replace

from raybatch.durable.audit import Audit, audit, is_finished
from raybatch.durable.layout import SUCCESS
from raybatch.durable.sink import output_files
from raybatch.durable.storage import store_of, told_as
from raybatch.pictures.wording import count
from raybatch.planning.fingerprint import backend_kind
from raybatch.planning.store import read_all_units, read_plan, read_plans
from raybatch.planning.stored import StoredPlan
from raybatch.prefix.histogram import Histogram
from raybatch.redaction import redacted
from raybatch.report.history.reading import read_history, with_unlogged
from raybatch.report.history.records import History, RunRecord
from raybatch.report.record import RunReport, error_counts


def report_of(sink: str) -> RunReport:
    """Return the report of a job from its plan, its output and the logs of its runs.

    Whatever became of the runs: the rows are counted from the output itself.

    Raises:
        ConfigError: there is no plan of this version below it, or it cannot be read.
    """
    with told_as(f"the output in {sink!r} cannot be read"):
        store, plans = store_of(sink), read_plans(sink)
        if not plans:
            read_plan(sink)  # says what is missing
        units = read_all_units(sink, plans)
        found, history = audit(store, units), read_history(store)
        report = counted_report(sink, plans, found, history, is_complete=is_finished(store, units))
    return replace(report, is_rebuilt=True)


def counted_report(
    sink: str,
    plans: Sequence[StoredPlan],
    found: Audit,
    history: History,
    *,
    is_complete: bool,
) -> RunReport:
    """Return what plans, audit and logs say of a job.

    Args:
        sink: of the job.
        plans: of it, at least one.
        found: in its output.
        history: of its runs.
        is_complete: all units were written once, so that one that is not there is lost.
    """
    counts = found.counts
    history = with_unlogged(
        history,
        num_units=found.num_units - found.num_missing,
        num_rows=found.written_rows,
    )
    spans = [(run.seconds, run.work_span or (run.seconds, run.seconds)) for run in history.runs]
    root = store_of(sink).uri + "/"
    last = history.runs[-1] if history.runs else RunRecord(run_id="", started=0.0, seconds=0.0)
    return RunReport(
        source=redacted(last.source or plans[0].source) or "not known",
        sink=redacted(sink),
        model=last.model or redacted(plans[0].model) or "not known",
        backend=last.backend or backend_kind(plans[0].fingerprint) or "",
        backend_reason=last.backend_reason,
        rows_in=found.expected_rows,
        rows_out=found.written_rows,
        rows_lost=found.lost_rows if is_complete else found.unreadable_rows,
        rows_todo=0 if is_complete else found.missing_rows,
        rows_duplicated=found.duplicated_rows,
        rows_resumed=last.rows_resumed,
        statuses=dict(sorted(counts.statuses.items(), key=lambda item: (-item[1], item[0]))),
        errors=error_counts(counts),
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        cost=sum(run.last.cost for run in history.runs),
        startup_s=sum(first for _, (first, _) in spans),
        engines_s=sum(end - first for _, (first, end) in spans),
        write_s=sum(max(0.0, seconds - end) for seconds, (_, end) in spans),
        total_s=history.total_s,
        replicas=max((s.num_ready for run in history.runs for s in run.samples), default=0),
        restarts=sum(run.last.restarts for run in history.runs),
        executor=last.executor,
        versions=last.versions,
        output_files=tuple(name.removeprefix(root) for name in output_files(sink)),
        planned_hit_rate=_planned_hit_rate(plans),
        num_units=found.num_units,
        problems=_problems(found, is_complete=is_complete),
        skipped=_skipped(plans),
        special_rows=counts.special_rows,
        special_tokens=counts.special_tokens,
        stopped=last.limit if found.missing_rows else "",
        prompt_lengths=Histogram.of_bins(counts.prompt_lengths, counts.prompt_tokens),
        output_lengths=Histogram.of_bins(counts.output_lengths, counts.generated_tokens),
        history=history,
    )


def _planned_hit_rate(plans: Sequence[StoredPlan]) -> float | None:
    logical = sum(stored.logical_tokens for stored in plans)
    if not logical:
        return None
    return 1 - sum(stored.computed_tokens for stored in plans) / logical


def _skipped(plans: Sequence[StoredPlan]) -> tuple[tuple[str, str], ...]:
    """Return the files that were left out and are in no plan that was made later."""
    read = {name for stored in plans for name, *_ in stored.files}
    found = {name: reason for stored in plans for name, reason in stored.skipped}
    return tuple((name, reason) for name, reason in found.items() if name not in read)


def _problems(found: Audit, *, is_complete: bool) -> tuple[str, ...]:
    said = found.foreign
    if found.num_missing and is_complete:
        said += (f"{SUCCESS}: {found.told_gone}",)
    elif found.num_missing:
        some = ", ".join(str(unit) for unit in found.missing)
        units = count(found.num_missing, "unit")
        said += (f"{units} not written yet, such as {some}; run the job again to go on",)
    return said
