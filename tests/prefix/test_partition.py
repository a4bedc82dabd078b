"""Cutting an input into parts: what shares much comes together, parts are of nearly equal size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.config import PlanConfig
from raybatch.prefix.plan import RowFeatures, arrange_rows, choose_parts, cut_values

from .prompts import block_sizes, keys_of, letters, prompt_lists


def take(keys, rows):
    parts = [keys.slice(row, row + 1) for row in rows]
    return type(keys).concat(parts)


def documents(num_documents, rows_each, *, system=0, seed=0):
    """Draw rows of documents of 64 tokens behind a system prompt, shuffled."""
    rng = np.random.default_rng(seed)
    head = rng.integers(0, 1000, system).tolist()
    prompts = []
    for _ in range(num_documents):
        document = rng.integers(0, 1000, 64).tolist()
        prompts += [head + document + rng.integers(0, 1000, 8).tolist() for _ in range(rows_each)]
    return keys_of([prompts[i] for i in rng.permutation(len(prompts))], 16)


def assign(rule, keys, first_row=0):
    return rule.assign(keys, first_row + np.arange(keys.num_rows))


def mixed_with_copies(num_copies, prompt, *, num_others, seed=0):
    """Draw rows that share nothing, and many copies of one prompt among them."""
    rng = np.random.default_rng(seed)
    others = rng.integers(0, 1000, (num_others, 40)).tolist()
    prompts = [*others, *([prompt] * num_copies)]
    return keys_of([prompts[i] for i in rng.permutation(len(prompts))], 16)


def computed(keys, part):
    """Sum what the parts compute when each is planned by itself."""
    total = 0
    for number in np.unique(part):
        rows = take(keys, np.flatnonzero(part == number))
        lengths = np.ones(rows.num_rows)
        plan_rows = RowFeatures(keys=rows, expected_tokens=lengths)
        total += arrange_rows(plan_rows, PlanConfig()).computed_tokens
    return total


@given(prompt_lists, block_sizes, st.integers(1, 5))
def test_every_row_has_a_part(prompts, block_size, num_parts):
    keys = keys_of(prompts, block_size)
    part = assign(choose_parts(keys, num_parts), keys)
    assert len(prompts) == len(part)
    assert all(0 <= p < num_parts for p in part)


@pytest.mark.parametrize("length", [5, 32, 40], ids=["no block", "whole blocks", "a tail"])
def test_copies_of_a_dense_prompt_are_spread(length):
    keys = mixed_with_copies(1000, [7] * length, num_others=1000)
    part = assign(choose_parts(keys.slice(0, 500), 8), keys)
    assert np.bincount(part, minlength=8).max() <= 1.25 * keys.num_rows / 8


def test_copies_of_other_prompts_stay_together():
    keys = keys_of([[1] * 16 + [i // 4] for i in range(800)], 16)
    part = assign(choose_parts(keys.slice(0, 400), 4), keys)
    assert [1] * 200 == [len(set(part[i : i + 4].tolist())) for i in range(0, 800, 4)]


def test_dense_copies_at_even_distances_are_spread():
    prompts = [[7] * 40 if i % 4 == 0 else [i] * 40 for i in range(2000)]
    keys = keys_of(prompts, 16)
    part = assign(choose_parts(keys, 4), keys)
    assert np.bincount(part, minlength=4).max() <= 1.25 * keys.num_rows / 4


def test_copies_are_spread_by_row_and_not_by_batch():
    keys = mixed_with_copies(200, [7] * 40, num_others=200)
    rule = choose_parts(keys, 4)
    batches = [assign(rule, keys.slice(i, i + 50), first_row=i) for i in range(0, 400, 50)]
    assert assign(rule, keys).tolist() == np.concatenate(batches).tolist()


@pytest.mark.parametrize("system", [0, 32])
def test_rows_of_a_document_stay_together_behind_a_common_system_prompt(system):
    keys = documents(60, 8, system=system)
    part = assign(choose_parts(keys.slice(0, 200), 4), keys)
    whole, apart = computed(keys, np.zeros(keys.num_rows)), computed(keys, part)
    # at most the system prompt once more in each part
    assert apart <= whole + 3 * system + 3 * 16


def test_parts_are_of_nearly_equal_size():
    keys = documents(200, 8, system=32)
    part = assign(choose_parts(keys.slice(0, 400), 4), keys)
    assert np.bincount(part).max() <= 1.5 * keys.num_rows / 4


def test_rows_that_share_nothing_are_spread_by_their_hash():
    keys = keys_of([[i, i, i, i] for i in range(400)], 2)
    part = assign(choose_parts(keys.slice(0, 40), 4), keys)
    assert np.bincount(part, minlength=4).min() > 60


def test_one_prefix_of_all_rows_is_passed_through():
    keys = keys_of([[7, 7, i, i] for i in range(400)], 2)
    part = assign(choose_parts(keys.slice(0, 40), 4), keys)
    assert np.bincount(part, minlength=4).min() > 60


def test_the_rule_is_the_same_for_any_batch_of_rows():
    keys = documents(40, 6, system=16)
    rule = choose_parts(keys.slice(0, 100), 3)
    halves = [
        assign(rule, keys.slice(0, 100)),
        assign(rule, keys.slice(100, keys.num_rows), first_row=100),
    ]
    assert assign(rule, keys).tolist() == np.concatenate(halves).tolist()


def test_rows_without_a_block_go_by_their_digest():
    keys = keys_of([*letters(["a", "b", "", "a"]), *([i] for i in range(40))], 4)
    part = assign(choose_parts(keys, 3), keys)
    assert part[0] == part[3]


def test_values_are_cut_at_equal_weights():
    values, weights = np.array([3.0, 1.0, 2.0, 4.0]), np.array([1, 2, 1, 4])
    assert [4.0] == cut_values(values, weights, 2).tolist()
    assert [2.0, 4.0] == cut_values(values, weights, 4).tolist()


def test_equal_values_make_fewer_stretches():
    assert [5.0] == cut_values(np.full(4, 5.0), np.ones(4, int), 3).tolist()


def test_no_values_make_no_cuts():
    assert [] == cut_values(np.zeros(0), np.zeros(0, int), 3).tolist()
