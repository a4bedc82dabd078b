"""How far the planned batch sizes are from the best of a measured grid, end to end.

python benchmarks/batch_plan.py --out result.json              # dense-4m and moe-8m
python benchmarks/batch_plan.py --models moe-8m --requests 16 --repetitions 1

Each run drives a fresh engine in this process over the same prompts; time is its CPU seconds, all
configurations take turns, and the plan is measured before any of them. Tokens are compared row by
row with those of the plain forward pass.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import conditions
import models
import workloads_e2e
from peer_raybatch import kv_bytes_per_token, native_requests

from raybatch.backends import native
from raybatch.config import EngineConfig
from raybatch.explanation.bench_plan import plan_report
from raybatch.policy.batches.step_plan import RowShape

KV_TOKENS = 65_536
BATCHED_TOKENS = (256, 1024, 2048)
# tokens that attend at once, and rows for which the experts wait
WAYS = ((None, None), (512, None), (128, None), (128, 0))


class Choice(NamedTuple):
    """Batch sizes of one engine; the names are those of its options."""

    max_batched_tokens: int
    attn_batch_tokens: int | None
    moe_batch_tokens: int | None = None


def grid(planned: Choice) -> list[Choice]:
    """Return the planned sizes, and those that they are compared with."""
    others = [Choice(tokens, *way) for tokens, way in product(BATCHED_TOKENS, WAYS)]
    return [planned, *(choice for choice in others if choice != planned)]


def run(folder: Path, config: EngineConfig, requests: Sequence[Any]) -> tuple[float, list[Any]]:
    """Return the CPU seconds of a fresh engine for all requests, and the tokens of each."""
    found: dict[int, list[int]] = {}
    with closing(native.create(str(folder), config)) as backend:
        began = time.process_time()
        backend.submit(requests)
        while backend.num_unfinished():
            for completion in backend.poll():
                if completion.error:
                    raise RuntimeError(f"row {completion.request_id}: {completion.error}")
                found[completion.request_id] = completion.token_ids.tolist()
        seconds = time.process_time() - began
    return seconds, [found[i] for i in range(len(requests))]


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Plan, run the grid in turns, and compare."""
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        kv_cache_bytes=KV_TOKENS * kv_bytes_per_token(folder),
        max_num_seqs=args.requests,
        attn_batch_tokens=None,
    )
    row = RowShape(prompt_tokens=args.prompt_len, output_tokens=args.output_len)
    report = plan_report(str(folder), config, row, fresh=True)
    planned = Choice(**report.options())  # type: ignore[arg-type]
    choices = grid(planned)
    workload = workloads_e2e.Workload(
        name="plan",
        kind="random",
        num_requests=args.requests,
        prompt_len=args.prompt_len,
        output_len=args.output_len,
    )
    requests = native_requests(workloads_e2e.build(workload), None)
    seconds: dict[Choice, list[float]] = {choice: [] for choice in choices}
    tokens: dict[Choice, list[Any]] = {}
    # the first run of a process pays for what all later ones find
    run(folder, replace(config, **planned._asdict()), requests)
    for choice in turns(choices, args.repetitions):
        sized = replace(config, **choice._asdict())
        took, tokens[choice] = run(folder, sized, requests)
        seconds[choice].append(took)
    plain = next(choice for choice in choices if choice.attn_batch_tokens is None)
    rows = [
        {
            **choice._asdict(),
            "cpu_s": seconds[choice],
            "median_cpu_s": statistics.median(seconds[choice]),
            "differing_rows": sum(
                a != b for a, b in zip(tokens[choice], tokens[plain], strict=True)
            ),
        }
        for choice in choices
    ]
    best = min(rows, key=lambda found: found["median_cpu_s"])
    planned_told = {**json.loads(report.to_json()), "profile": None}
    return {
        "planned": rows[0],
        "best": best,
        "planned_over_best": round(rows[0]["median_cpu_s"] / best["median_cpu_s"], 3),
        "grid": rows,
        "plan": planned_told,
    }


def turns(choices: Sequence[Choice], repetitions: int) -> Iterator[Choice]:
    """Give every choice once in each repetition, from another one on each time."""
    for repetition in range(repetitions):
        start = repetition * len(choices) // repetitions
        yield from (*choices[start:], *choices[:start])


def table(name: str, found: dict[str, Any]) -> str:
    """Return the grid in lines, the fastest first, the planned one marked."""
    lines = [f"{name}: planned / best = {found['planned_over_best']:.3f}"]
    for row in sorted(found["grid"], key=lambda r: r["median_cpu_s"]):
        low, high = min(row["cpu_s"]), max(row["cpu_s"])
        mark = "  <- planned" if row is found["planned"] else ""
        sizes = ["-" if row[name] is None else row[name] for name in Choice._fields]
        lines.append(
            "  tokens {:>5}  attention {:>5}  experts {:>5}".format(*sizes)
            + f"  {row['median_cpu_s']:7.2f} CPU s ({low:.2f} to {high:.2f})"
            f"  {row['differing_rows']} rows differ{mark}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print and write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="dense-4m,moe-8m")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results = {}
    for name in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            models.write(name, Path(folder))
            results[name] = measure(Path(folder), args)
        print(table(name, results[name]))
        sys.stdout.flush()
    options = {"kv_tokens": KV_TOKENS, **vars(args), "out": None}
    conditions.write_result(args.out, "batch_plan.py", options=options, models=results)


if __name__ == "__main__":
    main()
