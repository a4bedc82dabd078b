"""Times `raybatch run` with and without Ray, from the start of the process to its end.

python benchmarks/executors.py                              # the demo's questions, in several sizes
python benchmarks/executors.py --rows 10 512 --repetitions 5 --out result.json

Both executors get the same files, model, options and number of engines, and take turns. CPU seconds
are those of the process and its descendants. The bound of `executor: auto` follows from these times
(`raybatch/policy/executor.py`).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import conditions
import meters

from raybatch.demo.run import MAX_ANSWER_TOKENS, QUESTIONS_PER_DOCUMENT, write_dataset
from raybatch.demo.task import PROMPT

EXECUTORS = ("local", "ray")


def run(folder: Path, executor: str, replicas: int) -> dict[str, Any]:
    """Answer the questions below a folder in a separate process; return its times."""
    sink = folder / "out"
    shutil.rmtree(sink, ignore_errors=True)
    command = [sys.executable, "-m", "raybatch", "run", f"--{executor}", "--model", "demo"]
    command += ["--input", str(folder / "in"), "--output", str(sink), "--prompt", PROMPT]
    command += ["--max-tokens", str(MAX_ANSWER_TOKENS), "--replicas", str(replicas)]
    # do not use a running cluster, which would be warm
    variables = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
    own = {"OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables | own)
        with meters.TreeMeter(process.pid) as meter:
            code = process.wait()
    if code:
        raise SystemExit(
            f"raybatch run --{executor} exited with code {code}: {(folder / 'log').read_text()}"
        )
    return {
        "executor": executor,
        "wall_s": round(meter.wall_s, 2),
        "cpu_s": round(meter.cpu_s, 1),
        "foreign_cores": round(meter.foreign_cores, 2),
    }


def measure(num_rows: int, replicas: int, repetitions: int) -> dict[str, Any]:
    """Run both executors in turns over `num_rows` questions."""
    with tempfile.TemporaryDirectory(prefix="raybatch-executors-") as name:
        folder = Path(name)
        questions = min(num_rows, QUESTIONS_PER_DOCUMENT)
        write_dataset(
            folder / "in",
            num_documents=-(-num_rows // questions),
            questions_per_document=questions,
            seed=0,
            num_files=1,
            include_bad_rows=False,
        )
        runs = [run(folder, e, replicas) for _ in range(repetitions) for e in EXECUTORS]
    medians = {
        f"{executor}_{key}": statistics.median(r[key] for r in runs if r["executor"] == executor)
        for executor in EXECUTORS
        for key in ("wall_s", "cpu_s")
    }
    return {"rows": num_rows, "replicas": replicas, **medians, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[10, 512, 4096, 10_000])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    options = parser.parse_args()
    results = []
    for num_rows in options.rows:
        results.append(measure(num_rows, options.replicas, options.repetitions))
        print(json.dumps({k: v for k, v in results[-1].items() if k != "runs"}), flush=True)
    conditions.write_result(options.out, "executors.py", results=results)


if __name__ == "__main__":
    main()
