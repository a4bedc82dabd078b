import hashlib
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.engine.sequences.block_manager import BlockManager, hash_blocks
from raybatch.errors import CapacityError
from raybatch.prefix.block_keys import BlockKeys
from raybatch.prefix.forecast import CacheLoad, CacheSize, forecast_order, simulate_hits


def key_of(block_hash):
    return int.from_bytes(hashlib.blake2b(block_hash, digest_size=8).digest(), "little")


def cache_load(prompts, block_size, outputs=None):
    hashes = [hash_blocks(np.array(p, np.int32), block_size) for p in prompts]
    keys = BlockKeys(
        keys=np.array([key_of(h) for row in hashes for h in row], np.uint64),
        offsets=np.cumsum([0, *(len(row) for row in hashes)]),
        num_tokens=np.array([len(p) for p in prompts]),
        digest=np.zeros(len(prompts), np.uint64),
        block_size=block_size,
    )
    outputs = np.zeros(len(prompts)) if outputs is None else np.array(outputs, float)
    return CacheLoad(keys=keys, output_tokens=outputs)


def engine_hits(prompts, outputs, order, size, block_size):
    """Cached tokens per row with the engine's own book of blocks."""
    manager = BlockManager(size.num_blocks, block_size)
    live, cached = deque(), []
    for row in order:
        hashes = hash_blocks(np.array(prompts[row], np.int32), block_size)
        num_held = -(-(len(prompts[row]) + outputs[row]) // block_size)
        if len(live) >= size.concurrency:
            manager.release(live.popleft())
        hits = manager.find_prefix(hashes[: (len(prompts[row]) - 1) // block_size])
        while num_held - len(hits) + manager.num_unused(hits) > manager.num_available:
            manager.release(live.popleft())
        manager.pin(hits)
        blocks = hits + manager.allocate(num_held - len(hits))
        for block, block_hash in zip(blocks, hashes, strict=False):
            manager.register(block, block_hash)
        live.append(np.array(blocks, np.int32))
        cached.append(len(hits) * block_size)
    return cached


@st.composite
def cases(draw):
    num_rows, block_size = draw(st.integers(1, 25)), draw(st.integers(1, 4))
    prompts = draw(
        st.lists(
            st.lists(st.integers(0, 1), min_size=1, max_size=12),
            min_size=num_rows,
            max_size=num_rows,
        )
    )
    outputs = draw(st.lists(st.integers(0, 5), min_size=num_rows, max_size=num_rows))
    order = draw(st.permutations(range(num_rows)))
    longest = max(-(-(len(p) + o) // block_size) for p, o in zip(prompts, outputs, strict=True))
    size = CacheSize(num_blocks=draw(st.integers(longest, 40)), concurrency=draw(st.integers(1, 6)))
    return prompts, outputs, order, size, block_size


@settings(max_examples=300, deadline=None)
@given(cases())
def test_hits_equal_those_of_the_engines_block_manager(case):
    prompts, outputs, order, size, block_size = case
    load = cache_load(prompts, block_size, outputs)
    assert engine_hits(*case) == simulate_hits(load, np.array(order), size).tolist()


def grouped(num_groups, num_members, prefix_blocks, tail_blocks):
    """Keys of groups that share a prefix, members of a group side by side; blocks of 16."""
    rng = np.random.default_rng(0)
    prefix = np.repeat(
        rng.integers(0, 2**63, (num_groups, prefix_blocks), np.uint64), num_members, axis=0
    )
    tails = rng.integers(0, 2**63, (num_groups * num_members, tail_blocks), np.uint64)
    keys = np.concatenate([prefix, tails], axis=1)
    num_rows = len(keys)
    of_rows = BlockKeys(
        keys=keys.ravel(),
        offsets=np.arange(num_rows + 1) * keys.shape[1],
        num_tokens=np.full(num_rows, 16 * keys.shape[1] + 3),
        digest=np.zeros(num_rows, np.uint64),
        block_size=16,
    )
    return CacheLoad(keys=of_rows, output_tokens=np.zeros(num_rows))


def test_grouped_order_hits_the_closed_form_in_a_small_cache():
    load = grouped(num_groups=20, num_members=8, prefix_blocks=10, tail_blocks=2)
    hits = simulate_hits(load, np.arange(160), CacheSize(num_blocks=30, concurrency=2))
    assert 20 * 7 * 10 * 16 == hits.sum()


def test_round_robin_over_more_prefixes_than_fit_hits_nothing():
    load = grouped(num_groups=20, num_members=8, prefix_blocks=10, tail_blocks=2)
    order = np.arange(160).reshape(20, 8).T.ravel()
    hits = simulate_hits(load, order, CacheSize(num_blocks=100, concurrency=2))
    assert 0 == hits.sum()


def test_any_order_hits_the_same_in_a_cache_that_holds_everything():
    load = grouped(num_groups=20, num_members=8, prefix_blocks=10, tail_blocks=2)
    order = np.random.default_rng(1).permutation(160)
    hits = simulate_hits(load, order, CacheSize(num_blocks=10_000, concurrency=4))
    assert 20 * 7 * 10 * 16 == hits.sum()


def test_a_prompt_seen_before_still_computes_its_last_token():
    load = cache_load([[1, 2, 3, 4], [1, 2, 3, 4]], 2)
    assert [0, 2] == simulate_hits(
        load, np.arange(2), CacheSize(num_blocks=4, concurrency=1)
    ).tolist()


def test_windows_estimate_the_rate_of_all_rows_within_their_error():
    load = grouped(num_groups=400, num_members=8, prefix_blocks=3, tail_blocks=1)
    # half of the groups run together, the members of the others lie far apart
    order = np.concatenate([np.arange(1600), np.arange(1600, 3200).reshape(200, 8).T.ravel()])
    size = CacheSize(num_blocks=60, concurrency=4)
    exact, sampled = (forecast_order("input", load, order, size, max_rows=n) for n in (3200, 800))
    assert (0.0, False) == (exact.error, sampled.is_lower_bound)
    assert abs(exact.hit_rate - sampled.hit_rate) <= sampled.error


def test_windows_that_never_fill_the_cache_say_so():
    load = grouped(num_groups=40, num_members=8, prefix_blocks=3, tail_blocks=1)
    size = CacheSize(num_blocks=10_000, concurrency=4)
    assert forecast_order("input", load, np.arange(320), size, max_rows=160).is_lower_bound


def test_a_hundred_thousand_rows_take_seconds_of_cpu():
    load = grouped(num_groups=6250, num_members=16, prefix_blocks=26, tail_blocks=4)
    order = np.random.default_rng(0).permutation(100_000)
    before = time.thread_time()
    simulate_hits(load, order, CacheSize(num_blocks=50_000, concurrency=256))
    assert time.thread_time() - before < 20


def test_a_row_that_does_not_fit_is_named():
    load = cache_load([[1], [1] * 9], 2)
    with pytest.raises(CapacityError, match=r"row 1 needs 5 KV blocks.* has 4;"):
        simulate_hits(load, np.arange(2), CacheSize(num_blocks=4, concurrency=1))
