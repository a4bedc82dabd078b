"""The commands of the laboratory: bench faults, calibrate, simulate, plan and plan memory.

`raybatch.cli.app` names them and says what each is for.
"""

import logging
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from raybatch.cli.flags import DEMO_MODEL, check_writable
from raybatch.config import BackendConfig
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import torch_command
from raybatch_lab.memory_command import plan_memory as plan_memory
from raybatch_lab.plan_command import engine_of
from raybatch_lab.plan_command import plan as plan
from raybatch_lab.simulator.events import Death, PoolSpec
from raybatch_lab.simulator.workloads import make_rows

if TYPE_CHECKING:
    from faultlab.figures import FaultFigures

# no two engines are ready at the same moment, and each leaves its share to those that start
_LATE_S = 0.01
_Backend = Annotated[str, Option(help="Whose engine: native, or vllm where it is installed.")]
_Settings = Annotated[
    list[str] | None, Option("--set", help="Options of the engine, such as engine.dtype=bfloat16.")
]


def faults(
    seed: Annotated[int, Option(help="Seed of schedules and rounds.")] = 0,
    schedules: Annotated[int, Option(min=0, help="To simulate; 0 skips them.")] = 20_000,
    rounds: Annotated[int, Option(min=0, help="Jobs to run, with three faults each.")] = 3,
    first_round: Annotated[int, Option(min=0, help="Number of the first round.")] = 0,
    no_sweep: Annotated[
        bool, Option("--no-sweep", help="Skip the crashes at each point of the commit.")
    ] = False,
    no_peers: Annotated[
        bool, Option("--no-peers", help="Skip the comparison with Ray Data.")
    ] = False,
    no_bad_inputs: Annotated[
        bool, Option("--no-bad-inputs", help="Skip the corpus of bad inputs.")
    ] = False,
    soak_minutes: Annotated[
        float, Option(min=0, help="Minutes of one long job under many faults; 0 skips it.")
    ] = 0.0,
    fault_every_s: Annotated[
        float, Option(min=1, help="Seconds between two faults of the long job.")
    ] = 60.0,
    moto_python: Annotated[
        str, Option(help="Python interpreter with moto, for faults of S3.")
    ] = sys.executable,
    out: Annotated[Path | None, Option(help="JSON file for all results.")] = None,
) -> None:
    from faultlab.bench import measure_faults
    from faultlab.broken import BREAKS
    from faultlab.figures import FaultOptions
    from faultlab.peers import PEERS
    from faultlab.soak import SoakOptions
    from faultlab.sweep import SWEPT

    check_writable("--out", out)
    long = SoakOptions(minutes=soak_minutes, fault_every_s=fault_every_s, seed=seed)
    options = FaultOptions(
        seed=seed,
        schedules=schedules,
        rounds=rounds,
        first_round=first_round,
        points=() if no_sweep else SWEPT,
        breaks=() if no_sweep else tuple(BREAKS),
        peers=() if no_peers else PEERS,
        has_bad_inputs=not no_bad_inputs,
        soak=long if soak_minutes else None,
        moto_python=moto_python,
    )
    logger = logging.getLogger("raybatch")
    with ExitStack() as stack:
        # nothing is said of errors that are made on purpose
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.CRITICAL)
        figures = measure_faults(options, _reporter(out))
    typer.echo(figures.to_text())
    raise typer.Exit(0 if figures.is_right else 1)


def calibrate(
    model: Annotated[
        str, Argument(help="Checkpoint folder, hub id or URI; demo by default.")
    ] = DEMO_MODEL,
    backend: _Backend = "native",
    settings: _Settings = None,
    seconds: Annotated[
        float, Option(min=0.1, help="Of each run; there are 112, some two minutes in all at 1.")
    ] = 1.0,
    out: Annotated[Path | None, Option(help="JSON file for all errors.")] = None,
) -> None:
    check_writable("--out", out)
    engine = engine_of(settings or [], command="calibrate")
    if find_spec("torch") is None:
        raise MissingDependency(
            f"raybatch bench calibrate measures an engine, which needs torch: {torch_command()}"
        )
    from rich.console import Console

    from raybatch_lab.calibrate import calibrate as measure
    from raybatch_lab.simulator.validation import to_json

    logger = logging.getLogger("raybatch")
    with ExitStack() as stack, Console(stderr=True).status("starting") as status:
        # of many engines each would say the same
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.WARNING)
        kind = BackendConfig(kind=backend)
        found = measure(model, engine, backend=kind, seconds=seconds, tell=status.update)
    if out is not None:
        out.write_text(to_json(found.validation) + "\n", encoding="utf-8")
    typer.echo(found.to_text())
    raise typer.Exit(0 if found.is_stored else 1)


