"""The plan of rows in memory: order, groups, loads and units."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.config import PlanConfig
from raybatch.prefix.plan import RowFeatures, append_skipped, arrange_rows, plan_rows, put_first

from .prompts import SLIDES, block_sizes, cost_of, draw_prefix_tree, keys_of, letters, prompt_lists

CONFIG = PlanConfig(min_saved_fraction=0)


def rows_of(prompts, block_size=1, expected=None):
    keys = keys_of(prompts, block_size)
    lengths = np.full(len(prompts), 4.0) if expected is None else np.array(expected, float)
    return RowFeatures(keys=keys, expected_tokens=lengths)


def runs(values):
    """Return the distinct values in order; fails where one comes back after another."""
    kept = [v for i, v in enumerate(values) if i == 0 or values[i - 1] != v]
    assert len(kept) == len(set(kept)), values
    return kept


@given(
    prompt_lists,
    block_sizes,
    st.sampled_from(["single_level", "multi_level"]),
    st.sampled_from([1, 1024]),
)
def test_every_row_has_one_rank_and_groups_stay_together(prompts, block_size, sharing, unit_rows):
    config = PlanConfig(min_saved_fraction=0, sharing=sharing, order="ratio", unit_rows=unit_rows)
    plan, _ = plan_rows(rows_of(prompts, block_size), config)
    assert list(range(len(prompts))) == sorted(plan.order.tolist())
    runs([g for g in plan.group_id[plan.order].tolist() if g >= 0])


@given(prompt_lists, block_sizes, st.booleans())
def test_loads_add_up_to_the_tokens_that_the_chosen_prefixes_cost(prompts, block_size, dedup):
    rows = rows_of(prompts, block_size)
    found = arrange_rows(rows, PlanConfig(), dedup=dedup)
    assert found.computed_tokens == int(found.load.prefill_tokens.sum())


@given(prompt_lists, block_sizes, st.booleans(), st.sampled_from([1, 3, 1024]))
def test_loads_of_all_levels_add_up_as_well(prompts, block_size, dedup, unit_rows):
    config = PlanConfig(sharing="multi_level", unit_rows=unit_rows)
    found = arrange_rows(rows_of(prompts, block_size), config, dedup=dedup)
    assert found.computed_tokens == int(found.load.prefill_tokens.sum())


@given(prompt_lists, block_sizes)
def test_computed_tokens_are_those_of_the_groups_that_rows_got(prompts, block_size):
    plan, found = plan_rows(rows_of(prompts, block_size), PlanConfig(), dedup=False)
    if plan.is_reordered:
        opened = {
            tuple(prompts[row][: plan.prefix_len[row]])
            for row in range(len(prompts))
            if plan.group_id[row] >= 0
        }
        assert cost_of(prompts, opened) <= found.computed_tokens


@given(prompt_lists, block_sizes)
def test_identical_rows_are_neighbours(prompts, block_size):
    plan, _ = plan_rows(rows_of(prompts, block_size), CONFIG)
    runs([tuple(prompts[row]) for row in plan.order.tolist()])


@pytest.mark.parametrize("seed", range(4))
def test_a_random_tree_is_planned_the_same_from_any_order_of_the_input(seed):
    prompts = draw_prefix_tree(seed, 100)
    shuffled = np.random.default_rng(seed).permutation(len(prompts))
    (one, found), (two, found_two) = (
        plan_rows(rows_of(p, 16), CONFIG) for p in (prompts, [prompts[i] for i in shuffled])
    )
    assert found.computed_tokens == found_two.computed_tokens
    sizes = [sorted(np.bincount(p.group_id[p.group_id >= 0]).tolist()) for p in (one, two)]
    assert sizes[0] == sizes[1]


def test_groups_with_much_output_for_little_prefill_run_first():
    prompts = letters(["aaaab", "aaaac", "bbbbc", "bbbbd"])
    plan, _ = plan_rows(rows_of(prompts, expected=[1, 1, 9, 9]), CONFIG)
    assert [2, 3, 0, 1] == plan.order.tolist()


def test_rows_keep_the_order_of_the_input_where_little_is_saved():
    prompts = letters(["abcdefgh", "xbcdefgh", "axxxxxxx"])
    plan, found = plan_rows(rows_of(prompts), PlanConfig(min_saved_fraction=0.05))
    assert (1 / 24, [0, 1, 2], [-1, -1, -1]) == (
        pytest.approx(found.saved_fraction),
        plan.order.tolist(),
        plan.group_id.tolist(),
    )


def test_all_levels_keep_the_order_of_the_tree_below_the_first():
    plan, _ = plan_rows(rows_of(letters(SLIDES)), PlanConfig(sharing="multi_level", order="ratio"))
    ranked = [SLIDES[row] for row in plan.order.tolist()]
    runs([word[:1] for word in ranked])
    runs([word[:3] for word in ranked])


def under_one_prefix(num_documents, rows_each):
    """Draw prompts of documents behind a system prompt that all of them have."""
    return [
        [1] * 32 + [100 + document] * 16 + [1000 + row, document]
        for document in range(num_documents)
        for row in range(rows_each)
    ]


def all_levels(prompts, **options):
    config = PlanConfig(sharing="multi_level", **options)
    return plan_rows(rows_of(prompts, 2), config)


def test_one_prefix_of_all_rows_leaves_entries_to_be_ordered():
    _, found = all_levels(under_one_prefix(50, 4), unit_rows=8)
    assert [4] * 50 == np.diff(found.starts).tolist()


def test_rows_that_end_in_a_passed_prefix_are_one_entry():
    _, found = all_levels([[1] * 32] * 3 + under_one_prefix(50, 4), unit_rows=8)
    assert [3] + [4] * 50 == np.diff(found.starts).tolist()


def test_a_prefix_of_many_entries_is_paid_by_each_for_its_rows():
    _, found = all_levels(under_one_prefix(16, 8), unit_rows=8)
    assert [32 // 16 + 16] * 16 == found.load.prefix_tokens.tolist()


def test_the_order_of_entries_counts_below_one_prefix():
    prompts = under_one_prefix(50, 4)
    config = PlanConfig(sharing="multi_level", unit_rows=8)
    expected = np.where(np.arange(200) // 4 == 30, 9, 1)
    plan, _ = plan_rows(rows_of(prompts, 2, expected), config)
    assert [120, 121, 122, 123] == plan.order[:4].tolist()


def test_rows_that_ran_first_are_in_the_units_in_which_they_ran():
    words = [f"aaaa{document * 4}{row}" for document in "dcb" for row in "012"]
    expected = [1, 1, 1, 5, 5, 5, 9, 9, 9]
    config = PlanConfig(min_saved_fraction=0, unit_rows=2, max_unit_rows=4)
    plan, _ = plan_rows(rows_of(letters(words), expected=expected), config)
    first = put_first(plan, np.array([0, 4, 8]), config)
    units = np.split(first.order, first.unit_starts[1:-1])
    assert [[0, 4], [8]] == [unit.tolist() for unit in units[:2]]
    assert list(range(9)) == sorted(first.order.tolist())


def test_units_of_all_levels_begin_between_documents():
    plan, _ = all_levels(under_one_prefix(50, 6), unit_rows=8)
    assert [0] * (plan.num_units + 1) == (plan.unit_starts % 6).tolist()


def test_a_subtree_of_one_unit_is_one_entry():
    _, found = all_levels(under_one_prefix(2, 4), unit_rows=8)
    assert [8] == np.diff(found.starts).tolist()


def test_units_begin_between_groups():
    prompts = letters(["aaab", "aaac", "aaad", "bbba", "bbbc", "bbbd"])
    config = PlanConfig(min_saved_fraction=0, unit_rows=2, max_unit_rows=4)
    plan, _ = plan_rows(rows_of(prompts), config)
    assert [0, 3, 6] == plan.unit_starts.tolist()


def test_rows_that_no_engine_sees_come_last_in_units_of_their_own():
    config = PlanConfig(min_saved_fraction=0, unit_rows=2, max_unit_rows=2)
    plan, _ = plan_rows(rows_of(letters(["aab", "aac"])), config)
    whole = append_skipped(plan, np.array([False, True, False, True, False]), config)
    assert ([1, 3, 0, 2, 4], [0, 2, 4, 5]) == (whole.order.tolist(), whole.unit_starts.tolist())
    assert [-1, 0, -1, 0, -1] == whole.group_id.tolist()
    assert [0, 2, 0, 2, 0] == whole.prefix_len.tolist()


def test_rows_that_no_engine_sees_stay_in_place_where_nothing_is_reordered():
    plan, _ = plan_rows(rows_of(letters(["abc", "xyz"])), PlanConfig())
    whole = append_skipped(plan, np.array([True, False, True]), PlanConfig())
    assert ([0, 1, 2], [0, 3]) == (whole.order.tolist(), whole.unit_starts.tolist())


def test_no_rows_make_an_empty_plan():
    plan, found = plan_rows(rows_of([]), CONFIG)
    assert (0, [0], 0) == (plan.num_rows, plan.unit_starts.tolist(), found.computed_tokens)


def test_a_part_follows_what_is_decided_for_the_whole():
    rows = rows_of(letters(["aab", "aac", "xyz"]))
    kept, _ = plan_rows(rows, CONFIG, is_reordered=False)
    ordered, _ = plan_rows(rows, PlanConfig(min_saved_fraction=1), is_reordered=True)
    assert (False, True) == (kept.is_reordered, ordered.is_reordered)


def test_nothing_is_reordered_where_plans_are_off():
    plan, _ = plan_rows(rows_of(letters(["aab", "aac"])), PlanConfig(mode="off"))
    assert [-1, -1] == plan.group_id.tolist()


@given(prompt_lists, block_sizes, st.integers(0, 5))
def test_rows_of_an_adapter_follow_each_other(prompts, block_size, seed):
    adapters = np.random.default_rng(seed).integers(0, 3, len(prompts)).astype(np.uint64)
    rows = rows_of(prompts, block_size)
    zeros = np.zeros_like(adapters)
    rows = replace(rows, keys=rows.keys.salted(adapters, zeros), adapters=adapters)
    plan, _ = plan_rows(rows, CONFIG)
    assert list(range(len(prompts))) == sorted(plan.order.tolist())
    runs(adapters[plan.order].tolist())


def test_rows_of_adapters_are_ordered_although_they_share_nothing():
    rows = rows_of([[1], [2], [3], [4]])
    rows = replace(rows, adapters=np.array([1, 2, 1, 2], np.uint64))
    plan, _ = plan_rows(rows, PlanConfig())
    assert plan.order.tolist() == [0, 2, 1, 3]
