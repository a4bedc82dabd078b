import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from raybatch.prefix.block_keys import find_representatives
from raybatch.prefix.groups import exact_single_level, make_groups, multi_level, num_computed_tokens
from raybatch.prefix.tree import build_tree
from tests.prefix.prompts import SLIDES, block_sizes, keys_of, letters, prompt_lists


def groups_of(prompts, block_size, *, dedup=False):
    keys = keys_of(prompts, block_size)
    tree = build_tree(keys)
    representative = find_representatives(keys) if dedup else None
    return make_groups(tree, keys, exact_single_level(tree, keys), representative)


def members(groups):
    return [np.flatnonzero(groups.group_id == group).tolist() for group in range(groups.num_groups)]


@given(prompt_lists, block_sizes)
def test_rows_of_a_group_begin_with_its_prefix(prompts, block_size):
    groups = groups_of(prompts, block_size)
    for rows, prefix_len in zip(members(groups), groups.prefix_len.tolist(), strict=True):
        assert len(rows) > 1
        assert prefix_len % block_size == 0
        assert len({tuple(prompts[row][:prefix_len]) for row in rows}) == 1
        assert {int(tokens) for tokens in groups.prefix_tokens[rows]} == {prefix_len}


@given(prompt_lists, block_sizes)
def test_groups_add_up_to_the_computed_tokens(prompts, block_size):
    keys = keys_of(prompts, block_size)
    tree = build_tree(keys)
    open_nodes = exact_single_level(tree, keys)
    groups = make_groups(tree, keys, open_nodes)
    distinct = np.maximum(keys.num_tokens - groups.prefix_tokens, 1).sum()
    total = groups.prefix_len.sum() + distinct
    assert total == num_computed_tokens(tree, keys, open_nodes)


@given(prompt_lists, block_sizes)
def test_groups_are_numbered_by_their_first_row(prompts, block_size):
    groups = groups_of(prompts, block_size)
    assert groups.first_row.tolist() == sorted(rows[0] for rows in members(groups))
    assert groups.first_row.tolist() == [rows[0] for rows in members(groups)]
    assert groups.num_rows.tolist() == [len(rows) for rows in members(groups)]


@given(prompt_lists, st.randoms())
def test_order_of_the_input_changes_no_group(prompts, random):
    order = list(range(len(prompts)))
    random.shuffle(order)
    shuffled = members(groups_of([prompts[i] for i in order], 2))
    renamed = sorted(sorted(order[row] for row in rows) for rows in shuffled)
    assert renamed == sorted(members(groups_of(prompts, 2)))


def test_rows_that_share_nothing_are_alone():
    groups = groups_of([[1, 1], [2, 2], [3]], 2)
    assert groups.group_id.tolist() == [-1, -1, -1]
    assert groups.prefix_tokens.tolist() == [0, 0, 0]
    assert groups.num_groups == 0


def test_six_prompts_of_the_slides_make_two_groups():
    groups = groups_of(letters(SLIDES), 1)
    assert groups.group_id.tolist() == [-1, 0, 0, 1, 1, -1]
    assert groups.prefix_tokens.tolist() == [0, 2, 2, 8, 8, 0]


def test_identical_rows_are_generated_once_when_asked():
    prompts = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [9], [9]]
    groups = groups_of(prompts, 2, dedup=True)
    assert groups.representative.tolist() == [0, 1, 0, 3, 3]
    assert groups.num_rows.tolist() == [3]
    assert groups_of(prompts, 2).representative.tolist() == [0, 1, 2, 3, 4]


def test_row_that_is_left_alone_at_an_open_node_is_in_no_group():
    keys = keys_of([[1, 1, 5], [1, 1, 2, 2, 6], [1, 1, 2, 2, 7]], 2)
    tree = build_tree(keys)
    groups = make_groups(tree, keys, multi_level(tree))
    assert groups.group_id.tolist() == [-1, 0, 0]


def test_no_rows_make_no_groups():
    assert groups_of([], 4, dedup=True).num_groups == 0
