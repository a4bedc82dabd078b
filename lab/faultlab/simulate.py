"""Many schedules of crashes, zombies and lost replies, each checked to the last row."""

import random
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from faultlab.oracle import Oracle
from faultlab.plans import LATER_ROWS, NUM_ROWS, PLANS
from faultlab.players import REAL, Player, Steps, drive, foreign_part
from faultlab.virtual_store import Files
from faultlab.world import FaultRates, Process, World
from raybatch.durable.layout import PLAN, part_name, plan_name

_RATES = (
    FaultRates(crash=0.0, stall=0.0, error=0.0, delay=0.1),
    FaultRates(crash=0.02, stall=0.0, error=0.02, delay=0.1),
    FaultRates(crash=0.0, stall=0.06, error=0.0, delay=0.1),
    FaultRates(crash=0.0, stall=0.0, error=0.15, delay=0.1),
    FaultRates(crash=0.04, stall=0.04, error=0.04, delay=0.1),
    FaultRates(crash=0.1, stall=0.1, error=0.1, delay=0.1),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Violation:
    """A schedule that broke a promise.

    Args:
        what: was broken first.
    """

    schedule: int
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """Counts of some schedules.

    Args:
        num_late: parts that a driver came to write when another had, and left as they were.
        num_grown: schedules in which rows were added to the input.
        num_foreign: schedules with a part of another job among the parts.
        num_joined: parts that were removed after they were joined.
        violations: the first broken promise of each schedule that broke one.
    """

    seed: int
    num_schedules: int
    num_commits: int
    num_late: int
    num_grown: int
    num_foreign: int
    num_joined: int
    faults: Mapping[str, int]
    violations: tuple[Violation, ...]
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """One schedule, event by event."""

    lines: tuple[str, ...]
    violations: tuple[str, ...]


def simulate(
    seed: int,
    schedules: int,
    *,
    steps: Steps = REAL,
    first: int = 0,
    max_violations: int | None = None,
) -> SimulationReport:
    """Run schedules of several drivers, feeders and zombies over one output each.

    Args:
        seed: decides every schedule, together with its number.
        schedules: how many.
        steps: of the protocol, see `faultlab.mutations` for broken ones.
        first: number of the first schedule.
        max_violations: stop after this number of schedules that broke a promise; None runs all.
    """
    begin = time.perf_counter()
    faults: Counter[str] = Counter()
    violations = []
    num_commits = num_late = num_grown = num_foreign = num_joined = num_run = 0
    for number in range(first, first + schedules):
        world, oracle = _run(seed, number, steps, None)
        num_run += 1
        faults.update(world.faults)
        num_commits += oracle.num_commits
        num_late += oracle.num_late
        num_grown += oracle.may_grow
        num_foreign += oracle.is_foreign
        num_joined += oracle.num_joined
        if oracle.violations:
            violations.append(Violation(schedule=number, what=oracle.violations[0]))
            if max_violations is not None and len(violations) >= max_violations:
                break
    return SimulationReport(
        seed=seed,
        num_schedules=num_run,
        num_commits=num_commits,
        num_late=num_late,
        num_grown=num_grown,
        num_foreign=num_foreign,
        num_joined=num_joined,
        faults=dict(faults),
        violations=tuple(violations),
        seconds=time.perf_counter() - begin,
    )


def replay(seed: int, schedule: int, *, steps: Steps = REAL) -> Replay:
    """Run one schedule again and return its trace."""
    lines: list[str] = []
    _, oracle = _run(seed, schedule, steps, lines)
    return Replay(lines=tuple(lines), violations=tuple(oracle.violations))


def _run(seed: int, number: int, steps: Steps, trace: list[str] | None) -> tuple[World, Oracle]:
    rng = random.Random((seed << 40) + number)
    world = World(rng, _RATES[int(rng.random() * len(_RATES))], trace=trace)
    # without exclusive creates the protocol asks that all drivers make the same plan
    is_exclusive = rng.random() < 0.9
    # where the last writer wins, an older run's success record would win as well
    may_grow = rng.random() < 0.25 and is_exclusive
    oracle = Oracle(
        [f"r{row}" for row in range(NUM_ROWS)],
        later=[f"r{row}" for row in LATER_ROWS] if may_grow else [],
        is_exclusive=is_exclusive,
    )
    files = Files(world, oracle, is_exclusive=is_exclusive)
    has_journal = rng.random() < 0.3
    # planted bugs of parts are not looked for where there are none
    is_partitioned = rng.random() < 0.4 and steps.committed is REAL.committed
    # as in a job, where the store decides who creates a file
    is_joined = rng.random() < 0.3 and is_exclusive
    variants = [int(rng.random() * len(PLANS)) for _ in range(4)]
    damage = 0.1 if rng.random() < 0.3 else 0.0

    def player(driver: int, damage: float, *, has_grown: bool) -> Player:
        return Player(
            world=world,
            files=files,
            steps=steps,
            number=driver,
            variant=variants[driver if is_exclusive else 0],
            has_journal=has_journal,
            is_partitioned=is_partitioned,
            damage=damage,
            may_grow=may_grow,
            has_grown=has_grown,
            is_joined=is_joined,
        )

    for driver in range(1 + int(rng.random() * 3)):
        has_grown = may_grow and rng.random() < 0.5
        _start(world, player(driver, damage, has_grown=has_grown), is_faulty=True)
    # a store that replaces parts may replace a foreign one unnoticed
    if rng.random() < 0.05 and is_exclusive and not is_partitioned and not is_joined:
        world.start("stranger", lambda process: _plant(world, files), is_faulty=False)
    try:
        world.run()
        last = _run_last(world, files, player(3, 0.0, has_grown=may_grow))
        oracle.finished(last.failure, files.by_name)
        # zombies go on over a finished output
        world.wake_all()
        world.run()
        oracle.finished(last.failure, files.by_name)
    finally:
        world.close()
    if trace is not None:
        trace += [f"broken: {violation}" for violation in oracle.violations]
    return world, oracle


def _run_last(world: World, files: Files, player: Player) -> Process:
    """Run a driver without faults; again where a zombie let the input grow under it."""
    while True:
        has_grown = plan_name(2) in files.by_name
        last = _start(world, player, is_faulty=False)
        world.run(until=last)
        if last.failure is None or has_grown == (plan_name(2) in files.by_name):
            return last


def _start(world: World, player: Player, *, is_faulty: bool) -> Process:
    def run(process: Process) -> None:
        drive(player, process)

    return world.start(f"d{player.number}", run, is_faulty=is_faulty)


def _plant(world: World, files: Files) -> None:
    """Put a part of another job among the parts, as a careless copy does."""
    for _ in range(int(world.rng.random() * 40)):
        world.yield_turn()
    # every plan has these two; a part of no unit could come between the audit and _SUCCESS
    unit = int(world.rng.random() * 2)
    name = part_name(unit)
    if PLAN in files.by_name and name not in files.by_name:
        files.by_name[name] = foreign_part(unit)
        files.oracle.plant(files.by_name[name])
