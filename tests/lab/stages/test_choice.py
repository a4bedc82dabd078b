"""When stages are taken, and when not; and the forecast beside a run of every step."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch_lab.stages.choice import choose_stages, like_seconds, sorted_seconds, staged_seconds
from raybatch_lab.stages.plan import plan_exactly
from tests.lab.stages.pools import pool, uniform
from tests.lab.stages.step_run import run
from tests.tiers import examples

CASES = {
    "equal outputs": ((1, 400), (60, 62)),
    "short prompts": ((1, 40), (20, 400)),
    "long prompts": ((1, 600), (20, 100)),
}


def all_at_once(num_replicas=8):
    """Return rows that all run at once, so that sorting them changes nothing."""
    return uniform(num_replicas * 32, (1, 4000), (50, 100))


@given(seed=st.integers(0, 1000), num_replicas=st.integers(1, 16))
@settings(max_examples=examples(20, full=300))
def test_a_flat_curve_never_has_stages(seed, num_replicas):
    choice = choose_stages(pool(num_replicas, 1.0), uniform(500, (1, 300), (1, 900), seed))
    assert choice.plan is None
    assert choice.staged_s is None


def test_the_reason_says_what_equal_lengths_would_save():
    choice = choose_stages(pool(4, 1.0), uniform(500, (1, 300), (1, 900)))
    expected = "no stages: batches of one length would save 0.0% at most, and it takes 5%"
    assert expected == choice.reason


def test_one_replica_has_no_stages():
    choice = choose_stages(pool(1, 9.0), uniform(500, (1, 300), (1, 900)))
    assert "no stages: there is one replica" == choice.reason


def test_stages_are_taken_where_they_save_enough():
    choice = choose_stages(pool(8, 8.0, bytes_per_s=1e12), all_at_once())
    assert choice.plan is not None
    assert len(choice.plan.stages) > 1
    assert choice.staged_s <= 0.95 * choice.sorted_s
    saved = 1 - choice.staged_s / choice.sorted_s
    assert f"{len(choice.plan.stages)} stages save {saved:.1%} over sorted rows" == choice.reason


def test_stages_that_save_too_little_are_not_taken():
    choice = choose_stages(pool(4, 3.0), uniform(2000, (5, 15), (100, 600)))
    assert choice.plan is None
    assert choice.staged_s > 0.95 * choice.sorted_s
    assert "over sorted rows, and it takes 5%" in choice.reason


def test_a_slow_link_leaves_one_stage():
    choice = choose_stages(pool(8, 8.0, bytes_per_s=1.0), all_at_once())
    assert "no stages: one of all replicas is the best" == choice.reason


@pytest.mark.parametrize("num_replicas", [256, 300])
def test_many_replicas_are_planned_as_well(num_replicas):
    choice = choose_stages(pool(num_replicas, 8.0, bytes_per_s=1e12), all_at_once(num_replicas))
    assert choice.plan is None or num_replicas == len(choice.plan.stage_of_replica)
    assert choice.staged_s is not None


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
def test_stages_that_are_taken_save_as_much_step_by_step(factor):
    lengths, given_pool = all_at_once(), pool(8, factor, bytes_per_s=1e12)
    plan = choose_stages(given_pool, lengths).plan
    rows = lengths.prompt_lens, lengths.final_lens
    assert run(given_pool, *rows, plan) <= 0.95 * run(given_pool, *rows)


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
