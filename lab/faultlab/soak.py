"""One long job under a fault every minute, watched for lost rows, repeated rows and growth."""

import json
import math
import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from faultlab.drivers import Driver
from faultlab.kills import KILLS, Kills
from faultlab.readings import Reading, bytes_per_row, longest_run
from faultlab.rig import MAX_TOKENS, Answers, Checked, Rig
from raybatch.actors.pool import release_pools
from raybatch.durable.layout import DATA, FRAGMENTS, STAGING
from raybatch.durable.parts import read_footer
from raybatch.durable.storage import Store
from raybatch.job.job import Job

_POLL_S = 0.5
# a driver has loaded everything some seconds after its first unit
_WARM_S = 10.0
# a driver that writes nothing for so long hangs
_HANG_S = 240.0


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakOptions:
    """Length and faults of a soak.

    Args:
        fault_every_s: between two faults; each waits for a new unit of the driver that it hits.
        max_faults: that come; None sets no bound.
        read_every_s: between two readings of memory and handles.
    """

    minutes: float
    fault_every_s: float = 60.0
    max_faults: int | None = None
    read_every_s: float = 5.0
    seed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakResult:
    """Results of a soak.

    Args:
        seconds: from the first driver to the end of the last one that had something to do.
        num_drivers: that were started until the job was done.
        rows_redone: rows that engines finished more than once.
        late_units: commits of units that a faster driver had written, see `Rig`.
        start_s: start of the first driver until its first unit.
        resume_s: the same time of every driver after a fault that ended one.
        rerun_s: of one more run, which has nothing to do.
        num_left: temporary files and journals in the output in the end.
        problem: what went wrong with the soak itself; "" where nothing did.
    """

    options: SoakOptions
    rows_per_s: float
    unit_rows: int
    seconds: float
    faults: Mapping[str, int]
    num_drivers: int
    rows_redone: int
    late_units: int
    checked: Checked
    start_s: float
    resume_s: tuple[float, ...]
    rerun_s: float
    num_left: int
    readings: tuple[Reading, ...]
    problem: str = ""

    @property
    def is_right(self) -> bool:
        """Return whether the job came to its end with every row once and nothing left behind."""
        return self.checked.is_right and not self.num_left and not self.problem

    @property
    def redone_share(self) -> float:
        """Return the rows that were done again as a share of all rows."""
        return self.rows_redone / max(1, self.checked.expected)

    @property
    def driver_growth(self) -> float | None:
        """Return the bytes by which a driver grows with 1,000 finished rows."""
        slope = bytes_per_row(self.readings, lambda reading: reading.driver_bytes)
        return None if slope is None else 1000 * slope

    @property
    def coordinator_growth(self) -> float | None:
        """Return the bytes by which a coordinator grows with 1,000 finished rows."""
        slope = bytes_per_row(self.readings, lambda reading: reading.coordinator_bytes)
        return None if slope is None else 1000 * slope

    @property
    def most_staged(self) -> int:
        """Return the most files that were seen in the staging folder."""
        return max((reading.num_staged for reading in self.readings), default=0)

    @property
    def longest(self) -> tuple[Reading, Reading] | None:
        """Return the first and the last reading of the run that lived longest."""
        run = longest_run(self.readings)
        return (run[0], run[-1]) if run else None


def soak_rig(folder: Path, minutes: float) -> Rig:
    """Return a job that takes `minutes`, at the pace and with the units of a real one.

    Args:
        folder: empty.
        minutes: that it takes at least, because engines are never faster than their steps.
    """
    rig = Rig(
        folder=folder, unit_rows=300, replicas=3, max_num_seqs=32, step_s=0.02, flush_every_s=5.0
    )
    num_units = math.ceil(_rows_per_s(rig) * 60 * minutes / rig.unit_rows)
    return replace(rig, num_rows=max(2, num_units) * rig.unit_rows)


def soak(folder: Path, options: SoakOptions, rig: Rig | None = None) -> SoakResult:
    """Run one long job under faults until it is done, and count what that has cost.

    Args:
        folder: empty.
        options: of the soak.
        rig: of the job; None takes that of `soak_rig`.
    """
    rig = soak_rig(folder / "job", options.minutes) if rig is None else rig
    expected = _answers(replace(rig, folder=folder / "reference"))
    rig.prepare()
    running = _Soak(rig=rig, store=rig.store(), options=options, rng=random.Random(options.seed))
    problem, rerun_s = "", 0.0
    try:
        running.run()
        redone, rerun_s = rig.num_redone(), _run_once_more(rig)
    except (TimeoutError, OSError) as error:
        problem, redone = f"{type(error).__name__}: {error}", rig.num_redone()
    finally:
        for driver in running.drivers:
            driver.kill_tree()
    return SoakResult(
        options=options,
        rows_per_s=round(_rows_per_s(rig), 1),
        unit_rows=rig.unit_rows,
        seconds=running.seconds,
        faults=dict(sorted(running.injected.items())),
        num_drivers=len(running.drivers),
        rows_redone=redone,
        late_units=rig.num_late_units(),
        checked=rig.check(expected),
        start_s=running.first_unit_s.get(0, 0.0),
        resume_s=tuple(seconds for run, seconds in running.first_unit_s.items() if run),
        rerun_s=rerun_s,
        num_left=sum(len(running.store.names(name)) for name in (STAGING, FRAGMENTS)),
        readings=tuple(running.readings),
        problem=problem,
    )


