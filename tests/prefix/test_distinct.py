"""The estimate of distinct block keys: exact while they fit, close beyond."""

import numpy as np
import pytest

from raybatch.prefix.block_keys import BlockKeys, DistinctKeys, find_representatives
from raybatch.prefix.tree import build_tree, tree_stats
from tests.prefix.prompts import keys_of


def random_keys(num_rows, seed):
    keys = np.random.default_rng(seed).integers(0, 2**64, num_rows, np.uint64)
    return BlockKeys(
        keys=keys,
        offsets=np.arange(num_rows + 1),
        num_tokens=np.full(num_rows, 16),
        digest=keys,
        block_size=16,
    )


def test_few_keys_are_counted_exactly():
    distinct = DistinctKeys(max_keys=100)
    for _ in range(5):
        distinct.add(random_keys(90, seed=1))
    assert distinct.num_distinct() == 90


@pytest.mark.parametrize("seed", range(5))
def test_many_keys_are_estimated_within_three_standard_errors(seed):
    distinct = DistinctKeys(max_keys=4096)
    for part in range(50):
        distinct.add(random_keys(2000, seed=(seed, part)))
        distinct.add(random_keys(2000, seed=(seed, part)))
    assert distinct.num_distinct() == pytest.approx(100_000, rel=3 * np.sqrt(2 / 4096))


def test_the_memory_is_bounded():
    distinct = DistinctKeys(max_keys=1000)
    for part in range(20):
        distinct.add(random_keys(3000, seed=part))
        assert len(distinct._sample) + distinct._num_new <= 1000 + 250


def test_computed_tokens_are_those_of_the_tree():
    prompts = [[1, 1, 2, 2, 9], [1, 1, 2, 2, 8], [1, 1, 3], [4], [5, 5, 5]]
    keys = keys_of(prompts, 2)
    distinct = DistinctKeys()
    distinct.add(keys.slice(0, 2))
    distinct.add(keys.slice(2, 5))
    assert (
        tree_stats(build_tree(keys), keys, find_representatives(keys)).physical_tokens
        == distinct.computed_tokens()
    )


def test_nothing_is_computed_of_nothing():
    assert (0, 0) == (DistinctKeys().num_distinct(), DistinctKeys().computed_tokens())
