"""Runs the same job several times in one driver: the cost of a job whose engines already run.

python benchmarks/repeat_jobs.py                    # W1, three times, each side
python benchmarks/repeat_jobs.py --workload docs --times 5 --out result.json

Both sides get the same files and vLLM with the same options. raybatch keeps its engines between the
jobs of a driver, `ray.data.llm` starts them for each job. Seconds of the first job include the
start of Ray.
"""

import argparse
import dataclasses
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import conditions
import job_data
import venvs
import workloads_e2e
from bench_run import Bench, sized_to_vocabulary
from peer_loop import Settings
from prefix_orders import kv_tokens_for, rows_in_order, sharing
from prefix_sides import VLLM_BLOCK_SIZE, Contestant
from prefix_suites import WORKLOADS
from runlog import RunLog
from suites import Part

# neither side plans, so the difference is the fixed cost of a job
SIDES = ("raybatch-vllm-job", "raydata-llm")
MODEL = "dense-4m"
KV_PERCENT = 25


def measure(bench: Bench, folder: Path, name: str, side: str, times: int) -> dict[str, Any]:
    """Run the jobs of one side in a separate process; return their seconds and digests of rows."""
    part = Part(model=MODEL, engine=(WORKLOADS[name],))
    (workload,) = sized_to_vocabulary(part, bench.model_folder(MODEL)).engine
    facts = sharing(workload, bench.settings.block_size)
    requests = workloads_e2e.build(workload)
    settings = dataclasses.replace(
        bench.settings,
        kv_tokens=kv_tokens_for(facts, KV_PERCENT / 100),
        max_model_len=facts.longest,
    )
    shutil.rmtree(folder / "job", ignore_errors=True)
    order = rows_in_order(workload, "shuffled")
    job_data.write_input(requests, folder / "job" / "in", order)
    options = {
        "input": str(folder / "job" / "in"),
        "output": str(folder / "job" / "out"),
        "replicas": 1,
        "times": times,
    }
    peer = Contestant(side=side).peer(KV_PERCENT)
    with dataclasses.replace(bench, settings=settings).start(peer, MODEL, options) as process:
        answer, meter = process.finish(times * workload.num_requests)
    written = [folder / "job" / "out", *(folder / "job").glob("out-*")]
    tokens = [job_data.read_output(output, len(requests)).token_ids for output in written]
    return {
        "side": side,
        "versions": answer["versions"],
        "seconds": [round(run["wall_s"], 2) for run in answer["runs"]],
        "cpu_s": round(meter.cpu_s, 1),
        "foreign_cores": round(meter.foreign_cores, 2),
        "rows": [workloads_e2e.row_digest(row) for row in tokens[0]],
        "is_same_every_time": len(tokens) == times and all(each == tokens[0] for each in tokens),
    }


def main() -> int:
    """Print the seconds of each job; 1 if rows differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="W1 x16")
    parser.add_argument("--times", type=int, default=3, help="jobs of a driver")
    parser.add_argument("--repetitions", type=int, default=3, help="drivers of each side, in turn")
    parser.add_argument("--venv", action="append", default=[], help="NAME=FOLDER")
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    args = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="raybatch-repeat-") as name:
        folder = Path(name)
        bench = Bench(
            peers=(),
            settings=Settings(block_size=VLLM_BLOCK_SIZE),
            num_repetitions=args.repetitions,
            given_venvs=venvs.parse_given(args.venv),
            given_models={},
            folder=folder,
            log=RunLog(folder / "results.jsonl", {}),
            quiet_wait_s=0.0,
        )
        for _ in range(args.repetitions):
            for side in SIDES:
                results.append(measure(bench, folder, args.workload, side, args.times))
                print(json.dumps({n: v for n, v in results[-1].items() if n != "rows"}), flush=True)
    is_same = all(r["is_same_every_time"] and r["rows"] == results[0]["rows"] for r in results)
    medians = {
        side: [
            statistics.median(job)
            for job in zip(*(r["seconds"] for r in results if r["side"] == side), strict=True)
        ]
        for side in SIDES
    }
    for number, (own, other) in enumerate(zip(*medians.values(), strict=True), 1):
        print(f"job {number}: {SIDES[0]} {own:.1f} s, {SIDES[1]} {other:.1f} s, {other / own:.1f}x")
    print("rows: equal" if is_same else "rows: DIFFERENT")
    for result in results:
        del result["rows"]
    conditions.write_result(
        args.out, "repeat_jobs.py", workload=args.workload, medians=medians, runs=results
    )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
