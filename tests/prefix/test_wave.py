import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.prefix.hits import CacheLoad, CacheSize, simulate_hits
from raybatch.prefix.wave import kv_tokens_of_groups, plan_waves
from tests.prefix.loads import loads, make_load


def test_a_group_holds_its_prefix_once_and_every_member():
    load = make_load([100], [4 * 10], [4], [4 * 6])
    assert [100 + 4 * 16] == kv_tokens_of_groups(load).tolist()


def test_prefix_and_members_round_up_to_blocks():
    load = make_load([33], [4 * 10], [4], [4 * 7])
    assert [48 + 4 * 32] == kv_tokens_of_groups(load, 16).tolist()


@given(loads(), st.integers(1, 400), st.randoms())
def test_a_wave_is_the_longest_run_that_fits(load, kv_tokens, random):
    order = np.array(random.sample(range(len(load)), len(load)))
    held = kv_tokens_of_groups(load)[order].tolist()
    end = plan_waves(load, order, kv_tokens=kv_tokens).end.tolist()
    for place, stop in enumerate(end):
        assert sum(held[place:stop]) <= kv_tokens or stop == place + 1
        assert stop == len(held) or sum(held[place : stop + 1]) > kv_tokens


def test_the_largest_groups_limit_how_many_are_live():
    load = make_load([0] * 6, [10, 10, 40, 40, 10, 10], [1] * 6)
    waves = plan_waves(load, np.arange(6), kv_tokens=85)
    assert (2, [3, 3, 4, 6, 6, 6]) == (waves.num_live, waves.end.tolist())


def test_all_groups_are_live_where_everything_fits():
    load = make_load([10] * 6, [10] * 6, [1] * 6)
    assert 6 == plan_waves(load, np.arange(6), kv_tokens=120).num_live


def test_a_group_above_the_cache_runs_alone_with_some_of_its_members():
    load = make_load([50, 10], [100 * 10, 10], [100, 1])
    waves = plan_waves(load, np.arange(2), kv_tokens=200)
    assert (1, [15, 1]) == (waves.num_live, waves.num_members.tolist())


def test_a_prefix_above_the_cache_leaves_no_room_for_members():
    load = make_load([500], [10], [1])
    assert [0] == plan_waves(load, np.arange(1), kv_tokens=200).num_members.tolist()


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.data())
def test_no_live_prefix_is_evicted_while_a_wave_runs(members, prefix, tail, fitting, data):
    """Members of the groups of a wave take turns, the worst order inside it."""
    load = make_load([16 * prefix] * 12, [16 * tail * members] * 12, [members] * 12)
    spare = data.draw(st.integers(0, prefix + tail * members - 1))
    num_blocks = fitting * (prefix + tail * members) + spare
    num_live = plan_waves(load, np.arange(12), kv_tokens=16 * num_blocks, block_size=16).num_live
    rows = np.arange(12 * members).reshape(12, members)
    order = np.concatenate([rows[i : i + num_live].T.ravel() for i in range(0, 12, num_live)])
    keys = [[g * 1000 + b for b in range(prefix)] for g in range(12) for _ in range(members)]
    for row, row_keys in enumerate(keys):
        row_keys.extend(10**6 + row * 1000 + b for b in range(tail))
    cache = CacheLoad(
        keys=np.array(keys, np.uint64).ravel(),
        offsets=np.arange(len(keys) + 1) * (prefix + tail),
        num_tokens=np.full(len(keys), 16 * (prefix + tail)),
        block_size=16,
    )
    size = CacheSize(num_blocks=num_blocks, concurrency=num_live * members)
    assert 12 * (members - 1) * prefix * 16 == simulate_hits(cache, order, size).sum()


@pytest.mark.parametrize("sizes", [{"kv_tokens": 0}, {"kv_tokens": 5, "block_size": 0}])
def test_a_cache_without_room_is_refused(sizes):
    with pytest.raises(ConfigError, match="both are at least 1"):
        plan_waves(make_load([1], [1], [1]), np.arange(1), **sizes)
