"""KV that is swapped to host memory in 8 bits: which rows use it, and its errors."""

import logging
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.config import EngineConfig
from raybatch.engine.memory.kv_cache import KVCache, KVTiers, kv_bytes_per_token
from raybatch.errors import ConfigError
from raybatch.kernels.byte_numbers import FP8, INT8, dequantise, quantise
from raybatch.models.config import read_model_spec
from raybatch.policy.memory_budget import num_host_blocks_for
from tests.backends.test_native_backend import shared_prompts
from tests.engine import real_engines
from tests.engine.fakes import make_request, run_all
from tests.engine.memory.test_swap import Choice, num_used, rows, run_to_preemption, watch_decodes
from tests.engine.sequences.test_groups import _mixed_requests, expected
from tests.engine.test_engine import make_engine, tokens_of
from tests.engine.tiny_models import save
from tests.tiers import examples

# largest error of a number relative to the largest one of its row: half a step of the dtype
LARGEST_ERROR = {INT8: 0.5 / 127, FP8: 16 / 448}
BOTH = pytest.mark.parametrize("kind", ["int8", "fp8"])


def make(**options):
    """An engine without exact host blocks by default."""
    sizes = {"num_blocks": 20, "host": 0, "rounded": 100}
    engine, runner = make_engine(**sizes | {"recovery": Choice()} | options)
    watch(engine)
    return engine, runner


def watch(engine):
    """Record in `engine.rounded` the samples that were restored from 8 bits."""
    swap, engine.rounded = engine._scheduler._swap, set()
    load = swap.load

    def note(record, *place):
        is_rounded = record.swapped.is_rounded
        is_back = load(record, *place)
        if is_rounded and is_back:
            engine.rounded.add((record.request.request_id, record.sample_idx))
        return is_back

    swap.load = note


def others(done, engines):
    rounded = set().union(*(engine.rounded for engine in engines))
    return {key: tokens for key, tokens in done.items() if key not in rounded}


@pytest.mark.parametrize("host", [0, 12, 100])
def test_exact_blocks_are_used_first(rng, host):
    requests = rows(rng)
    engine, _ = make(host=host)
    engine.add(requests)
    found = tokens_of(run_all(engine))
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_recomputed_tokens, stats.kv_used_fraction) == (0, 0.0)
    assert len(engine.rounded) == stats.num_rounded_sequences
    assert (stats.num_rounded_tokens > 0) == (host < 100)
    assert (stats.num_rounded_tokens < stats.num_swapped_tokens) == (host > 0)
    assert others(expected(requests), [engine]) == others(found, [engine])
    # rounding changes tokens of the fake model
    assert (expected(requests) != found) == (host < 100)
    assert num_used(engine) == 0


def test_without_free_blocks_of_either_kind_tokens_are_recomputed(rng):
    requests = rows(rng)
    engine, _ = make(host=3, rounded=3)
    engine.add(requests)
    found = tokens_of(run_all(engine))
    assert engine.stats().num_recomputed_tokens > 0
    assert others(expected(requests), [engine]) == others(found, [engine])


def test_no_clock_decides_which_rows_are_rounded():
    engine, _ = make(host_kv_bytes=1, host_kv_dtype="int8", host=8, recovery=None)
    assert engine._recovery is None
    exact, _ = make(host_kv_bytes=1, host=8, recovery=None)
    assert exact._recovery is not None


def preempt(engine):
    """Preempt the latest sequence, and evict its cached blocks."""
    scheduler = engine._scheduler
    slot = scheduler._preempt_latest()
    engine._clear_slot(slot)
    evicted = scheduler.blocks.allocate(scheduler.blocks.num_available)
    scheduler.blocks.release(np.array(evicted, np.int32), keep_cached=False)


@pytest.mark.parametrize("is_saved_again", [False, True])
def test_no_row_finds_a_prompt_that_was_restored_rounded(is_saved_again):
    engine, _ = make(num_blocks=60, host=20)
    request = make_request(0, np.arange(100, 121), max_tokens=60)
    engine.add([request])
    swap = engine._scheduler._swap
    engine.step()
    exact = swap._tiers[False].blocks
    held = np.array(exact.allocate(20), np.int32)
    preempt(engine)
    exact.release(held)
    engine.step()
    assert engine.rounded == {(0, 0)}
    if is_saved_again:
        # an exact copy of rounded KV
        preempt(engine)
        assert exact.num_used > 0
        engine.step()
    late = make_request(1, [*request.prompt_token_ids, 9], max_tokens=6)
    engine.add([late])
    found = tokens_of(run_all(engine))
    assert expected([late])[1, 0] == found[1, 0]
    assert expected([request])[0, 0] != found[0, 0]
    assert engine.stats().cached_tokens == 0


