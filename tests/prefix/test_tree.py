import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.prefix.block_keys import find_representatives
from raybatch.prefix.tree import build_tree, tree_stats
from tests.prefix.prompts import (
    SLIDES,
    block_sizes,
    draw_prefix_tree,
    keys_of,
    letters,
    num_shared_block_tokens,
    prompt_lists,
    shared_prefixes,
)


def tree_of(prompts, block_size):
    return build_tree(keys_of(prompts, block_size))


def rows_below(tree, node):
    return tree.row_order[tree.row_start[node] : tree.row_stop[node]].tolist()


def nodes_as_sets(tree):
    """Return depth and rows of each node below the root."""
    return {
        (int(tree.depth_tokens[node]), frozenset(rows_below(tree, node)))
        for node in range(1, tree.num_nodes)
    }


def uniform_groups(num_groups, degree, prefix, distinct):
    rng = np.random.default_rng(0)
    draws = rng.integers(1000, 2000, (num_groups, prefix)), rng.integers(0, 9, distinct)
    return [
        [*draws[0][group], 3000 + member, *draws[1][1:]]
        for group in range(num_groups)
        for member in range(degree)
    ]


@given(prompt_lists, block_sizes)
def test_nodes_are_the_longest_common_prefixes_of_pairs(prompts, block_size):
    expected = {(len(p), rows) for p, rows in shared_prefixes(prompts, block_size).items()}
    tree = tree_of(prompts, block_size)
    assert nodes_as_sets(tree) == expected
    assert tree.num_nodes == len(expected) + 1


@given(prompt_lists, block_sizes)
def test_parent_is_the_deepest_node_around(prompts, block_size):
    tree = tree_of(prompts, block_size)
    assert (tree.parent[0], tree.depth_tokens[0]) == (-1, 0)
    for node in range(1, tree.num_nodes):
        around = [
            other
            for other in range(tree.num_nodes)
            if other != node
            and set(rows_below(tree, node)) <= set(rows_below(tree, other))
            and tree.depth_tokens[other] < tree.depth_tokens[node]
        ]
        assert tree.parent[node] == max(around, key=lambda other: tree.depth_tokens[other])


@given(prompt_lists, block_sizes)
def test_nodes_are_in_pre_order_with_children_by_first_row(prompts, block_size):
    tree = tree_of(prompts, block_size)
    stack, visited = [0], []
    while stack:
        node = stack.pop()
        visited.append(node)
        children = np.flatnonzero(tree.parent == node).tolist()
        stack += sorted(children, key=lambda child: min(rows_below(tree, child)), reverse=True)
    assert visited == list(range(tree.num_nodes))


@given(prompt_lists, block_sizes)
def test_own_rows_lead_the_slice_of_a_node_in_input_order(prompts, block_size):
    tree = tree_of(prompts, block_size)
    assert sorted(tree.row_order.tolist()) == list(range(len(prompts)))
    for node in range(tree.num_nodes):
        rows = rows_below(tree, node)
        children = np.flatnonzero(tree.parent == node)
        in_children = {row for child in children for row in rows_below(tree, child)}
        own = rows[: tree.num_ending[node]]
        assert own == sorted(set(rows) - in_children)


@given(prompt_lists, block_sizes)
def test_deepest_node_of_a_row_is_its_longest_shared_prefix(prompts, block_size):
    tree = tree_of(prompts, block_size)
    prefixes = shared_prefixes(prompts, block_size)
    expected = [
        max((len(prefix) for prefix, rows in prefixes.items() if row in rows), default=0)
        for row in range(len(prompts))
    ]
    assert tree.depth_tokens[tree.deepest_nodes()].tolist() == expected


@given(prompt_lists, block_sizes)
def test_levels_and_stops_describe_the_subtrees(prompts, block_size):
    tree = tree_of(prompts, block_size)
    levels, stops = tree.levels(), tree.node_stops()
    for node in range(1, tree.num_nodes):
        assert levels[node] == levels[tree.parent[node]] + 1
        above = node
        while above > 0:
            above = tree.parent[above]
            assert above < node < stops[above]
    assert levels[0] == 0
    assert (stops - np.arange(tree.num_nodes)).sum() == (levels + 1).sum()


