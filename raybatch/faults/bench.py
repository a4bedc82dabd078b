"""All that is known about faults, measured: simulation, sweep of points, chaos, comparisons."""

import dataclasses
import json
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raybatch.faults.chaos import RoundResult, plan_round, run_round
from raybatch.faults.mutations import MUTATIONS
from raybatch.faults.peers import PEERS, Compared, compare
from raybatch.faults.places import Places
from raybatch.faults.rig import NUM_ROWS, NUM_UNITS
from raybatch.faults.simulate import SimulationReport, simulate
from raybatch.faults.sweep import SWEPT, Baseline, PointResult, baseline, sweep
from raybatch.report import installed_versions

__all__ = ["FaultFigures", "FaultOptions", "measure_faults"]

# a planted bug that so many schedules do not find counts as missed
_MUTATION_SCHEDULES = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOptions:
    """What is run.

    Args:
        seed: of schedules and rounds.
        schedules: to simulate.
        rounds: of chaos.
        first_round: number of the first.
        points: to sweep.
        peers: to compare with.
        moto_python: interpreter of an environment that has moto.
    """

    seed: int
    schedules: int
    rounds: int
    first_round: int = 0
    points: Sequence[str] = SWEPT
    peers: Sequence[str] = PEERS
    moto_python: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultFigures:
    """What was found; a part that has not been run yet is None or empty.

    Args:
        options: what was to be run.
        conditions: where it ran.
        simulation: of the real commit code.
        mutations: planted bug, and the schedule that found it; None where none did.
        undisturbed: the job without faults.
        points: of the sweep.
        rounds: of chaos.
        missing: places that this host has not, and why.
        peers: the same kill under other ways of going on.
        seconds: of wall clock.
    """

    options: FaultOptions
    conditions: Mapping[str, Any]
    simulation: SimulationReport | None = None
    mutations: Mapping[str, int | None] | None = None
    undisturbed: Baseline | None = None
    points: tuple[PointResult, ...] = ()
    rounds: tuple[RoundResult, ...] = ()
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    peers: tuple[Compared, ...] = ()
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Return whether nothing was lost, doubled or wrong, and every planted bug was found."""
        return (
            (self.simulation is None or not self.simulation.violations)
            and None not in (self.mutations or {}).values()
            and all(point.is_right for point in self.points)
            and all(each.is_right for each in self.rounds)
        )

    @property
    def injected(self) -> Counter[str]:
        """Return how many faults of each kind came to real jobs."""
        faults = Counter(kind for each in self.rounds for kind in each.injected)
        faults.update({"exit at a point": sum(point.is_reached for point in self.points)})
        return +faults

    def to_json(self) -> str:
        """Return everything, for a file."""
        values = dataclasses.asdict(self)
        if values["undisturbed"] is not None:
            del values["undisturbed"]["answers"]
        values |= {"is_right": self.is_right, "injected": dict(self.injected)}
        return json.dumps(values, indent=1)

    def to_text(self) -> str:
        """Return the table for people."""
        lines = [*self._simulated(), *self._swept(), *self._chaos(), *self._compared()]
        conditions = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        said = "nothing lost, doubled or wrong" if self.is_right else "NOT RIGHT, see above"
        return "\n".join([*lines, f"conditions: {conditions}", f"seed {self.options.seed}: {said}"])

    def _simulated(self) -> list[str]:
        lines = []
        if (found := self.simulation) is not None:
            lines.append(
                f"simulated   {found.num_schedules} schedules, {sum(found.faults.values())} faults,"
                f" {found.num_commits} commits, {len(found.violations)} broken promises"
            )
        if self.mutations is not None:
            caught = sum(number is not None for number in self.mutations.values())
            lines.append(f"mutations   {caught} of {len(self.mutations)} planted bugs found")
        return lines

    def _swept(self) -> list[str]:
        if not self.points:
            return []
        reached = sum(point.is_reached for point in self.points)
        return [
            f"points      {reached} of {len(self.points)} reached, "
            f"{_told([point.checked for point in self.points])}"
        ]

    def _chaos(self) -> list[str]:
        if not self.rounds:
            return []
        num_faults = sum(len(each.injected) for each in self.rounds)
        redone = sum(each.rows_redone for each in self.rounds)
        expected = sum(each.checked.expected for each in self.rounds)
        drivers = sum(each.num_drivers for each in self.rounds)
        lines = [
            f"chaos       {len(self.rounds)} jobs, {num_faults} faults, {drivers} drivers, "
            f"{_told([each.checked for each in self.rounds])}, redone {redone} "
            f"({100 * redone / expected:.1f} %, {redone / max(1, num_faults):.0f} rows a fault)"
        ]
        lines += [f"  {kind:<16} {number}" for kind, number in sorted(self.injected.items())]
        lines += [f"  not run: {name}: {why}" for name, why in self.missing.items()]
        lines += [
            f"  problem: {each.planned}: {each.problem or each.checked}"
            for each in self.rounds
            if not each.is_right
        ]
        return lines

    def _compared(self) -> list[str]:
        return [
            f"{each.system:<11} killed at {each.rows_done}, then written {each.rows_written} of "
            f"{each.rows_expected}, lost {each.lost}, duplicated {each.duplicated}, redone "
            f"{each.rows_redone}, {_seconds(each.resume_s)}; a third run added "
            f"{each.written_by_third}"
            for each in self.peers
        ]


def measure_faults(options: FaultOptions, tell: Callable[[FaultFigures], None]) -> FaultFigures:
    """Run everything, and hand over what is known after each step.

    Args:
        options: what is run.
        tell: called with all figures so far, so that those of hours survive an end.
    """
    began = time.monotonic()
    figures = FaultFigures(options=options, conditions=_conditions())

    def add(**changes: Any) -> None:  # noqa: ANN401
        nonlocal figures
        seconds = time.monotonic() - began
        figures = dataclasses.replace(figures, seconds=seconds, **changes)
        tell(figures)

    if options.schedules:
        add(simulation=simulate(options.seed, options.schedules))
        add(mutations=_find_planted(options.seed))
    # short: Ray keeps sockets below it
    root = Path(tempfile.mkdtemp(prefix="rbf-"))
    try:
        for system in options.peers:
            add(peers=(*figures.peers, compare(root / system, system)))
        if options.points or options.rounds:
            add(undisturbed=baseline(root / "base"))
            expected = figures.undisturbed.answers if figures.undisturbed else {}
            for point in options.points:
                add(points=(*figures.points, sweep(root / point, point, expected)))
                shutil.rmtree(root / point, ignore_errors=True)
        if options.rounds:
            with Places.found(options.moto_python) as places:
                add(missing=places.missing)
                for number in range(options.first_round, options.first_round + options.rounds):
                    planned = plan_round(options.seed, number, places.names)
                    folder, rng = root / f"r{number}", random.Random(number)
                    found = run_round(folder, planned, expected, places, rng)
                    add(rounds=(*figures.rounds, found))
                    shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return figures


def _find_planted(seed: int) -> dict[str, int | None]:
    found = {}
    for name, steps in MUTATIONS.items():
        report = simulate(seed, _MUTATION_SCHEDULES, steps=steps, max_violations=1)
        found[name] = report.violations[0].schedule if report.violations else None
    return found


def _conditions() -> dict[str, Any]:
    return {
        "cpus": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        **installed_versions(),
        "backend": "fake",
        "rows": NUM_ROWS,
        "units": NUM_UNITS,
    }


def _told(checked: Sequence[Any]) -> str:
    sums = {
        name: sum(getattr(each, name) for each in checked)
        for name in ("expected", "written", "lost", "duplicated", "wrong")
    }
    return ", ".join(f"{name} {number}" for name, number in sums.items())


def _seconds(seconds: float | None) -> str:
    return "did not end" if seconds is None else f"in {seconds:.0f} s"
