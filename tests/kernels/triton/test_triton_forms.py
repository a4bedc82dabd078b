"""Forms of kernels that Triton compiles: few at start, and none while rows are computed."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.triton.test_triton_compile import ROOT

MAX_FORMS = 60


def census(*arguments):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.form_census", *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check(name, kind, num_steps, *num_tokens):
    found = census(name, kind, num_steps, *num_tokens)
    assert found["forms_after"] == 0, found["after"]
    assert found["forms_at_start"] <= MAX_FORMS, found["at_start"]
    assert (found["num_graph_steps"] > 0) == (kind == "graphs")
    assert found["num_steps"] > num_steps // 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Qwen3-8B", "eager"),
        pytest.param("Qwen3-8B", "graphs", marks=pytest.mark.slow),
        pytest.param("Qwen3-30B-A3B", "eager", marks=pytest.mark.slow),
        ("Qwen3-30B-A3B", "graphs"),
    ],
)
def test_no_step_compiles_a_kernel_that_start_has_not(name, kind):
    check(name, kind, 100)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["8 experts", "64 experts"])
def test_nor_does_a_larger_step_of_few_experts(name):
    check(name, "eager", 60, 16_384)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("kind", ["eager", "graphs"])
def test_none_of_ten_thousand_steps_compiles_a_kernel(name, kind):
    check(name, kind, 10_000)
