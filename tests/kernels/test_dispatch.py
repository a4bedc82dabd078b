import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from raybatch.kernels import attention, moe, small_ops
from raybatch.kernels.dispatch import ops_for


def output_of(program):
    """Run a program in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_cpu_runs_the_references_themselves():
    ops = ops_for(torch.device("cpu"))
    assert ops.rms_norm is small_ops.rms_norm
    assert ops.moe_ffn is moe.moe_ffn
    assert ops.prepare_attention is attention.prepare_attention
    assert ops.finish_heads is attention.finish_heads
    assert ops.attend is attention.attend


def test_triton_is_not_imported_for_a_cpu():
    programs = [
        "import raybatch",
        "import raybatch.kernels.triton",
        "import raybatch.engine.forward.decoder",
        "import torch; from raybatch.kernels.dispatch import ops_for; ops_for(torch.device('cpu'))",
    ]
    check = "import sys; print([m for m in sys.modules if m.split('.')[0] == 'triton'])"
    lines = [line for program in programs for line in (program, check)]
    assert ["[]"] * len(programs) == output_of("\n".join(lines)).splitlines()


ON_GPU = """
import dataclasses, torch
from raybatch.kernels.dispatch import REFERENCE, ops_for
ops = ops_for(torch.device("cuda"))
for field in dataclasses.fields(ops):
    op = getattr(ops, field.name)
    if callable(op):
        print(op.__module__)
assert ops.is_fixed and not REFERENCE.is_fixed
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton has wheels for Linux alone")
def test_a_gpu_runs_the_kernels_of_triton():
    modules = output_of(ON_GPU).split()
    others = [name for name in modules if not name.startswith("raybatch.kernels.triton.")]
    assert len(modules) == 10
    assert others == []


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from raybatch.kernels.dispatch import REFERENCE, ops_for
import raybatch.kernels.triton
print(ops_for(torch.device("cuda")) is REFERENCE)
"""


def test_a_gpu_without_triton_runs_the_references():
    assert "True" == output_of(WITHOUT_TRITON)
