"""The report of an output whose run has left none, or one that is older than the parts."""

import logging

from raybatch.durable.audit import audit, is_finished
from raybatch.durable.layout import PLAN
from raybatch.durable.store import open_store
from raybatch.errors import ConfigError
from raybatch.report import RunReport, error_counts, read_report
from raybatch.stages.plan.store import read_all_units, read_plans
from raybatch.stages.sink import is_marked, output_files
from raybatch.stages.storage import told_as

__all__ = ["report_of"]

logger = logging.getLogger(__name__)


def report_of(sink: str) -> RunReport:
    """Return the report of an output, also after a run that died.

    The one that a run has written is taken if it names the parts that are there. Else it is made
    from the plan and the footers: what only the run knew, such as times, is missing in it.

    Raises:
        ConfigError: no job has written there, or it has not come as far as a plan.
    """
    with told_as(f"output {sink!r} cannot be read"):
        store = open_store(sink)
        if store.size(PLAN) is None:
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
        return _rebuilt(sink, parts)


def _stored_report(sink: str) -> RunReport | None:
    try:
        return read_report(sink)
    except ConfigError as error:  # none, torn, or of another version
        logger.info("%s", error)
        return None


def _part_names(sink: str) -> tuple[str, ...]:
    root = open_store(sink).uri + "/"
    return tuple(path.removeprefix(root) for path in output_files(sink))


def _rebuilt(sink: str, parts: tuple[str, ...]) -> RunReport:
    store, plans = open_store(sink), read_plans(sink)
    plan, stored = read_all_units(sink, plans), plans[0]
    found, is_complete = audit(store, plan), is_finished(store, plan)
    counts = found.counts
    return RunReport(
        source=stored.source,
        sink=sink,
        model=stored.model,
        rows_in=found.expected_rows,
        rows_out=found.written_rows,
        rows_lost=found.lost_rows if is_complete else found.unreadable_rows,
        rows_todo=0 if is_complete else found.missing_rows,
        rows_duplicated=found.duplicated_rows,
        statuses=dict(sorted(counts.statuses.items(), key=lambda item: (-item[1], item[0]))),
        errors=error_counts(counts),
        prompt_tokens=counts.prompt_tokens,
        cached_tokens=counts.cached_tokens,
        generated_tokens=counts.generated_tokens,
        output_files=parts,
        is_rebuilt=True,
    )
