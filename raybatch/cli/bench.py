"""The commands of the command line that measure: bench plan, bench gpu, and raybatch-lab's."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from raybatch.cli.flags import DEMO_MODEL, check_writable, parse_settings
from raybatch.config import EngineConfig, from_mapping
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import LAB, install_command, torch_command
from raybatch.policy.cost.layers import RowShape

# those of raybatch-lab, which is in the repository alone
LAB_COMMANDS = {
    "calibrate": (
        "Fit the costs of an engine of this host, and say how far simulations with them are off."
    ),
    "simulate": (
        "Simulate pools of a calibrated engine: its scheduler and the queue, on a virtual clock."
    ),
    "plan memory": (
        "Say what replicas of a model hold on GPUs, alone and where they share weights."
    ),
    "faults": (
        "Lose replicas, drivers, nodes and disks on purpose, and count the rows; takes minutes."
    ),
}


class TwoWords(TyperGroup):
    """Commands whose names may be two words, such as `plan memory` beside `plan`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - those of click
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


bench = typer.Typer(
    cls=TwoWords, help="Measure what is promised, on this host.", no_args_is_help=True
)


@bench.command()
def plan(
    model: Annotated[
        str, Argument(help="Checkpoint folder, hub id or URI; demo by default.")
    ] = DEMO_MODEL,
    prompt_tokens: Annotated[
        int | None, Option(min=1, help="Computed prompt tokens of a row; default: 512.")
    ] = None,
    output_tokens: Annotated[
        int | None, Option(min=1, help="Mean output tokens of a row; default: 128.")
    ] = None,
    rows: Annotated[
        int | None, Option(min=1, help="Rows that are to come; default: always more.")
    ] = None,
    like: Annotated[str | None, Option(help="Output of a job to take the lengths from.")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="Options of the engine, such as engine.dtype=bfloat16."),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Measure again, even if there is a stored measurement.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, measurements included.")] = False,
) -> None:
    """Measure a layer of a model on this host, and say how its engine runs rows, and why."""
    engine = engine_of(settings or [], command="plan")
    flags = {"prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    of_job = {} if like is None else _mean_tokens(like)
    shape = of_job | {name: tokens for name, tokens in flags.items() if tokens is not None}
    row = RowShape(**shape) if shape else None
    if find_spec("torch") is None:
        raise MissingDependency(
            f"raybatch bench plan measures the native engine, which needs torch: {torch_command()}"
        )
    from rich.console import Console

    from raybatch.explanation.bench_plan import plan_report

    with Console(stderr=True).status("starting") as status:
        report = plan_report(model, engine, row, num_rows=rows, fresh=fresh, tell=status.update)
    typer.echo(report.to_json() if as_json else report.to_text())


@bench.command()
def gpu(
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    minutes: Annotated[float, Option(min=0.1, help="At most; what is left out is told.")] = 10.0,
    engines: Annotated[str, Option(help="Engines to measure, with commas.")] = "native,vllm",
    out: Annotated[
        Path | None, Option(help="File for all results; default: raybatch-bench-gpu.json.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the native engine on a GPU, and measure it beside the device's limits and vLLM."""
    out = out or Path("raybatch-bench-gpu.json")
    check_writable("--out", out)
    if find_spec("torch") is None:
        raise MissingDependency(
            f"raybatch bench gpu needs torch: {install_command('gpu')}, or with vllm in place of "
            "gpu"
        )
    from rich.console import Console
    from torch import cuda

    from raybatch.bench.gpu import bench_gpu

    names = tuple(name.strip() for name in engines.split(",") if name.strip())
    if device == "auto" and not cuda.is_available():
        typer.echo("torch sees no GPU here, so small models run on the processor", err=True)
    with Console(stderr=True).status("starting") as status:
        # what there is stays, should a driver end the process
        report = bench_gpu(
            device=device,
            minutes=minutes,
            engines=names,
            tell=status.update,
            keep=lambda made: out.write_text(made.to_json() + "\n", encoding="utf-8"),
        )
    out.write_text(report.to_json() + "\n", encoding="utf-8")
    typer.echo(report.to_json() if as_json else report.to_text())
    typer.echo(f"written to {out}; an issue with it tells us how your GPU does", err=True)
    raise typer.Exit(0 if report.is_right else 1)


def add_lab_commands(group: typer.Typer) -> None:
    """Add the commands of raybatch-lab, or where it is not installed what says how it gets here."""
    try:
        from raybatch_lab import commands
    except ImportError:  # also one that is older than this raybatch
        any_flags = {"allow_extra_args": True, "ignore_unknown_options": True}
        for name, help_text in LAB_COMMANDS.items():
            group.command(name, help=help_text, context_settings=any_flags)(_ask_for_lab)
        return
    for name, help_text in LAB_COMMANDS.items():
        group.command(name, help=help_text)(getattr(commands, name.replace(" ", "_")))


def _ask_for_lab(context: typer.Context) -> None:
    raise MissingDependency(f"raybatch bench {context.info_name} needs {LAB}")


def engine_of(settings: list[str], *, command: str) -> EngineConfig:
    """Return the options of an engine; ConfigError for those of anything else."""
    options = parse_settings(settings)
    for name in options:
        if not name.startswith("stage.engine."):
            raise ConfigError(
                f"--set {name.removeprefix('stage.')}: a {command} depends on options of the "
                "engine alone, such as engine.kv_cache_bytes"
            )
    of_engine = {name.removeprefix("stage.engine."): value for name, value in options.items()}
    return from_mapping(EngineConfig, of_engine, where=f"raybatch bench {command}: engine")


def _mean_tokens(output: str) -> dict[str, int]:
    """Return the mean tokens of the rows of an output, cached ones of prompts left out."""
    from raybatch.report.rebuild import current_report

    report = current_report(output)
    num_good = report.rows_out - report.rows_failed
    if not num_good or not report.generated_tokens:
        raise ConfigError(f"--like {output}: no row of this output has generated tokens")
    computed = report.prompt_tokens - report.cached_tokens
    return {
        "prompt_tokens": max(1, round(computed / num_good)),
        "output_tokens": max(1, round(report.generated_tokens / num_good)),
    }
