"""The pipelines and the README's script run unchanged, on small data."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from raybatch.demo.run import write_dataset

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]


def run_script(folder, *command):
    """Run a script in `folder` with its own Ray and return what it printed."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # another cluster on this machine is none of ours
        "RAY_ADDRESS": "local",
        # Ray Data starts 32 processes by default to read the footers of a few files
        "RAY_DATA_PARQUET_FOOTER_NUM_ACTORS": "1",
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_rank_prints_the_best_documents_of_each_query(tmp_path):
    printed = run_script(tmp_path, ROOT / "pipelines" / "rank.py", "--documents", "3")
    assert printed.count("  document ") == 6


def test_rsa_answers_every_candidate_of_every_round(tmp_path):
    sizes = ("--questions", "2", "--rounds", "2", "--candidates", "3", "--aggregated", "2")
    printed = run_script(tmp_path, ROOT / "pipelines" / "rsa.py", *sizes)
    (line,) = (line for line in printed.splitlines() if line.startswith("all rounds: 12 rows"))
    assert "prompt tokens computed" in line


def test_rollout_samples_every_prompt_of_every_round(tmp_path):
    sizes = ("--prompts", "2", "--samples", "3", "--rounds", "2")
    printed = run_script(tmp_path, ROOT / "pipelines" / "rollout.py", *sizes)
    (line,) = (line for line in printed.splitlines() if line.startswith("all rounds: 12 rows"))
    assert "prompt tokens computed" in line


def test_the_script_of_the_readme_runs_as_printed(tmp_path):
    write_dataset(
        tmp_path / "demo-out" / "prompts",
        num_documents=2,
        questions_per_document=4,
        seed=0,
        num_files=2,
    )
    readme = (ROOT / "README.md").read_text()
    (script,) = (
        s for s in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "demo-out" in s
    )
    run_script(tmp_path, "-c", script)
    answers = pq.read_table(
        tmp_path / "demo-out" / "from-script", columns=["generated_text", "__inference_error__"]
    )
    errors = [error for error in answers.column("__inference_error__").to_pylist() if error]
    # the questions, and the bad rows of both files
    assert (answers.num_rows, len(errors)) == (12, 4)


def test_the_demo_answers_its_questions(tmp_path):
    command = ("-m", "raybatch", "demo", "--rows", "32", "--out", "out", "--replicas", "1")
    lines = run_script(tmp_path, *command).splitlines()
    assert "rows: 36 in, 36 out, 0 lost" in lines
    (score,) = [line for line in lines if line.startswith("exact match: ")]
    assert float(score.split(": ")[1]) >= 0.9
