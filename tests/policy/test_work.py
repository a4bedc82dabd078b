"""Totals of a plan against loops over rows and steps."""

import numpy as np
import pytest

from raybatch.policy.cost.work import output_sample, work_totals

PROMPTS = np.array([100, 40, 40, 7])
OUTPUTS = np.array([5, 1, 9, 3])
CACHED = np.array([0, 0, 32, 0])
SHARED = np.array([0, 32, 32, 0])
MEMBERS = np.array([1, 2, 2, 1])


def totals(**changes):
    arrays = {"cached_tokens": CACHED, "shared_tokens": SHARED, "num_members": MEMBERS}
    return work_totals(PROMPTS, OUTPUTS, **(arrays | changes))


def test_computed_tokens_are_those_that_are_not_cached():
    assert 187 - 32 == totals().computed_tokens


def test_cached_tokens_come_first_in_prompts():
    found = work_totals(np.array([100]), np.array([1]), cached_tokens=np.array([60]))
    cached = work_totals(np.array([100]), np.array([1])).with_cache(40)
    assert found.computed_tokens == pytest.approx(cached.computed_tokens)
    # a token attends to itself, which halves count slightly more
    assert (
        pytest.approx(found.pairs + found.past_pairs, rel=0.01) == cached.pairs + cached.past_pairs
    )
    assert pytest.approx(found.past_pairs, rel=0.02) == cached.past_pairs
    assert totals().with_cache(10**6) == totals()


def test_pairs_are_about_those_of_a_loop_over_tokens():
    by_token = sum(
        position for n, c in zip(PROMPTS, CACHED, strict=True) for position in range(c, n)
    )
    assert pytest.approx(by_token, rel=0.02) == totals().pairs


def test_context_reads_are_those_of_a_loop_over_steps():
    own = sum(
        prompt - shared + generated
        for prompt, shared, output in zip(PROMPTS, SHARED, OUTPUTS, strict=True)
        for generated in range(1, output)
    )
    assert own == totals().context_reads


def test_shared_tokens_are_read_once_per_group_and_by_every_member():
    assert (32 * 8, 32 * 8 / 2) == (totals().shared_pairs, totals().cascade_reads)


def test_a_prefix_of_a_single_row_is_not_shared():
    alone = totals(num_members=np.ones(4, int))
    assert (0, 0) == (alone.shared_pairs, alone.cascade_reads)
    assert work_totals(PROMPTS, OUTPUTS).context_reads == alone.context_reads


def test_an_output_below_one_token_counts_as_one():
    assert 4 == work_totals(PROMPTS, np.zeros(4)).generated_tokens


@pytest.mark.parametrize("num_rows", [1, 7, 128, 1000])
def test_the_output_sample_keeps_the_mean_and_the_order(num_rows, rng):
    lengths = rng.integers(1, 500, num_rows).astype(float)
    sample = output_sample(lengths)
    assert pytest.approx(lengths.mean()) == np.mean(sample)
    assert sorted(sample) == list(sample)
    assert min(num_rows, 128) == len(sample)


def test_actual_counts_scale_what_engines_do_not_count():
    planned = totals()
    actual = planned.actual(computed_tokens=310, generated_tokens=36)
    assert (310, 36, 4) == (actual.computed_tokens, actual.generated_tokens, actual.num_rows)
    assert pytest.approx(2 * planned.pairs) == actual.pairs
    assert pytest.approx(2 * planned.context_reads) == actual.context_reads
    assert pytest.approx(2 * planned.output_lengths[0]) == actual.output_lengths[0]
