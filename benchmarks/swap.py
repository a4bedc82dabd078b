"""Measures the gain of KV in host memory if KV memory is short: recompute compared with swap.

python benchmarks/swap.py                                   # W4 in 20 % of its KV, dense-60m
python benchmarks/swap.py --workload equal --block-size 16 --out result.json
python benchmarks/swap.py --workload prompts --share 0.03 --stream --ways recompute offload ample
python benchmarks/swap.py --model moe-8m --workload equal --host-share 0.25 \
    --ways recompute swap int8 fp8                          # gain and changed tokens of 8 bits

The native engine runs on one thread, tokens are checked row by row, and the modes take turns.
"ample" has memory for all rows at once, the bound of what more memory can gain. "offload" keeps all
KV in host memory. "int8" and "fp8" round the KV that does not fit half of the host memory exactly.
Their tokens may differ, and the number of different ones is printed. CPU seconds are those of all
steps.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import conditions
import kv_dtype
import models
import numpy as np
import torch
import weights
import workloads_e2e

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token, pick_kv_dtype
from raybatch.kernels.byte_numbers import dequantise, quantise
from raybatch.models.config import read_model_spec
from raybatch.policy.memory_budget import USUAL_BUFFERS
from raybatch.records.types import Completion, Request, Sampling

# the heavy tail, also with longer prompts and outputs; and outputs of one length, whose rows all
# need their next block at once
WORKLOADS = {
    "w4": workloads_e2e.Workload(
        name="w4", kind="tail", num_requests=512, prompt_len=32, output_len=6
    ),
    "w4-medium": workloads_e2e.Workload(
        name="w4-medium", kind="tail", num_requests=256, prompt_len=128, output_len=50
    ),
    # rows that are scored
    "prompts": workloads_e2e.Workload(
        name="prompts", kind="random", num_requests=48, prompt_len=480, output_len=1
    ),
    "random": workloads_e2e.Workload(
        name="random", kind="random", num_requests=256, prompt_len=128, output_len=64
    ),
    "equal": workloads_e2e.Workload(
        name="equal", kind="random", num_requests=128, prompt_len=128, output_len=256
    ),
}
ROUNDING = ("int8", "fp8")
WAYS = ("recompute", "swap", *ROUNDING, "offload", "ample")
# rows whose KV is rounded and compared
_NUM_COMPARED = 8


def requests_of(workload: workloads_e2e.Workload) -> list[Request]:
    return [
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=np.array(request.prompt_ids, np.int32),
            sampling=Sampling(max_tokens=request.output_len, ignore_eos=True),
        )
        for i, request in enumerate(workloads_e2e.build(workload))
    ]


def need_blocks(requests: Sequence[Request], block_size: int) -> int:
    """Return the blocks of all rows at their ends; the last token of a row needs no KV."""
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens - 1 for r in requests]
    return sum(-(-length // block_size) for length in lengths)


def take_pages(backend: NativeBackend) -> None:
    """Write all memory for KV once, before anything is timed.

    The first use of a page takes time once in an engine's life, so modes with more memory would
    look slower. In a virtual machine that has just started it takes seconds per GB.
    """
    runner = backend._engine.runner
    caches = [runner.cache, runner.tiers.host, runner.rounded_tiers.host]
    if runner.window is not None:
        caches.append(runner.window.host.kv)
    for cache in caches:
        cache.k.zero_()
        cache.v.zero_()


def run(backend: NativeBackend, requests: Sequence[Request]) -> tuple[dict[str, Any], list[Any]]:
    """Return counters, with the CPU seconds of the steps, and the tokens of all rows."""
    before, done = backend.stats(), dict[int, Completion]()
    backend.submit(requests)
    num_decoding = []
    began = time.process_time()
    while backend.num_unfinished():
        done |= {completion.request_id: completion for completion in backend.poll()}
        num_decoding.append(backend.stats().num_running)
    seconds, after = time.process_time() - began, backend.stats()
    names = ("num_steps", "num_preemptions", "num_recomputed_tokens", "num_swapped_tokens")
    names = (*names, "swapped_bytes", "weight_copy_bytes", "prompt_tokens", "generated_tokens")
    names = (*names, "num_rounded_tokens", "num_rounded_sequences")
    counters = {name: getattr(after, name) - getattr(before, name) for name in names}
    counters["mean_running"] = round(float(np.mean(num_decoding)), 1)
    reasons = {completion.finish_reason for completion in done.values()}
    if reasons != {"length"}:
        raise SystemExit(f"rows ended by {sorted(reasons)}: one row alone does not fit the memory")
    tokens = [done[request.request_id].token_ids.tolist() for request in requests]
    return {**counters, "cpu_s": seconds}, tokens


def measure(
    folder: str, requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run all modes in turn; exit if tokens of a row differ between modes that do not round."""
    spec = read_model_spec(Path(folder))
    config = EngineConfig(dtype="float32", device="cpu", block_size_tokens=args.block_size)
    if args.stream:
        budget = weights.budgets(folder, config, USUAL_BUFFERS)["none"]
        config = dataclasses.replace(config, device_weight_bytes=budget)
    block_bytes = args.block_size * kv_bytes_per_token(spec, torch.float32)
    need = need_blocks(requests, args.block_size) * block_bytes
    short = round(need * args.share)
    host = need
    if args.host_share is not None:
        ample = dataclasses.replace(
            config, kv_cache_bytes=short, host_kv_bytes=need, kv_offload=False
        )
        host = round(most_swapped(folder, requests, ample) * block_bytes * args.host_share)
    swap = {"kv_cache_bytes": short, "host_kv_bytes": host, "kv_offload": False}
    options = {
        "recompute": {"kv_cache_bytes": short},
        "swap": swap,
        **{kind: swap | {"host_kv_dtype": kind} for kind in ROUNDING},
        "offload": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": True},
        "ample": {"kv_cache_bytes": need},
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    expected: list[Any] | None = None
    for repetition in range(args.repetitions):
        # the order alternates, so that no mode is always first
        for way in args.ways if repetition % 2 == 0 else args.ways[::-1]:
            # a slow model runs for minutes without output
            print(f"{way}: run {repetition + 1} of {len(requests):,} rows", flush=True)
            backend = create(folder, dataclasses.replace(config, **options[way]))
            take_pages(backend)
            run(backend, [dataclasses.replace(requests[0], sampling=Sampling(max_tokens=4))])
            result, tokens = run(backend, requests)
            backend.close()
            if way in ROUNDING:
                result |= changes(tokens, expected or [])
            else:
                expected = expected or tokens
            num_other = sum(a != b for a, b in zip(tokens, expected or [], strict=True))
            if num_other and way not in ROUNDING:
                raise SystemExit(f"{num_other} of {len(tokens)} rows of {way!r} differ in tokens")
            found[way].append(result)
            print(way, json.dumps(result), flush=True)
    return found


def most_swapped(folder: str, requests: Sequence[Request], config: EngineConfig) -> int:
    """Return the most blocks that are in host memory at once, if it has room for all."""
    backend, most = create(folder, config), 0
    backend.submit(requests)
    while backend.num_unfinished():
        backend.poll()
        most = max(most, backend._engine._scheduler._swap.num_used)
    backend.close()
    return most


def changes(tokens: Sequence[list[int]], exact: Sequence[list[int]]) -> dict[str, Any]:
    """Return the share of tokens that differ from `exact` at their position, and the rows."""
    if not exact:
        raise SystemExit("--ways must begin with an exact mode, not with int8 or fp8")
    pairs = [pair for row in zip(tokens, exact, strict=True) for pair in zip(*row, strict=True)]
    num_rows = sum(a != b for a, b in zip(tokens, exact, strict=True))
    return {
        "changed_tokens": round(sum(a != b for a, b in pairs) / len(pairs), 4),
        "changed_rows": num_rows,
    }


def row_errors(folder: str, requests: Sequence[Request], kind: str) -> dict[str, float]:
    """Return the largest and the mean relative error of KV rows, |x - y| / |x|."""
    config = kv_dtype.config_of("auto")
    runner, errors = ModelRunner.load(folder, config), list[torch.Tensor]()
    for request in requests[:_NUM_COMPARED]:
        prompt = request.prompt_token_ids.tolist()
        kv_dtype.logits_of(runner, prompt, [0])
        num_blocks = len(prompt) // config.block_size_tokens
        for pool in (runner.cache.k, runner.cache.v):
            rows = pool[:, :num_blocks].clone()
            rounded = dequantise(
                quantise(rows, pick_kv_dtype(kind, rows.dtype)), rows.shape[-1], rows.dtype
            )
            errors.append(((rounded - rows).norm(dim=-1) / rows.norm(dim=-1)).flatten())
    found = torch.cat(errors)
    return {"max": round(float(found.max()), 5), "mean": round(float(found.mean()), 5)}


def summary(found: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians of CPU seconds, and the ratios that they give."""
    medians = {way: statistics.median(r["cpu_s"] for r in runs) for way, runs in found.items()}
    ratios = {
        f"recompute / {way}": round(medians["recompute"] / medians[way], 3)
        for way in medians
        if "recompute" in medians and way != "recompute"
    }
    return {"median_cpu_s": {way: round(s, 2) for way, s in medians.items()}, "ratios": ratios}


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(models.SHAPES), default="dense-60m")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="w4")
    parser.add_argument("--rows", type=int, help="rows; default: the workload's")
    parser.add_argument(
        "--share", type=float, default=0.2, help="share of the KV that all rows need"
    )
    parser.add_argument("--host-share", type=float, help="share of the most swapped KV")
    parser.add_argument("--block-size", type=int, default=EngineConfig().block_size_tokens)
    parser.add_argument("--stream", action="store_true", help="no layer stays on the device")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["recompute", "swap", "ample"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    workload = WORKLOADS[args.workload]
    if args.rows is not None:
        workload = workloads_e2e.scaled(workload, args.rows)
    requests = requests_of(workload)
    with tempfile.TemporaryDirectory() as folder:
        models.write(args.model, Path(folder))
        found = measure(folder, requests, args)
        errors = {k: row_errors(folder, requests, k) for k in ROUNDING if k in found}
    summarised = summary(found)
    print(json.dumps({**summarised, "row_errors": errors}, indent=2))
    conditions.write_result(
        args.out,
        "swap.py",
        workload=dataclasses.asdict(workload),
        model=args.model,
        share=args.share,
        host_share=args.host_share,
        row_errors=errors,
        is_streamed=args.stream,
        block_size=args.block_size,
        runs=found,
        **summarised,
    )


if __name__ == "__main__":
    main()
