"""The commands of the command line that measure: bench plan, bench gpu, and raybatch-lab's."""

import math
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
from raybatch.policy.decode_times import GpuRates
from raybatch.policy.memory_plan import DEFAULT_RESERVE_BYTES, DEFAULT_UTILISATION, GpuBudget

# those of raybatch-lab, which is in the repository alone
LAB_COMMANDS = {
    "calibrate": (
        "Fit the costs of an engine of this host, and say how far simulations with them are off."
    ),
    "simulate": (
        "Simulate pools of a calibrated engine: its scheduler and the queue, on a virtual clock."
    ),
    "faults": (
        "Lose replicas, drivers, nodes and disks on purpose, and count the rows; takes minutes."
    ),
}


class _TwoWords(TyperGroup):
    """Commands whose names may be two words, such as `plan memory` beside `plan`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - those of click
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


bench = typer.Typer(
    cls=_TwoWords, help="Measure what is promised, on this host.", no_args_is_help=True
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
        group.command(name, help=help_text)(getattr(commands, name))


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


def plan_memory(
    model: Annotated[str, Argument(help="Checkpoint folder, hub id or URI; weights are not read.")],
    gpu_bytes: Annotated[float, Option(help="Memory of a GPU, such as 144e9.")],
    tp: Annotated[int, Option(min=1, help="GPUs of a replica.")] = 1,
    dp: Annotated[
        int, Option(min=1, max=128, help="Replicas of a host, which may share weights.")
    ] = 8,
    gpu_memory_utilization: Annotated[
        float, Option(help="Share of a GPU's memory that an engine takes, as in vLLM.")
    ] = DEFAULT_UTILISATION,
    reserve_bytes: Annotated[
        float, Option(min=0, help="Of that, for activations, graphs and libraries.")
    ] = DEFAULT_RESERVE_BYTES,
    sequence_tokens: Annotated[
        int, Option(min=1, help="Tokens of a row, prompt and output.")
    ] = 4096,
    slots: Annotated[
        int | None, Option(min=1, help="Slots of a replica; default: what hides copies.")
    ] = None,
    element_bytes: Annotated[int, Option(min=1, help="Bytes of a weight, and of KV.")] = 2,
    gpu_flops: Annotated[
        float | None, Option(help="Products that a GPU reaches in a second, such as 80e12.")
    ] = None,
    gpu_bytes_per_s: Annotated[
        float | None, Option(help="What it reads of its memory in a second, such as 3.2e12.")
    ] = None,
    link_bytes_per_s: Annotated[
        float | None, Option(help="What it reads of another GPU in a second, such as 450e9.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what replicas of a model hold on GPUs, alone and where they share weights."""
    if dp < 2:
        raise ConfigError(
            f"--dp {dp}: one replica has nobody to share weights with; give 2 or more"
        )
    known = None
    if gpu_flops is not None and gpu_bytes_per_s is not None and link_bytes_per_s is not None:
        known = GpuRates(
            bytes_per_s=gpu_bytes_per_s, flops=gpu_flops, link_bytes_per_s=link_bytes_per_s
        )
    elif (gpu_flops, gpu_bytes_per_s, link_bytes_per_s) != (None, None, None):
        raise ConfigError(
            "--gpu-flops, --gpu-bytes-per-s and --link-bytes-per-s belong together: give all three "
            "for seconds of passes, or none"
        )
    budget = GpuBudget(
        gpu_bytes=_whole("--gpu-bytes", gpu_bytes),
        utilisation=gpu_memory_utilization,
        reserve_bytes=_whole("--reserve-bytes", reserve_bytes),
    )
    # the clients of stores are slow to load
    from raybatch.explanation.bench_memory import MemoryReport
    from raybatch.models.config import read_model_spec
    from raybatch.models.source import resolve_config
    from raybatch.simulator.sharing_gain import MemoryQuestion, sharing_gain

    question = MemoryQuestion(
        budget=budget,
        tp=tp,
        size=dp,
        sequence_tokens=sequence_tokens,
        num_slots=slots,
        rates=known,
        element_bytes=element_bytes,
    )
    gain = sharing_gain(read_model_spec(resolve_config(model)), question)
    report = MemoryReport(model=model, gain=gain)
    typer.echo(report.to_json() if as_json else report.to_text())
    raise typer.Exit(0 if report.is_possible else 1)


def _whole(option: str, num_bytes: float) -> int:
    if not math.isfinite(num_bytes):
        raise ConfigError(f"{option} is {num_bytes}; give a number of bytes, such as 144e9")
    return round(num_bytes)
