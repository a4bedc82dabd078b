import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
# limits of one thread block on an H100
MAX_SHARED_BYTES = 227 << 10
WITH_PRODUCTS = {
    "decode_kernel",
    "down_kernel",
    "gate_up_kernel",
    "ragged_kernel",
    "scaled_linear_kernel",
}


def compiled(tmp_path, *arguments):
    """Compile in a process that does not interpret; return the report of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_kernels", *arguments],
        cwd=ROOT,
        env=environment
        | {
            "TRITON_CACHE_DIR": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "scripts"))),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(made, pointer):
    check_machine_code(made)
    products = [m for m in made if m["kernel"] in WITH_PRODUCTS]
    assert [m for m in products if pointer not in m["pointers"]] == []


def check_machine_code(made):
    assert [m for m in made if not m["cubin_bytes"]] == []
    assert [m for m in made if m["shared_bytes"] > MAX_SHARED_BYTES] == []
    products = [m for m in made if m["kernel"] in WITH_PRODUCTS]
    assert {m["kernel"] for m in products} == WITH_PRODUCTS
    assert [m for m in products if not m["mma"] + m["wgmma"]] == []
    decodes = [m for m in made if m["kernel"] == "decode_kernel"]
    # also with 8-bit pools and weights
    assert {"*i8", "*u8"} & {p for m in decodes for p in m["pointers"]}
    assert [m for m in decodes if m["byte_loads"]] == []
    # a tile of keys is loaded while the previous one is computed
    assert [m for m in decodes if m["is_tile_in_block"] and m["buffers"] < 2] == []
    assert any(m["is_tile_in_block"] for m in decodes)
    # pairs of a rotation are neighbours, and rows are read 16 bytes at a time
    assert [m for m in made if m["kernel"] == "heads_kernel" and m["short_loads"]] == []
    # products of float32 in three passes exceed the registers
    halves = [m for m in made if m not in products or {"*bf16", "*fp16"} & {*m["pointers"]}]
    assert [m for m in halves if m["stack_bytes"]] == []


@pytest.mark.timeout(900)
def test_one_form_of_every_kernel_compiles_for_an_h100_without_a_gpu(tmp_path):
    made = compiled(tmp_path, "bfloat16", "once")
    check(made, "*bf16")
    assert len(made) == 1 + len({m["kernel"] for m in made})


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("dtype", "pointer"),
    [
        pytest.param("float16", "*fp16", marks=pytest.mark.exhaustive),
        ("bfloat16", "*bf16"),
        pytest.param("float32", "*fp32", marks=pytest.mark.exhaustive),
    ],
)
def test_every_kernel_compiles_for_an_h100_without_a_gpu(dtype, pointer, tmp_path):
    made = compiled(tmp_path, dtype)
    check(made, pointer)
    assert {"*i8", "*u8"} <= {
        p for m in made if m["kernel"] == "decode_kernel" for p in m["pointers"]
    }
    assert len(made) > len({m["kernel"] for m in made})
    if pointer != "*fp32":
        # products of 64 rows and more; a decode has the heads that share keys
        assert {m["kernel"] for m in made if m["wgmma"]} == WITH_PRODUCTS - {"decode_kernel"}


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
def test_all_launches_of_engines_compile_for_an_h100(tmp_path):
    made = compiled(tmp_path, "engines")
    assert len(made) > 100
    check_machine_code(made)
