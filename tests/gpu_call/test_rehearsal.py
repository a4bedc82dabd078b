"""The whole call on a CPU: all stages, with small shapes and Triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    *("facts.json", "engine.json", "kernels.json", "steps.json", "bench.json"),
    *("junit.xml", "trace.json.gz", "tc.tar.gz"),
}
# a machine that does nothing else needs 300 s; one that runs tests beside it takes several times as
# long, for which RAYBATCH_TEST_PATIENCE allows
SECONDS = round(300 * float(os.environ.get("RAYBATCH_TEST_PATIENCE", "4")))


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
def test_the_call_runs_every_stage_on_a_cpu(tmp_path):
    done = subprocess.run(
        ["scripts/gpu_call.sh", str(SECONDS), "--device", "cpu"],
        cwd=ROOT,
        env=os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert FILES == {path.name for path in tmp_path.iterdir()}
    assert all(path.stat().st_size < 16 << 20 for path in tmp_path.iterdir())
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert "9 of 9 stages are ok" == lines[-1]
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert ["ok"] * 9 == [stage["status"] for stage in facts["stages"].values()]
    # of both models; a far pool; captured steps
    assert {"8B", "30B-A3B"} == set(facts["check"]["ops"])
    assert facts["forms"]["made"]
    steps = json.loads((tmp_path / "steps.json").read_text())
    assert all(step["step_ms"] > 0 for step in steps["steps"].values())
    assert steps["profile"]
    engine = json.loads((tmp_path / "engine.json").read_text())
    assert 8 == engine["beside_transformers"]["equal_rows"]
    assert 8 == engine["beside_without_graphs"]["equal_rows"]
    assert json.loads((tmp_path / "kernels.json").read_text())["times"]
