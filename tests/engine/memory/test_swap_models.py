"""Real (tiny) models whose KV goes to host memory and back: the same tokens, the same bits."""

import numpy as np
import pytest
import torch

from raybatch.backends.native import NativeBackend
from raybatch.config import EngineConfig
from raybatch.engine.engine import Engine
from raybatch.engine.loading.runner import ModelRunner
from raybatch.engine.memory.kv_cache import kv_bytes_per_token
from raybatch.engine.sampling.sampler import Sampler
from raybatch.models.config import read_model_spec
from tests.backends.test_native_backend import (
    VARIANTS,
    greedy_reference,
    make_backend,
    run,
    shared_prompts,
)
from tests.engine.fakes import FakeStopChecker
from tests.engine.memory.test_swap import Choice
from tests.tiers import pairs

BLOCK = 4

pytestmark = pytest.mark.usefixtures("shared_cache")


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tiny_checkpoint):
    return tiny_checkpoint(request.param), request.param


def block_bytes(path):
    return BLOCK * kv_bytes_per_token(read_model_spec(path), torch.float32)


def make_swapping(path, *, num_blocks, host, **options):
    """A backend that copies whatever there is room for, whatever the clock says."""
    config = EngineConfig(
        block_size_tokens=BLOCK,
        dtype="float32",
        device="cpu",
        kv_cache_bytes=num_blocks * block_bytes(path),
        host_kv_bytes=host * block_bytes(path),
        **options,
    )
    runner = ModelRunner.load(str(path), config)
    sampler = Sampler(runner.spec.vocab_size, config.max_num_seqs, runner.spec.eos_token_ids)
    engine = Engine(runner, sampler, FakeStopChecker(), config, recovery=Choice())
    return NativeBackend(engine), runner


@pytest.mark.parametrize(
    ("checkpoint", "host_options"),
    pairs(VARIANTS, [(200, False), (200, True), (8, True)]),
    indirect=["checkpoint"],
)
def test_greedy_tokens_under_heavy_preemption_equal_transformers(checkpoint, rng, host_options):
    path, variant = checkpoint
    host, caching = host_options
    prompts = shared_prompts(rng)
    backend, _ = make_swapping(
        path,
        num_blocks=18,
        host=host,
        max_batched_tokens=17,
        max_num_seqs=17,
        enable_prefix_caching=caching,
    )
    done = run(backend, prompts, n=2)
    expected = greedy_reference(variant, prompts)
    for sample_idx in range(2):
        assert expected == [done[i, sample_idx].token_ids.tolist() for i in range(len(prompts))]
    stats = backend.stats()
    assert stats.num_preemptions >= 5
    assert stats.num_swapped_tokens > 0
    assert (stats.num_recomputed_tokens > 0) == (host == 8)


def test_the_measured_choice_leaves_the_tokens_as_they_are(checkpoint, rng):
    path, variant = checkpoint
    prompts = shared_prompts(rng)
    backend = make_backend(
        path,
        num_blocks=18,
        max_batched_tokens=17,
        host_kv_bytes=200 * block_bytes(path),
        kv_offload=False,
    )
    done = run(backend, prompts)
    assert greedy_reference(variant, prompts) == [
        done[i, 0].token_ids.tolist() for i in range(len(prompts))
    ]
    assert backend.stats().num_preemptions >= 5


def test_random_tokens_do_not_depend_on_moves(checkpoint, rng):
    path, _ = checkpoint
    prompts = shared_prompts(rng)
    outputs = []
    for num_blocks in (400, 18):
        backend, _ = make_swapping(
            path, num_blocks=num_blocks, host=200, max_batched_tokens=64, max_num_seqs=17
        )
        done = run(backend, prompts, temperature=0.8, top_p=0.9, n=2)
        outputs.append({key: completion.token_ids.tolist() for key, completion in done.items()})
    assert outputs[0] == outputs[1]
    assert backend.stats().num_swapped_tokens > 0


def test_blocks_that_come_back_have_the_bits_that_went(checkpoint, rng):
    path, _ = checkpoint
    backend, runner = make_swapping(path, num_blocks=18, host=200, max_num_seqs=17)
    gone, num_back = {}, 0
    tiers, save_blocks, load_blocks = (
        runner.tiers,
        runner.tiers.save_blocks,
        runner.tiers.load_blocks,
    )

    def blocks(cache, ids):
        return torch.stack((cache.k[:, ids], cache.v[:, ids])).clone()

    def note_save(block_ids, host_ids):
        save_blocks(block_ids, host_ids)
        gone.update(zip(host_ids.tolist(), blocks(runner.cache, block_ids).unbind(2), strict=True))

    def check_load(host_ids, block_ids):
        nonlocal num_back
        load_blocks(host_ids, block_ids)
        for host_id, found in zip(
            host_ids.tolist(), blocks(runner.cache, block_ids).unbind(2), strict=True
        ):
            assert torch.equal(found, gone[host_id])
            num_back += 1

    tiers.save_blocks, tiers.load_blocks = note_save, check_load
    run(backend, shared_prompts(rng))
    assert num_back > 10
    assert tiers.num_host_blocks == 200
    assert np.isfinite(tiers.copy_bytes_per_s())
