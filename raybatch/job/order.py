"""Runs a job whose output is to have the order of the input.

The rows are written in the order of the plan to a folder of their own below the sink, whose name
readers skip, and that is what runs go on with. Once all of them are there they are written to the
sink itself, as an output that follows a plan in the order of the input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raybatch.durable.layout import PLAN, PLAN_ORDER
from raybatch.durable.sink import output_files, prepare_sink
from raybatch.durable.storage import error_context, store_of
from raybatch.errors import ConfigError, shell_path
from raybatch.job.config import JobConfig
from raybatch.job.parts import is_whole, plans_of
from raybatch.job.pool_watch import ProgressCallback
from raybatch.job.progress import ProgressPrinter
from raybatch.job.run import JobRun
from raybatch.outputs.ordered import restore_order
from raybatch.planning.stored import StoredPlan
from raybatch.redaction import redacted
from raybatch.report import RunReport
from raybatch.report.rebuild import keep_report, report_of_complete


def check_order(config: JobConfig) -> None:
    """Raise ConfigError where a run with another `output_order` has begun the output.

    With `overwrite` what it has written is removed instead.

    Args:
        config: of a job whose sink is prepared.
    """
    if config.output_order == "input" or not _has_plan(_folder(config)):
        return
    if not config.overwrite:
        raise ConfigError(
            f"the output in {config.sink} was begun with output_order=input; set that again, or "
            "choose another folder"
        )
    prepare_sink(_folder(config), is_overwrite=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class OrderedRun:
    """A run with `output_order="input"`."""

    run: JobRun

    def execute(self, progress: ProgressCallback | ProgressPrinter | None) -> RunReport:
        """Generate and write every row that is not written yet, then bring them into order."""
        config = self.run.config
        job = self.run.described()
        plans = plans_of(job, may_grow=config.extend)
        if plans and is_whole(job, plans):
            self._check_follows_input(plans)
            return report_of_complete(config.sink)
        folder = _folder(config)
        if plans and not _has_plan(folder):
            raise ConfigError(
                f"the output in {config.sink} has a plan and nothing in {folder}, so it was begun "
                "with output_order=plan, or that folder was removed; choose another folder"
            )
        prepare_sink(folder, is_overwrite=config.overwrite)
        inner = replace(config, sink=folder, output_order="plan", partition_by=())
        report = replace(self.run, config=inner).execute(progress)
        report = replace(report, sink=redacted(config.sink), is_rebuilt=False)
        if not (report.rows_todo or report.rows_lost or report.rows_duplicated):
            restore_order(folder, config.sink, subject=job.subject)
            below = store_of(config.sink).uri + "/"
            names = tuple(path.removeprefix(below) for path in output_files(config.sink))
            report = replace(report, output_files=names)
        return keep_report(report, config.sink)

    def _check_follows_input(self, plans: Sequence[StoredPlan]) -> None:
        if any(stored.is_reordered for stored in plans):
            sink = self.run.config.sink
            raise ConfigError(
                f"the output in {sink} is complete, in the order of the plan; `raybatch ordered "
                f"{shell_path(sink)} NEW_FOLDER` makes a copy in the order of the input"
            )


def _folder(config: JobConfig) -> str:
    return f"{config.sink.rstrip('/')}/{PLAN_ORDER}"


def _has_plan(folder: str) -> bool:
    with error_context(f"{folder!r} cannot be read"):
        return store_of(folder).size(PLAN) is not None
