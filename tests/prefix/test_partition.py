"""Cutting an input into parts: what shares much comes together, parts are of nearly equal size."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.config import PlanConfig
from raybatch.errors import ConfigError
from raybatch.prefix.partition import choose_parts, cut_values
from raybatch.prefix.plan import PlanRows, arrange_rows

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


def computed(keys, part):
    """Sum what the parts compute when each is planned by itself."""
    total = 0
    for number in np.unique(part):
        rows = take(keys, np.flatnonzero(part == number))
        lengths = np.ones(rows.num_rows)
        plan_rows = PlanRows(keys=rows, expected_tokens=lengths)
        total += arrange_rows(plan_rows, PlanConfig()).computed_tokens
    return total


@given(prompt_lists, block_sizes, st.integers(1, 5))
def test_every_row_has_a_part(prompts, block_size, num_parts):
    keys = keys_of(prompts, block_size)
    part = choose_parts(keys, num_parts).assign(keys)
    assert len(prompts) == len(part)
    assert all(0 <= p < num_parts for p in part)


@pytest.mark.parametrize("system", [0, 32])
def test_rows_of_a_document_stay_together_behind_a_common_system_prompt(system):
    keys = documents(60, 8, system=system)
    part = choose_parts(keys.slice(0, 200), 4).assign(keys)
    whole, apart = computed(keys, np.zeros(keys.num_rows)), computed(keys, part)
    # at most the system prompt once more in each part
    assert apart <= whole + 3 * system + 3 * 16


def test_parts_are_of_nearly_equal_size():
    keys = documents(200, 8, system=32)
    part = choose_parts(keys.slice(0, 400), 4).assign(keys)
    assert np.bincount(part).max() <= 1.5 * keys.num_rows / 4


def test_rows_that_share_nothing_are_spread_by_their_hash():
    keys = keys_of([[i, i, i, i] for i in range(400)], 2)
    part = choose_parts(keys.slice(0, 40), 4).assign(keys)
    assert np.bincount(part, minlength=4).min() > 60


def test_one_prefix_of_all_rows_is_passed_through():
    keys = keys_of([[7, 7, i, i] for i in range(400)], 2)
    part = choose_parts(keys.slice(0, 40), 4).assign(keys)
    assert np.bincount(part, minlength=4).min() > 60


def test_the_rule_is_the_same_for_any_batch_of_rows():
    keys = documents(40, 6, system=16)
    rule = choose_parts(keys.slice(0, 100), 3)
    halves = [rule.assign(keys.slice(0, 100)), rule.assign(keys.slice(100, keys.num_rows))]
    assert rule.assign(keys).tolist() == np.concatenate(halves).tolist()


def test_rows_without_a_block_go_by_their_digest():
    keys = keys_of(letters(["a", "b", "", "a"]), 4)
    part = choose_parts(keys, 3).assign(keys)
    assert part[0] == part[3]


def test_values_are_cut_at_equal_weights():
    values, weights = np.array([3.0, 1.0, 2.0, 4.0]), np.array([1, 2, 1, 4])
    assert [4.0] == cut_values(values, weights, 2).tolist()
    assert [2.0, 4.0] == cut_values(values, weights, 4).tolist()


def test_equal_values_make_fewer_stretches():
    assert [5.0] == cut_values(np.full(4, 5.0), np.ones(4, int), 3).tolist()


def test_no_values_make_no_cuts():
    assert [] == cut_values(np.zeros(0), np.zeros(0, int), 3).tolist()


def test_no_parts_are_refused():
    with pytest.raises(ConfigError, match="0 parts"):
        choose_parts(keys_of([[1]], 1), 0)
