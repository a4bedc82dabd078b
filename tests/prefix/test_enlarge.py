import numpy as np
import pytest
from hypothesis import given

from raybatch.prefix.block_keys import find_representatives
from raybatch.prefix.groups import (
    exact_single_level,
    multi_level,
    nearest_open,
    num_computed_tokens,
)
from raybatch.prefix.tree import build_tree, tree_stats
from tests.prefix.choices import greedy_single_level, naive_first_level
from tests.prefix.prompts import (
    SLIDES,
    block_sizes,
    cheapest_cost,
    cost_of,
    draw_prefix_tree,
    keys_of,
    letters,
    prompt_lists,
)


def planned(prompts, block_size):
    keys = keys_of(prompts, block_size)
    return build_tree(keys), keys


def costs(tree, keys):
    """Return the tokens computed by each choice, best first by right."""
    return [
        num_computed_tokens(tree, keys, multi_level(tree), multi_level=True),
        num_computed_tokens(tree, keys, exact_single_level(tree, keys)),
        num_computed_tokens(tree, keys, greedy_single_level(tree, keys)),
        num_computed_tokens(tree, keys, naive_first_level(tree)),
        num_computed_tokens(tree, keys, np.zeros(tree.num_nodes, bool)),
    ]


def prefixes_of(prompts, tree, open_nodes):
    return [
        tuple(prompts[tree.row_order[tree.row_start[node]]][: tree.depth_tokens[node]])
        for node in np.flatnonzero(open_nodes)
    ]


@given(prompt_lists, block_sizes)
def test_exact_choice_is_the_best_of_all_open_sets(prompts, block_size):
    tree, keys = planned(prompts, block_size)
    found = num_computed_tokens(tree, keys, exact_single_level(tree, keys))
    assert found == cheapest_cost(prompts, block_size)


@given(prompt_lists)
def test_exact_choice_is_the_best_also_for_blocks_of_one_token(prompts):
    tree, keys = planned(prompts, 1)
    found = num_computed_tokens(tree, keys, exact_single_level(tree, keys))
    assert found <= min(costs(tree, keys)[1:])


@given(prompt_lists, block_sizes)
def test_computed_tokens_are_those_of_the_open_prefixes_and_the_rests(prompts, block_size):
    tree, keys = planned(prompts, block_size)
    for open_nodes in (exact_single_level(tree, keys), multi_level(tree), naive_first_level(tree)):
        expected = cost_of(prompts, prefixes_of(prompts, tree, open_nodes))
        assert num_computed_tokens(tree, keys, open_nodes) == expected


# a block of one token is no gain where it is a whole prompt
@given(prompt_lists, block_sizes.filter(lambda size: size > 1))
def test_choices_are_ordered_from_multi_level_to_none(prompts, block_size):
    found = costs(*planned(prompts, block_size))
    assert found == sorted(found)


@pytest.mark.parametrize("seed", range(8))
def test_choices_are_ordered_on_large_random_trees(seed):
    found = costs(*planned(draw_prefix_tree(seed, 100), 16))
    assert found == sorted(found)


@given(prompt_lists, block_sizes)
def test_sharing_at_all_levels_is_what_the_stats_say(prompts, block_size):
    tree, keys = planned(prompts, block_size)
    assert (
        tree_stats(tree, keys, find_representatives(keys)).physical_tokens == costs(tree, keys)[0]
    )


@given(prompt_lists, block_sizes)
def test_identical_rows_that_are_generated_once_are_like_absent_ones(prompts, block_size):
    tree, keys = planned(prompts, block_size)
    representative = find_representatives(keys)
    for choose in (exact_single_level, greedy_single_level):
        open_nodes = choose(tree, keys, representative=representative)
        found = num_computed_tokens(tree, keys, open_nodes, representative=representative)
        rest, rest_keys = planned(list(dict.fromkeys(prompts)), block_size)
        assert found == num_computed_tokens(rest, rest_keys, choose(rest, rest_keys))


@given(prompt_lists, block_sizes)
def test_nearest_open_node_is_found_by_walking_up(prompts, block_size):
    tree, keys = planned(prompts, block_size)
    open_nodes = exact_single_level(tree, keys)
    for node, found in enumerate(nearest_open(tree, open_nodes).tolist()):
        while node > 0 and not open_nodes[node]:
            node = tree.parent[node]
        assert found == node


def test_six_prompts_of_the_slides_open_the_deep_prefix_too():
    tree, keys = planned(letters(SLIDES), 1)
    assert costs(tree, keys) == [29, 32, 32, 38, 42]
    assert greedy_single_level(tree, keys).tolist() == [False, True, False, True]
    assert naive_first_level(tree).tolist() == [False, True, False, False]


def test_exact_choice_closes_a_head_that_the_greedy_keeps():
    # each long prefix by itself saves less than repeating the head; both together empty the head
    head = [1] * 10
    prompts = [[*head, *[branch] * 6, tail] for branch in (2, 3) for tail in (8, 9)]
    tree, keys = planned(prompts, 1)
    assert costs(tree, keys) == [10 + 2 * 6 + 4, 2 * 16 + 4, 10 + 4 * 7, 10 + 4 * 7, 4 * 17]


def test_greedy_counts_the_forward_tokens_of_covered_rows():
    # a separate prefix saves each of the six rows one token of two, and costs ten tokens
    head = [1] * 8
    prompts = [[*head, 2, 2]] * 6 + [[*head, 3], [*head, 4]]
    tree, keys = planned(prompts, 2)
    assert prefixes_of(prompts, tree, greedy_single_level(tree, keys)) == [tuple(head)]


def test_tie_opens_fewer_nodes():
    tree, keys = planned(letters(SLIDES), 1)
    assert num_computed_tokens(tree, keys, multi_level(tree)) == 32
    assert exact_single_level(tree, keys).sum() == 2


def test_duplicates_that_are_generated_once_open_nothing():
    tree, keys = planned([[1, 2, 3, 4, 5]] * 5, 2)
    representative = find_representatives(keys)
    assert exact_single_level(tree, keys).sum() == 1
    assert exact_single_level(tree, keys, representative=representative).sum() == 0


def test_chain_of_prefixes_needs_no_recursion():
    tokens = list(range(700))
    tree, keys = planned([tokens[:stop] for stop in range(2, 701)], 1)
    found = costs(tree, keys)
    assert found == sorted(found)


def test_no_rows_open_nothing():
    tree, keys = planned([], 4)
    assert costs(tree, keys) == [0] * 5
