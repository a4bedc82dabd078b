"""Captured steps launch and compute little beyond what the steps of real workloads need."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.triton.test_triton_compile import ROOT

MOST = 1.15
# tiles of experts have room for rows that random choices do not fill
MOST_OF_EXPERTS = 1.7
MOST_GRAPHS = 125


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("model", "name", "num_rows", "num_steps"),
    [
        ("Qwen3-8B", "W1", 320, 300),
        pytest.param("Qwen3-8B", "W2", 320, 500, marks=pytest.mark.slow),
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
    assert found["worst"]["programs"] >= found["programs"]
    most = dict.fromkeys(("programs", "rows", "logits", "flops"), MOST)
    if "expert_rows" in found:
        most |= {"flops": MOST_OF_EXPERTS, "expert_rows": MOST_OF_EXPERTS}
    assert [kind for kind, limit in most.items() if not 1 <= found[kind] <= limit] == [], found
