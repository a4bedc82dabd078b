from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.prefix.block_keys import BlockKeys, find_representatives, hash_blocks
from tests.prefix.prompts import block_sizes, keys_of, num_common_blocks, prompt_lists

FIELDS = ("keys", "offsets", "num_tokens", "digest")


def row_keys(keys, row):
    return keys.keys[keys.offsets[row] : keys.offsets[row + 1]].tolist()


def assert_same(a, b):
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    assert a.block_size == b.block_size


@given(prompt_lists, block_sizes)
def test_rows_have_as_many_keys_in_common_as_leading_blocks(prompts, block_size):
    keys = keys_of(prompts, block_size)
    for i, a in enumerate(prompts):
        assert len(row_keys(keys, i)) == len(a) // block_size
        for j, b in enumerate(prompts):
            common = set(row_keys(keys, i)) & set(row_keys(keys, j))
            assert num_common_blocks(a, b, block_size) == len(common)


@given(prompt_lists, block_sizes)
def test_digests_are_equal_for_equal_prompts_only(prompts, block_size):
    digest = keys_of(prompts, block_size).digest.tolist()
    assert [digest.index(d) for d in digest] == [prompts.index(p) for p in prompts]


@given(prompt_lists, block_sizes)
def test_representative_is_the_first_identical_row(prompts, block_size):
    found = find_representatives(keys_of(prompts, block_size))
    assert found.tolist() == [prompts.index(prompt) for prompt in prompts]


def test_equal_digest_alone_makes_no_duplicate():
    keys = keys_of([[1, 2, 3, 4], [5, 6, 7, 8]], 4)
    forged = BlockKeys(
        keys=keys.keys,
        offsets=keys.offsets,
        num_tokens=keys.num_tokens,
        digest=np.full(2, 7, np.uint64),
        block_size=4,
    )
    assert find_representatives(forged).tolist() == [0, 1]


def mix(word):
    """Scramble a 64-bit word as the keys do."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        word = (word ^ (word >> shift)) * factor % 2**64
    return word ^ (word >> 31)


def tokens_of(words):
    return np.array(words, "<u8").view("<i4").tolist()


def test_prompts_whose_keys_collide_are_not_identical():
    # the second word of the other block undoes what its first word has changed
    first, other, last = 12345, 67890, 13579
    states = [mix((word + 0x9E3779B97F4A7C15) % 2**64) for word in (first, other)]
    prompts = [[first, last], [other, last ^ states[0] ^ states[1]]]
    keys = keys_of([tokens_of(words) for words in prompts], 4)
    assert keys.keys[0] == keys.keys[1]
    assert find_representatives(keys).tolist() == [0, 1]


def test_trailing_zeros_are_tokens():
    keys = keys_of([[5], [5, 0], [5, 0, 0]], 4)
    assert len(set(keys.digest.tolist())) == 3


def test_rows_with_other_digests_are_not_identical():
    keys = keys_of([[1, 2, 3]] * 3, 1)
    other = replace(keys, digest=keys.digest ^ np.array([0, 1, 0], np.uint64))
    assert find_representatives(other).tolist() == [0, 1, 0]


def test_hashes_are_the_same_on_every_machine():
    keys = keys_of([[1, 2, 3, 4, 5], [6, 7]], 2)
    assert keys.keys.tolist() == [12711357330213595081, 4546903929958394437, 16533875468901102534]
    assert keys.digest.tolist() == [10183123633267509462, 3491157378074539849]


def test_hashes_do_not_depend_on_the_rows_beside():
    prompts = [[7] * 40, [], [1, 2, 3], list(range(33)), [5] * 4]
    together = keys_of(prompts, 4)
    alone = BlockKeys.concat([keys_of([prompt], 4) for prompt in prompts])
    assert_same(together, alone)


def test_more_blocks_than_fit_a_chunk_hash_like_few():
    tokens = np.arange(200_000, dtype=np.int32)
    keys = hash_blocks(tokens, np.array([0, 100_000, 200_000]), 5)
    assert row_keys(keys, 1) == row_keys(keys_of([range(100_000, 200_000)], 5), 0)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4])
def test_each_run_of_zeros_has_keys_of_its_own(block_size):
    zeros = keys_of([[0] * length for length in range(12)], block_size)
    assert len(set(zeros.digest.tolist())) == 12
    longest = row_keys(zeros, 11)
    assert len(set(longest)) == len(longest)


def test_words_that_differ_in_one_bit_have_unrelated_keys():
    prompts = [[bit] * 15 + [1 << bit] for bit in range(16)] + [
        [1 << bit] * 16 for bit in range(31)
    ]
    keys = keys_of(prompts, 16).keys
    flipped = np.bitwise_count(keys[:, None] ^ keys[None, :])[~np.eye(len(keys), dtype=bool)]
    assert 10 <= flipped.min()
    assert flipped.max() <= 54
    assert abs(flipped.mean() - 32) < 1


@given(prompt_lists, st.integers(0, 9), st.integers(0, 9))
def test_slice_is_the_keys_of_these_rows(prompts, start, stop):
    assert_same(keys_of(prompts, 2).slice(start, stop), keys_of(prompts[start:stop], 2))


@given(prompt_lists, prompt_lists)
def test_table_of_any_chunks_gives_the_keys_back(first, second):
    tables = [keys_of(first, 2).to_table(), keys_of(second, 2).to_table()]
    assert_same(BlockKeys.from_table(pa.concat_tables(tables)), keys_of([*first, *second], 2))


def test_slice_of_a_table_gives_these_rows():
    prompts = [[1, 2, 3, 4], [5, 6], [7, 8, 9, 1]]
    table = keys_of(prompts, 2).to_table().slice(1, 2)
    assert_same(BlockKeys.from_table(table), keys_of(prompts[1:], 2))


def test_keys_of_a_table_are_not_copied():
    keys = keys_of([[1, 2, 3, 4], [5, 6]], 2)
    assert np.shares_memory(BlockKeys.from_table(keys.to_table()).keys, keys.keys)


def test_parts_of_different_block_sizes_are_refused():
    with pytest.raises(AssertionError, match=r"\[2, 3\]"):
        BlockKeys.concat([keys_of([[1]], 2), keys_of([[1]], 3)])


@pytest.mark.parametrize(
    "offsets",
    [[0, 2], [1, 3], [0, 2, 1, 3]],
    ids=["end before the last token", "begin after the first", "decrease"],
)
def test_offsets_that_do_not_cut_the_tokens_are_refused(offsets):
    with pytest.raises(AssertionError, match="do not cut 3 tokens"):
        hash_blocks(np.arange(3, dtype=np.int32), np.array(offsets), 4)
