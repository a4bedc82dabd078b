"""Which requests make a group, and which blocks it holds."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.groups import PrefixGroups
from tests.engine.fakes import make_request

BLOCK = 4


def request_of(prompt_len, prefix_len, *, group_id=7, fill=1):
    request = make_request(0, np.full(prompt_len, fill))
    return replace(request, group_id=group_id, prefix_len=prefix_len)


def make_groups():
    blocks = BlockManager(8, BLOCK)
    return blocks, PrefixGroups(blocks, keep_cached=True)


@pytest.mark.parametrize(
    ("prefix_len", "num_blocks"), [(BLOCK, 1), (2 * BLOCK - 1, 1), (2 * BLOCK, 2)]
)
def test_whole_blocks_of_a_prefix_are_shared_be_it_one(prefix_len, num_blocks):
    _, groups = make_groups()
    group = groups.join(request_of(10, prefix_len))
    assert (num_blocks, num_blocks * BLOCK) == (group.max_blocks, len(group.prefix))
    assert group is groups.join(request_of(12, prefix_len))
    assert 2 == group.num_members


@pytest.mark.parametrize(
    "request_",
    [
        request_of(10, BLOCK - 1),
        request_of(10, 0),
        request_of(10, BLOCK, group_id=None),
        request_of(BLOCK - 1, BLOCK),
    ],
    ids=["less than a block", "nothing", "no group", "a prompt that is shorter"],
)
def test_without_a_whole_block_to_share_there_is_no_group(request_):
    _, groups = make_groups()
    assert groups.join(request_) is None


def test_who_has_other_tokens_is_no_member():
    _, groups = make_groups()
    group = groups.join(request_of(10, BLOCK))
    assert groups.join(request_of(10, BLOCK, fill=2)) is None
    assert 1 == group.num_members


def test_a_group_holds_the_blocks_of_its_prefix_and_gives_them_back_with_its_last_member():
    blocks, groups = make_groups()
    group = groups.join(request_of(12, 2 * BLOCK))
    groups.join(request_of(12, 2 * BLOCK))
    table = blocks.allocate(3)
    groups.pin(group, 0, table[:1])
    groups.pin(group, 1, table[1:])
    assert (table[:2], 2) == (group.blocks, groups.num_pinned)
    groups.leave(group)
    assert [2, 2, 1] == blocks.num_refs[table].tolist()
    groups.leave(group)
    assert [1, 1, 1] == blocks.num_refs[table].tolist()
    assert [] == groups.tables()


def test_blocks_behind_a_gap_are_not_those_of_the_prefix():
    blocks, groups = make_groups()
    group = groups.join(request_of(12, 2 * BLOCK))
    table = blocks.allocate(3)
    groups.pin(group, 1, table[1:2])
    assert [] == group.blocks
    groups.pin(group, 0, table)
    assert table[:2] == group.blocks
