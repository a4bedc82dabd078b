"""Compares orders of groups on the native engine: CPU seconds and tokens, orders in turns.

Run: OMP_NUM_THREADS=1 python benchmarks/plan_order_engine.py [--cases W2,W4] [--repeats 3]
Cases and orders are those of `plan_order.py`. The model is small and has random weights, the case
sets the size of KV, and every row ends at its length. Greedy answers are the same in any order.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import conditions
import models
import numpy as np
from group_order import Workload
from plan_order import CASES, MAX_NUM_SEQS, Case, rows_in_order

from raybatch.backends.native import create
from raybatch.config import EngineConfig
from raybatch.models.config import read_model_spec
from raybatch.records.types import Request, Sampling


def requests_of(workload: Workload, block_size: int) -> list[Request]:
    """Return the rows as requests; groups share the whole blocks of their prefixes."""
    rows, random = workload.rows, np.random.default_rng(7)
    stems = random.integers(10, models.VOCAB_SIZE, (int(rows.group.max()) + 1, rows.prefix.max()))
    requests = []
    for row, (group, prefix) in enumerate(zip(rows.group, rows.prefix, strict=True)):
        own = random.integers(10, models.VOCAB_SIZE, int(rows.distinct[row]))
        requests.append(
            Request(
                request_id=row,
                row_id=str(row),
                prompt_token_ids=np.concatenate([stems[group, :prefix], own]).astype(np.int32),
                sampling=Sampling(max_tokens=int(rows.output[row]), temperature=0, ignore_eos=True),
                group_id=int(group) if prefix else None,
                prefix_len=int(prefix) // block_size * block_size,
            )
        )
    return requests


def run(folder: Path, case: Case, by: str, knows: str) -> tuple[dict[str, float], list[list[int]]]:
    """Return the cost of a run in this order, and the answers by row."""
    workload, spec = case.make(0), read_model_spec(folder)
    token_bytes = spec.num_layers * 2 * spec.num_kv_heads * spec.head_dim * 4
    config = EngineConfig(
        dtype="float32",
        device="cpu",
        kv_cache_bytes=workload.device.kv_tokens * token_bytes,
        max_batched_tokens=workload.device.token_budget,
        max_num_seqs=min(MAX_NUM_SEQS, workload.device.token_budget),
        block_size_tokens=case.block_size,
    )
    requests = requests_of(workload, case.block_size)
    engine = create(str(folder), config)
    began, ended = time.process_time(), dict[int, list[int]]()
    engine.submit([requests[row] for row in rows_in_order(workload, by, knows, 0).tolist()])
    while engine.num_unfinished():
        for completion in engine.poll():
            ended[completion.request_id] = list(completion.token_ids)
    cpu_s, stats = time.process_time() - began, engine.stats()
    engine.close()
    figures = {
        "cpu_s": cpu_s,
        "steps": stats.num_steps,
        "preemptions": stats.num_preemptions,
        "recomputed": stats.num_recomputed_tokens,
    }
    return figures, [ended[row] for row in range(len(requests))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="W2,W3 .9,W3 1.4,W4")
    parser.add_argument("--orders", default="auto,ratio,shuffle")
    parser.add_argument("--knows", default="true")
    parser.add_argument("--model", default="dense-4m", choices=sorted(models.SHAPES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    orders, results = options.orders.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        models.write(options.model, Path(folder))
        for name in options.cases.split(","):
            runs = {by: list[dict[str, float]]() for by in orders}
            answers = None
            for _ in range(options.repeats):
                for by in orders:
                    figures, found = run(Path(folder), CASES[name], by, options.knows)
                    answers = answers or found
                    figures["rows_with_other_tokens"] = sum(
                        a != b for a, b in zip(answers, found, strict=True)
                    )
                    runs[by].append(figures)
            for by in orders:
                median = statistics.median(one["cpu_s"] for one in runs[by])
                results.append(
                    {"case": name, "order": by, "median_cpu_s": median, "runs": runs[by]}
                )
                print(json.dumps(results[-1]), flush=True)
    what = "runs of the native engine, orders in turns; CPU seconds"
    conditions.write_result(
        options.out, "plan_order_engine.py", what=what, model=options.model, runs=results
    )


if __name__ == "__main__":
    main()
