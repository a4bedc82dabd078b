import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.errors import ConfigError
from raybatch.prefix.block_keys import hash_blocks
from raybatch.prefix.enlarge import exact_single_level
from raybatch.prefix.groups import make_groups
from raybatch.prefix.nested import flatten_nested, nest_rows, nested_groups
from raybatch.prefix.tree import build_tree
from tests.prefix.prompts import keys_of, prompt_lists

tokens = st.lists(st.integers(0, 9), max_size=7)
nested_inputs = st.lists(st.tuples(tokens, st.lists(tokens, max_size=4)), max_size=5)


def prompts_of(rows):
    return [part.tolist() for part in np.split(rows.token_ids, rows.offsets[1:-1])]


@given(nested_inputs)
def test_prompts_are_prefix_and_context(nested):
    rows = flatten_nested(nested)
    expected = [[*prefix, *context] for prefix, contexts in nested for context in contexts]
    assert prompts_of(rows)[: len(expected)] == expected
    assert len(rows.offsets) == len(expected) + 1


@given(nested_inputs)
def test_given_groups_stay_as_they_are(nested):
    rows = flatten_nested(nested)
    keys = hash_blocks(rows.token_ids, rows.offsets, 2)
    groups = nested_groups(rows, keys, dedup=False)
    kept = [g for g, (prefix, ctxs) in enumerate(nested) if len(prefix) >= 2 and len(ctxs) > 1]
    found = rows.group_of_row[groups.first_row].tolist()
    assert found == kept
    assert groups.num_rows.tolist() == [len(nested[g][1]) for g in kept]
    assert groups.prefix_len.tolist() == [len(nested[g][0]) // 2 * 2 for g in kept]


@given(prompt_lists)
def test_nested_form_of_groups_gives_every_row_back_by_number(prompts):
    keys = keys_of(prompts, 2)
    tree = build_tree(keys)
    groups = make_groups(tree, keys, exact_single_level(tree, keys), dedup=False)
    flat = np.array([token for prompt in prompts for token in prompt], np.int32)
    offsets = np.cumsum([0, *map(len, prompts)])
    nested, row_numbers = nest_rows(flat, offsets, groups)
    restored = dict(
        zip(
            [row for rows in row_numbers for row in rows.tolist()],
            [(*prefix, *context) for prefix, contexts in nested for context in contexts],
            strict=True,
        )
    )
    assert [restored[row] for row in range(len(prompts))] == prompts


def test_nested_form_survives_the_round_trip():
    nested = [([1, 2, 3, 4], [[5], [], [5]]), ([6, 7], [[8, 8], [9]])]
    rows = flatten_nested(nested)
    groups = nested_groups(rows, hash_blocks(rows.token_ids, rows.offsets, 2), dedup=False)
    again, row_numbers = nest_rows(rows.token_ids, rows.offsets, groups)
    assert again == nested
    assert [numbers.tolist() for numbers in row_numbers] == [[0, 1, 2], [3, 4]]


def test_duplicates_within_a_given_group_are_found():
    rows = flatten_nested([([1, 2], [[5], [], [5]])])
    groups = nested_groups(rows, hash_blocks(rows.token_ids, rows.offsets, 2), dedup=True)
    assert groups.representative.tolist() == [0, 1, 0]


def test_rows_that_are_alone_get_an_empty_prefix():
    keys = keys_of([[1], [2]], 2)
    tree = build_tree(keys)
    groups = make_groups(tree, keys, exact_single_level(tree, keys), dedup=False)
    nested, _ = nest_rows(np.array([1, 2], np.int32), np.array([0, 1, 2]), groups)
    assert nested == [([], [[1]]), ([], [[2]])]


def test_group_of_three_parts_is_refused():
    with pytest.raises(ConfigError, match="group 1 has 3 parts"):
        flatten_nested([([1], [[2]]), ([1], [[2]], [3])])
