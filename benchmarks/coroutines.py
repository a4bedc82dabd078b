"""What it is worth that experts see more rows than the device has KV for.

python benchmarks/coroutines.py                              # moe-100m, KV for 8 rows, 512 rows
python benchmarks/coroutines.py --models moe-8m dense-60m --device-rows 4 8 16 64 --rows 256
python benchmarks/coroutines.py --gates 32 64 128 256 512    # rows at the experts, attention fixed
python benchmarks/coroutines.py --workload documents --out result.json

The native engine on one thread with KV memory for so many rows on the device: preemption by
recompute, by swap, and KV in host memory (`kv_offload`), and with memory for all rows as the bound.
Ways take turns, tokens are checked row by row, seconds are CPU seconds of the engine's steps.
Beside each is what `choose_engine` forecasts, and its regret: what the way that it takes costs more
than the best of those measured.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conditions
import models
import swap
import torch
import workloads_e2e

from raybatch.backends.native import create
from raybatch.config import EngineConfig
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.profile.layer_bench import profile_options
from raybatch.engine.profile.module_profile import ModuleProfile, measured_profile
from raybatch.models.config import read_model_spec
from raybatch.policy.batches.step_plan import RowShape
from raybatch.policy.choose_engine import EngineChoice, EngineFacts, RowsAhead, choose_engine
from raybatch.records.types import Request, Sampling

WORKLOADS = {
    "random": workloads_e2e.Workload(
        name="random", kind="random", num_requests=512, prompt_len=128, output_len=64
    ),
    "w4": swap.WORKLOADS["w4"],
    # rows that read one of a few documents
    "documents": workloads_e2e.Workload(
        name="documents",
        kind="shared",
        num_requests=256,
        prompt_len=64,
        output_len=64,
        doc_len=960,
        queries_per_doc=16,
    ),
}
WAYS = ("recompute", "swap", "offload", "ample")
_BLOCK_SIZE = 16


def device_bytes(folder: Path, requests: Sequence[Request], num_rows: float) -> tuple[int, int]:
    """Return bytes of KV for so many mean rows, and for all of them."""
    spec = read_model_spec(folder)
    block_bytes = _BLOCK_SIZE * kv_bytes_per_token(spec, torch.float32)
    need = swap.need_blocks(requests, _BLOCK_SIZE) * block_bytes
    return round(need * num_rows / len(requests)), need


def options_of(way: str, short: int, need: int) -> dict[str, Any]:
    return {
        "recompute": {"kv_cache_bytes": short},
        "swap": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": False},
        "offload": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": True},
        "ample": {"kv_cache_bytes": need},
    }[way]


def forecast(
    profile: ModuleProfile, requests: Sequence[Request], short: int, need: int, max_seqs: int
) -> EngineChoice:
    prompts = [len(request.prompt_token_ids) for request in requests]
    outputs = [request.sampling.max_tokens for request in requests]
    row = RowShape(
        prompt_tokens=round(statistics.mean(prompts)),
        output_tokens=max(1, round(statistics.mean(outputs))),
    )
    return choose_engine(
        EngineFacts(
            model=profile.model,
            costs=profile.costs(),
            device_kv_bytes=short,
            host_kv_bytes=need,
            max_num_seqs=max_seqs,
            token_budgets=(EngineConfig().max_batched_tokens,),
            block_size=_BLOCK_SIZE,
            rows=RowsAhead(shape=row, num_rows=len(requests)),
        )
    )


def measure(
    folder: Path, requests: Sequence[Request], ways: dict[str, dict[str, Any]], repetitions: int
) -> dict[str, list[dict[str, Any]]]:
    """Run all ways in turn; rows whose tokens differ between them end the benchmark."""
    base = EngineConfig(
        dtype="float32", device="cpu", block_size_tokens=_BLOCK_SIZE, attn_batch_tokens=None
    )
    spec = read_model_spec(folder)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    expected: list[Any] | None = None
    for repetition in range(repetitions):
        order = list(ways) if repetition % 2 == 0 else list(ways)[::-1]
        for way in order:
            backend = create(str(folder), dataclasses.replace(base, **ways[way]))
            first = dataclasses.replace(requests[0], sampling=Sampling(max_tokens=4))
            swap.run(backend, [first])
            result, tokens = swap.run(backend, requests)
            backend.close()
            expected = expected or tokens
            num_other = sum(a != b for a, b in zip(tokens, expected, strict=True))
            if num_other:
                raise SystemExit(f"{num_other} rows of {way} have other tokens")
            generated = result["generated_tokens"]
            told = {
                "cpu_s": round(result["cpu_s"], 3),
                "tokens_per_cpu_s": round(generated / result["cpu_s"]),
                "num_steps": result["num_steps"],
                "num_recomputed_tokens": result["num_recomputed_tokens"],
                "mean_running": result["mean_running"],
                "moved_bytes_per_token": round(result["swapped_bytes"] / generated),
            }
            if spec.moe is not None:
                share = spec.moe.top_k / spec.moe.num_experts
                told["decode_rows_per_expert"] = round(result["mean_running"] * share, 1)
            found[way].append(told)
            print(way, json.dumps(told), flush=True)
    return found


def medians(found: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    return {way: statistics.median(r["cpu_s"] for r in runs) for way, runs in found.items()}


def setting(args: argparse.Namespace, folder: Path, model: str, num_rows: float) -> dict[str, Any]:
    """Measure one model with KV memory for so many rows."""
    workload = WORKLOADS[args.workload]
    if args.rows is not None:
        workload = workloads_e2e.scaled(workload, args.rows)
    requests = swap.requests_of(workload)
    short, need = device_bytes(folder, requests, num_rows)
    ways = {way: options_of(way, short, need) for way in args.ways}
    for gate in args.gates:
        ways[f"offload-{gate}"] = options_of("offload", short, need) | {
            "max_num_seqs": gate,
            "attn_batch_tokens": args.attn_tokens,
        }
    loaded = load_model(str(folder), EngineConfig(dtype="float32", device="cpu"))
    options = profile_options(EngineConfig(dtype="float32", device="cpu"))
    profile, _ = measured_profile(loaded.spec, loaded.weights, options)
    choice = forecast(profile, requests, short, need, EngineConfig().max_num_seqs)
    print(model, f"KV for {num_rows:g} rows:", choice.reason, flush=True)
    found = measure(folder, requests, ways, args.repetitions)
    seconds = medians(found)
    told: dict[str, Any] = {"median_cpu_s": seconds, "choice": dataclasses.asdict(choice)}
    others = {way: seconds[way] for way in ("recompute", "swap") if way in seconds}
    if others and "offload" in seconds:
        best_other = min(others.values())
        taken = seconds["offload"] if choice.best.kv_offload else best_other
        told["best_other / offload"] = round(best_other / seconds["offload"], 2)
        told["regret"] = round(taken / min(best_other, seconds["offload"]) - 1, 3)
    print(json.dumps({key: told[key] for key in told if key != "choice"}), flush=True)
    return {
        "model": model,
        "device_rows": num_rows,
        "workload": dataclasses.asdict(workload),
        "runs": found,
        **told,
    }


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=sorted(models.SHAPES), default=["moe-100m"])
    parser.add_argument("--device-rows", nargs="+", type=float, default=[8])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="random")
    parser.add_argument("--rows", type=int, help="of the workload; the default is its own number")
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--gates", nargs="*", type=int, default=[], help="rows at the experts")
    parser.add_argument("--attn-tokens", type=int, help="of a part, with --gates")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    settings = []
    for model in args.models:
        with tempfile.TemporaryDirectory() as folder:
            models.write(model, Path(folder))
            for num_rows in args.device_rows:
                settings.append(setting(args, Path(folder), model, num_rows))
    conditions.write_result(args.out, "coroutines.py", settings=settings)


if __name__ == "__main__":
    main()
