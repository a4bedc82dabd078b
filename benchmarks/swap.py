"""What KV in host memory is worth where KV memory is short: preemption by recompute against swap.

python benchmarks/swap.py                                   # W4 in 20 % of its KV, dense-60m
python benchmarks/swap.py --workload equal --block-size 16 --out result.json
python benchmarks/swap.py --workload prompts --share 0.03 --stream --ways recompute offload ample

The native engine on one thread, tokens checked row by row; the ways take turns. "ample" has memory
for all rows at once, as the bound of what more memory can bring; "offload" keeps all KV in host
memory. CPU seconds are of all steps.
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
import models
import numpy as np
import torch
import weights
import workloads_e2e

from raybatch.backends.native import NativeBackend, create
from raybatch.config import EngineConfig
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.models.config import read_model_spec
from raybatch.records.types import Completion, Request, Sampling

# the heavy tail, with longer prompts and outputs as well; and outputs of one length, which all ask
# for their next block at once
WORKLOADS = {
    "w4": workloads_e2e.Workload(
        name="w4", kind="tail", num_requests=512, prompt_len=32, output_len=6
    ),
    "w4-medium": workloads_e2e.Workload(
        name="w4-medium", kind="tail", num_requests=256, prompt_len=128, output_len=50
    ),
    # as where rows are scored
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
WAYS = ("recompute", "swap", "offload", "ample")


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
    """Return the blocks of all rows at their ends; a last token needs no place."""
    lengths = [len(r.prompt_token_ids) + r.sampling.max_tokens - 1 for r in requests]
    return sum(-(-length // block_size) for length in lengths)


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
    counters = {name: getattr(after, name) - getattr(before, name) for name in names}
    counters["mean_running"] = round(float(np.mean(num_decoding)), 1)
    reasons = {completion.finish_reason for completion in done.values()}
    if reasons != {"length"}:
        raise SystemExit(f"rows ended by {sorted(reasons)}; the memory is too small for one alone")
    tokens = [done[request.request_id].token_ids.tolist() for request in requests]
    return {**counters, "cpu_s": seconds}, tokens


def measure(
    folder: str, requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run all ways in turn; rows whose tokens differ between them end the benchmark."""
    spec = read_model_spec(Path(folder))
    config = EngineConfig(dtype="float32", device="cpu", block_size_tokens=args.block_size)
    if args.stream:
        budget = weights.budgets(folder, config, config.weight_buffers)["none"]
        config = dataclasses.replace(config, device_weight_bytes=budget)
    block_bytes = args.block_size * kv_bytes_per_token(spec, torch.float32)
    need = need_blocks(requests, args.block_size) * block_bytes
    short = round(need * args.share)
    options = {
        "recompute": {"kv_cache_bytes": short},
        "swap": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": False},
        "offload": {"kv_cache_bytes": short, "host_kv_bytes": need, "kv_offload": True},
        "ample": {"kv_cache_bytes": need},
    }
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    expected: list[Any] | None = None
    for repetition in range(args.repetitions):
        # neither way always comes first
        for way in args.ways if repetition % 2 == 0 else args.ways[::-1]:
            # a slow model says nothing for minutes
            print(f"{way}: run {repetition + 1} of {len(requests):,} rows", flush=True)
            backend = create(folder, dataclasses.replace(config, **options[way]))
            run(backend, [dataclasses.replace(requests[0], sampling=Sampling(max_tokens=4))])
            result, tokens = run(backend, requests)
            backend.close()
            expected = expected or tokens
            num_other = sum(a != b for a, b in zip(tokens, expected, strict=True))
            if num_other:
                raise SystemExit(f"{num_other} rows of {way} have other tokens")
            found[way].append(result)
            print(way, json.dumps(result), flush=True)
    return found


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
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(models.SHAPES), default="dense-60m")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="w4")
    parser.add_argument("--rows", type=int, help="of the workload; the default is its own number")
    parser.add_argument("--share", type=float, default=0.2, help="of the KV that all rows need")
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
    told = summary(found)
    print(json.dumps(told, indent=2))
    conditions.write_result(
        args.out,
        "swap.py",
        workload=dataclasses.asdict(workload),
        model=args.model,
        share=args.share,
        is_streamed=args.stream,
        block_size=args.block_size,
        runs=found,
        **told,
    )


if __name__ == "__main__":
    main()
