"""The report of a job, written at its end or rebuilt from the files below its sink."""

import json
import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata

import fsspec

from raybatch.config import from_plain
from raybatch.durable.audit import Audit, audit, is_finished
from raybatch.durable.commit import is_of_units
from raybatch.durable.layout import PLAN, SUCCESS
from raybatch.durable.sink import folders_below, how_to_resume, is_marked, output_files
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import ConfigError, shell_path
from raybatch.explanation.outcome import PlanOutcome
from raybatch.pictures.wording import count
from raybatch.planning.fingerprint import backend_kind
from raybatch.planning.store import StoredPlan, is_joining, read_all_units, read_plan, read_plans
from raybatch.prefix.histogram import Histogram
from raybatch.records.pool_stats import POOL_COUNTS
from raybatch.redaction import redacted
from raybatch.report.history import History, RunRecord, read_history, with_unlogged
from raybatch.report.record import ErrorCount, RunReport, error_counts, report_path

__all__ = [
    "ErrorCount",
    "RunReport",
    "counted_report",
    "installed_versions",
    "read_report",
    "report_of",
]

logger = logging.getLogger(__name__)


def read_report(sink: str) -> RunReport:
    """Read the report that a run wrote below `sink`.

    Raises:
        ConfigError: it does not exist, or has another version.
    """
    path = report_path(sink)
    fs, name = fsspec.core.url_to_fs(path)
    if not fs.exists(name):
        raise ConfigError(f"{sink} has no report; expected {path}, written when a job ends")
    try:
        values = json.loads(fs.cat_file(name))
        derived = ("rows_failed", "prompt_tokens_per_s", "generated_tokens_per_s", "exit_code")
        stored = {key: value for key, value in values.items() if key not in derived}
        plan = stored.pop("plan", None)
        if plan is not None:
            plan = PlanOutcome.from_mapping(plan, where=f"{path}: plan")
        return replace(from_plain(RunReport, stored, where=path), plan=plan)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not a report of this version of raybatch ({error})") from error


def current_report(sink: str) -> RunReport:
    """Return the report of an output, also after a crashed run.

    The stored report is used if it lists the existing files. Else it is rebuilt from plan, Parquet
    footers and logs, without data that only the run had.

    Raises:
        ConfigError: the folder is not the output of a job, or has no plan yet.
    """
    with error_context(f"output {sink!r} cannot be read"):
        store = store_of(sink)
        below = [f for f in folders_below(sink) if store_of(f).size(PLAN) is not None]
        has_record, record = bool(below), "".join(below[:1])
        # units of an output whose parts are still being joined are not in it yet
        if store.size(PLAN) is None or is_joining(sink):
            if has_record:
                report = current_report(record)
                return replace(report, sink=redacted(sink), output_files=_part_names(sink))
            if is_marked(store):
                raise ConfigError(
                    f"{sink}: nothing to report, a run ended before it wrote its plan; run the job "
                    "again"
                )
            return read_report(sink)
        try:
            stored = read_report(sink)
            if set(stored.output_files) == set(_part_names(sink)):
                return stored
        except ConfigError as error:  # missing, torn, or of another version
            logger.info("%s", error)
        made = report_of(sink)
        if not has_record:
            return made
        # the stored report has data of the input that is not rebuilt
        old_report = report_of(record)
        return replace(
            made,
            special_rows=old_report.special_rows,
            special_tokens=old_report.special_tokens,
            history=old_report.history,
        )


def report_of_complete(sink: str) -> RunReport:
    """Return the report of a complete output; if it had to be rebuilt, write it as well."""
    report = current_report(sink)
    # without logs it would not be more than anybody can make again
    if not (report.is_rebuilt and report.history.runs):
        return report
    return keep_report(replace(report, is_rebuilt=False), sink)


def keep_report(report: RunReport, sink: str) -> RunReport:
    """Write a report and return it; errors are only logged, since the rows are written."""
    try:
        with error_context(f"the report cannot be written below {sink!r}"):
            report.write(sink)
    except ConfigError as error:
        again = f"raybatch report {shell_path(sink)}"
        logger.error("%s; run the same command, or `%s`, to make it again", error, again)
        return replace(report, is_rebuilt=True)
    return report


