"""Profiles of inputs, and of their parts."""

import dataclasses

import numpy as np
import pytest

from raybatch.prefix.profile import InputProfile, merge_stats, profile_rows
from tests.explanation.inputs import grouped_prompts, plan_prompts


def profile(prompts, *, skipped=None):
    planned = plan_prompts(prompts, skipped=skipped)
    return profile_rows(
        planned.keys,
        planned.expected_tokens,
        planned.arrangement,
        num_rows=planned.num_rows,
        skipped=planned.skipped,
        limit_tokens=int(planned.max_tokens.sum()),
        num_units=planned.plan.num_units,
    )


@pytest.fixture
def parts(rng):
    """Two lists of prompts without a common beginning."""
    first = [[1, 1, 1, 1, *prompt] for prompt in grouped_prompts(rng, groups=3, size=4)]
    second = [[2, 2, 2, 2, *prompt] for prompt in grouped_prompts(rng, groups=5, size=2)]
    return first, [*second, second[0]]


def test_rows_are_asked_copied_or_left_out(parts):
    found = profile(parts[1], skipped={"PromptTooLong": 2})
    assert (13, 11, 10) == (found.num_rows, found.num_requested, found.num_generated)


def test_groups_are_counted_with_their_rows(parts):
    found = profile(parts[0])
    assert (3, 12, 4) == (found.num_groups, found.group_rows.total, found.group_rows.highest)


def test_parts_add_up_to_the_whole(parts):
    whole = profile(parts[0] + parts[1], skipped={"filtered": 1, "PromptTooLong": 5})
    merged = InputProfile.merge(
        [
            profile(parts[0], skipped={"filtered": 1, "PromptTooLong": 2}),
            profile(parts[1], skipped={"PromptTooLong": 3}),
        ]
    )
    # units are cut in each part
    assert merged.num_units == 2
    merged = dataclasses.replace(merged, num_units=whole.num_units, tree=whole.tree)
    assert whole == merged


def test_statistics_of_trees_add_up(parts):
    whole = plan_prompts(parts[0] + parts[1]).arrangement.stats
    merged = merge_stats([plan_prompts(part).arrangement.stats for part in parts])
    for field in dataclasses.fields(whole):
        assert getattr(whole, field.name) == pytest.approx(getattr(merged, field.name))


def test_the_bound_is_every_prefix_once(parts):
    found = profile(parts[0])
    assert 4 + 3 * 32 + 12 * 8 == found.bound_tokens
    assert found.bound_tokens < found.computed_tokens


def test_an_input_without_rows_has_a_profile():
    found = profile([])
    assert (0, 0, 0) == (found.num_rows, found.num_requested, found.num_groups)
    assert InputProfile.merge([found, found]).tree == found.tree


def test_profiles_are_plain_values(parts):
    found = profile(parts[0])
    assert all(type(n) is int for n in found.prompt_tokens.counts)
    assert not isinstance(found.computed_tokens, np.generic)
