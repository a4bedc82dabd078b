import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.engine.sequences.block_manager import BlockManager, hash_blocks

PROMPT = np.arange(12, dtype=np.int32)


def table(blocks):
    return np.array(blocks, np.int32)


def cached_prefix(manager, tokens, *, root=b""):
    """Allocate, register and release the full blocks of `tokens`; return them."""
    hashes = hash_blocks(tokens, manager.block_size, root=root)
    blocks = manager.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        manager.register(block, block_hash)
    manager.release(table(blocks))
    return blocks


def test_a_hash_covers_all_tokens_before_its_block():
    first, second = hash_blocks(PROMPT, 4), hash_blocks(np.r_[99, PROMPT[1:]].astype(np.int32), 4)
    assert not set(first) & set(second)


def test_equal_prefixes_have_equal_hashes_up_to_the_first_difference():
    other = PROMPT.copy()
    other[9] = 99
    first, second = hash_blocks(PROMPT, 4), hash_blocks(other, 4)
    assert (first[:2], first[2] == second[2]) == (second[:2], False)


def test_only_full_blocks_are_hashed():
    assert [len(hash_blocks(PROMPT[:n], 4)) for n in (3, 4, 11)] == [0, 1, 2]


def test_another_root_gives_other_hashes():
    assert hash_blocks(PROMPT, 4)[0] != hash_blocks(PROMPT, 4, root=b"x")[0]


def test_the_lowest_free_block_is_handed_out_first():
    manager = BlockManager(8, 4)
    manager.allocate(5)
    manager.release(table([3]))
    manager.release(table([1]))
    assert manager.allocate(3) == [1, 3, 5]


def test_freed_blocks_are_reusable():
    manager = BlockManager(4, 4)
    manager.release(table(manager.allocate(4)))
    assert manager.allocate(4) == [0, 1, 2, 3]


def test_more_blocks_than_available_are_refused():
    manager = BlockManager(4, 4)
    manager.reserve(2)
    with pytest.raises(RuntimeError, match="cannot allocate 3 KV blocks: 2 are available"):
        manager.allocate(3)


def test_reserved_blocks_are_kept_for_their_owner():
    manager = BlockManager(4, 4)
    manager.reserve(3)
    manager.allocate(1)
    assert manager.num_available == 0
    assert manager.allocate(3, is_reserved=True) == [1, 2, 3]


def test_a_released_prefix_is_found_again():
    manager = BlockManager(8, 4)
    blocks = cached_prefix(manager, PROMPT)
    assert blocks == manager.find_prefix(hash_blocks(PROMPT, 4))


def test_a_pinned_prefix_is_not_evicted():
    manager = BlockManager(4, 4)
    blocks = cached_prefix(manager, PROMPT)
    manager.pin(blocks)
    assert manager.num_available == 1


def test_the_tail_of_the_oldest_prefix_is_evicted_first():
    manager = BlockManager(6, 4)
    old, new = cached_prefix(manager, PROMPT), cached_prefix(manager, PROMPT + 50)
    manager.allocate(2)
    assert old[:1] == manager.find_prefix(hash_blocks(PROMPT, 4))
    assert new == manager.find_prefix(hash_blocks(PROMPT + 50, 4))


def test_free_blocks_are_used_before_cached_ones():
    manager = BlockManager(6, 4)
    blocks = cached_prefix(manager, PROMPT)
    manager.allocate(3)
    assert blocks == manager.find_prefix(hash_blocks(PROMPT, 4))


def test_a_known_hash_keeps_its_block():
    manager = BlockManager(8, 4)
    blocks = cached_prefix(manager, PROMPT)
    cached_prefix(manager, PROMPT)
    assert blocks == manager.find_prefix(hash_blocks(PROMPT, 4))
    manager.check([])


def test_forgotten_blocks_are_not_found():
    manager = BlockManager(8, 4)
    blocks = cached_prefix(manager, PROMPT)
    manager.pin(blocks)
    manager.forget(blocks[1:])
    assert blocks[:1] == manager.find_prefix(hash_blocks(PROMPT, 4))
    manager.release(table(blocks))
    manager.check([])


@pytest.mark.parametrize(
    ("breaking", "message"),
    [
        (lambda m: m._free.append(7), "free twice"),
        (lambda m: m.num_refs.__setitem__(7, 1), "reference counts differ"),
        (lambda m: m._free.pop(), "free . used . cached differs"),
        (lambda m: m._block_of.clear(), "index of hashes"),
        (lambda m: setattr(m, "num_reserved", 99), "reserved than available"),
    ],
)
def test_check_finds_broken_books(breaking, message):
    manager = BlockManager(8, 4)
    blocks = cached_prefix(manager, PROMPT)
    manager.pin(blocks)
    manager.release(table(manager.allocate(1)))
    manager.check([table(blocks)])
    breaking(manager)
    with pytest.raises(RuntimeError, match=message):
        manager.check([table(blocks)])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(0, 3)), max_size=60))
def test_books_stay_consistent_under_random_traffic(events):
    manager = BlockManager(10, 4)
    prompts = [np.arange(i, i + 16, dtype=np.int32) // (1 + i % 2) for i in range(4)]
    tables = []
    for kind, size, prompt in events:
        if kind == 0 and tables:
            manager.release(tables.pop(size % len(tables)))
        elif kind == 1 and size <= manager.num_available:
            tables.append(table(manager.allocate(size)))
        elif kind == 2:
            hashes = hash_blocks(prompts[prompt], 4)
            hits = manager.find_prefix(hashes)
            count = len(hashes) - len(hits)
            if count + manager.num_unused(hits) <= manager.num_available:
                manager.pin(hits)
                new = manager.allocate(count)
                for block, block_hash in zip(new, hashes[len(hits) :], strict=True):
                    manager.register(block, block_hash)
                tables.append(table(hits + new))
        manager.check(tables)
    assert manager.num_used == len({b for t in tables for b in t.tolist()})
