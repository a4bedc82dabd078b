"""The report of an output whose run has left none, or one that is older than the parts."""

import logging
from dataclasses import replace

from raybatch import report
from raybatch.durable.layout import PLAN, PLAN_ORDER
from raybatch.durable.sink import is_marked, output_files
from raybatch.durable.storage import store_of, told_as
from raybatch.errors import ConfigError, shell_path
from raybatch.redaction import redacted
from raybatch.report import RunReport, read_report

logger = logging.getLogger(__name__)


def report_of(sink: str) -> RunReport:
    """Return the report of an output, also after a run that died.

    The one that a run has written is taken if it names the parts that are there. Else it is made
    from the plan and the footers: what only the run knew, such as times, is missing in it.

    Raises:
        ConfigError: no job has written there, or it has not come as far as a plan.
    """
    with told_as(f"output {sink!r} cannot be read"):
        store, record = store_of(sink), f"{sink.rstrip('/')}/{PLAN_ORDER}"
        has_record = store.size(f"{PLAN_ORDER}/{PLAN}") is not None
        if store.size(PLAN) is None:
            if has_record:
                return replace(report_of(record), sink=redacted(sink))
            if is_marked(store):
                raise ConfigError(
                    f"{sink}: a run began here and ended before its plan was written, so there is "
                    "nothing to report; run the job again"
                )
            return read_report(sink)
        parts = _part_names(sink)
        stored = _stored_report(sink)
        if stored is not None and set(stored.output_files) == set(parts):
            return stored
        made = report.report_of(sink)
        if not has_record:
            return made
        # it knows the runs and what came in
        known = report.report_of(record)
        return replace(
            made,
            special_rows=known.special_rows,
            special_tokens=known.special_tokens,
            history=known.history,
        )


def report_of_complete(sink: str) -> RunReport:
    """Return the report of an output to which nothing is added, and write it where there is none.

    Raises:
        ConfigError: see `report_of`.
    """
    found = report_of(sink)
    # without logs it would not be more than anybody can make again
    if not (found.is_rebuilt and found.history.runs):
        return found
    return keep_report(replace(found, is_rebuilt=False), sink)


def keep_report(found: RunReport, sink: str) -> RunReport:
    """Write a report; where it cannot be written that is logged, since its rows are written."""
    try:
        with told_as(f"the report cannot be written below {sink!r}"):
            found.write(sink)
    except ConfigError as error:
        again = f"raybatch report {shell_path(sink)}"
        logger.error("%s; the same command, or `%s`, makes it again", error, again)
        return replace(found, is_rebuilt=True)
    return found


def _stored_report(sink: str) -> RunReport | None:
    try:
        return read_report(sink)
    except ConfigError as error:  # none, torn, or of another version
        logger.info("%s", error)
        return None


def _part_names(sink: str) -> tuple[str, ...]:
    root = store_of(sink).uri + "/"
    return tuple(path.removeprefix(root) for path in output_files(sink))
