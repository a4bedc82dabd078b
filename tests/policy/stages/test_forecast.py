"""The forecast of both ways beside a run of every step."""

import pytest

from raybatch.policy.stages.forecast import like_seconds, sorted_seconds, staged_seconds
from raybatch.policy.stages.program import plan_exactly
from tests.policy.stages.pools import pool, uniform
from tests.policy.stages.step_run import run

CASES = {
    "equal outputs": ((1, 400), (60, 62)),
    "short prompts": ((1, 40), (20, 400)),
    "long prompts": ((1, 600), (20, 100)),
}


@pytest.mark.parametrize("factor", [1.0, 2.1])
@pytest.mark.parametrize("case", CASES)
def test_sorted_rows_take_what_their_steps_take(case, factor):
    lengths, given_pool = uniform(700, *CASES[case]), pool(4, factor)
    expected = run(given_pool, lengths.prompt_lens, lengths.final_lens)
    assert sorted_seconds(given_pool, lengths) == pytest.approx(expected, rel=0.07)


@pytest.mark.parametrize("case", CASES)
def test_stages_take_no_more_than_is_said_and_not_much_less(case):
    lengths, given_pool = uniform(700, *CASES[case]), pool(4, 4.0)
    plan = plan_exactly(given_pool, lengths)
    assert len(plan.stages) > 1
    expected = run(given_pool, lengths.prompt_lens, lengths.final_lens, plan)
    assert 0.95 * expected < staged_seconds(given_pool, lengths, plan) < 1.35 * expected


def test_rows_of_one_length_gain_nothing_from_batches_of_one_length():
    lengths, given_pool = uniform(256, (50, 51), (100, 101)), pool(4, 9.0)
    assert sorted_seconds(given_pool, lengths) == pytest.approx(like_seconds(given_pool, lengths))


def test_a_stage_waits_until_rows_have_grown_into_it():
    lengths, given_pool = uniform(64, (1, 2), (300, 301)), pool(4, 30.0, bytes_per_s=1e12)
    plan = plan_exactly(given_pool, lengths)
    assert len(plan.stages) > 1
    assert staged_seconds(given_pool, lengths, plan) > plan.seconds
