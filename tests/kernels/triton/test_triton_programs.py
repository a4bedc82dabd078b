"""Captured steps launch and compute little beyond what the steps of real workloads need."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.triton.test_triton_compile import ROOT

MOST = 1.15
MOST_GRAPHS = 125


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("model", "name", "num_rows", "num_steps"),
    [
        ("Qwen3-8B", "W1", 320, 300),
        ("Qwen3-8B", "W2", 320, 500),
        pytest.param("Qwen3-8B", "W4", 300, 700, marks=pytest.mark.slow),
        ("Qwen3-30B-A3B", "W1", 320, 300),
        pytest.param("Qwen3-30B-A3B", "W2", 320, 500, marks=pytest.mark.slow),
        pytest.param("Qwen3-30B-A3B", "W4", 300, 700, marks=pytest.mark.slow),
    ],
)
def test_what_graphs_launch_is_little_more_than_steps_need(model, name, num_rows, num_steps):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    arguments = map(str, (model, name, num_rows, num_steps))
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.program_census", *arguments],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["num_steps"] > 100
    assert found["num_graphs"] <= MOST_GRAPHS
    assert {kind: found[kind] for kind in ("programs", "rows", "logits", "flops")} == {
        kind: pytest.approx(1, abs=MOST - 1) for kind in ("programs", "rows", "logits", "flops")
    }
