"""The stored plans that a run resumes: whether they match the job, and what is left to do."""

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace

from raybatch.durable.audit import is_finished
from raybatch.durable.commit import committed
from raybatch.durable.sink import holds_answers, prepare_sink
from raybatch.durable.storage import store_of
from raybatch.errors import ConfigError
from raybatch.planning.fingerprint import InputFiles, check_same, comparable
from raybatch.planning.planned import RunSpec
from raybatch.planning.run import fit_units
from raybatch.planning.store import read_all_units, read_plans
from raybatch.planning.stored import StoredPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPart:
    """One plan of an output and the input files that it covers."""

    job: RunSpec
    """The spec of the plan, with only these files."""
    stored: StoredPlan | None
    """None if the plan is not made yet."""
    rows_done: int
    """Rows of the plan that are in the output."""


def plans_of(job: RunSpec, *, may_grow: bool) -> tuple[StoredPlan, ...]:
    """Return the plans below the sink of a job; ConfigError: they belong to another job.

    Plans of another job that has written no rows are removed.
    """
    plans = read_plans(job.sink)

    def now(stored: Sequence[Mapping[str, str]]) -> Sequence[Mapping[str, str]]:
        return comparable(job.fingerprint, stored, job.config)

    return plans if is_same(job.sink, plans, now, job.files, may_grow=may_grow) else ()


def is_same(
    sink: str,
    plans: Sequence[StoredPlan],
    now: Callable[[Sequence[Mapping[str, str]]], Sequence[Mapping[str, str]]],
    files: InputFiles,
    **checks: bool,
) -> bool:
    """Return whether plans below a sink belong to a job; ConfigError: they belong to another one.

    Plans of another job that has written no rows are removed. `now` returns the job's fingerprint
    in the terms of each plan; `checks` are options of `check_same`.
    """
    # files in the order of the plans, then those without a plan
    plan_of = {name: stored.number for stored in plans for name, *_ in stored.files}
    files = sorted(files, key=lambda file: plan_of.get(file[0], len(plans) + 1))
    stored_files = [file for stored in plans for file in stored.files]
    try:
        fingerprints = [stored.fingerprint for stored in plans]
        for stored, of_plan in zip(plans, now(fingerprints), strict=True):
            check_same(
                sink,
                stored=stored.fingerprint,
                stored_files=stored_files,
                now=of_plan,
                files=files,
                **checks,
            )
    except ConfigError as error:
        if holds_answers(sink):
            raise
        logger.warning(
            "removing the plan of another job in %s, which has written no rows: %s", sink, error
        )
        prepare_sink(sink, is_overwrite=True)
        return False
    return True


def log_options_in_use(job: RunSpec, plans: Sequence[StoredPlan]) -> None:
    """Warn about plan options of the job that differ from the stored plans, which are used."""
    for stored in plans:
        now = asdict(fit_units(job.plan, job.source.only({name for name, *_ in stored.files})))
        for name, value in stored.options.items():
            if name in now and now[name] != value:
                logger.warning(
                    "ignoring plan.%s=%r: the plan stored in %s uses %r",
                    name,
                    now[name],
                    job.sink,
                    value,
                )


def is_whole(job: RunSpec, plans: Sequence[StoredPlan]) -> bool:
    """Return whether these plans cover all files of a job, and all their units are written."""
    if not plans or sum(len(stored.files) for stored in plans) < len(job.files):
        return False
    return is_finished(store_of(job.sink), read_all_units(job.sink, plans))


def is_complete(part: JobPart) -> bool:
    """Return whether all units of a part are in the output."""
    plans = read_plans(part.job.sink)
    (stored,) = (one for one in plans if one.number == part.job.number)
    is_done = committed(store_of(part.job.sink), read_all_units(part.job.sink, plans))
    return bool(is_done[stored.first_unit :][: stored.num_units].all())


def parts_to_run(job: RunSpec, plans: Sequence[StoredPlan]) -> tuple[list[JobPart], int]:
    """Return the parts of a job that have rows to do, and the number of rows already written.

    The parts are one for each plan with units to do, in order, then one for the files without a
    plan. The number is logged.
    """
    parts, known, rows_resumed = [], set[str](), 0
    if plans:
        units = read_all_units(job.sink, plans)
        is_done = committed(store_of(job.sink), units)
        rows_resumed = int(units.unit_rows[is_done].sum())
        logger.info(
            "resuming %s: %d of %d rows (%d of %d units) already written",
            job.sink,
            rows_resumed,
            units.num_rows,
            int(is_done.sum()),
            units.num_units,
        )
    for stored in plans:
        names = {name for name, *_ in stored.files}
        known |= names
        of_plan = slice(stored.first_unit, stored.first_unit + stored.num_units)
        if not is_done[of_plan].all():
            rows_done = int(units.unit_rows[of_plan][is_done[of_plan]].sum())
            part = _part_of(job, names, stored.number, stored.first_unit)
            parts.append(JobPart(job=part, stored=stored, rows_done=rows_done))
    new = {name for name, *_ in job.files} - known
    if new or not plans:
        num_units = sum(stored.num_units for stored in plans)
        added = _part_of(job, new, len(plans) + 1, num_units)
        parts.append(JobPart(job=added, stored=None, rows_done=0))
    return parts, rows_resumed


def _part_of(job: RunSpec, names: Set[str], number: int, first_unit: int) -> RunSpec:
    files = tuple(file for file in job.files if file[0] in names)
    source = job.source.only(names)
    return replace(job, source=source, files=files, number=number, first_unit=first_unit)
