"""Orders of admission side by side: arrival, shortest first, static batches, bins of like length.

python benchmarks/admission.py                                   # all cases, dense-4m
python benchmarks/admission.py --cases tail --out result.json

The native engine on one thread, tokens checked row by row; the ways take turns. All rows are
there from the beginning. CPU seconds are of all steps, with those of the scheduler apart; a row's
completion is counted from the beginning, in CPU seconds and in steps. For each case it says whether
static batches would be chosen.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import conditions
import models
import numpy as np
import workloads_e2e
from static_batches import LEAST_RUNS, RowLengths, prefers_static
from swap import requests_of

from raybatch.backends.native import NativeBackend, create
from raybatch.config import AdmissionPolicy, EngineConfig
from raybatch.records.types import Request, Sampling


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Rows and the engine that runs them.

    Args:
        workload: what is asked.
        batch: rows that run at once.
        budget: tokens of a step.
        kv_mib: memory for KV.
    """

    workload: workloads_e2e.Workload
    batch: int
    budget: int = EngineConfig().max_batched_tokens
    kv_mib: int = 512


def _case(kind: workloads_e2e.Kind, rows: int, lengths: tuple[int, int], **engine: int) -> Case:
    workload = workloads_e2e.Workload(
        name=kind, kind=kind, num_requests=rows, prompt_len=lengths[0], output_len=lengths[1]
    )
    return Case(workload=workload, **engine)


# rows of one length, for which static batches were published; the prompts of a batch of 64 fill
# four steps, or one; and with KV memory for a third of them. Then lengths that differ, and a heavy
# tail
CASES = {
    "uniform-16": _case("random", 256, (32, 16), batch=16),
    "uniform-64": _case("random", 256, (128, 64), batch=64),
    "uniform-64-wide": _case("random", 256, (128, 64), batch=64, budget=8192),
    "uniform-short": _case("random", 96, (128, 128), batch=64, kv_mib=44),
    "mixed": _case("mixed", 192, (64, 64), batch=32),
    "tail": _case("tail", 512, (32, 6), batch=32),
}
# what engines differ in; the last one is the order of arrival with a forecast of KV memory
WAYS: dict[str, dict[str, Any]] = {
    **{policy: {"admission": policy} for policy in get_args(AdmissionPolicy)},
    "fcfs-forecast": {"kv_admission_fraction": 1.0},
}


class Stopwatch:
    """CPU seconds of this thread inside one function."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: object) -> object:
            began = time.thread_time()
            try:
                return work(*args)
            finally:
                self.seconds += time.thread_time() - began

        return timed


def run(backend: NativeBackend, requests: Sequence[Request]) -> tuple[dict[str, Any], list[Any]]:
    """Return what a run took, and the tokens of all rows."""
    before, tokens = backend.stats(), dict[int, list[int]]()
    ended_s, ended_steps = list[float](), list[int]()
    scheduler, watch = backend._engine._scheduler, Stopwatch()
    scheduler.schedule = watch.around(type(scheduler).schedule.__get__(scheduler))  # type: ignore[method-assign]
    began, num_running = time.process_time(), list[int]()
    backend.submit(requests)
    while backend.num_unfinished():
        done = backend.poll()
        stats = backend.stats()
        num_running.append(stats.num_running + len(done))
        for completion in done:
            tokens[completion.request_id] = completion.token_ids.tolist()
            ended_s.append(time.process_time() - began)
            ended_steps.append(stats.num_steps - before.num_steps)
    cpu_s, after = time.process_time() - began, backend.stats()
    num_steps = after.num_steps - before.num_steps
    num_prompt = after.prompt_tokens - before.prompt_tokens
    num_prompt -= after.cached_tokens - before.cached_tokens
    num_generated = after.generated_tokens - before.generated_tokens
    result = {
        "cpu_s": cpu_s,
        "scheduler_s": watch.seconds,
        "scheduler_us_per_token": 1e6 * watch.seconds / num_generated,
        "num_steps": num_steps,
        # the first token of a row comes with its prompt
        "tokens_per_step": (num_prompt + num_generated - len(requests)) / num_steps,
        "rows_per_step": float(np.mean(num_running)),
        "mean_completion_s": statistics.fmean(ended_s),
        "mean_completion_steps": statistics.fmean(ended_steps),
        "num_recomputed_tokens": after.num_recomputed_tokens - before.num_recomputed_tokens,
        "num_preemptions": after.num_preemptions - before.num_preemptions,
    }
    return result, [tokens[request.request_id] for request in requests]


def measure(
    folder: str, case: Case, requests: Sequence[Request], args: argparse.Namespace
) -> dict[str, list[dict[str, Any]]]:
    """Run all ways in turn; rows whose tokens differ between them end the benchmark."""
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in args.ways}
    expected: list[Any] | None = None
    for repetition in range(args.repetitions):
        # none of them always comes first
        for way in args.ways if repetition % 2 == 0 else args.ways[::-1]:
            config = EngineConfig(
                dtype="float32",
                device="cpu",
                max_num_seqs=case.batch,
                max_batched_tokens=case.budget,
                kv_cache_bytes=case.kv_mib << 20,
                **WAYS[way],
            )
            backend = create(folder, config)
            warm = [dataclasses.replace(r, sampling=Sampling(max_tokens=4)) for r in requests[:8]]
            run(backend, warm)
            result, tokens = run(backend, requests)
            backend.close()
            expected = expected or tokens
            num_other = sum(a != b for a, b in zip(tokens, expected, strict=True))
            if num_other:
                raise SystemExit(f"{num_other} rows of {way} have other tokens")
            found[way].append(result)
            print(f"{way:13}", json.dumps({k: round(v, 3) for k, v in result.items()}), flush=True)
    return found


def summary(found: dict[str, list[dict[str, Any]]], requests: Sequence[Request]) -> dict[str, Any]:
    """Return the least of each figure, ratios to the order of arrival, and what would be chosen."""
    # other work on the host only adds time, and counters are the same in all runs
    least = {
        way: {name: round(min(r[name] for r in runs), 4) for name in runs[0]}
        for way, runs in found.items()
    }
    told: dict[str, Any] = {"least": least}
    if "fcfs" in found:
        names = ("cpu_s", "mean_completion_s", "mean_completion_steps", "num_steps")
        told["over_fcfs"] = {
            way: {name: round(row[name] / least["fcfs"][name], 3) for name in names}
            for way, row in least.items()
        }
    num_runs = min(len(runs) for runs in found.values())
    if {"fcfs", "static"} <= set(found) and num_runs >= LEAST_RUNS:
        told["would_run_static"] = prefers_static(
            RowLengths.of(requests),
            static_s=[run["cpu_s"] for run in found["static"]],
            continuous_s=[run["cpu_s"] for run in found["fcfs"]],
        )
    return told


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(models.SHAPES), default="dense-4m")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    told: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        models.write(args.model, Path(folder))
        for name in args.cases:
            print(name, flush=True)
            case = CASES[name]
            requests = requests_of(case.workload)
            found = measure(folder, case, requests, args)
            told[name] = {**dataclasses.asdict(case), **summary(found, requests), "runs": found}
            print(json.dumps(told[name].get("over_fcfs"), indent=2))
    conditions.write_result(args.out, "admission.py", model=args.model, cases=told)


if __name__ == "__main__":
    main()
