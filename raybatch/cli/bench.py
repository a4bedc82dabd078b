"""The benchmark command of raybatch itself: bench gpu."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from raybatch.cli.flags import check_writable
from raybatch.errors import MissingDependency
from raybatch.installation import install_command


class TwoWords(TyperGroup):
    """A group that also finds commands of two words, such as `plan memory` next to `plan`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # noqa: ANN401 - those of click
        name = " ".join(args[:2])
        if name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)


bench = typer.Typer(cls=TwoWords, help="Measure engines on this host.", no_args_is_help=True)


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
