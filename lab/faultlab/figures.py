"""Figures of every part of the proof about faults, as a table and as a file."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from faultlab.broken import BREAKS, BrokenResult
from faultlab.chaos import RoundResult
from faultlab.input_runs import InputResult
from faultlab.peers import OURS, PEERS, Compared
from faultlab.rig import Checked
from faultlab.simulate import SimulationReport
from faultlab.soak import SoakOptions, SoakResult
from faultlab.sweep import SWEPT, Baseline, PointResult


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOptions:
    """Parts and sizes of a run.

    Args:
        first_round: number of the first round.
        soak: the long job; None leaves it out.
        moto_python: interpreter of an environment that has moto.
    """

    seed: int
    schedules: int
    rounds: int
    first_round: int = 0
    points: Sequence[str] = SWEPT
    breaks: Sequence[str] = tuple(BREAKS)
    peers: Sequence[str] = PEERS
    has_bad_inputs: bool = True
    soak: SoakOptions | None = None
    moto_python: str


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultFigures:
    """Figures of a run; a part that has not been run yet is None or empty.

    Args:
        conditions: where it ran.
        mutations: planted bug, and the schedule that found it; None where none did.
        undisturbed: the job without faults.
        missing: places that this host has not, and why.
        peers: the same kill under other ways of resuming.
    """

    options: FaultOptions
    conditions: Mapping[str, Any]
    simulation: SimulationReport | None = None
    mutations: Mapping[str, int | None] | None = None
    inputs: tuple[InputResult, ...] = ()
    undisturbed: Baseline | None = None
    points: tuple[PointResult, ...] = ()
    broken: tuple[BrokenResult, ...] = ()
    rounds: tuple[RoundResult, ...] = ()
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    soak: SoakResult | None = None
    peers: tuple[Compared, ...] = ()
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Return whether nothing was lost, doubled or wrong, and every planted bug was found."""
        return (
            (self.simulation is None or not self.simulation.violations)
            and None not in (self.mutations or {}).values()
            and all(each.is_handled for each in self.inputs)
            and (self.undisturbed is None or self.undisturbed.is_right)
            and all(each.is_right for each in self.peers if each.system == OURS)
            and all(point.is_right for point in self.points)
            and all(each.is_right for each in self.broken)
            and all(each.is_right for each in self.rounds)
            and (self.soak is None or self.soak.is_right)
        )

    @property
    def injected(self) -> Counter[str]:
        """Return how many faults of each kind came to real jobs."""
        faults = Counter(kind for each in self.rounds for kind in each.injected)
        faults.update({"exit at a point": sum(point.is_reached for point in self.points)})
        if self.soak is not None:
            faults.update(self.soak.faults)
        return +faults

    @property
    def outputs(self) -> list[Checked]:
        """Return the checks of the output of every real job that met a fault."""
        soaks = [] if self.soak is None else [self.soak.checked]
        points = [point.checked for point in self.points]
        return [*points, *(each.checked for each in self.rounds), *soaks]

    def to_json(self) -> str:
        """Return everything, for a file that others may read: no path of this host."""
        values = dataclasses.asdict(self)
        for one in values["inputs"]:
            one["said"] = one.pop("message")  # as in stored results
        del values["options"]["moto_python"]
        if values["undisturbed"] is not None:
            del values["undisturbed"]["answers"]
        if self.soak is not None:
            values["soak"] |= {
                "redone_share": self.soak.redone_share,
                "driver_growth": self.soak.driver_growth,
                "coordinator_growth": self.soak.coordinator_growth,
                "longest": [dataclasses.asdict(one) for one in self.soak.longest or ()],
                "most_staged": self.soak.most_staged,
            }
        values |= {
            "is_right": self.is_right,
            "injected": dict(self.injected),
            "verified": sum(each.is_verified for each in self.outputs),
        }
        return json.dumps(values, indent=1)

    def to_text(self) -> str:
        """Return the table for people."""
        lines = [
            *self._simulated(),
            *self._tried(),
            *self._swept(),
            *self._broke(),
            *self._chaos(),
            *self._soaked(),
            *self._verified(),
            *self._compared(),
        ]
        conditions = ", ".join(f"{name} {value}" for name, value in self.conditions.items())
        text = "nothing lost, doubled or wrong" if self.is_right else "NOT RIGHT, see above"
        return "\n".join([*lines, f"conditions: {conditions}", f"seed {self.options.seed}: {text}"])

    def _simulated(self) -> list[str]:
        lines = []
        if (simulation := self.simulation) is not None:
            num_faults = sum(simulation.faults.values())
            lines.append(
                f"simulated   {simulation.num_schedules} schedules, {num_faults} faults, "
                f"{simulation.num_commits} commits, {simulation.num_late} late ones, "
                f"{simulation.num_joined} parts joined, "
                f"{len(simulation.violations)} broken promises"
            )
        if self.mutations is not None:
            caught = sum(number is not None for number in self.mutations.values())
            lines.append(f"mutations   {caught} of {len(self.mutations)} planted bugs found")
        return lines

    def _tried(self) -> list[str]:
        if not self.inputs:
            return []
        outcomes = Counter(each.outcome for each in self.inputs)
        handled = sum(each.is_handled for each in self.inputs)
        return [
            f"bad inputs  tried {len(self.inputs)}, handled {handled}, crashes "
            f"{outcomes['crashed']}, hangs {outcomes['hung']}",
            *(
                f"  problem: {each.name}: {each.outcome}: {each.message}"
                for each in self.inputs
                if not each.is_handled
            ),
        ]

    def _swept(self) -> list[str]:
        if not self.points:
            return []
        reached = sum(point.is_reached for point in self.points)
        return [
            f"points      {reached} of {len(self.points)} reached, "
            f"{_rows_checked([point.checked for point in self.points])}"
        ]

    def _broke(self) -> list[str]:
        return [
            f"engines break at {each.kind}: {each.num_deaths} deaths in {each.seconds:.0f} s, the "
            f"job {'failed' if each.has_failed else 'ended'}; once repaired "
            f"{_rows_checked([each.checked])}, {each.num_errors} error rows"
            + ("" if each.is_right else " NOT RIGHT")
            for each in self.broken
        ]

    def _chaos(self) -> list[str]:
        if not self.rounds:
            return []
        faults = Counter(kind for each in self.rounds for kind in each.injected)
        redone = sum(each.rows_redone for each in self.rounds)
        expected = sum(each.checked.expected for each in self.rounds)
        drivers = sum(each.num_drivers for each in self.rounds)
        lines = [
            f"chaos       {len(self.rounds)} jobs, {faults.total()} faults, {drivers} drivers, "
            f"{_rows_checked([each.checked for each in self.rounds])}, redone {redone} "
            f"({100 * redone / expected:.1f} %, {redone / max(1, faults.total()):.0f} rows a "
            f"fault), late commits {sum(each.late_units for each in self.rounds)}"
        ]
        lines += [f"  {kind:<16} {number}" for kind, number in sorted(faults.items())]
        lines += self._moved()
        lines += [f"  not run: {name}: {why}" for name, why in self.missing.items()]
        if gave_up := sum(len(each.gave_up) for each in self.rounds):
            lines.append(f"  {gave_up} drivers failed by themselves and were run again")
        lines += [
            f"  problem: {each.planned}: {each.problem or each.checked}"
            for each in self.rounds
            if not each.is_right
        ]
        return lines

    def _moved(self) -> list[str]:
        moved = [each.moved for each in self.rounds if each.moved is not None]
        if not moved:
            return []
        return [
            f"  rows moved       {sum(each.num_moved for each in moved)} in {len(moved)} jobs, "
            f"{sum(each.num_bytes for each in moved) / 1e6:.0f} MB of KV; "
            f"{sum(each.num_failed for each in moved)} moves left their row where it was; "
            f"{sum(each.num_hung for each in moved)} engines that hung were replaced; "
            f"{sum(each.num_tp_groups or 0 for each in moved)} TP groups formed; "
            f"{sum(each.num_launched for each in moved)} rows ran on two engines"
        ]

    def _soaked(self) -> list[str]:
        if (soaked := self.soak) is None:
            return []
        faults = ", ".join(f"{number} {kind}" for kind, number in soaked.faults.items())
        num_faults = sum(soaked.faults.values())
        lines = [
            f"soak        {soaked.seconds / 60:.1f} min, {num_faults} faults "
            f"({faults}), {soaked.num_drivers} drivers, {_rows_checked([soaked.checked])}, redone "
            f"{soaked.rows_redone} ({100 * soaked.redone_share:.1f} %, "
            f"{soaked.rows_redone / max(1, num_faults):.0f} rows a fault), late commits "
            f"{soaked.late_units}",
            f"  driver           {_grown(soaked.driver_growth)}",
            f"  coordinator      {_grown(soaked.coordinator_growth)}",
            *_first_and_last(soaked),
            f"  temporary files  {soaked.most_staged} at most, {soaked.num_left} left",
            f"  first unit       {soaked.start_s:.1f} s after the first start, after a fault "
            f"{_range(soaked.resume_s)}",
            f"  nothing to do    {soaked.rerun_s:.1f} s, the start of Ray with it",
        ]
        if not soaked.is_right:
            lines.append(f"  problem: {soaked.problem or soaked.checked}")
        return lines

    def _verified(self) -> list[str]:
        if not self.outputs:
            return []
        right = sum(each.is_verified for each in self.outputs)
        return [f"verified    {right} of {len(self.outputs)} outputs, deeply"]

    def _compared(self) -> list[str]:
        return [
            f"{each.system:<11} killed at {each.rows_done}, then written {each.rows_written} of "
            f"{each.rows_expected}, lost {each.lost}, duplicated {each.duplicated}, redone "
            f"{each.rows_redone}, {_seconds(each.resume_s)}; a third run added "
            f"{each.written_by_third}"
            for each in self.peers
        ]


def _rows_checked(checked: Sequence[Checked]) -> str:
    sums = {
        name: sum(getattr(each, name) for each in checked)
        for name in ("expected", "written", "lost", "duplicated", "wrong")
    }
    return ", ".join(f"{name} {number}" for name, number in sums.items())


def _seconds(seconds: float | None) -> str:
    return "did not end" if seconds is None else f"in {seconds:.0f} s"


def _grown(num_bytes: float | None) -> str:
    if num_bytes is None:
        return "memory unknown"
    return f"{num_bytes / 1024:+.1f} KiB per 1,000 finished rows"


def _first_and_last(soaked: SoakResult) -> list[str]:
    """Return the readings of the longest run at its start and at its end."""
    if soaked.longest is None:
        return []
    first, last = soaked.longest
    return [
        f"  longest run      driver {first.driver_bytes >> 20} MiB first, "
        f"{last.driver_bytes >> 20} last, coordinator {first.coordinator_bytes >> 20} and "
        f"{last.coordinator_bytes >> 20}, handles {first.num_handles} and {last.num_handles}"
    ]


def _range(seconds: Sequence[float]) -> str:
    if not seconds:
        return "never"
    return f"{min(seconds):.1f} to {max(seconds):.1f} s"
