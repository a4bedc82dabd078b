"""Real (tiny) models whose KV lives in host memory: the tokens of transformers, the same KV."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import KVCache, kv_bytes_per_token
from raybatch.engine.memory.kv_window import HostLayers, KVWindow, WindowMoves
from raybatch.engine.sampling.sampler import Sampler
from raybatch.models.config import read_model_spec
from tests import tolerances
from tests.backends.test_native_backend import VARIANTS, greedy_reference, run, shared_prompts
from tests.engine.fakes import FakeStopChecker, make_request
from tests.engine.tiny_models import TOLERANCE
from tests.tiers import singles

BLOCK = 4

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


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


# blocks of the device and of the host, tokens of a step, and blocks of a part
SIZES = {
    "short-device": (18, 300, 64, None),
    "cut-prompts": (18, 300, 17, None),
    "short-host": (60, 40, 64, None),
    "rows-alone": (18, 300, 17, 1),
}


@pytest.mark.parametrize(
    ("checkpoint", "sizes"), singles(VARIANTS, list(SIZES)), indirect=["checkpoint"]
)
def test_greedy_tokens_equal_transformers(checkpoint, rng, sizes):
    path, variant = checkpoint
    num_blocks, host, budget, part_blocks = SIZES[sizes]
    prompts = shared_prompts(rng)
    backend, runner = make(path, num_blocks=num_blocks, host=host, max_batched_tokens=budget)
    runner.num_window_blocks = part_blocks or runner.num_window_blocks
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
def test_host_memory_has_the_kv_of_a_plain_pool(checkpoint, rng, budget):
    path, _ = checkpoint
    prompts = [prompt for prompt in shared_prompts(rng) if len(prompt) > 9][:4]
    requests = [make_request(i, prompt, max_tokens=20) for i, prompt in enumerate(prompts)]
    kv = {}
    for offload, most in ((False, 512), (True, budget)):
        backend, runner = make(path, num_blocks=60, kv_offload=offload, max_batched_tokens=most)
        engine = backend._engine
        engine.add(requests)
        while engine.stats().generated_tokens < 3 * len(prompts):
            engine.step()
        cache = runner.window.host.kv if offload else runner.cache
        for slot, record in enumerate(engine.table.records):
            if record is None:
                continue
            blocks = engine.table.blocks(slot).astype(np.int64)
            pools = [pool[:, blocks].transpose(1, 2).flatten(2, 3) for pool in (cache.k, cache.v)]
            num_computed = engine.table.num_computed[slot]
            kv[offload, record.request.request_id] = torch.stack(pools)[:, :, :, :num_computed]
    for i in range(len(prompts)):
        num_both = min(kv[True, i].shape[3], kv[False, i].shape[3])
        assert num_both >= len(prompts[i])
        pair = kv[True, i][:, :, :, :num_both], kv[False, i][:, :, :, :num_both]
        tolerances.assert_close(*pair, TOLERANCE)


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
    pool = KVCache(k=torch.zeros(num_layers, num_blocks, 2, BLOCK, 3), v=torch.zeros(0))
    pool = replace(pool, v=pool.k.clone())
    window = KVWindow(pool, HostLayers(pool, 8))
    assert window.num_blocks == num_layers * num_blocks // 2
    nothing = np.empty(0, np.int64)
    moves = WindowMoves(load_host=nothing, save_host=nothing)
    places = []
    for layer in range(num_layers):
        cache = window.enter(layer, moves)
        cache.k[layer].fill_(layer + 1)
        assert (cache.k == layer + 1).all()
        places.append(cache.k[layer].data_ptr())
        window.leave(layer, torch.from_numpy(nothing), moves)
    # two in turn, and nothing but the pool was written
    assert [place == places[0] for place in places] == [i % 2 == 0 for i in range(num_layers)]
    used = min(2, num_layers) * window.num_blocks
    assert int((pool.k.flatten(0, 1).sum((1, 2, 3)) > 0).sum()) == used
    assert not pool.v.any()
