"""Which requests make a group, and which blocks it holds."""

from dataclasses import replace

import numpy as np
import pytest

from raybatch.engine.sequences.block_manager import BlockManager
from raybatch.engine.sequences.shared_prompts import SharedPrompts
from raybatch.engine.sequences.table import Sequence
from tests.engine.fakes import make_request

BLOCK = 4


def record_of(prompt_len, prefix_len, *, group_id=7, fill=1):
    request = make_request(0, np.full(prompt_len, fill))
    request = replace(request, group_id=group_id, prefix_len=prefix_len)
    return Sequence(request=request, sample_idx=0, arrival=0, max_len=prompt_len + 8)


def make_shared():
    blocks = BlockManager(8, BLOCK)
    return blocks, SharedPrompts(blocks, has_cache=True)


def joined(shared, *args, **options):
    """A sequence that was asked whether it is a member."""
    record = record_of(*args, **options)
    shared.join(record)
    return record


@pytest.mark.parametrize(
    ("prefix_len", "num_blocks"), [(BLOCK, 1), (2 * BLOCK - 1, 1), (2 * BLOCK, 2)]
)
def test_whole_blocks_of_a_prefix_are_shared_be_it_one(prefix_len, num_blocks):
    _, shared = make_shared()
    group = joined(shared, 10, prefix_len).group
    assert (num_blocks, num_blocks * BLOCK) == (group.max_blocks, len(group.prefix))
    assert group is joined(shared, 12, prefix_len).group
    assert 2 == group.num_members


@pytest.mark.parametrize(
    "record",
    [
        record_of(10, BLOCK - 1),
        record_of(10, 0),
        record_of(10, BLOCK, group_id=None),
        record_of(BLOCK - 1, BLOCK),
    ],
    ids=["less than a block", "nothing", "no group", "a prompt that is shorter"],
)
def test_without_a_whole_block_to_share_there_is_no_group(record):
    _, shared = make_shared()
    shared.join(record)
    assert record.group is None


def test_who_has_other_tokens_is_no_member():
    _, shared = make_shared()
    group = joined(shared, 10, BLOCK).group
    assert joined(shared, 10, BLOCK, fill=2).group is None
    assert 1 == group.num_members


def test_a_group_holds_the_blocks_of_its_prefix_and_gives_them_back_with_its_last_member():
    blocks, shared = make_shared()
    first, second = (joined(shared, 12, 2 * BLOCK) for _ in range(2))
    table = blocks.allocate(3)
    shared.pin(first.group, 0, table[:1])
    shared.pin(first.group, 1, table[1:])
    assert (table[:2], 2) == (first.group.blocks, shared.num_pinned)
    shared.leave(first)
    assert [2, 2, 1] == blocks.num_refs[table].tolist()
    shared.leave(second)
    assert [1, 1, 1] == blocks.num_refs[table].tolist()
    assert [] == shared.tables()


def test_blocks_behind_a_gap_are_not_those_of_the_prefix():
    blocks, shared = make_shared()
    group = joined(shared, 12, 2 * BLOCK).group
    table = blocks.allocate(3)
    shared.pin(group, 1, table[1:2])
    assert [] == group.blocks
    shared.pin(group, 0, table)
    assert table[:2] == group.blocks