def _answers(rig: Rig) -> Answers:
    """Return the texts of a run without faults, waiting or Ray, none of which changes an answer."""
    fast = replace(rig, step_s=0.0)
    fast.prepare()
    job = json.loads(fast.job_file.read_text(encoding="utf-8"))
    try:
        Job.from_mapping({**job, "executor": "local"}).run(progress=lambda *_: None)
    finally:
        release_pools()
    return fast.answers()


def _run_once_more(rig: Rig) -> float:
    """Run a job that has nothing to do; return the seconds of the whole process."""
    code, seconds = rig.finish(timeout_s=600.0)
    if code:
        raise OSError(f"a run with nothing to do ended with {code}")
    return seconds


def _rows_per_s(rig: Rig) -> float:
    """Return the engines' answers where nothing delays them."""
    return rig.replicas * rig.max_num_seqs / (rig.step_s * (1 + MAX_TOKENS) / 2)


@dataclass(kw_only=True)
class _Soak:
    """The job between its first driver and its end."""

    rig: Rig
    store: Store
    options: SoakOptions
    rng: random.Random
    drivers: list[Driver] = field(default_factory=list)
    injected: Counter[str] = field(default_factory=Counter)
    readings: list[Reading] = field(default_factory=list)
    # of each driver that wrote a unit, since its start
    first_unit_s: dict[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    _began_s: float = field(default_factory=time.monotonic)
    _fault_s: float = 0.0
    _read_s: float = 0.0
    _known: set[str] = field(default_factory=set)
    _attempts: set[str] = field(default_factory=set)

    def run(self) -> None:
        """Start drivers until one says that the job is done."""
        self._fault_s = time.monotonic()
        while True:
            driver = self.rig.start(name=f"d{len(self.drivers)}")
            self.drivers.append(driver)
            num_faults = self.injected.total()
            self._watch(driver)
            self.seconds = time.monotonic() - self._began_s
            if driver.process.poll() == 0:
                return
            if self.injected.total() == num_faults:
                raise OSError(f"a driver failed without a fault: {driver.last_words()}")

    def _watch(self, driver: Driver) -> None:
        """Look at a driver until it ends, by itself or by a fault."""
        run = len(self.drivers) - 1
        started_s = moved_s = time.monotonic()
        while driver.is_running:
            new = self._new_parts()
            now_s = time.monotonic()
            moved_s = now_s if new else moved_s
            if now_s - moved_s > _HANG_S:
                raise TimeoutError(f"no new unit for {_HANG_S:.0f} s: {driver.last_words()}")
            if run not in self.first_unit_s:
                if self._has_written(new):
                    self.first_unit_s[run] = round(now_s - started_s, 2)
            else:
                self._read_if_due(driver, run, now_s - started_s - self.first_unit_s[run])
                self._hit_if_due(driver)
            time.sleep(_POLL_S)

    def _new_parts(self) -> list[str]:
        """Return the parts that have come since the last look."""
        new = [name for name in self.store.names(DATA) if name not in self._known]
        self._known.update(new)
        return new

    def _has_written(self, new: list[str]) -> bool:
        """Return whether one of these parts is of a run that has written none before.

        Processes that a killed driver leaves behind may continue for a moment.
        """
        attempts = {read_footer(self.store, name).attempt for name in new} - self._attempts
        self._attempts |= attempts
        return bool(attempts)

    def _read_if_due(self, driver: Driver, run: int, age_s: float) -> None:
        now_s = time.monotonic()
        if age_s < min(_WARM_S, 2 * self.options.read_every_s):
            return
        if now_s - self._read_s < self.options.read_every_s:
            return
        self._read_s = now_s
        rows_done = len(self._known) * self.rig.unit_rows
        reading = Reading.of(
            driver, self.store, run=run, at_s=now_s - self._began_s, rows_done=rows_done
        )
        if reading is not None:
            self.readings.append(reading)

    def _hit_if_due(self, driver: Driver) -> None:
        if time.monotonic() - self._fault_s < self.options.fault_every_s:
            return
        if self.options.max_faults is not None and (
            self.injected.total() >= self.options.max_faults
        ):
            return
        kind = self.rng.choice(KILLS)
        if Kills(rng=self.rng).by_kind[kind](driver):
            self.injected[kind] += 1
            self._fault_s = time.monotonic()