@given(prompt_lists, st.randoms())
def test_order_of_the_input_changes_no_group_of_rows(prompts, random):
    order = list(range(len(prompts)))
    random.shuffle(order)
    shuffled = nodes_as_sets(tree_of([prompts[i] for i in order], 2))
    renamed = {(depth, frozenset(order[row] for row in rows)) for depth, rows in shuffled}
    assert renamed == nodes_as_sets(tree_of(prompts, 2))


@given(prompt_lists)
def test_tree_does_not_depend_on_the_values_of_the_hashes(prompts):
    keys = keys_of(prompts, 2)
    # other values, of which the larger ones are the smaller ones
    renamed = dataclasses.replace(keys, keys=~keys.keys)
    plain, other = build_tree(keys), build_tree(renamed)
    for field in dataclasses.fields(plain):
        np.testing.assert_array_equal(getattr(plain, field.name), getattr(other, field.name))


@pytest.mark.parametrize("num_prompts", [20, 100, 400])
@pytest.mark.parametrize("seed", range(5))
def test_random_trees_hold_each_shared_block_once(seed, num_prompts):
    prompts = draw_prefix_tree(seed, num_prompts)
    tree = tree_of(prompts, 16)
    assert tree.edge_tokens().sum() == num_shared_block_tokens(prompts, 16)


def test_chain_of_prefixes_needs_no_recursion():
    tokens = list(range(1200))
    tree = tree_of([tokens[:stop] for stop in range(1, 1201)], 1)
    assert tree.parent.tolist() == list(range(-1, 1199))
    assert tree.depth_tokens.tolist() == list(range(1200))


def test_one_prefix_of_all_rows_is_the_only_child_of_the_root():
    tree = tree_of([[9] * 40 + [i] for i in range(5)], 4)
    assert nodes_as_sets(tree) == {(40, frozenset(range(5)))}


def test_rows_that_share_nothing_hang_on_the_root():
    tree = tree_of([[i] * 8 for i in range(5)], 4)
    assert tree.row_order.tolist() == [0, 1, 2, 3, 4]
    assert tree.num_ending.tolist() == [5]


def test_no_rows_make_a_root_alone():
    tree = tree_of([], 4)
    assert (tree.num_nodes, tree.num_rows) == (1, 0)
    assert tree.node_stops().tolist() == [1]
    assert tree_stats(tree, keys_of([], 4), np.zeros(0, np.int64)).saved_tokens == 0


def test_six_prompts_of_the_slides_have_three_shared_prefixes():
    tree = tree_of(letters(SLIDES), 1)
    assert tree.depth_tokens.tolist() == [0, 1, 2, 8]
    assert tree.parent.tolist() == [-1, 0, 1, 2]
    assert tree.num_ending.tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("degree", "prefix", "distinct", "block_size"),
    [(2, 256, 32, 16), (16, 256, 32, 16), (16, 2000, 200, 16), (16, 2000, 200, 64)],
)
def test_saving_of_uniform_groups_is_the_closed_form(degree, prefix, distinct, block_size):
    keys = keys_of(uniform_groups(3, degree, prefix, distinct), block_size)
    stats = tree_stats(build_tree(keys), keys, find_representatives(keys))
    shared = prefix // block_size * block_size
    assert stats.saved_tokens / stats.logical_tokens == pytest.approx(
        (1 - 1 / degree) * shared / (prefix + distinct)
    )
    assert stats.mean_sharing_degree == degree
    assert stats.mean_prefix_len == shared
    assert stats.mean_distinct_len == prefix + distinct - shared


def test_stats_count_rows_that_repeat_an_earlier_one():
    keys = keys_of([[1, 2, 3], [4], [1, 2, 3], [1, 2, 3], [4], [5]], 2)
    stats = tree_stats(build_tree(keys), keys, find_representatives(keys))
    assert (stats.num_rows, stats.num_duplicates) == (6, 3)


def test_row_that_is_covered_entirely_still_computes_one_token():
    keys = keys_of([[1, 2, 3, 4]] * 3, 2)
    stats = tree_stats(build_tree(keys), keys, find_representatives(keys))
    assert (stats.logical_tokens, stats.physical_tokens, stats.saved_tokens) == (12, 7, 5)