def _part_names(sink: str) -> tuple[str, ...]:
    root = store_of(sink).uri + "/"
    return tuple(path.removeprefix(root) for path in output_files(sink))


def report_of(sink: str) -> RunReport:
    """Return the report of a job from its plan, its output and the logs of its runs.

    Rows are counted in the output itself, so that it is right for any state of the runs.

    Raises:
        ConfigError: there is no plan of this version below the sink, or it cannot be read.
    """
    with error_context(f"the output in {sink!r} cannot be read"):
        store, plans = store_of(sink), read_plans(sink)
        if not plans:
            read_plan(sink)  # raises the error
        units = read_all_units(sink, plans)
        result, history = audit(store, units), read_history(store)
        is_complete = is_finished(store, units) and not is_of_units(store)
        report = counted_report(sink, plans, result, history, is_complete=is_complete)
    return replace(report, is_rebuilt=True)


def counted_report(
    sink: str, plans: Sequence[StoredPlan], result: Audit, history: History, *, is_complete: bool
) -> RunReport:
    """Return the report of a job from its plans, audit and logs.

    `is_complete`: all units had been written, so units that are missing now count as lost.
    """
    counts = result.counts
    history = with_unlogged(
        history, num_units=result.num_units - result.num_missing, num_rows=result.written_rows
    )
    problems = result.foreign
    resume = how_to_resume(store_of(sink))
    if result.num_missing and is_complete:
        problems += (f"{SUCCESS}: {result.gone_message(resume)}",)
    elif result.missing_rows:
        some = ", ".join(str(unit) for unit in result.missing)
        left = f"{count(result.num_missing, 'unit')} not written yet, such as {some}"
        if not result.num_missing:
            left = f"{count(result.missing_rows, 'row')} not planned yet"
        problems += (f"{left}; {resume} to resume",)
    read = {name for stored in plans for name, *_ in stored.files}
    skipped = {name: reason for stored in plans for name, reason in stored.skipped}
    logical = sum(stored.logical_tokens for stored in plans)
    computed = sum(stored.computed_tokens for stored in plans)
    spans = [(run.seconds, run.work_span or (run.seconds, run.seconds)) for run in history.runs]
    last = history.runs[-1] if history.runs else RunRecord(run_id="", started=0.0, seconds=0.0)
    return RunReport(
        source=redacted(last.source or plans[0].source) or "not known",
        sink=redacted(sink),
        model=last.model or redacted(plans[0].model) or "not known",
        backend=last.backend or backend_kind(plans[0].fingerprint) or "",
        backend_reason=last.backend_reason,
        rows_in=result.expected_rows,
        rows_out=result.written_rows,
        rows_lost=result.lost_rows if is_complete else result.unreadable_rows,
        rows_todo=0 if is_complete else result.missing_rows,
        rows_duplicated=result.duplicated_rows,
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
        **{name: sum(getattr(run.last, name) for run in history.runs) for name in POOL_COUNTS},
        executor=last.executor,
        versions=last.versions,
        output_files=_part_names(sink),
        planned_hit_rate=1 - computed / logical if logical and not plans[-1].files_left else None,
        num_units=result.num_units,
        problems=problems,
        # those that are in no plan that was made later
        skipped=tuple((name, reason) for name, reason in skipped.items() if name not in read),
        special_rows=counts.special_rows,
        special_tokens=counts.special_tokens,
        stopped=last.limit if result.missing_rows else "",
        prompt_lengths=Histogram.of_bins(counts.prompt_lengths, counts.prompt_tokens),
        output_lengths=Histogram.of_bins(counts.output_lengths, counts.generated_tokens),
        history=history,
    )


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, raybatch and the packages that decide results."""
    versions = {"python": platform.python_version()}
    for name in ("raybatch", "ray", "torch", "transformers", "tokenizers", "pyarrow", "numpy"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
