"""Forms of kernels that Triton compiles: few at start, and none while rows are computed."""

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.triton.test_triton_compile import ROOT

MAX_FORMS = 60


# model, kind and steps; the last of them with the tokens of a step that an engine has chosen
QUICK = (
    ("Qwen3-8B", "eager", 100),
    ("Qwen3-30B-A3B", "graphs", 100),
    ("8 experts", "eager", 60, 16_384),
    ("64 experts", "eager", 60, 16_384),
)


def census(*cases):
    """Return what is counted of each case, in one process."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    texts = [":".join(map(str, case)) for case in cases]
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.form_census", *texts],
        cwd=ROOT,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(cases) :]]


@pytest.fixture(scope="module")
def counted():
    """What is counted of each quick case."""
    return dict(zip(QUICK, census(*QUICK), strict=True))


def check(found, kind, num_steps):
    assert found["forms_after"] == 0, found["after"]
    assert found["forms_at_start"] <= MAX_FORMS, found["at_start"]
    assert (found["num_graph_steps"] > 0) == (kind == "graphs")
    assert found["num_steps"] > num_steps // 2


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", QUICK, ids=[case[0] for case in QUICK])
def test_no_step_compiles_a_kernel_that_start_has_not(counted, case):
    """Nor does a larger step of few experts."""
    _, kind, num_steps, *_ = case
    check(counted[case], kind, num_steps)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "kind"), [("Qwen3-8B", "graphs"), ("Qwen3-30B-A3B", "eager")])
def test_no_step_of_other_kinds_compiles_one_either(name, kind):
    (found,) = census((name, kind, 100))
    check(found, kind, 100)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["Qwen3-8B", "Qwen3-30B-A3B"])
@pytest.mark.parametrize("kind", ["eager", "graphs"])
def test_none_of_ten_thousand_steps_compiles_a_kernel(name, kind):
    (found,) = census((name, kind, 10_000))
    check(found, kind, 10_000)