def simulate(
    model: Annotated[
        str, Argument(help="Whose calibrated engine is simulated; demo by default.")
    ] = DEMO_MODEL,
    backend: _Backend = "native",
    cost_model: Annotated[
        Path | None, Option(help="File of a calibrated cost model, in place of MODEL.")
    ] = None,
    replicas: Annotated[str, Option(help="Numbers of replicas, such as 1,8,64.")] = "1,2,4,8",
    workload: Annotated[str, Option(help="Lengths of rows: W1 to W8, or W11.")] = "W4",
    like: Annotated[str | None, Option(help="Output of a job with the lengths to use.")] = None,
    rows: Annotated[int | None, Option(min=1, help="Rows; default: those of the workload.")] = None,
    slow: Annotated[
        list[str] | None, Option(help="RANK:FACTOR, a replica whose steps take longer.")
    ] = None,
    kill: Annotated[
        list[str] | None,
        Option(help="RANK@FRACTION, a replica that dies at this share of finished rows."),
    ] = None,
    start_s: Annotated[float, Option(min=0, help="Seconds of a start.")] = 1.0,
    seed: Annotated[int, Option(min=0, help="Of the lengths.")] = 42,
    settings: _Settings = None,
    out: Annotated[Path | None, Option(help="JSON file for all figures.")] = None,
) -> None:
    check_writable("--out", out)
    numbers = _numbers(replicas)
    pools = [_pool(number, slow or [], kill or [], start_s) for number in numbers]
    from raybatch.backends.cost_cache import cost_model_path
    from raybatch_lab.simulated import rows_like, simulation_report

    if cost_model is not None and settings:
        raise ConfigError(
            "--set has no effect with --cost-model, whose file has the options of the engine; "
            "leave one of them out"
        )
    if cost_model is None:
        engine = engine_of(settings or [], command="simulate")
        cost_model = cost_model_path(model, BackendConfig(kind=backend), engine)
    if like is None:
        simulated = make_rows(workload, num_rows=rows, seed=seed)
    else:
        from raybatch.report import current_report

        simulated = rows_like(like, current_report(like).output_files)
        if rows is not None:
            raise ConfigError(
                "--rows has no effect with --like, whose rows are all simulated; leave one of them "
                "out"
            )
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        report = simulation_report(
            simulated,
            cost_model,
            pools,
            workload=workload if like is None else like,
            seed=seed,
            tell=status.update,
        )
    if out is not None:
        out.write_text(report.to_json() + "\n", encoding="utf-8")
    typer.echo(report.to_text())


def _reporter(out: Path | None) -> Callable[["FaultFigures"], None]:
    """Return what stores all figures after each step, and says what the last one found."""
    num_reported = 0

    def report(figures: "FaultFigures") -> None:
        nonlocal num_reported
        if out is not None:
            out.write_text(figures.to_json())
        done = len(figures.points) + len(figures.rounds) + len(figures.peers)
        if done > num_reported:
            num_reported = done
            last = (*figures.peers, *figures.points, *figures.rounds)[-1]
            typer.echo(f"{figures.seconds:7.0f} s  {last}", err=True)

    return report


def _numbers(replicas: str) -> list[int]:
    try:
        numbers = sorted({int(number) for number in replicas.split(",")})
    except ValueError as error:
        raise ConfigError(
            f"--replicas {replicas}: must be whole numbers separated by commas, such as 1,8,64"
        ) from error
    if numbers[0] < 1:
        raise ConfigError(f"--replicas {replicas}: each number must be at least 1")
    return numbers


def _pool(num_replicas: int, slow: list[str], kill: list[str], start_s: float) -> PoolSpec:
    slowness = dict(_pair(text, ":", "--slow", "0:2") for text in slow)
    deaths = tuple(
        Death(rank=rank, at_fraction=fraction)
        for rank, fraction in (_pair(text, "@", "--kill", "0@0.5") for text in kill)
    )
    return PoolSpec(
        num_replicas=num_replicas,
        start_s=start_s,
        late_s={rank: rank * _LATE_S for rank in range(num_replicas)},
        slowness=slowness,
        deaths=deaths,
    )


def _pair(text: str, separator: str, flag: str, example: str) -> tuple[int, float]:
    rank, _, value = text.partition(separator)
    try:
        return int(rank), float(value)
    except ValueError as error:
        raise ConfigError(f"{flag} {text}: must have the form of {flag} {example}") from error
