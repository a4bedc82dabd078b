"""Weights that do not fit a GPU: resident layers by free memory; a CPU acts as the GPU."""

import logging
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.forward.decoder import Decoder
from raybatch.engine.loading import peak_memory
from raybatch.engine.loading.loaded_model import load_model
from raybatch.engine.loading.peak_memory import step_peak_bytes
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.profile import module_profile
from raybatch.engine.profile.module_profile import profile_options
from raybatch.engine.weights.loading import load_weights
from raybatch.models.config import read_model_spec
from tests.engine.loading.storage_peak import StoragePeak
from tests.engine.profile.test_module_profile import OPTIONS
from tests.engine.test_runtime import BLOCK, finish, make_engine, requests, tokens_of
from tests.engine.tiny_models import build
from tests.engine.weights.test_streamed_layers import held_bytes
from tests.tiers import examples

CPU = torch.device("cpu")
NUM_LAYERS = 6

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe-sparse-step"])
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    build(request.param, num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dense")
    build("qwen3", num_hidden_layers=NUM_LAYERS).save_pretrained(folder)
    return folder


def quick_options(config):
    return replace(OPTIONS, block_size=profile_options(config).block_size)


def measure(run):
    """Peak bytes as an allocator counts them."""
    counted = StoragePeak(CPU)
    with counted:
        run()
    return counted.peak


@pytest.fixture
def fake_gpu(monkeypatch, tmp_path):
    """Give the CPU the free memory of a GPU; return the layers that probes have loaded."""
    probed = []

    def fake(free_bytes):
        def load(path, spec, form, **options):
            probed.append(spec.num_layers)
            with monkeypatch.context() as patch:
                # a GPU has no prepared file, which a probe would write with only its layers
                patch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path))
                return load_weights(path, spec, form, **options)

        monkeypatch.setattr(peak_memory, "free_device_bytes", lambda _: free_bytes)
        monkeypatch.setattr(peak_memory, "load_weights", load)
        monkeypatch.setattr(peak_memory, "profile_options", quick_options)
        monkeypatch.setattr(peak_memory, "_on_gpu", lambda _: measure)
        # less than a cache holds, to read quickly
        monkeypatch.setattr(module_profile, "_BEYOND_CACHE_BYTES", 1 << 20)
        monkeypatch.setattr(module_profile, "_COPY_BYTES", (1 << 10, 1 << 14))
        # partial results of kernels, as many as for a small model
        monkeypatch.setattr(peak_memory, "_unmeasured_bytes", lambda *_: 0)
        return probed

    return fake


def config_of(**options):
    given = {"max_batched_tokens": 16, "max_num_seqs": 8, "block_size_tokens": 4}
    return EngineConfig(device="cpu", tune_malloc=False, **(given | options))


def sizes_of(path, **options):
    return load_model(str(path), config_of(**options)).sizes


