"""Measures the pipelines that run in rounds: their computed prompt tokens and their speed.

python benchmarks/pipelines.py --out result.json    # recursive aggregation, and rollouts

Each repetition is a separate process with an empty output. A round is a job, and all rounds share
one warm pool. Seconds are those of the jobs, including the start of the engine.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import conditions

from raybatch.report import read_report

FOLDER = Path(__file__).parents[1] / "pipelines"
SIZES = {
    "rsa": ("--questions", "32", "--rounds", "4", "--candidates", "16", "--aggregated", "4"),
    "rollout": ("--prompts", "8", "--samples", "16", "--rounds", "2"),
}


def measure(name: str) -> dict[str, Any]:
    """Run a pipeline once; return rows, tokens and seconds over its rounds."""
    with tempfile.TemporaryDirectory(prefix="raybatch-pipelines-") as folder:
        command = [sys.executable, FOLDER / f"{name}.py", *SIZES[name], "--out", "out"]
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
        rounds = sorted(Path(folder, "out").iterdir())
        reports = [read_report(str(one / "answers")) for one in rounds]
    return {
        "rows": sum(report.rows_out for report in reports),
        "prompt_tokens": sum(report.prompt_tokens for report in reports),
        "computed_tokens": sum(r.prompt_tokens - r.cached_tokens for r in reports),
        "generated_tokens": sum(report.generated_tokens for report in reports),
        "round_s": [round(report.total_s, 2) for report in reports],
    }


def main() -> None:
    """Print the counts of each pipeline, and the median and range of its rows per second."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write conditions and results to this file")
    args = parser.parse_args()
    results = {name: [] for name in SIZES}
    # in turn, so that a slower host slows both
    for _ in range(args.repetitions):
        for name, found in results.items():
            found.append(measure(name))
    for name, found in results.items():
        one, speeds = found[0], sorted(run["rows"] / sum(run["round_s"]) for run in found)
        print(
            f"{name}: {one['rows']} rows, {one['computed_tokens']} of {one['prompt_tokens']} "
            f"prompt tokens computed, {one['generated_tokens']} generated, "
            f"{statistics.median(speeds):.1f} rows/s ({speeds[0]:.1f} to {speeds[-1]:.1f})"
        )
    conditions.write_result(args.out, "pipelines.py", sizes=SIZES, results=results)


if __name__ == "__main__":
    main()
