"""The command `raybatch bench plan`."""

from importlib.util import find_spec
from typing import Annotated

import typer
from typer import Argument, Option

from raybatch.cli.flags import DEMO_MODEL, parse_settings
from raybatch.config import EngineConfig, from_mapping
from raybatch.errors import ConfigError, MissingDependency
from raybatch.installation import torch_command
from raybatch.policy.cost.layers import RowShape


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

    from raybatch_lab.engine_plan import plan_report

    with Console(stderr=True).status("starting") as status:
        report = plan_report(model, engine, row, num_rows=rows, fresh=fresh, tell=status.update)
    typer.echo(report.to_json() if as_json else report.to_text())


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
    from raybatch.report import current_report

    report = current_report(output)
    num_good = report.rows_out - report.rows_failed
    if not num_good or not report.generated_tokens:
        raise ConfigError(f"--like {output}: no row of this output generated tokens")
    computed = report.prompt_tokens - report.cached_tokens
    return {
        "prompt_tokens": max(1, round(computed / num_good)),
        "output_tokens": max(1, round(report.generated_tokens / num_good)),
    }
