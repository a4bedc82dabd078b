"""Measures the cost of sizing the steps of a slow model by seconds: prefill with and without it.

python benchmarks/step_size.py                       # a dense model of 180 million weights
python benchmarks/step_size.py --rows 8 --repeats 1 --out result.json

Both engines have the same weights and take turns. Each run has a new engine, so that the time
includes finding the size, which takes one step that is too long. Every step is timed, because a
cancel, or a query of statistics, waits for the end of a step. One thread, float32, prompts of 512
tokens that share nothing.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import conditions
import models
import torch
from engine import PREFILL_TOKENS, requests_of

from raybatch.backends.native import create
from raybatch.config import EngineConfig

# steps sized by seconds, and steps of the size for a fast device
SIDES: dict[str, Any] = {"auto": "auto", "2048": 2048}


def run(folder: str, most: int | str, num_rows: int, seed: int) -> dict[str, float]:
    """Compute the prompts; return CPU seconds, wall seconds, and wall seconds of steps."""
    sizes = {"max_batched_tokens": most, "kv_cache_bytes": 1 << 30}
    engine = create(folder, EngineConfig(dtype="float32", device="cpu", **sizes))
    engine.submit(requests_of(num_rows, PREFILL_TOKENS, 1, seed))
    steps = list[float]()
    cpu = time.process_time()
    wall = time.perf_counter()
    while engine.num_unfinished():
        began = time.perf_counter()
        engine.poll()
        steps.append(time.perf_counter() - began)
    found = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "median_step_s": statistics.median(steps),
        "longest_step_s": max(steps),
        "num_steps": len(steps),
    }
    engine.close()
    return found


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        models.write("dense-180m", Path(folder))
        for repeat in range(args.repeats):
            # the order alternates, because a host may warm up
            for name in sorted(SIDES, reverse=bool(repeat % 2)):
                found[name].append(run(folder, SIDES[name], args.rows, seed=repeat))
                print(name, {key: round(value, 2) for key, value in found[name][-1].items()})
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in found.items()
    }
    ratio = medians["auto"]["cpu_s"] / medians["2048"]["cpu_s"]
    print(
        f"steps sized by seconds take {ratio:.3f} of the CPU time, and one step "
        f"{medians['auto']['median_step_s']:.1f} s in place of "
        f"{medians['2048']['median_step_s']:.1f} s (medians)"
    )
    conditions.write_result(args.out, "step_size.py", runs=found, medians=medians, cpu_ratio=ratio)


if __name__ == "__main__":
    main()
