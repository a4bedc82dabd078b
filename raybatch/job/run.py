"""One run of a job: resumes its stored plans, runs rows into files, and reports."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import pyarrow as pa

from raybatch.backends.registry import check_installed
from raybatch.durable.audit import Audit, audit, finish, is_finished
from raybatch.durable.commit import committed
from raybatch.durable.journal import drop_journal_and_staging
from raybatch.durable.sink import holds_answers, prepare_sink
from raybatch.durable.storage import Store, absolute, error_context, store_of
from raybatch.errors import ConfigError, RunStopped, shell_path
from raybatch.explanation.explain import explain_run
from raybatch.explanation.outcome import actual_of
from raybatch.explanation.query import JobQuery
from raybatch.inputs.source import Source
from raybatch.job.config import JobConfig
from raybatch.job.executor import Executor
from raybatch.job.progress import Progress, shown
from raybatch.job.watching import (
    LimitWatch,
    PoolWatch,
    RunClock,
    RunDeadline,
    StopSignal,
    WavesSoFar,
)
from raybatch.planning.dataset import remove_ordered_rows
from raybatch.planning.fingerprint import (
    InputFiles,
    check_same,
    comparable,
    deciding_options,
    fingerprint,
    fingerprint_digest,
    input_files,
    output_schema,
)
from raybatch.planning.head import HeadRun, may_have_head, split_head
from raybatch.planning.planned import LargePlan, PlannedInput, RunSpec
from raybatch.planning.run import fit_units, run_planned, store_input_order
from raybatch.planning.store import StoredPlan, covered_files, read_all_units, read_plans
from raybatch.records.pool_stats import PoolStats
from raybatch.redaction import redacted
from raybatch.report import (
    RunReport,
    counted_report,
    installed_versions,
    keep_report,
    report_of_complete,
)
from raybatch.report.history import read_history
from raybatch.report.recorder import RunRecorder, new_run_id
from raybatch.stages.feeder import StageFeeder
from raybatch.stages.unit_run import FeederRunner

logger = logging.getLogger(__name__)

# rows for which the report simulates each order
_MAX_ROWS_SIMULATED = 20_000


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
    plan_of = {name: one.number for one in reversed(plans) for name, *_ in one.files}
    files = sorted(files, key=lambda file: plan_of.get(file[0], len(plans) + 1))
    stored_files = covered_files(plans, plans[-1].files_left if plans else ())
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
    portions, ignored = portions_of(plans), dict[tuple[str, object], object]()
    for stored in plans:
        now = asdict(fit_units(job.plan, job.source.within(portions[stored.number])))
        wanted = {(name, used): now.get(name, used) for name, used in stored.options.items()}
        ignored |= {option: value for option, value in wanted.items() if value != option[1]}
    for (name, used), value in ignored.items():
        text = "ignoring plan.%s=%r: the plan stored in %s uses %r"
        logger.warning(text, name, value, job.sink, used)


def is_whole(job: RunSpec, plans: Sequence[StoredPlan]) -> bool:
    """Return whether these plans cover all files of a job, and all their units are written."""
    if not plans or sum(rows for _, rows, _ in covered_files(plans)) < job.source.num_rows:
        return False
    return is_finished(store_of(job.sink), read_all_units(job.sink, plans))


def is_complete(job: RunSpec) -> bool:
    """Return whether all units of a plan are in the output."""
    plans = read_plans(job.sink)
    is_done = committed(store_of(job.sink), read_all_units(job.sink, plans))
    found = [is_done[p.first_unit :][: p.num_units] for p in plans if p.number == job.number]
    return bool(found) and bool(found[0].all())


def portions_of(plans: Sequence[StoredPlan]) -> dict[int, dict[str, range]]:
    """Return for each plan, by number, the positions of its rows in each file, by name."""
    starts, portions = Counter[str](), {}
    for stored in plans:
        of_plan = {name: range(starts[name], starts[name] + n) for name, n, _ in stored.files}
        portions[stored.number] = of_plan
        starts.update({name: len(rows) for name, rows in of_plan.items()})
    return portions


def parts_to_run(
    job: RunSpec, plans: Sequence[StoredPlan], *, may_split: bool = False
) -> tuple[list[JobPart], int]:
    """Return the parts of a job that have rows to do, and the number of rows already written.

    The parts are one for each plan with units to do, in order, then one for the rows without a
    plan; with `may_split` these may be two, a head and the rest. The number is logged.
    """
    parts, rows_resumed, portions = [], 0, portions_of(plans)
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
        of_plan = slice(stored.first_unit, stored.first_unit + stored.num_units)
        if not is_done[of_plan].all():
            rows_done = int(units.unit_rows[of_plan][is_done[of_plan]].sum())
            part = _part_of(job, portions[stored.number], stored.number)
            part = replace(part, first_unit=stored.first_unit, files_left=stored.files_left)
            parts.append(JobPart(job=part, stored=stored, rows_done=rows_done))
    planned = {name: rows for name, rows, _ in covered_files(plans)}
    new = {name: range(planned.get(name, 0), rows) for name, rows, _ in job.files}
    new = {name: rows for name, rows in new.items() if len(rows)}
    if new or not plans:
        is_rest = bool(plans) and len(plans[-1].files_left) > 0
        # that of a rest is known once its head has a plan
        first_unit = sum(stored.num_units for stored in plans)
        added = replace(_part_of(job, new, len(plans) + 1), first_unit=first_unit)
        shares = split_head(added, new) if may_split and not is_rest else [new]
        if len(shares) > 1:
            rest = _part_of(job, shares[1], added.number + 1)
            head = replace(_part_of(added, shares[0], added.number), files_left=tuple(rest.files))
            parts.append(JobPart(job=head, stored=None, rows_done=0))
            added = rest
        parts.append(JobPart(job=added, stored=None, rows_done=0))
    return parts, rows_resumed


def _part_of(job: RunSpec, portions: Mapping[str, range], number: int) -> RunSpec:
    files = tuple((n, len(portions[n]), digest) for n, _, digest in job.files if n in portions)
    return replace(job, source=job.source.within(portions), files=files, number=number)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobExecution:
    """Run a job with `execute`, once its source has been read and checked and its sink is ready."""

    config: JobConfig
    stage: type[StageFeeder]
    source: Source
    clock: RunClock
    executor: Executor
    ending: Callable[[], str | None] | None = None
    """Returns why the run has to end early, or None; called about every second."""
    start_ray: Callable[[], None] | None = None
    """Called before Ray is used; None lets Ray start by itself."""

    def described(self) -> RunSpec:
        """Return the run's spec with its fingerprint and input files."""
        decisive = fingerprint(self.config.stage, self._schema, deciding_options(self.config))
        return replace(
            run_spec(self.config, self.source),
            fingerprint={**decisive, **self.source.choice},
            files=input_files(self.source),
        )

    def execute(self, progress: Progress) -> RunReport:
        """Generate and write every row that is not written yet, and audit the output."""
        store = store_of(self.config.sink)
        job = self.described()
        plans = plans_of(job, may_grow=self.config.extend)
        log_options_in_use(job, plans)
        is_new = not plans
        if is_whole(job, plans):
            logger.info("%s is already complete; nothing to generate", self.config.sink)
            return report_of_complete(self.config.sink)
        # a deadline chooses among all units
        may_split = not (self.executor.is_local or self.config.deadline_s)
        parts, rows_resumed = parts_to_run(job, plans, may_split=may_split)
        if any(part.stored is None for part in parts):
            self._check_plan_repeats(store)
        logger.info("executor: %s", self.executor)
        if self.executor.is_local:
            check_installed(self.config.stage.backend)
        elif self.start_ray is not None:
            self.start_ray()
        self.stage.pool.connect()
        before = self.stage.stats()
        deadline = self._deadline()
        limits = LimitWatch(self.config.limits, before, ending=self._ending_of(deadline))
        with self._recorder(store, job, rows_resumed) as recorder:
            planned = None
            if parts:
                planned = self._execute(parts, progress, recorder, limits, deadline)
            plans = read_plans(self.config.sink)
            units = read_all_units(self.config.sink, plans)
            counted = audit(store, units)
            left = counted.missing_rows
            # other limits and signals have logged their reason
            if left and deadline and (recorder.limit is None or deadline.has_passed):
                done = recorder.rows_written
                recorder.stopping(deadline.account(rows_done=done, rows_open=left))
            if not counted.is_clean:
                recorder.incomplete()
        if counted.is_clean:
            finish(store, units, counted)
            drop_journal_and_staging(store)
            remove_ordered_rows(self.config.sink, plans, self.config.plan)
        elif recorder.limit is not None:
            logger.warning("stopped by %s; run the same job again to resume", recorder.limit)
        else:
            logger.error("the output in %s is not complete: %s", self.config.sink, counted)
        # the plan is only comparable with a run that executed all of it, except a head
        report = self._report(plans, counted, before, planned if is_new else None, rows_resumed)
        return keep_report(report, self.config.sink)

    @property
    def _backend_reason(self) -> str:
        return "" if self.stage.choice is None else self.stage.choice.why

    @property
    def _schema(self) -> pa.Schema:
        return output_schema(self.source.schema, self.config.stage)

    def _deadline(self) -> RunDeadline | None:
        if self.config.deadline_s is None:
            return None
        return RunDeadline(
            deadline_s=self.config.deadline_s,
            query=self._query(),
            clock=self.clock,
            read_stats=self.stage.stats,
        )

    def _ending_of(self, deadline: RunDeadline | None) -> Callable[[], str | None] | None:
        """Return a callback that returns why to end early: the deadline, or `self.ending`."""
        if deadline is None:
            return self.ending
        return lambda: deadline.reason_to_end() or (self.ending() if self.ending else None)

    def _recorder(self, store: Store, job: RunSpec, rows_resumed: int) -> RunRecorder:
        now_s = time.time()
        about = {
            "source": self.config.source,
            "sink": self.config.sink,
            "model": self.config.stage.model,
            "backend": self.config.stage.backend.kind,
            "backend_reason": self._backend_reason,
            "task": self.config.stage.task,
            "rows": self.source.num_rows,
            "rows_resumed": rows_resumed,
            "fingerprint": fingerprint_digest(job.fingerprint),
            "versions": installed_versions(),
            "executor": self.executor.name,
        }
        return RunRecorder(store, new_run_id(now_s), about=about)

    def _check_plan_repeats(self, store: Store) -> None:
        """Raise ConfigError if concurrent drivers could write different plans into the sink."""
        with error_context(f"sink {self.config.sink!r} cannot be used"):
            is_exclusive = store.is_exclusive
        if not is_exclusive and self.config.plan.lengths == "probe":
            raise ConfigError(
                f"plan.lengths='probe' makes another plan in every run, and {store.uri} cannot "
                "create files exclusively, so two concurrent runs might follow different plans; "
                "set plan.lengths='auto', or choose a sink on a local disk or on S3"
            )

    def _execute(
        self,
        parts: Sequence[JobPart],
        progress: Progress,
        recorder: RunRecorder,
        limits: LimitWatch,
        deadline: RunDeadline | None,
    ) -> PlannedInput | LargePlan | None:
        """Run the rows of all parts; return the last plan, None if it is not in memory."""
        if not any(part.job.source.num_rows for part in parts):
            self._runner(self.stage, recorder).write_nothing(store_input_order(parts[0].job))
            return None
        stage = self.stage.of_run(id_column=parts[0].job.row_id_column)
        watch: PoolWatch | None = None

        def end(reason: str) -> None:
            recorder.stopping(reason)
            stage.pool.stop(client=stage.client)

        stop_signal = StopSignal(partial(end, "SIGTERM"), lambda: recorder.units.total > 0)
        try:
            with shown(progress, lambda: recorder.units) as show:

                def observe(stats: PoolStats, num_rows: int) -> None:
                    waves = None
                    if self.config.waves:
                        rows = (recorder.rows_written, recorder.rows_failed)
                        waves = WavesSoFar(stage.stats(again=True), *rows)
                    if reason := limits.observe(stats, waves):
                        end(reason)
                    recorder.observe(stats, cost=limits.spent.cost)
                    show(stats, num_rows)

                runner = replace(self._runner(stage, recorder), deadline=deadline)
                num_rows = sum(part.job.source.num_rows - part.rows_done for part in parts)
                watch = PoolWatch(
                    read_stats=stage.stats, num_rows=num_rows, callback=observe, clock=self.clock
                )
                with stop_signal, watch:
                    # engines load weights while the plan is made and Ray starts feeders
                    stage.pool.start()
                    return self._run_parts(parts, runner, recorder, watch)
        except KeyboardInterrupt:
            # `rows_done` of the watch may be out of date
            num_seen = 0 if watch is None else watch.rows_done
            logger.warning(
                "interrupted: %d of %d rows were done in this run; run the same job again to "
                "resume, complete units in %s are kept",
                max(num_seen, recorder.rows_written),
                self.source.num_rows,
                shell_path(self.config.sink),
            )
            if stop_signal.has_arrived and not recorder.units.total:
                raise RunStopped(
                    "SIGTERM arrived before any row was running; run the same command again"
                ) from None
            raise

    def _run_parts(
        self,
        parts: Sequence[JobPart],
        runner: FeederRunner,
        recorder: RunRecorder,
        watch: PoolWatch,
    ) -> PlannedInput | LargePlan | None:
        """Run the parts in turn, but a head beside the rest; return the last plan."""
        planned: PlannedInput | LargePlan | None = None
        stage, left = runner.stage, list(parts)
        may_overlap = may_have_head(self.config.plan) and not (runner.is_local or runner.deadline)
        while left:
            running = [left.pop(0)]
            job = replace(running[0].job, units=runner)
            # the next part of a head whose rest is written extends the input
            if may_overlap and job.files_left and left and left[0].job.number == job.number + 1:
                running.append(left.pop(0))
                planned = HeadRun(
                    head=job,
                    rest=replace(running[1].job, units=runner),
                    plans=(running[0].stored, running[1].stored),
                    rows_received=lambda: watch.rows_received,
                    is_stopped=lambda: recorder.limit is not None,
                    stop=lambda: stage.pool.stop(client=stage.client),
                ).run()
            elif job.source.num_rows:
                planned = run_planned(job, running[0].stored)
            else:
                runner.write_nothing(store_input_order(job))
            if not all(is_complete(part.job) for part in running):
                break  # a limit or a signal ended the run
        return planned

    def _runner(self, stage: type[StageFeeder], recorder: RunRecorder) -> FeederRunner:
        return FeederRunner(
            stage=stage,
            sink=absolute(self.config.sink),
            schema=self._schema,
            attempt=recorder.run_id,
            flush_every_s=self.config.flush_every_s,
            observer=recorder,
            waves=self.config.waves,
            is_local=self.executor.is_local,
        )

    def _report(
        self,
        plans: Sequence[StoredPlan],
        counted: Audit,
        before: PoolStats,
        planned: PlannedInput | LargePlan | None,
        rows_resumed: int,
    ) -> RunReport:
        clock, after = self.clock, self.stage.stats()
        total_s = clock.elapsed_s()
        started_s = clock.started_s if clock.started_s is not None else total_s
        ended_s = max(started_s, clock.ended_s if clock.ended_s is not None else total_s)
        # an idle pool that has stopped meanwhile restarts its counters at 0
        restarts = max(0, after.restarts - before.restarts)
        wall_s = ended_s - started_s
        actual = actual_of(counted.counts, before, after, num_restarts=restarts, wall_s=wall_s)
        plan = None
        if planned is not None:
            query = replace(self._query(), measured_kv_tokens=actual.kv_tokens)
            plan = explain_run(query, planned, actual)
        history = read_history(store_of(self.config.sink))
        report = replace(
            # rows are not lost if the same job, run again, writes them
            counted_report(self.config.sink, plans, counted, history, is_complete=False),
            source=redacted(self.config.source),
            model=redacted(self.config.stage.model),
            rows_resumed=rows_resumed,
            replicas=max(after.num_replicas, after.most_replicas),
            restarts=restarts,
            executor=self.executor.name,
            versions=installed_versions(),
            plan=plan,
        )
        # times of several runs come from their logs
        if len(history.runs) != 1:
            return report
        write_s = total_s - ended_s
        return replace(
            report, startup_s=started_s, engines_s=wall_s, write_s=write_s, total_s=total_s
        )

    def _query(self) -> JobQuery:
        """Return the query about this job during a run; it measures no engine."""
        return JobQuery(
            job=run_spec(self.config, self.source),
            spec=self.stage.pool.spec,
            name=self.config.source,
            backend_reason=self._backend_reason,
            weights=self.stage.how_weights_are_held(),
            measure=False,
            is_local=self.executor.is_local,
            max_rows=_MAX_ROWS_SIMULATED,
            lint=False,
        )


def run_spec(config: JobConfig, source: Source) -> RunSpec:
    """Return the spec from which the job is planned, before it has a runner for its units."""
    stage = config.stage
    row_id_column = None if stage.id_column is not None else stage.output.prefix + "row_id"
    return RunSpec(
        source=source,
        config=stage if row_id_column is None else replace(stage, id_column=row_id_column),
        plan=config.plan,
        sink=absolute(config.sink),
        row_id_column=row_id_column,
        partition_by=config.partition_by,
    )
