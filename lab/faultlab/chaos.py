"""Whole jobs under faults that are chosen by a seed, run again until they end, then compared.

A fault comes at a number of units in the output, never at a time.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from faultlab.drivers import Driver, wait_until
from faultlab.kills import KILLS, Kills
from faultlab.moving_driver import Moved
from faultlab.places import Place, Places
from faultlab.rig import JOINED_BYTES, NUM_UNITS, Answers, Checked, Rig

_TWO = "two drivers"
_HANG = "hang"
_FAULTS_PER_ROUND = 3
# of rounds whose jobs join the parts of units, whose outputs are partitioned, and of large jobs
_JOINED_SHARE, _PARTITIONED_SHARE, _LARGE_SHARE = 0.5, 0.4, 0.5
_MAX_DRIVERS = 12
# an engine that hangs is noticed and ended in less
_REPLACED_S = 60.0
_NUM_HTTP_ERRORS = 25
# places of jobs whose rows move: at random or as the pool decides, of fake engines or of real ones;
# and of jobs whose real engines form TP groups
MOVING = ("moves", "tail", "native moves", "teams")
# where a fault of each kind can happen, and how often such rounds are drawn
KINDS: Mapping[str, Sequence[str]] = {
    "local": (*KILLS, _HANG, _TWO),
    "disk": ("disk full", "read-only"),
    "s3": ("s3 errors", "tree", "replica"),
    "nodes": ("node",),
    **dict.fromkeys(MOVING, ("source killed", "target killed", "source hangs", "target hangs")),
    "teams": ("driver killed", "worker killed", "worker hangs"),
}
_WEIGHTS = {"local": 5, "disk": 1, "s3": 2, "nodes": 2, **dict.fromkeys(MOVING, 2)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The faults of a round, and where it runs.

    Args:
        place: where the output and the cluster are.
        faults: kind, and the number of units in the output at which it comes; of `MOVING`, rows
            that have moved.
    """

    place: str
    faults: tuple[tuple[str, int], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundResult:
    """Results of a round.

    Args:
        injected: kinds of the faults that came; a job may end before one does.
        num_drivers: that were started until the job was done.
        rows_redone: rows that engines finished more than once.
        late_units: commits of units that a faster driver had written, see `Rig`.
        problem: what went wrong with the round itself; "" where nothing did.
        gave_up: last words of drivers that ended with an error although none was killed.
        moved: what moves went through, where rows moved.
    """

    planned: Planned
    injected: tuple[str, ...]
    num_drivers: int
    rows_redone: int
    late_units: int
    seconds: float
    checked: Checked
    problem: str = ""
    gave_up: tuple[str, ...] = ()
    moved: Moved | None = None

    @property
    def is_right(self) -> bool:
        """Return whether the job came to its end with every row once."""
        return self.checked.is_right and not self.problem


def plan_round(seed: int, number: int, places: Sequence[str]) -> Planned:
    """Return what round `number` goes through."""
    rng = random.Random((seed << 32) + number)
    place = rng.choices(places, [_WEIGHTS[name] for name in places])[0]
    moments = sorted(rng.sample(range(2, NUM_UNITS * 3 // 4), _FAULTS_PER_ROUND))
    kinds = [rng.choice(KINDS[place]) for _ in moments]
    # a second driver that starts later would find nothing left to do
    faults = [(kind, 0 if kind == _TWO else at) for kind, at in zip(kinds, moments, strict=True)]
    return Planned(place=place, faults=tuple(sorted(faults, key=lambda fault: fault[1])))


def run_round(
    folder: Path, planned: Planned, expected: Answers, places: Places, rng: random.Random
) -> RoundResult:
    """Run a job through the faults of a round, until it is done.

    Args:
        folder: empty, of this round.
        planned: the faults.
        expected: the text of every row.
        places: makes where the job runs.
        rng: chooses among processes.
    """
    began, problem = time.monotonic(), ""
    with places.open(planned.place, folder, rng) as place:
        joined = JOINED_BYTES if rng.random() < _JOINED_SHARE else None
        by = ("third",) if rng.random() < _PARTITIONED_SHARE else ()
        is_large = place.rig.executor == "ray" and rng.random() < _LARGE_SHARE
        rig = replace(place.rig, output_file_bytes=joined, partition_by=by, is_large=is_large)
        rig.prepare()
        with _Round.of(rig, place, rng) as running:
            try:
                for kind, at in planned.faults:
                    running.go_through(kind, at)
                running.finish()
            except (TimeoutError, OSError) as error:
                problem = f"{type(error).__name__}: {error}"
        return RoundResult(
            planned=planned,
            injected=tuple(running.injected),
            num_drivers=len(running.drivers),
            rows_redone=rig.num_redone(),
            late_units=rig.num_late_units(),
            seconds=time.monotonic() - began,
            checked=rig.check(expected),
            problem=problem,
            gave_up=tuple(running.gave_up),
        )


@dataclass(kw_only=True)
class _Round:
    """A job between its first driver and its end."""

    rig: Rig
    place: Place
    rng: random.Random
    drivers: list[Driver] = field(default_factory=list)
    injected: list[str] = field(default_factory=list)
    gave_up: list[str] = field(default_factory=list)
    is_done: bool = False

    @classmethod
    @contextmanager
    def of(cls, rig: Rig, place: Place, rng: random.Random) -> Iterator["_Round"]:
        """Yield a round; what still runs at its end is ended."""
        running = cls(rig=rig, place=place, rng=rng)
        try:
            yield running
        finally:
            for driver in running.drivers:
                driver.kill_tree()

    def go_through(self, kind: str, at: int) -> None:
        """Let a fault come when `at` units are in the output."""
        while not self.is_done:
            driver = self._driver()
            if wait_until(lambda: self.rig.num_parts() >= at, driver) and driver.is_running:
                if self._injections()[kind](driver):
                    self.injected.append(kind)
                return
            self._ended(driver)

    def finish(self) -> None:
        """Run the job until it reports that it is done, and let other drivers end too."""
        while not self.is_done:
            driver = self._driver()
            wait_until(lambda: False, driver)
            self._ended(driver)
        for driver in self.drivers:
            wait_until(lambda: False, driver)

    def _driver(self) -> Driver:
        """Return the last driver that runs, or start another."""
        for driver in reversed(self.drivers):
            if driver.is_running:
                return driver
        if len(self.drivers) >= _MAX_DRIVERS:
            raise TimeoutError(
                f"not done after {_MAX_DRIVERS} runs: {self.drivers[-1].last_words()}"
            )
        return self._start()

    def _start(self) -> Driver:
        self.drivers.append(self.rig.start(name=f"d{len(self.drivers)}"))
        return self.drivers[-1]

    def _ended(self, driver: Driver, *, had_no_disk: bool = False) -> None:
        code = driver.process.poll()
        self.is_done |= code == 0
        # the exit code of a signal that we sent
        if code is not None and code > 0 and not had_no_disk:
            self.gave_up.append(driver.last_words())

    def _injections(self) -> Mapping[str, Callable[[Driver], bool]]:
        return {
            **Kills(rng=self.rng).by_kind,
            _HANG: self._hang,
            _TWO: self._start_second,
            "disk full": self._fill_disk,
            "read-only": self._make_read_only,
            "s3 errors": self._fail_requests,
            "node": self._lose_node,
        }

    def _start_second(self, driver: Driver) -> bool:
        self._start()
        return True

    def _hang(self, driver: Driver) -> bool:
        """Let the thread of an engine hang, and wait until its process is replaced."""
        engines = driver.workers("Replica")
        if not engines:
            return False
        engine = self.rng.choice(engines)
        (self.rig.folder / str(engine.pid)).touch()
        # one that has no rows does not hang
        wait_until(lambda: not engine.is_running(), driver, timeout_s=_REPLACED_S)
        return True

    def _fill_disk(self, driver: Driver) -> bool:
        self.place.small_disk.fill()
        try:
            wait_until(lambda: False, driver)
        finally:
            self.place.small_disk.free()
        self._ended(driver, had_no_disk=True)
        return True

    def _make_read_only(self, driver: Driver) -> bool:
        self.place.small_disk.make_read_only()
        try:
            wait_until(lambda: False, driver)
        finally:
            self.place.small_disk.make_writable()
        self._ended(driver, had_no_disk=True)
        return True

    def _fail_requests(self, driver: Driver) -> bool:
        before = self.place.errors.num_given
        self.place.errors.arm(_NUM_HTTP_ERRORS)
        wait_until(lambda: not self.place.errors.num_left, driver)
        self.place.errors.arm(0)
        self._ended(driver)
        return self.place.errors.num_given > before

    def _lose_node(self, driver: Driver) -> bool:
        self.place.nodes.lose()
        self.place.nodes.add()
        return True
