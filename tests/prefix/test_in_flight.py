"""Groups among the rows that wait: the same as of a full plan, with names that last."""

import numpy as np
from hypothesis import given

from raybatch.prefix.groups import exact_single_level, make_groups
from raybatch.prefix.plan import match_prefixes, plan_in_flight
from raybatch.prefix.tree import build_tree
from tests.prefix.prompts import block_sizes, keys_of, letters, prompt_lists


def plan_of(prompts, block_size, outputs=None):
    keys = keys_of(prompts, block_size)
    return plan_in_flight(keys, np.ones(len(prompts), np.int64) if outputs is None else outputs)


def members(group_ids):
    return {frozenset(np.flatnonzero(group_ids == g).tolist()) for g in set(group_ids.tolist())}


@given(prompt_lists, block_sizes)
def test_the_groups_are_those_that_save_most(prompts, block_size):
    keys, plan = keys_of(prompts, block_size), plan_of(prompts, block_size)
    tree = build_tree(keys)
    groups = make_groups(tree, keys, exact_single_level(tree, keys))
    is_grouped = groups.group_id >= 0
    assert is_grouped.tolist() == (plan.group_id >= 0).tolist()
    assert groups.prefix_tokens.tolist() == plan.prefix_len.tolist()
    assert members(groups.group_id[is_grouped]) == members(plan.group_id[is_grouped])


@given(prompt_lists, block_sizes)
def test_every_row_runs_once_and_members_run_together(prompts, block_size):
    plan = plan_of(prompts, block_size)
    assert list(range(len(prompts))) == sorted(plan.order.tolist())
    ordered = plan.group_id[plan.order]
    changes = np.flatnonzero(np.diff(ordered)) + 1
    runs = [int(run[0]) for run in np.split(ordered, changes) if len(run) and run[0] >= 0]
    assert len(runs) == len(set(runs))


@given(prompt_lists, block_sizes)
def test_a_group_is_found_by_its_name(prompts, block_size):
    plan = plan_of(prompts, block_size)
    names = np.unique(plan.group_id[plan.group_id >= 0])
    group_id, prefix_len = match_prefixes(keys_of(prompts, block_size), [set(names.tolist())])
    # a deeper prefix of another group may match as well, never a shorter one
    assert (prefix_len >= plan.prefix_len).all()
    is_same = prefix_len == plan.prefix_len
    assert group_id[is_same].tolist() == plan.group_id[is_same].tolist()


def test_the_longest_of_several_prefixes_is_found():
    plan = plan_of([[1, 1, 2, 2, 3], [1, 1, 2, 2, 4]], 2)
    short = plan_of([[1, 1, 5], [1, 1, 6]], 2)
    names = np.concatenate([plan.group_id[:1], short.group_id[:1]])
    keys = keys_of([[1, 1, 2, 2], [1, 1, 9], [2, 2]], 2)
    group_id, prefix_len = match_prefixes(keys, [{int(name)} for name in names])
    assert [int(names[0]), int(names[1]), -1] == group_id.tolist()
    assert [4, 2, 0] == prefix_len.tolist()


class SizedOnly(dict):
    """Names that can be looked up, and not gone through."""

    def __iter__(self):
        raise AssertionError("all groups were gone through")


def test_rows_are_matched_without_going_through_all_groups():
    plan = plan_of([[1, 1, 2], [1, 1, 3]], 2)
    waiting = SizedOnly.fromkeys([*range(100), int(plan.group_id[0])])
    group_id, _ = match_prefixes(keys_of([[1, 1, 9]], 2), [waiting.keys()])
    assert plan.group_id[:1].tolist() == group_id.tolist()


def test_most_output_per_computed_token_comes_first():
    prompts = [[1, 1, 9], [2, 2, 8], [1, 1, 7], [2, 2, 6], [3]]
    plan = plan_of(prompts, 2, np.array([1, 50, 1, 50, 9]))
    assert [1, 3, 4, 0, 2] == plan.order.tolist()


@given(prompt_lists, block_sizes)
def test_selected_rows_have_their_own_keys(prompts, block_size):
    rows = np.arange(len(prompts))[::-2]
    selected = keys_of(prompts, block_size).take(rows)
    expected = keys_of([prompts[row] for row in rows], block_size)
    assert expected.keys.tolist() == selected.keys.tolist()
    assert expected.offsets.tolist() == selected.offsets.tolist()
    assert expected.num_tokens.tolist() == selected.num_tokens.tolist()


def test_groups_below_one_prefix_stay_below_it():
    words = ["aaaabbbb0", "aaaabbbb1", "aaaacccc0", "aaaacccc1", "xxxxyyyy0", "xxxxyyyy1"]
    outputs = np.array([9, 9, 1, 1, 4, 4])
    assert [0, 1, 2, 3, 4, 5] == plan_of(letters(words), 4, outputs).order.tolist()
