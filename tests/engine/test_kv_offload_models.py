"""Real (tiny) models whose KV lives in host memory: the tokens of transformers, the same KV."""

import numpy as np
import pytest
import torch

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import KVCache, kv_bytes_per_token
from raybatch.engine.memory.kv_tiers import LayerWindow
from raybatch.engine.sampling.sampler import Sampler
from raybatch.models.config import read_model_spec
from tests import tolerances
from tests.engine.fakes import FakeStopChecker, make_request
from tests.engine.test_native_backend import VARIANTS, greedy_reference, run, shared_prompts
from tests.engine.tiny_models import TOLERANCE
from tests.tiers import singles

BLOCK = 4


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAYBATCH_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def make(path, *, num_blocks, host=300, **options):
    block_bytes = BLOCK * kv_bytes_per_token(read_model_spec(path), torch.float32)
    config = EngineConfig(
        **(
            {
                "block_size_tokens": BLOCK,
                "dtype": "float32",
                "device": "cpu",
                "max_batched_tokens": 64,
                "max_num_seqs": 17,
                "kv_offload": True,
                "kv_cache_bytes": num_blocks * block_bytes,
                "host_kv_bytes": host * block_bytes,
            }
            | options
        )
    )
    runner = ModelRunner.load(str(path), config)
    sampler = Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids)
    return NativeBackend(Engine(runner, sampler, FakeStopChecker(), config)), runner


SIZES = {
    "short-device": (18, 300, 64, None),
    "cut-prompts": (18, 300, 17, None),
    "short-host": (60, 40, 64, None),
    "coroutines": (18, 300, 17, 3),
}


@pytest.mark.parametrize(
    ("checkpoint", "sizes"), singles(VARIANTS, list(SIZES)), indirect=["checkpoint"]
)
def test_greedy_tokens_equal_transformers(checkpoint, rng, sizes):
    path, variant = checkpoint
    num_blocks, host, budget, attn = SIZES[sizes]
    prompts = shared_prompts(rng)
    backend, _ = make(
        path, num_blocks=num_blocks, host=host, max_batched_tokens=budget, attn_batch_tokens=attn
    )
    done = run(backend, prompts, n=2)
    expected = greedy_reference(variant, prompts)
    for sample_idx in range(2):
        assert expected == [done[i, sample_idx].token_ids.tolist() for i in range(len(prompts))]
    assert backend.stats().swapped_bytes > 0


def test_random_tokens_do_not_depend_on_where_kv_lives(checkpoint, rng):
    path, _ = checkpoint
    prompts = shared_prompts(rng)
    outputs = []
    for options in ({"num_blocks": 400, "kv_offload": False}, {"num_blocks": 18}):
        backend, _ = make(path, **options)
        done = run(backend, prompts, temperature=0.8, top_p=0.9, n=2)
        outputs.append({key: completion.token_ids.tolist() for key, completion in done.items()})
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("budget", [64, 7])
def test_a_round_leaves_the_kv_of_a_plain_prefill_in_host_memory(checkpoint, rng, budget):
    path, _ = checkpoint
    prompts = [prompt for prompt in shared_prompts(rng) if len(prompt) > 9][:4]
    requests = [make_request(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    kv = {}
    for offload, most in ((False, 512), (True, budget)):
        backend, runner = make(path, num_blocks=60, kv_offload=offload, max_batched_tokens=most)
        engine = backend._engine
        engine.add(requests)
        while engine.stats().generated_tokens < len(prompts):
            engine.step()
        if offload:
            found = engine._scheduler._sequences.values()
            tables = {s.record.request.request_id: s.host_blocks for s in found}
        else:
            found = enumerate(engine._table.records)
            tables = {r.request.request_id: engine._table.blocks(s) for s, r in found if r}
        cache = runner.tiers.host if offload else runner.cache
        for i, prompt in enumerate(prompts):
            blocks = np.array(tables[i], np.int64)
            pools = [pool[:, blocks].transpose(1, 2).flatten(2, 3) for pool in (cache.k, cache.v)]
            kv[offload, i] = torch.stack([pool[:, :, : len(prompt)] for pool in pools])
    for i in range(len(prompts)):
        assert kv[True, i].abs().max() > 0
        tolerances.assert_close(kv[True, i], kv[False, i], TOLERANCE)


@pytest.mark.parametrize(
    ("checkpoint", "options"),
    singles(
        VARIANTS,
        [{"device_weight_bytes": True}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}],
    ),
    indirect=["checkpoint"],
)
def test_other_ways_to_save_memory_go_with_it(checkpoint, rng, options):
    path, _ = checkpoint
    prompts = shared_prompts(rng)
    if "device_weight_bytes" in options:
        size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
        options = {"device_weight_bytes": size * 9 // 10, "weight_buffers": 1}
    plain, _ = make(path, num_blocks=400, kv_offload=False, **options)
    offloaded, runner = make(path, num_blocks=18, **options)
    found = [
        {key: completion.token_ids.tolist() for key, completion in run(b, prompts).items()}
        for b in (plain, offloaded)
    ]
    assert found[0] == found[1]
    assert offloaded.stats().swapped_bytes > 0
    assert runner.decoder.layers.is_streamed == ("device_weight_bytes" in options)


@pytest.mark.parametrize(("num_layers", "num_blocks"), [(1, 5), (2, 5), (3, 5), (4, 6)])
def test_the_window_is_the_memory_of_the_pool_and_holds_two_layers(num_layers, num_blocks):
    pool = torch.zeros(num_layers, num_blocks, 2, BLOCK, 3)
    cache = KVCache(k=pool, v=pool.clone())
    window = LayerWindow(cache, None)
    halves = {window.cache(i).k[i].data_ptr() for i in range(num_layers)}
    assert len(halves) == min(2, num_layers)
    assert window.num_blocks == num_layers * num_blocks // min(2, num_layers)
    for i in range(num_layers):
        window.cache(i).k[i].fill_(i + 1)
        assert (window.cache(i).k == i + 1).all()
    # neighbours do not meet, and nothing but the pool was written
    used = min(2, num_layers) * window.num_blocks
    assert int((pool.flatten(0, 1).sum((1, 2, 3)) > 0).sum()) == used
    if num_layers > 1:
        assert (window.cache(num_layers - 2).k == num_layers - 1).all()
    assert not cache.v.any()