def test_a_cpu_keeps_all_layers_and_so_does_a_gpu_with_enough_memory(path, fake_gpu):
    sizes = sizes_of(path)
    assert not load_model(str(path), config_of()).placement.streamed
    probed = fake_gpu(100 * sizes.total_bytes)
    assert not load_model(str(path), config_of()).placement.streamed
    fake_gpu(sizes.total_bytes // 2)
    assert not load_model(str(path), config_of(device_weight_bytes=None)).placement.streamed
    assert probed == []


def test_steps_are_measured_before_anything_is_streamed(dense, fake_gpu, caplog):
    config, sizes = config_of(max_model_len=64), sizes_of(dense)
    kv = 16 * 64 * kv_bytes_per_token(read_model_spec(dense), torch.float32)
    # a third of the memory for steps is slightly too little
    free = int((kv + 0.9 * sizes.total_bytes) / (0.9 - 1 / 3)) - 1000
    probed = fake_gpu(free)
    with caplog.at_level(logging.INFO, logger=peak_memory.__name__):
        assert not load_model(str(dense), config).placement.streamed
    assert probed == [2]
    assert "engine.device_weight_bytes" not in caplog.text
    # streamed feed-forward blocks leave memory for a few rows
    fake_gpu(None)
    step = step_bytes(dense, config.token_budget, config.max_num_seqs)
    fake_gpu(sizes.total_bytes + step)
    assert load_model(str(dense), config).placement.streamed


def step_bytes(path, max_batched_tokens, max_num_seqs):
    """Return the bytes of the largest step."""
    config = config_of(
        max_batched_tokens=max_batched_tokens, max_num_seqs=max_num_seqs, max_model_len=64
    )
    model = load_model(str(path), replace(config, device_weight_bytes=None))
    decoder = Decoder(model.spec, model.weights)
    options = {"kv_dtype": torch.float32, "device": CPU, "measure": measure}
    return step_peak_bytes(decoder, config, model.spec, **options)


@pytest.mark.parametrize("kv_offload", [False, True])
def test_tokens_are_those_of_the_model_that_fits(path, fake_gpu, caplog, kv_offload):
    expected, _, _ = run(path)
    sizes = sizes_of(path, compile_kernels=False)
    num_blocks = 40
    pool = num_blocks * 4 * kv_bytes_per_token(read_model_spec(path), torch.float32)
    options = {"num_blocks": num_blocks, "max_model_len": 64, "max_num_seqs": 9}
    options |= {"kv_offload": kv_offload, "host_kv_bytes": 20 * pool}
    fake_gpu(None)
    step = step_bytes(path, 16, 9)
    free = sizes.total_bytes + pool + step - max(sizes.ffn_bytes)
    fake_gpu(free)
    with caplog.at_level(logging.INFO, logger=peak_memory.__name__):
        found, stats, runner = run(path, max_batched_tokens=16, **options)
    assert expected == found
    store = runner.decoder.layers
    assert store.is_streamed
    assert stats.num_steps * len(store._placement.streamed) == stats.num_weight_copies
    # weights, KV and the largest step, which was measured
    (warning,) = [text for text in caplog.messages if "set engine.device_weight_bytes to" in text]
    assert warning.startswith(
        f"set engine.device_weight_bytes to {store._placement.device_bytes}: "
    )
    assert ("KV in host memory" in warning) == kv_offload
    held = held_bytes(store) + sizes.other_bytes
    assert held == store._placement.device_bytes
    assert held + runner.cache.k.nbytes + runner.cache.v.nbytes + step <= free


def run(path, *, counted=None, **options):
    engine, runner = make_engine(path, compile_kernels=False, **options)
    engine.add(requests())
    with counted or nullcontext():
        done = finish(engine)
    return tokens_of(done), engine.stats(), runner


@pytest.fixture(scope="module")
def expected(dense):
    return run(dense, max_model_len=64)[0]


@settings(
    max_examples=examples(5, full=80), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    num_resident=st.integers(0, NUM_LAYERS - 1),
    buffers=st.integers(1, 3),
    num_blocks=st.integers(17, 40),
    most=st.sampled_from([9, 16, 200]),
    kv_offload=st.booleans(),
)
def test_any_weight_placement_gives_the_same_tokens_with_any_batches(
    dense, expected, num_resident, buffers, num_blocks, most, kv_offload
):
    sizes = sizes_of(dense, compile_kernels=False)
    layers = (num_resident + buffers) * max(sizes.ffn_bytes)
    options = {"device_weight_bytes": sizes.other_bytes + layers, "weight_buffers": buffers}
    block_bytes = BLOCK * kv_bytes_per_token(read_model_spec(dense), torch.float32)
    if kv_offload:
        options |= {"kv_offload": True, "host_kv_bytes": 100 * block_bytes}
    counted = StoragePeak(CPU)
    found, stats, runner = run(
        dense,
        counted=counted,
        num_blocks=num_blocks,
        max_batched_tokens=most,
        max_num_seqs=9,
        max_model_len=64,
        **options,
    )
    assert expected == found
    assert (runner.window is not None) == kv_offload
    store, budget = runner.decoder.layers, options["device_weight_bytes"]
    num_streamed = len(store._placement.streamed) if store.is_streamed else 0
    assert stats.num_steps * num_streamed == stats.num_weight_copies
    assert not store.is_streamed or held_bytes(store) + sizes.other_bytes <= budget
    if kv_offload:
        window = 2 * runner.num_window_blocks * block_bytes // NUM_LAYERS
        assert window <= runner.cache.k.nbytes + runner.cache.v.nbytes == num_blocks * block_bytes
    # no step copies all streamed weights
    assert most > 16 or counted.peak < sum(sizes.ffn_bytes)
