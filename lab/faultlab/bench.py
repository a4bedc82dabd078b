"""All that is known about faults, measured: simulation, inputs, points, chaos, a soak, peers."""

import dataclasses
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from faultlab.broken import run_broken
from faultlab.chaos import MOVING, plan_round, run_round
from faultlab.figures import FaultFigures, FaultOptions
from faultlab.input_runs import try_inputs
from faultlab.moving import moving_answers, run_moving_round
from faultlab.mutations import MUTATIONS
from faultlab.peers import compare
from faultlab.places import Places
from faultlab.rig import NUM_ROWS, NUM_UNITS, Answers
from faultlab.simulate import simulate
from faultlab.soak import soak
from faultlab.sweep import baseline, sweep
from raybatch.actors.replicas.placement import usable_cores
from raybatch.report import installed_versions

# a planted bug that this number of schedules does not find counts as missed
_MUTATION_SCHEDULES = 20_000

Add = Callable[..., FaultFigures]


def measure_faults(options: FaultOptions, report: Callable[[FaultFigures], None]) -> FaultFigures:
    """Run everything, and hand over the figures after each step.

    Args:
        options: of the run.
        report: called with all figures so far, so that those of hours survive an end.
    """
    began = time.monotonic()
    figures = FaultFigures(options=options, conditions=_conditions())

    def add(**changes: Any) -> FaultFigures:  # noqa: ANN401
        nonlocal figures
        seconds = time.monotonic() - began
        figures = dataclasses.replace(figures, seconds=seconds, **changes)
        report(figures)
        return figures

    if options.schedules:
        add(simulation=simulate(options.seed, options.schedules))
        add(mutations=_find_planted(options.seed))
    # short: Ray keeps sockets below it
    root = Path(tempfile.mkdtemp(prefix="rbf-"))
    try:
        for system in options.peers:
            add(peers=(*figures.peers, compare(root / system, system)))
        if options.has_bad_inputs:
            add(inputs=try_inputs(root / "inputs"))
        for kind in options.breaks:
            add(broken=(*figures.broken, run_broken(root / "broken", kind)))
            shutil.rmtree(root / "broken", ignore_errors=True)
        if options.points or options.rounds:
            undisturbed = baseline(root / "base")
            add(undisturbed=undisturbed)
            _sweep(root, options, undisturbed.answers, add)
            _go_through_chaos(root, options, undisturbed.answers, add)
        if options.soak is not None:
            add(soak=soak(root / "soak", options.soak))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    return figures


def _sweep(root: Path, options: FaultOptions, expected: Answers, add: Add) -> None:
    figures = add()
    for point in options.points:
        figures = add(points=(*figures.points, sweep(root / point, point, expected)))
        shutil.rmtree(root / point, ignore_errors=True)


def _go_through_chaos(root: Path, options: FaultOptions, expected: Answers, add: Add) -> None:
    if not options.rounds:
        return
    with Places.found(options.moto_python) as places:
        figures = add(missing=places.missing)
        unmoved = cache(lambda place: moving_answers(root / place, place))
        for number in range(options.first_round, options.first_round + options.rounds):
            planned = plan_round(options.seed, number, [*places.names, *MOVING])
            folder, rng = root / f"r{number}", random.Random(number)
            if planned.place in MOVING:
                result = run_moving_round(folder, planned, unmoved(planned.place), rng)
            else:
                result = run_round(folder, planned, expected, places, rng)
            figures = add(rounds=(*figures.rounds, result))
            shutil.rmtree(folder, ignore_errors=True)


def _find_planted(seed: int) -> dict[str, int | None]:
    caught = {}
    for name, steps in MUTATIONS.items():
        report = simulate(seed, _MUTATION_SCHEDULES, steps=steps, max_violations=1)
        caught[name] = report.violations[0].schedule if report.violations else None
    return caught


def _conditions() -> dict[str, Any]:
    return {
        "cpus": usable_cores(),
        "load": round(os.getloadavg()[0], 1),
        **installed_versions(),
        "backend": "fake, and native where its rows move",
        "rows": NUM_ROWS,
        "units": NUM_UNITS,
    }
