"""Measures the cost of streaming layer weights that do not fit the device, by rows of a step.

python benchmarks/weights.py                                # dense-60m, 1 to 64 rows at once
python benchmarks/weights.py --model moe-100m --out result.json

The native engine runs on one CPU thread, tokens are checked row by row, and the placements take
turns. Times are CPU seconds of decode steps; on a CPU copies do not overlap computation.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import conditions
import models
import numpy as np

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.sampling.sampler import Sampler
from raybatch.policy.memory_budget import plan_weight_placement
from raybatch.records.types import Request, Sampling
from raybatch.text.detokenizer import StopChecker

# share of the layers that stay on the device, by placement
WAYS = {"resident": 1.0, "half": 0.5, "none": 0.0}
OUTPUT_LEN = 24


def run(folder: str, config: EngineConfig, num_rows: int) -> tuple[dict[str, Any], list[Any]]:
    """Return counters, with the CPU seconds of the decoding steps, and the tokens of all rows."""
    runner = ModelRunner.load(folder, config)
    sampler = Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids)
    # no row has stop strings, so the stop checker needs no tokenizer
    engine = Engine(runner, sampler, StopChecker(None), config)
    backend = NativeBackend(engine)
    random = np.random.default_rng(0)
    backend.submit(
        Request(
            request_id=i,
            row_id=str(i),
            prompt_token_ids=random.integers(3, 1000, 16).astype(np.int32),
            sampling=Sampling(max_tokens=OUTPUT_LEN, ignore_eos=True),
        )
        for i in range(num_rows)
    )
    done = {completion.request_id: completion for completion in backend.poll()}
    before, began = backend.stats(), time.process_time()
    while backend.num_unfinished():
        done |= {completion.request_id: completion for completion in backend.poll()}
    seconds, after = time.process_time() - began, backend.stats()
    num_steps = after.num_steps - before.num_steps
    num_tokens = after.generated_tokens - before.generated_tokens
    num_bytes = after.weight_copy_bytes - before.weight_copy_bytes
    layers = runner.decoder.layers
    backend.close()
    return {
        "step_s": seconds / num_steps,
        "num_steps": num_steps,
        "copied_bytes_per_token": round(num_bytes / num_tokens),
        "copied_bytes_per_step": round(num_bytes / num_steps),
        "is_streamed": layers.is_streamed,
    }, [done[i].token_ids.tolist() for i in range(num_rows)]


def budgets(folder: str, config: EngineConfig, buffers: int) -> dict[str, int | None]:
    """Return the weight bytes on the device for each placement; None if all layers stay."""
    sizes = load_model(folder, config).sizes
    largest, num_layers = max(sizes.ffn_bytes), len(sizes.ffn_bytes)
    found: dict[str, int | None] = {}
    for way, share in WAYS.items():
        num_bytes = sizes.other_bytes + (round(share * num_layers) + buffers) * largest
        found[way] = None if share == 1 else num_bytes
        if share < 1:
            # raises early if the budget streams nothing
            plan_weight_placement(sizes, device_weight_bytes=num_bytes, weight_buffers=buffers)
    return found


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(models.SHAPES), default="dense-60m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--buffers", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = EngineConfig(dtype="float32", device="cpu", kv_cache_bytes=1 << 28)
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        models.write(args.model, Path(folder))
        given = budgets(folder, config, args.buffers)
        for num_rows in args.rows:
            runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            expected: list[Any] | None = None
            for repetition in range(args.repetitions):
                # the order alternates, so that no placement is always first
                for way in list(WAYS)[:: 1 if repetition % 2 == 0 else -1]:
                    options = config
                    if given[way] is not None:
                        options = dataclasses.replace(
                            config, device_weight_bytes=given[way], weight_buffers=args.buffers
                        )
                    result, tokens = run(folder, options, num_rows)
                    expected = expected or tokens
                    if tokens != expected:
                        raise SystemExit(f"{way!r} changes tokens at {num_rows} rows")
                    runs[way].append(result)
            medians = {w: statistics.median(r["step_s"] for r in of) for w, of in runs.items()}
            figures = {
                way: {
                    "step_ms": round(1e3 * medians[way], 2),
                    "longer": round(medians[way] / medians["resident"] - 1, 3),
                    "copied_kib_per_token": of[0]["copied_bytes_per_token"] >> 10,
                }
                for way, of in runs.items()
            }
            print(num_rows, json.dumps(figures), flush=True)
            found[str(num_rows)] = runs
    conditions.write_result(
        args.out, "weights.py", model=args.model, buffers=args.buffers, runs=found
    )


if __name__ == "__main__":
    main()
