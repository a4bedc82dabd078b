"""The benchmark commands of raybatch itself: bench plan and bench gpu."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from raybatch.cli.flags import DEMO_MODEL, check_writable, parse_settings
from raybatch.config import EngineConfig, from_mapping
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import install_command, torch_command
from raybatch.policy.cost.layers import RowShape


class TwoWords(TyperGroup):
    """A group that also finds commands of two words, such as `plan memory` next to `plan`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - those of click
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


bench = typer.Typer(cls=TwoWords, help="Measure engines on this host.", no_args_is_help=True)


@bench.command()
def plan(
    model: Annotated[
        str, Argument(help="Checkpoint folder, hub id or URI; default: demo.")
    ] = DEMO_MODEL,
    prompt_tokens: Annotated[
        int | None, Option(min=1, help="Computed prompt tokens of a row; default: 512.")
    ] = None,
    output_tokens: Annotated[
        int | None, Option(min=1, help="Mean output tokens of a row; default: 128.")
    ] = None,
    rows: Annotated[int | None, Option(min=1, help="Number of rows; default: unlimited.")] = None,
    like: Annotated[str | None, Option(help="Output of a job with the lengths to use.")] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", help="Options of the engine, such as engine.dtype=bfloat16."),
    ] = None,
    fresh: Annotated[
        bool, Option("--fresh", help="Ignore stored measurements and measure again.")
    ] = False,
    as_json: Annotated[bool, Option("--json", help="Print JSON, measurements included.")] = False,
) -> None:
    """Measure one layer of a model on this host; print how its engine runs rows, and why."""
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
    minutes: Annotated[float, Option(min=0.1, help="Limit; skipped parts are listed.")] = 10.0,
    engines: Annotated[str, Option(help="Engines, separated by commas.")] = "native,vllm",
    out: Annotated[
        Path | None, Option(help="File for all results; default: raybatch-bench-gpu.json.")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check the native engine on a GPU, and compare it with the device's limits and vLLM."""
    out = out or Path("raybatch-bench-gpu.json")
    check_writable("--out", out)
    if find_spec("torch") is None:
        raise MissingDependency(
            f"raybatch bench gpu needs torch: {install_command('gpu')}, or with vllm instead of gpu"
        )
    from rich.console import Console
    from torch import cuda

    from raybatch.bench.gpu import bench_gpu

    names = tuple(name.strip() for name in engines.split(",") if name.strip())
    if device == "auto" and not cuda.is_available():
        typer.echo("torch finds no GPU: small models run on the CPU", err=True)
    with Console(stderr=True).status("starting") as status:
        # partial results are written, in case a GPU driver kills the process
        report = bench_gpu(
            device=device,
            minutes=minutes,
            engines=names,
            tell=status.update,
            keep=lambda made: out.write_text(made.to_json() + "\n", encoding="utf-8"),
        )
    out.write_text(report.to_json() + "\n", encoding="utf-8")
    typer.echo(report.to_json() if as_json else report.to_text())
    typer.echo(f"written to {out}; please attach it to an issue", err=True)
    raise typer.Exit(0 if report.is_right else 1)


def engine_of(settings: list[str], *, command: str) -> EngineConfig:
    """Return the engine options that `--set` flags give; ConfigError for any other option."""
    options = parse_settings(settings)
    for name in options:
        if not name.startswith("stage.engine."):
            raise ConfigError(
                f"--set {name.removeprefix('stage.')}: bench {command} only uses engine options, "
                "such as engine.kv_cache_bytes"
            )
    of_engine = {name.removeprefix("stage.engine."): value for name, value in options.items()}
    return from_mapping(EngineConfig, of_engine, where=f"raybatch bench {command}: engine")


def _mean_tokens(output: str) -> dict[str, int]:
    """Return the mean tokens per row of an output, without cached prompt tokens."""
    from raybatch.report.rebuild import current_report

    report = current_report(output)
    num_good = report.rows_out - report.rows_failed
    if not num_good or not report.generated_tokens:
        raise ConfigError(f"--like {output}: no row of this output generated tokens")
    computed = report.prompt_tokens - report.cached_tokens
    return {
        "prompt_tokens": max(1, round(computed / num_good)),
        "output_tokens": max(1, round(report.generated_tokens / num_good)),
    }
