"""The command `raybatch bench plan memory`."""

import math
from typing import Annotated

import typer
from typer import Argument, Option

from raybatch.errors import ConfigError
from raybatch_extensions.sharing.decode_times import GpuRates
from raybatch_lab.sharing.memory_plan import DEFAULT_RESERVE_BYTES, DEFAULT_UTILISATION, GpuBudget


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
    """Print the GPU memory of replicas of a model, with and without shared weights."""
    if dp < 2:
        raise ConfigError(f"--dp {dp}: weights are shared by at least 2 replicas; set 2 or more")
    known = None
    if gpu_flops is not None and gpu_bytes_per_s is not None and link_bytes_per_s is not None:
        known = GpuRates(
            bytes_per_s=gpu_bytes_per_s, flops=gpu_flops, link_bytes_per_s=link_bytes_per_s
        )
    elif (gpu_flops, gpu_bytes_per_s, link_bytes_per_s) != (None, None, None):
        raise ConfigError(
            "--gpu-flops, --gpu-bytes-per-s and --link-bytes-per-s go together: set all three to "
            "simulate the time of passes, or none"
        )
    budget = GpuBudget(
        gpu_bytes=_whole("--gpu-bytes", gpu_bytes),
        utilisation=gpu_memory_utilization,
        reserve_bytes=_whole("--reserve-bytes", reserve_bytes),
    )
    # the clients of stores are slow to load
    from raybatch.models.config import read_model_spec
    from raybatch.models.source import resolve_config
    from raybatch_lab.sharing.gain import MemoryQuery, sharing_gain
    from raybatch_lab.sharing.memory_report import MemoryReport

    query = MemoryQuery(
        budget=budget,
        tp=tp,
        size=dp,
        sequence_tokens=sequence_tokens,
        num_slots=slots,
        rates=known,
        element_bytes=element_bytes,
    )
    gain = sharing_gain(read_model_spec(resolve_config(model)), query)
    report = MemoryReport(model=model, gain=gain)
    typer.echo(report.to_json() if as_json else report.to_text())
    raise typer.Exit(0 if report.is_possible else 1)


def _whole(option: str, num_bytes: float) -> int:
    if not math.isfinite(num_bytes):
        raise ConfigError(f"{option} is {num_bytes}; give a number of bytes, such as 144e9")
    return round(num_bytes)