@pytest.mark.parametrize("caching", [False, True])
def test_samples_do_not_start_from_a_prompt_that_was_rounded(caching):
    engine, _ = make(max_batched_tokens=8, enable_prefix_caching=caching)
    request = make_request(0, np.arange(100, 121), n=3, max_tokens=6)
    engine.add([request])
    engine.step()
    engine.step()
    preempt(engine)
    found = tokens_of(run_all(engine))
    assert engine.rounded == {(0, 0)}
    answers = expected([request])
    assert answers[0, 0] != found[0, 0]
    assert [answers[0, i] for i in (1, 2)] == [found[0, i] for i in (1, 2)]
    # the second one recomputes the prompt, and the third starts with it
    assert engine.stats().cached_tokens == 21
    assert engine.stats().num_copied_blocks == 1


@settings(max_examples=examples(15, full=100))
@given(
    seed=st.integers(0, 2**32 - 1),
    num_blocks=st.integers(16, 40),
    host=st.integers(0, 12),
    rounded=st.integers(4, 30),
    budget=st.integers(6, 60),
    caching=st.booleans(),
    failing=st.sets(st.integers(0, 12)),
    events=st.lists(st.integers(0, 9), min_size=20, max_size=50),
)
def test_rows_that_were_never_rounded_keep_their_tokens(
    seed, num_blocks, host, rounded, budget, caching, failing, events
):
    """With prefixes, groups, samples, prompt chunks, evictions, and moves between engines."""
    rng = np.random.default_rng(seed)
    engines = []
    for _ in range(2):
        engine, runner = make(
            num_blocks=num_blocks,
            host=host,
            rounded=rounded,
            max_batched_tokens=budget,
            max_num_seqs=6,
            enable_prefix_caching=caching,
        )
        runner.failing_moves = failing
        watch_decodes(engine)
        engines.append(engine)
    requests = _mixed_requests(rng)
    new, done = list(requests), {}
    for event in events:
        ids = rng.choice(len(requests), 3).tolist()
        if event < 2:
            source, target = engines[:: rng.choice((1, -1))]
            target.restore(source.export(ids, with_kv=bool(event)))
        elif event in (2, 3) and new:
            engines[0].add(new[:6])
            new = new[6:]
        elif event in (4, 5) and engines[0].table.num_running:
            preempt(engines[0])
        else:
            for engine in engines:
                done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
        for engine in engines:
            engine.check()
    engines[0].add(new)
    for engine in engines:
        done |= run_all(engine)
        assert (num_used(engine), engine.stats().kv_used_fraction) == (0, 0.0)
    assert others(expected(requests), engines) == others(tokens_of(done), engines)


@pytest.mark.parametrize("is_back", [False, True], ids=["on the host", "on the device"])
def test_a_row_that_leaves_takes_no_rounded_kv_along(rng, is_back):
    engine, _ = make(enable_prefix_caching=False, max_num_seqs=4)
    requests = rows(rng, count=6)
    engine.add(requests)
    done = run_to_preemption(engine)
    while is_back and not engine.rounded:
        done |= {(c.request_id, c.sample_idx): c for c in engine.step()}
    table = engine.table
    running = {r.request.request_id for r in table.records if r is not None}
    rounded = {i for i, _ in engine.rounded}
    assert bool(rounded & running) == is_back
    states = engine.export(range(6), with_kv=True)
    assert running - rounded == {s.request.request_id for s in states if s.kv is not None}
    target, _ = make()
    target.restore(states)
    found = tokens_of(done | run_all(target))
    assert others(expected(requests), [engine, target]) == others(found, [engine, target])


def make_tiers(dtype, device_dtype=torch.float32, num_blocks=40, head_dim=6):
    torch.manual_seed(3)
    shape = (2, num_blocks, 2, 4, head_dim)
    cache = KVCache(k=torch.randn(shape).to(device_dtype), v=torch.randn(shape).to(device_dtype))
    return cache, KVTiers(cache, num_blocks, dtype=dtype)


