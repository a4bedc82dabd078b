"""Runs a job whose output is made of another one in a folder below it.

With `output_order` "input" that one has the order of the plan, and is sorted at the end. Where the
parts of units are joined, it has a part per unit.
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from raybatch.durable.layout import PLAN, PLAN_ORDER, UNITS
from raybatch.durable.run_log import beating
from raybatch.durable.sink import output_files, prepare_sink
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import ConfigError, shell_path
from raybatch.job.config import JobConfig
from raybatch.job.plans import is_whole, plans_of
from raybatch.job.progress import ProgressPrinter
from raybatch.job.run import JobExecution
from raybatch.job.watching import ProgressCallback
from raybatch.outputs.joined import FEW_UNITS, FILE_BYTES, PartJoiner, reopen_lost_parts
from raybatch.outputs.ordered import restore_order
from raybatch.planning.run import fit_units
from raybatch.planning.store import read_plans
from raybatch.redaction import redacted
from raybatch.report import RunReport
from raybatch.report.rebuild import keep_report, report_of_complete
from raybatch.report.recorder import new_run_id

logger = logging.getLogger(__name__)

Progress = ProgressCallback | ProgressPrinter | None


def check_layout(config: JobConfig) -> None:
    """Raise ConfigError for an output that was started with another layout."""
    in_order, of_units = _folder(config, PLAN_ORDER), _folder(config, UNITS)
    if config.output_order != "input" and _has_plan(in_order):
        raise ConfigError(
            f"the output in {config.sink} was started with output_order=input; set it again, or "
            "choose another folder"
        )
    if config.output_order == "input" and _has_plan(of_units):
        raise ConfigError(
            f"the output in {config.sink} was started with output_order=plan; finish it, and copy "
            f"it by `raybatch ordered {shell_path(config.sink)} NEW_FOLDER`, or choose another "
            "folder"
        )
    is_set = isinstance(config.output_file_bytes, int)
    if is_set and config.partition_by and config.output_order == "plan":
        raise ConfigError(
            "output_file_bytes joins the files of an output with partition_by only if it is sorted "
            "at the end; set output_order=input, or leave one of them out"
        )


def execute_with_layout(run: JobExecution, progress: Progress) -> RunReport:
    """Generate and write every row that is not written yet, in the layout that the job sets."""
    if run.config.output_order == "input":
        return _execute_in_order(run, progress)
    file_bytes = _joined_bytes(run)
    if file_bytes is None:
        return run.execute(progress)
    return _execute_joined(run, progress, file_bytes)


def _execute_in_order(run: JobExecution, progress: Progress) -> RunReport:
    """Generate and write every row that is not written yet, then sort them into input order."""
    config, folder = run.config, _folder(run.config, PLAN_ORDER)
    job = run.described()
    plans = plans_of(job, may_grow=config.extend)
    if plans and is_whole(job, plans):
        if any(stored.is_reordered for stored in plans):
            raise ConfigError(
                f"the output in {config.sink} is complete with output_order=plan; `raybatch "
                f"ordered {shell_path(config.sink)} NEW_FOLDER` makes a copy in input order"
            )
        return report_of_complete(config.sink)
    if plans and not _has_plan(folder):
        raise ConfigError(
            f"the output in {config.sink} has a plan but no {folder}: it was started with "
            "output_order=plan, or that folder was removed; choose another folder"
        )
    inner = replace(config, sink=folder, output_order="plan", partition_by=())

    def complete(_: RunReport) -> None:
        size = _wanted_bytes(run)
        restore_order(folder, config.sink, subject=job.subject, file_bytes=size)

    return _execute_below(replace(run, config=inner), config, progress, complete)


def _execute_joined(run: JobExecution, progress: Progress, file_bytes: int) -> RunReport:
    """Generate and write every row that is not written yet, and join the parts of units."""
    config, folder = run.config, _folder(run.config, UNITS)
    job = run.described()
    # files that an earlier run has added are in the plans of the units first
    is_growing = len(read_plans(folder)) > len(read_plans(config.sink))
    plans = plans_of(job, may_grow=config.extend or is_growing)
    if plans and is_whole(job, plans):
        return report_of_complete(config.sink)
    reopen_lost_parts(folder, config.sink)
    is_local = run.executor.is_local
    joiner = PartJoiner(folder, config.sink, file_bytes=file_bytes, is_local=is_local)
    with closing(joiner):

        def complete(report: RunReport) -> None:
            if not is_local and run.start_ray is not None:
                run.start_ray()
            joiner.finish(report.rows_in)

        inner = replace(run, config=replace(config, sink=folder))
        return _execute_below(inner, config, progress, complete)


def _execute_below(
    run: JobExecution,
    config: JobConfig,
    progress: Progress,
    complete: Callable[[RunReport], object],
) -> RunReport:
    """Run a job into a folder below its sink; if that is complete, complete the sink from it.

    `config` are the options of the job as the user gave them.
    """
    prepare_sink(run.config.sink, is_overwrite=config.overwrite)
    report = run.execute(progress)
    report = replace(report, sink=redacted(config.sink), is_rebuilt=False)
    if not (report.rows_todo or report.rows_lost or report.rows_duplicated):
        with beating(store_of(run.config.sink), new_run_id(time.time()), time.time):
            complete(report)
    below = store_of(config.sink).uri + "/"
    names = tuple(path.removeprefix(below) for path in output_files(config.sink))
    return keep_report(replace(report, output_files=names), config.sink)


def _joined_bytes(run: JobExecution) -> int | None:
    """Return the size of the files into which parts are joined; None if they are not.

    A started output keeps its layout.

    Raises:
        ConfigError: the job sets a size, but the output cannot have it.
    """
    config, wanted = run.config, run.config.output_file_bytes
    if _has_plan(_folder(config, UNITS)):
        if wanted is None:
            logger.warning("ignoring output_file_bytes: the output was started with joined files")
        return wanted if isinstance(wanted, int) else FILE_BYTES
    size = _wanted_bytes(run)
    if size is None:
        return None
    is_started, is_set = _has_plan(config.sink), isinstance(wanted, int)
    if is_started and is_set and not is_whole(run.described(), read_plans(config.sink)):
        raise ConfigError(
            f"the output in {config.sink} has no {UNITS}/: it was started with a file per unit, or "
            "that folder was removed; leave output_file_bytes out, and when the job is done copy "
            f"it by `raybatch compact {shell_path(config.sink)} NEW_FOLDER`"
        )
    with error_context(f"sink {config.sink!r} cannot be used"):
        is_exclusive = store_of(config.sink).is_exclusive
    if is_set and not is_exclusive:
        raise ConfigError(
            f"output_file_bytes: {config.sink} cannot create files exclusively, so two concurrent "
            "runs might join other files; leave it out, or choose a sink on a local disk or on S3"
        )
    if config.partition_by and not is_started:
        logger.warning(
            "each of about %d units writes a file per value of %s; for fewer, larger files set "
            "output_order=input, which also sorts the rows",
            run.source.num_rows // fit_units(config.plan, run.source).unit_rows,
            ", ".join(config.partition_by),
        )
    return None if is_started or config.partition_by or not is_exclusive else size


def _wanted_bytes(run: JobExecution) -> int | None:
    """Return the size of files that the job sets; "auto" sets one if there are many units."""
    wanted = run.config.output_file_bytes
    if wanted != "auto":
        return wanted
    unit_rows = fit_units(run.config.plan, run.source).unit_rows
    return FILE_BYTES if run.source.num_rows > FEW_UNITS * unit_rows else None


def _folder(config: JobConfig, name: str) -> str:
    return f"{config.sink.rstrip('/')}/{name}"


def _has_plan(folder: str) -> bool:
    with error_context(f"{folder!r} cannot be read"):
        return store_of(folder).size(PLAN) is not None
