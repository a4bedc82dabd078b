"""Which of the last rows an idle replica computes as well: tables in, decisions out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raybatch.policy.pool.spread import end_s
from raybatch.policy.pool.throughput import StepSeconds
from raybatch_extensions.speculative.policy import HeldRows, Owner, Spare, choose_copies, row_ends_s

USUAL = StepSeconds(step_s=0.01, row_s=0.001, token_s=0.0001)


def owner(replica_id=1, *, left=(100,), slowness=1.0, silent_s=0.0, generated=50, kept=0, **more):
    size = len(left)
    rows = HeldRows(
        ids=np.arange(size) + 100 * replica_id,
        prompt=np.full(size, 20),
        generated=np.full(size, generated),
        kept=np.full(size, kept),
        left=np.array(left, float),
        may_copy=np.array(more.get("may_copy", [True] * size)),
    )
    seconds = USUAL.times(slowness)
    return Owner(replica_id=replica_id, seconds=seconds, silent_s=silent_s, rows=rows)


def spare(replica_id=9, *, num_seqs=16, kv_tokens=10_000, slowness=1.0):
    return Spare(replica_id, USUAL.times(slowness), num_seqs, kv_tokens)


def chosen(owners, spares):
    return [(d.row_id, d.target) for d in choose_copies(owners, spares)]


def test_a_row_of_a_replica_as_fast_as_the_other_gets_no_copy():
    assert [] == chosen([owner(left=(1000,))], [spare()])


@pytest.mark.parametrize(("slowness", "num_copies"), [(1.2, 0), (3.0, 1)])
def test_only_a_copy_that_ends_clearly_sooner_is_worth_it(slowness, num_copies):
    assert num_copies == len(chosen([owner(left=(1000,), slowness=slowness)], [spare()]))


def test_a_slow_row_that_is_about_to_end_gets_no_copy():
    assert [] == chosen([owner(left=(5,), slowness=10.0)], [spare()])


def test_a_replica_that_ends_no_step_is_expected_to_end_none_for_as_long_again():
    (copy,) = choose_copies([owner(left=(100,), silent_s=20.0)], [spare()])
    assert copy.row_s == pytest.approx(20 + 100 * 0.011)
    # its prompt and the tokens so far, once more
    assert copy.copy_s == pytest.approx(20 * 0.0001 + 150 * 0.011)


def test_tokens_that_are_kept_outside_the_engine_are_not_generated_again():
    (copy,) = choose_copies([owner(left=(100,), silent_s=20.0, kept=40)], [spare()])
    assert copy.copy_s == pytest.approx(60 * 0.0001 + 110 * 0.011)


def test_rows_that_would_end_last_come_first_and_each_has_one_copy():
    owners = [owner(1, left=(10, 900, 500), silent_s=60.0), owner(2, left=(700,), silent_s=60.0)]
    assert [101, 200, 102, 100] == [row_id for row_id, _ in chosen(owners, [spare(8), spare(9)])]


def test_rows_that_may_have_no_copy_get_none():
    held = owner(left=(900, 500), silent_s=60.0, may_copy=(False, True))
    assert [(101, 9)] == chosen([held], [spare()])


def test_an_idle_replica_gets_a_few_copies_and_no_more_than_it_has_room_for():
    held = owner(left=(100,) * 40, silent_s=600.0)
    assert 8 == len(chosen([held], [spare()]))
    assert 16 == len(chosen([held], [spare(8), spare(9)]))
    assert 3 == len(chosen([held], [spare(num_seqs=3)]))
    assert 2 == len(chosen([held], [spare(kv_tokens=2 * 170)]))


def test_the_idle_replica_that_ends_a_copy_first_gets_it():
    held = owner(left=(100,), silent_s=60.0)
    assert [(100, 9)] == chosen([held], [spare(8, slowness=4.0), spare(9)])


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_the_last_row_ends_when_the_replica_does(left):
    lengths = np.array(left, float)
    ends_s = row_ends_s(lengths, USUAL)
    assert ends_s.max() == pytest.approx(end_s(lengths, USUAL))
    assert (np.diff(ends_s[np.argsort(lengths, kind="stable")]) >= 0).all()