@pytest.mark.parametrize("device_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [INT8, FP8])
def test_blocks_come_back_rounded_once_row_by_row(dtype, device_dtype):
    cache, tiers = make_tiers(dtype, device_dtype)
    before = (cache.k.clone(), cache.v.clone())
    # more blocks than are rounded at once, in several ranges
    source, host = np.arange(36)[::-1].copy(), np.r_[0:20, 22:38]
    target = np.roll(source, 5)
    tiers.save_blocks(source, host)
    tiers.load_blocks(host, target)
    for pool, old in zip((cache.k, cache.v), before, strict=True):
        restored = dequantise(quantise(old[:, source], dtype), 6, device_dtype)
        assert torch.equal(pool[:, target], restored)
        assert torch.equal(pool[:, 36:], old[:, 36:])
        error = (pool[:, target].float() - old[:, source].float()).abs()
        share = error / old[:, source].float().abs().amax(-1, keepdim=True)
        # bfloat16 rounds again
        slack = 1.001 if device_dtype == torch.float32 else 2
        assert 0 < float(share.max()) <= LARGEST_ERROR[dtype] * slack
    assert tiers.block_bytes == 2 * 2 * 2 * 4 * 12


@BOTH
def test_half_of_the_memory_is_for_exact_blocks(tmp_path, kind):
    save("llama", tmp_path)
    spec = read_model_spec(tmp_path)
    exact, rounded = (4 * kv_bytes_per_token(spec, dtype) for dtype in (torch.float32, INT8))

    def count(host_kv_bytes, dtype=kind):
        config = EngineConfig(block_size_tokens=4, host_kv_bytes=host_kv_bytes, host_kv_dtype=dtype)
        token_bytes, rounded_bytes = (
            kv_bytes_per_token(spec, kv_dtype) for kv_dtype in (torch.float32, INT8)
        )
        return num_host_blocks_for(config, token_bytes=token_bytes, rounded_bytes=rounded_bytes)

    assert count(21 * exact, "auto") == (21, 0)
    assert count(21 * exact) == (10, 11 * exact // rounded)
    with pytest.raises(ConfigError, match=rf"needs {2 * exact} with host_kv_dtype"):
        count(2 * exact - 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_kv_bytes": None}, "applies to KV in host memory; set host_kv_bytes as well"),
        ({"kv_cache_dtype": "fp8"}, "no effect with kv_cache_dtype.*leave one"),
        ({"kv_offload": True}, "none with kv_offload; set kv_cache_dtype"),
    ],
)
def test_host_kv_dtype_is_refused_with_options_that_exclude_it(options, message):
    with pytest.raises(ConfigError, match=rf"engine\.host_kv_dtype .*{message}"):
        EngineConfig(**{"host_kv_bytes": 1 << 30, "host_kv_dtype": "int8"} | options)


@pytest.fixture(scope="module", params=["llama", "qwen3-moe"])
def engines(request, tiny_checkpoint):
    return real_engines.Engines(tiny_checkpoint(request.param))


@BOTH
def test_real_rows_that_were_never_rounded_keep_their_tokens(engines, kind, caplog):
    prompts = shared_prompts(np.random.default_rng(5))
    requests = real_engines.requests_of(prompts, max_tokens=24, n=2)
    sizes = {"block_size_tokens": 4, "max_batched_tokens": 37}
    ample = real_engines.run(engines.make(engines.config(**sizes)), requests)
    with caplog.at_level(logging.INFO):
        config = engines.config(num_blocks=26, num_host_blocks=24, host_kv_dtype=kind, **sizes)
        engine = engines.make(config)
    assert re.search(rf"12 swap blocks in host memory, \d+ more in {kind}", caplog.text)
    watch(engine)
    short = real_engines.run(engine, requests)
    stats = engine.stats()
    assert 0 < stats.num_rounded_tokens < stats.num_swapped_tokens
    assert stats.num_rounded_sequences == len(engine.rounded) < len(short)
    plain, found = real_engines.tokens_of(ample), real_engines.tokens_of(short)
    assert others(plain, [engine]) == others(found, [engine])
    changed = [key for key in plain if plain[key] != found[key]]
    assert len(changed) < len(engine.rounded)
