"""Kernels compiled for the vectors of other processors."""

import pytest
import torch

from raybatch.errors import ConfigError
from raybatch.kernels.native.compiler import compile_library, has_compiler, host_vectors
from raybatch.kernels.native.decode_attention import decode_form
from raybatch.kernels.native.linears import compiled_linears, panelled_experts
from raybatch.kernels.native.small_ops import compiled_small_ops
from tests.engine.real_engines import Engines, requests_of, run, tokens_of
from tests.engine.tiny_models import build
from tests.kernels.keyless_rows import BLOCK_SIZE, STEPS
from tests.kernels.test_rows_without_keys import (
    HEAD_DIM,
    NUM_HEADS,
    NUM_KV_HEADS,
    POOLS,
    check_shared_runs,
)

VARIABLE = "RAYBATCH_KERNEL_VECTORS"
BYTES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(params=["avx2", "plain"])
def vectors(request, monkeypatch):
    """Vectors narrower than those of the host, which all other tests use."""
    if not has_compiler():
        pytest.skip("no C compiler here")
    if request.param not in host_vectors():
        pytest.skip("not on this processor")
    monkeypatch.setenv(VARIABLE, request.param)


# each is compared with torch once compiled; each converts bytes by other instructions


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", POOLS.values(), ids=POOLS.keys())
def test_attention_over_each_kind_of_pool(dtype):
    form = decode_form(
        head_dim=HEAD_DIM,
        num_grouped=NUM_HEADS // NUM_KV_HEADS,
        block_size=BLOCK_SIZE,
        kv_dtype=dtype,
    )
    assert form is not None
    for step in STEPS.values():
        for window in (None, 3):
            check_shared_runs(form, step, dtype, window)


@pytest.mark.usefixtures("vectors")
@pytest.mark.parametrize("dtype", BYTES.values(), ids=BYTES.keys())
def test_linears_and_experts_of_floats_and_bytes(dtype):
    assert compiled_linears(dtype) is not None
    assert panelled_experts(32, 16, dtype) is not None


@pytest.mark.usefixtures("vectors")
def test_an_engine_gives_the_tokens_of_torch(tmp_path, rng):
    assert compiled_small_ops() is not None
    build("qwen3-moe").save_pretrained(tmp_path)
    engines = Engines(tmp_path)
    prompts = [rng.integers(1, 211, length).tolist() for length in (1, 9, 30)]
    found = []
    for is_compiled in (True, False):
        config = engines.config(block_size_tokens=8, compile_kernels=is_compiled)
        found.append(tokens_of(run(engines.make(config), requests_of(prompts, max_tokens=12))))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("value", "flag"),
    [("avx512", "-march=x86-64-v4"), ("AVX2", "-march=x86-64-v3"), ("plain", None)],
)
def test_the_compiler_gets_the_vectors_as_flags(value, flag, monkeypatch, tmp_path):
    if value.lower() not in host_vectors():
        pytest.skip("not on this processor")
    monkeypatch.setenv(VARIABLE, value)
    assert flags_of_vectors(monkeypatch, tmp_path) == [flag] * bool(flag)


@pytest.mark.parametrize(
    ("machine", "flag"),
    [("x86_64", "-march=native"), ("aarch64", "-march=native"), ("arm64", "-mcpu=native")],
)
def test_the_compiler_gets_all_vectors_of_a_host(machine, flag, monkeypatch, tmp_path):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert flags_of_vectors(monkeypatch, tmp_path) == [flag]


def flags_of_vectors(monkeypatch, folder):
    """Return the compiler flags that select the processor."""
    compiler, arguments = folder / "cc", folder / "arguments"
    compiler.write_text(f"#!/bin/sh\necho \"$@\" >'{arguments}'\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert compile_library("small_ops.c", {}) is None
    return [part for part in arguments.read_text().split() if part.startswith(("-march", "-mcpu"))]


def test_kernels_of_other_vectors_are_other_kernels(monkeypatch):
    if not has_compiler():
        pytest.skip("no C compiler here")
    monkeypatch.delenv(VARIABLE, raising=False)
    own = compiled_small_ops()
    monkeypatch.setenv(VARIABLE, "plain")
    plain = compiled_small_ops()
    assert plain is not own
    assert plain is compiled_small_ops()
    monkeypatch.delenv(VARIABLE)
    assert own is compiled_small_ops()


def test_unknown_vectors_are_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "sse")
    with pytest.raises(ConfigError, match="must be one of avx512, avx2, plain, got 'sse'"):
        compiled_small_ops()


def test_vectors_that_the_host_lacks_are_refused_with_the_supported_ones(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setenv(VARIABLE, "avx512")
    with pytest.raises(ConfigError, match=r"is avx512, .* set it to one of avx2, plain, or unset"):
        compile_library("small_ops.c", {})


@pytest.mark.parametrize(
    ("machine", "capability", "expected"),
    [
        ("x86_64", "AVX512", ("avx512", "avx2", "plain")),
        ("AMD64", "AVX2", ("avx2", "plain")),
        ("x86_64", "DEFAULT", ("plain",)),
        ("aarch64", "SVE256", ("plain",)),
    ],
)
def test_what_hosts_can_run(machine, capability, expected, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert expected == host_vectors()
