"""Runs a Ray pipeline over shuffled rows that share prefixes, planned and in input order.

python benchmarks/ray_pipeline.py --rows 8192 --out result.json

Rows are those of W1 (256 shared tokens, 32 distinct ones, 16 rows a group) in random order, with
fewer output tokens. Both sides run in turns on the same warm engine with little KV memory, Parquet
to Parquet. The seconds of the planned side include its barrier. Each run has groups of a different
seed, so that no run reuses the KV of another.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import conditions
import models
import pyarrow as pa
import pyarrow.parquet as pq
import ray
from workloads_prefix import class_prompts

from raybatch import EngineConfig, LLMStage

SHARED, OWN, MEMBERS = 256, 32, 16
ROWS_PER_FILE = 1024


def write_rows(folder: Path, num_rows: int, output_len: int, seed: int) -> None:
    """Write the prompts in random order, in files of some rows."""
    groups = num_rows // MEMBERS
    classes = [(groups, MEMBERS, SHARED, OWN, output_len)]
    prompts = [ids for ids, _ in class_prompts(classes, models.VOCAB_SIZE, seed)]
    random.Random(seed).shuffle(prompts)
    table = pa.table({"id": range(len(prompts)), "ids": pa.array(prompts, pa.list_(pa.int32()))})
    for start in range(0, table.num_rows, ROWS_PER_FILE):
        pq.write_table(table.slice(start, ROWS_PER_FILE), folder / f"{start:09d}.parquet")


def measure(model: Path, options: argparse.Namespace, *, plan: bool, seed: int) -> dict[str, Any]:
    """Run the pipeline once; return its seconds and the computed tokens of its engine."""
    stage = LLMStage(
        str(model),
        tokenized_prompt="ids",
        id_column="id",
        sampling={"max_tokens": options.output_len, "ignore_eos": True},
        engine=EngineConfig(kv_cache_bytes=options.kv_mib << 20, num_threads=1),
        pool={"replicas": 1},
    )
    with tempfile.TemporaryDirectory(prefix="raybatch-pipeline-") as name:
        folder = Path(name)
        (folder / "in").mkdir()
        write_rows(folder / "in", options.rows, options.output_len, seed)
        began = time.monotonic()
        rows = ray.data.read_parquet(str(folder / "in"))
        stage.apply(rows, plan=plan).write_parquet(str(folder / "out"))
        seconds = time.monotonic() - began
        out = pq.read_table(folder / "out", columns=["num_input_tokens", "num_cached_tokens"])
    prompt, cached = (sum(column.to_pylist()) for column in out.columns)
    return {
        "plan": plan,
        "rows": out.num_rows,
        "wall_s": round(seconds, 2),
        "prompt_tokens": prompt,
        "computed_tokens": prompt - cached,
        "cached_share": round(cached / prompt, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--output-len", type=int, default=2)
    parser.add_argument("--kv-mib", type=int, default=64)
    parser.add_argument("--model", default="dense-4m", help="name in models.py")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    bound = round((1 - 1 / MEMBERS) * SHARED / (SHARED + OWN), 4)
    results = []
    with tempfile.TemporaryDirectory(prefix="raybatch-pipeline-") as name:
        models.write(options.model, model := Path(name) / options.model)
        # warm up: engine and feeders start
        warm_up = argparse.Namespace(**{**vars(options), "rows": 64})
        for plan in (False, True):
            measure(model, warm_up, plan=plan, seed=1000)
        for seed in range(options.repetitions):
            for plan in (False, True):
                results.append(measure(model, options, plan=plan, seed=2 * seed + plan))
                print(json.dumps(results[-1]), flush=True)
    for plan in (False, True):
        of_side = [result for result in results if result["plan"] == plan]
        middle = {
            name: statistics.median(result[name] for result in of_side)
            for name in ("wall_s", "computed_tokens", "cached_share")
        }
        print(f"plan={plan}: {middle}, of at most {bound} cached")
    conditions.write_result(options.out, "ray_pipeline.py", bound=bound, results=results)


if __name__ == "__main__":
    main()
