"""Readers of each block, updated while sequences are added, grow and are removed."""

import numpy as np
import pytest

from raybatch.engine.sequences.table import BlockUsers

NUM_BLOCKS = 8
# entries after the blocks of a slot are left over from others
TABLE = np.array([[5, 1, 6, 7], [5, 1, 2, 0], [3, 4, 0, 0]], np.int32)


def users_of(*targets):
    users = BlockUsers(NUM_BLOCKS, len(TABLE))
    users.extend(np.arange(len(targets)), np.array(targets), TABLE)
    return users


def test_blocks_have_their_readers_and_position():
    users = users_of(2, 3, 1)
    assert [0, 2, 1, 1, 0, 2, 0, 0] == users.count.tolist()
    assert [0, 1, 1, 2, 0, 1, 0, 0] == users.slot_sum.tolist()
    assert [1, 2, 0, 0] == users.position[[1, 2, 3, 5]].tolist()
    assert users.key_sum[5] == users.key_sum[1] != users.key_sum[2]
    users.check(TABLE)


def test_reads_of_blocks_that_another_row_has_read():
    assert (0, 1.0) == users_of(0).block_sharing()
    # blocks 5 and 1 have two readers
    assert (2, 2.0) == users_of(2, 3, 1).block_sharing()


def test_a_slot_that_grows_counts_only_its_new_blocks():
    users = users_of(1, 1)
    users.extend(np.array([0, 1]), np.array([3, 1]), TABLE)
    assert [0, 1, 0, 0, 0, 2, 1, 0] == users.count.tolist()
    users.extend(np.array([0, 1]), np.array([2, 0]), TABLE)
    assert [3, 1, 0] == users.num_attended.tolist()
    users.check(TABLE)


def test_the_high_water_is_above_every_block_that_was_ever_attended_to():
    users = users_of(0)
    assert 0 == users.high_water
    users.extend(np.array([0]), np.array([1]), TABLE)
    assert 6 == users.high_water
    users.extend(np.array([2]), np.array([2]), TABLE)
    assert 6 == users.high_water
    users.extend(np.array([0]), np.array([4]), TABLE)
    assert 8 == users.high_water


def test_a_removed_slot_subtracts_exactly_its_blocks():
    users = users_of(2, 3, 2)
    users.remove(0, TABLE)
    assert [0, 1, 1, 1, 1, 1, 0, 0] == users.count.tolist()
    users.check(TABLE)
    users.remove(1, TABLE)
    users.remove(2, TABLE)
    assert not any((users.count.any(), users.slot_sum.any(), users.key_sum.any()))


@pytest.mark.parametrize("name", ["count", "slot_sum"])
def test_books_that_differ_from_the_tables_are_reported(name):
    users = users_of(2, 3)
    getattr(users, name)[7] += 1
    with pytest.raises(RuntimeError, match="users of KV blocks differ from the block tables"):
        users.check(TABLE)
