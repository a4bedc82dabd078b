"""Copies of KV blocks between the pools of device and host; on the CPU, by the same interface."""

import numpy as np
import pytest
import torch

from raybatch.config import EngineConfig
from raybatch.engine.memory.kv_cache import KVCache, KVTiers, kv_bytes_per_token
from raybatch.errors import ConfigError
from raybatch.kernels.byte_numbers import FP8, INT8
from raybatch.models.config import read_model_spec
from raybatch.policy.memory_budget import num_host_blocks_for
from tests.engine.tiny_models import save

SHAPE = (3, 8, 2, 4, 5)  # L, N, G, B, D


def make_tiers(num_host_blocks=6, dtype=torch.float32):
    torch.manual_seed(3)
    cache = KVCache(k=torch.randn(SHAPE).to(dtype), v=torch.randn(SHAPE).to(dtype))
    return cache, KVTiers(cache, num_host_blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, INT8, FP8])
@pytest.mark.parametrize(
    "host_ids", [[1, 2, 3], [0, 2, 3], [5, 1, 0]], ids=["one run", "two runs", "no runs"]
)
def test_blocks_come_back_bit_by_bit_in_other_places(host_ids, dtype):
    cache, tiers = make_tiers(dtype=dtype)
    before = (cache.k.clone(), cache.v.clone())
    source, target = [7, 0, 4], [2, 5, 6]
    tiers.save_blocks(np.array(source), np.array(host_ids))
    tiers.load_blocks(np.array(host_ids), np.array(target))
    for pool, old in zip((cache.k, cache.v), before, strict=True):
        assert torch.equal(pool[:, target], old[:, source])
        others = [0, 1, 3, 4, 7]
        assert torch.equal(pool[:, others], old[:, others])


def test_a_block_of_the_host_is_one_piece_of_memory():
    cache, tiers = make_tiers()
    tiers.save_blocks(np.array([4]), np.array([2]))
    assert tiers.host.k[0, 2].is_contiguous()
    assert tiers.block_bytes == 2 * cache.k[:, 0].numel() * 4
    step = tiers.host.k.stride(1) * 4
    assert step == tiers.block_bytes


def test_measuring_leaves_the_device_as_it_is():
    cache, tiers = make_tiers()
    before = (cache.k.clone(), cache.v.clone())
    assert tiers.copy_bytes_per_s() > 0
    assert torch.equal(cache.k, before[0])
    assert torch.equal(cache.v, before[1])


def test_without_host_memory_there_is_none():
    _, tiers = make_tiers(num_host_blocks=0)
    assert (tiers.num_host_blocks, tiers.host.k.numel()) == (0, 0)


@pytest.mark.parametrize("num_host_blocks", [10**12, 10**16], ids=["no memory", "no addresses"])
def test_memory_that_the_host_does_not_give_is_refused_by_the_option(num_host_blocks):
    with pytest.raises(ConfigError, match=r"engine\.host_kv_bytes=\d+ .*lower it"):
        make_tiers(num_host_blocks)


def test_the_budget_is_counted_in_whole_blocks(tmp_path):
    save("llama", tmp_path)
    spec = read_model_spec(tmp_path)
    block_bytes = 4 * kv_bytes_per_token(spec, torch.float32)

    def count(host_kv_bytes):
        config = EngineConfig(block_size_tokens=4, host_kv_bytes=host_kv_bytes)
        token_bytes = kv_bytes_per_token(spec, torch.float32)
        exact, rounded = num_host_blocks_for(
            config, token_bytes=token_bytes, rounded_bytes=token_bytes
        )
        assert rounded == 0
        return exact

    budgets = (None, 0, block_bytes, 3 * block_bytes - 1)
    assert [count(budget) for budget in budgets] == [0, 0, 1, 2]
    with pytest.raises(ConfigError, match=r"engine\.host_kv_bytes is 7, but one block of 4 tokens"):
        count(7)


@pytest.mark.gpu
def test_blocks_come_back_from_pinned_memory_while_others_are_written():
    shape = torch.Size(SHAPE)
    cache = KVCache(k=torch.randn(shape).cuda(), v=torch.randn(shape).cuda())
    tiers = KVTiers(cache, 6)
    before = (cache.k.cpu(), cache.v.cpu())
    for _ in range(50):
        tiers.save_blocks(np.array([7, 0, 4]), np.array([0, 2, 3]))
        # what a step writes right after
        cache.k[:, [7, 0, 4]] = 0
        cache.v[:, [7, 0, 4]] = 0
        tiers.load_blocks(np.array([0, 2, 3]), np.array([7, 0, 4]))
        assert torch.equal(cache.k.cpu(), before[0])
        assert torch.equal(cache.v.cpu(), before[1])
