"""What a run of a job has to do: plans that are not complete, and input that is in no plan yet."""

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace

import pyarrow as pa

from raybatch.actors.replicas.placement import connected_ray
from raybatch.durable.audit import is_finished
from raybatch.durable.commit import committed
from raybatch.durable.layout import PLAN_ORDER
from raybatch.durable.storage import error_context, store_of
from raybatch.planning.fingerprint import InputFile, backend_kind, check_same
from raybatch.planning.planned import PlannedRun
from raybatch.planning.run import fit_units
from raybatch.planning.store import read_all_units, read_plans
from raybatch.planning.stored import StoredPlan
from raybatch.rows.stage_model import check_model
from raybatch.stages.feeder import StageFeeder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPart:
    """One plan of an output and the input files that it is of.

    Args:
        job: what the plan is about, with these files alone.
        stored: the plan; None where it is still to be made.
        rows_done: rows of it that are in the output.
    """

    job: PlannedRun
    stored: StoredPlan | None
    rows_done: int


def plans_of(job: PlannedRun, *, may_grow: bool) -> tuple[StoredPlan, ...]:
    """Return the plans that lie below the sink of a job.

    Args:
        may_grow: files that are in no plan are fine.

    Raises:
        ConfigError: they are those of another job.
    """
    plans = read_plans(job.sink)
    stored_files = [file for stored in plans for file in stored.files]
    files = _in_order_of(plans, job.files)
    for stored in plans:
        check_same(
            job.sink,
            stored=stored.fingerprint,
            stored_files=stored_files,
            now=job.fingerprint,
            files=files,
            may_grow=may_grow,
        )
    return plans


def log_options_in_use(job: PlannedRun, plans: Sequence[StoredPlan]) -> None:
    """Warn of options of the plan that differ from those of the plans in use, which hold."""
    for stored in plans:
        names = {name for name, *_ in stored.files}
        now = asdict(fit_units(job.plan, job.source.only(names)))
        for name, value in stored.options.items():
            if name in now and now[name] != value:
                logger.warning(
                    "plan.%s is %r in the plan below %s, which holds; %r is not used",
                    name,
                    value,
                    job.sink,
                    now[name],
                )


def _in_order_of(plans: Sequence[StoredPlan], files: Sequence[InputFile]) -> list[InputFile]:
    """Return files as plans have them one after the other, then those that are in none."""
    plan_of = {name: stored.number for stored in plans for name, *_ in stored.files}
    return sorted(files, key=lambda file: plan_of.get(file[0], len(plans) + 1))


def began_with(sink: str) -> str | None:
    """Return the kind of the backend that an output was begun with; None where there is none."""
    with error_context(f"sink {sink!r} cannot be used"):
        for folder in (sink, f"{sink.rstrip('/')}/{PLAN_ORDER}"):
            for stored in read_plans(folder):
                return backend_kind(stored.fingerprint)
    return None


def settled_stage(stage: type[StageFeeder], sinks: Sequence[str]) -> type[StageFeeder]:
    """Return a stage with a backend that is decided, where no cluster has to start for that.

    Args:
        sinks: outputs that it goes on with; the first that was begun says with which backend.
    """
    if stage.config.backend.is_decided:
        return stage
    begun = next(filter(None, map(began_with, sinks)), None)
    if begun is None and not stage.pool.is_local and connected_ray() is None:
        return stage
    return stage.settled(began_with=begun, connect=False)


def stage_of_cluster(
    stage: type[StageFeeder],
    schema: pa.Schema,
    start_ray: Callable[[], None] | None = None,
    *,
    connect: bool = True,
) -> type[StageFeeder]:
    """Return a stage with a backend that a cluster decides, and whose model that one can run.

    Args:
        stage: one that is decided is returned as it is.
        connect: to a cluster; else options alone decide.

    Raises:
        ConfigError: the backend cannot run the model, or cannot be decided.
    """
    if stage.config.backend.is_decided:
        return stage
    if start_ray is not None:
        start_ray()
    decided = stage.settled(connect=connect)
    check_model(decided.config, schema)
    return decided


def is_whole(job: PlannedRun, plans: Sequence[StoredPlan]) -> bool:
    """Return whether nothing is left to do for a job whose plans these are."""
    if not plans or sum(len(stored.files) for stored in plans) < len(job.files):
        return False
    return is_finished(store_of(job.sink), read_all_units(job.sink, plans))


def is_complete(part: JobPart) -> bool:
    """Return whether all units of a part that has run are in the output."""
    plans = read_plans(part.job.sink)
    (stored,) = (one for one in plans if one.number == part.job.number)
    is_done = committed(store_of(part.job.sink), read_all_units(part.job.sink, plans))
    return bool(is_done[stored.first_unit :][: stored.num_units].all())


def parts_to_run(job: PlannedRun, plans: Sequence[StoredPlan]) -> list[JobPart]:
    """Return the plans with units to do, in their order, then the files that are in none."""
    parts, known = [], set[str]()
    if plans:
        units = read_all_units(job.sink, plans)
        is_done = committed(store_of(job.sink), units)
    for stored in plans:
        names = {name for name, *_ in stored.files}
        known |= names
        units_of_plan = slice(stored.first_unit, stored.first_unit + stored.num_units)
        if not is_done[units_of_plan].all():
            rows_done = int(units.unit_rows[units_of_plan][is_done[units_of_plan]].sum())
            of_plan = _part_of(job, names, stored.number, stored.first_unit)
            parts.append(JobPart(job=of_plan, stored=stored, rows_done=rows_done))
    new = {name for name, *_ in job.files} - known
    if new or not plans:
        num_units = sum(stored.num_units for stored in plans)
        added = _part_of(job, new, len(plans) + 1, num_units)
        parts.append(JobPart(job=added, stored=None, rows_done=0))
    return parts


def _part_of(job: PlannedRun, names: Set[str], number: int, first_unit: int) -> PlannedRun:
    """Return what a plan of some of the files is about."""
    files = tuple(file for file in job.files if file[0] in names)
    source = job.source.only(names)
    return replace(job, source=source, files=files, number=number, first_unit=first_unit)
