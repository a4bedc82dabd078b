"""The native engine is measured like any other backend."""

import time

import pytest

from raybatch.backends.cost_cache import limits_of, load_or_measure, measure_backend
from raybatch.backends.registry import create_backend
from raybatch.config import BackendConfig, EngineConfig
from raybatch.policy.cost.cost_model import fit
from tests.engine.tiny_models import build

ENGINE = EngineConfig(
    dtype="float32", device="cpu", kv_cache_bytes=1 << 20, max_num_seqs=16, max_batched_tokens=256
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(path)
    return str(path)


def test_the_native_engine_is_measured_and_left_empty(checkpoint):
    backend = create_backend(checkpoint, BackendConfig(kind="native"), ENGINE)
    limits = limits_of(backend, ENGINE.token_budget)
    ticks = iter(range(10**6))
    steps = measure_backend(backend, limits, clock=lambda: next(ticks) * 1e-5)
    stats = backend.stats()
    assert (0, 0, 0) == (stats.num_running, stats.num_waiting, backend.num_unfinished())
    assert 16 == max(step.rows for step in steps)
    assert fit(steps, limits).step_s > 0


def test_prompts_of_the_program_share_nothing_but_their_prefix(checkpoint):
    backend = create_backend(checkpoint, BackendConfig(kind="native"), ENGINE)
    limits = limits_of(backend, ENGINE.token_budget)
    ticks = iter(range(10**6))
    steps = measure_backend(backend, limits, clock=lambda: next(ticks) * 1e-5, vocab_size=211)
    shared = sum(int(step.shared_pairs - step.cascade_reads) for step in steps)
    # prompts of 32 tokens after a cached prefix, measured three times
    cached = 3 * sum(int(step.past_pairs) // 32 for step in steps)
    assert cached > 0
    assert shared + cached == backend.stats().cached_tokens


def test_a_native_model_is_measured_and_kept(checkpoint, tmp_path):
    # load of other tests on this host must not matter
    options = {"folder": tmp_path, "cpu_clock": time.perf_counter}
    first = load_or_measure(checkpoint, BackendConfig(kind="native"), ENGINE, **options)
    assert 16 == first.limits.max_num_seqs
    assert first == load_or_measure(checkpoint, BackendConfig(kind="native"), ENGINE, **options)
