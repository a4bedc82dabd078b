"""Measures the planning of files by Ray tasks: seconds, seconds per row, and the driver's memory.

Run: python benchmarks/plan_job.py --rows 100000 1000000
Parquet files of token ids (the 16 prompts of a document share 96 of 128 tokens) are read, hashed,
planned in parts and written as shards, as `raybatch run` does before it generates. Nothing is
generated. The driver's peak memory is that of its process alone, and should not grow with the rows.
"""

import argparse
import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path

import conditions
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import ray

from raybatch import LLMStage, PlanConfig
from raybatch.inputs.source import scan_source
from raybatch.planning.large import plan_large, store_large_plan
from raybatch.planning.planned import RunSpec
from raybatch.planning.run import fit_units

SHARED, TOKENS, ROWS_PER_DOCUMENT, ROWS_PER_FILE = 96, 128, 16, 100_000


def write_source(folder: Path, num_rows: int, seed: int) -> None:
    """Write prompts of documents in random order."""
    rng = np.random.default_rng(seed)
    num_documents = -(-num_rows // ROWS_PER_DOCUMENT)
    documents = rng.integers(5, 400, (num_documents, SHARED), dtype=np.int32)
    document = rng.permutation(num_rows) // ROWS_PER_DOCUMENT
    for start in range(0, num_rows, ROWS_PER_FILE):
        of = document[start : start + ROWS_PER_FILE]
        tails = rng.integers(5, 400, (len(of), TOKENS - SHARED), dtype=np.int32)
        flat = np.concatenate([documents[of], tails], axis=1).reshape(-1)
        lists = pa.FixedSizeListArray.from_arrays(pa.array(flat), TOKENS).cast(pa.list_(pa.int32()))
        pq.write_table(pa.table({"ids": lists}), folder / f"{start:012d}.parquet")


def plan(folder: Path, num_rows: int) -> dict[str, object]:
    """Plan the files and return time and memory."""
    stage = LLMStage("demo", tokenized_prompt="ids", id_column="row_id")
    source = scan_source(str(folder / "in"))
    options = PlanConfig(max_driver_bytes=0)
    job = RunSpec(
        source=source,
        config=stage.config,
        plan=fit_units(options, source),
        sink=str(folder / "out"),
        row_id_column="row_id",
    )
    began = time.monotonic()
    large = plan_large(job)
    arranged = time.monotonic()
    stored = store_large_plan(job, large)
    ended = time.monotonic()
    return {
        "rows": num_rows,
        "parts": len(large.parts),
        "pieces": len(large.pieces),
        "groups": stored.num_groups,
        "units": stored.num_units,
        "saved_fraction": round(large.saved_fraction, 4),
        "describe_and_arrange_s": round(arranged - began, 2),
        "rank_and_write_s": round(ended - arranged, 2),
        "us_per_row": round(1e6 * (ended - began) / num_rows, 1),
        "driver_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    results, spawn = [], multiprocessing.get_context("spawn")
    for num_rows in options.rows:
        folder = Path(tempfile.mkdtemp(prefix="raybatch-plan-"))
        try:
            (folder / "in").mkdir()
            # written in a separate process, so that the driver's peak is that of planning
            drawing = spawn.Process(
                target=write_source, args=(folder / "in", num_rows, options.seed)
            )
            drawing.start()
            drawing.join()
            results.append(plan(folder, num_rows))
            print(json.dumps(results[-1]), flush=True)
        finally:
            shutil.rmtree(folder)
    conditions.write_result(options.out, "plan_job.py", results=results)


if __name__ == "__main__":
    main()
