"""When a group changes between moving weights and moving rows, and that it does so together."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raybatch.errors import ConfigError, RankError
from raybatch_extensions.sharing.modes import (
    GroupSnapshot,
    ModeBook,
    ModeGeneration,
    RankLoad,
    choose_mode,
    exchange_limit,
    wanted_rows,
)
from tests.extensions.sharing.share_loads import loads_of

B_TH = 40.0


def snapshot(*batches, mode="fetch", active=None, threshold_rows=B_TH):
    active = batches if active is None else active
    return GroupSnapshot(
        loads=loads_of([round(a) for a in active], batches),
        mode=mode,
        threshold_rows=threshold_rows,
    )


def follow(book, trace, first=0):
    """Look at a load of (batches of all ranks) at each boundary; return the mode after each."""
    modes = []
    for boundary, batches in enumerate(trace, start=first):
        found = book.update(snapshot(*batches, mode=book.current.mode), boundary)
        if found is not None:
            for rank in book.ranks:
                book.acknowledge(rank, found.generation)
        modes.append(book.current.mode)
    return modes


def num_changes(modes):
    return sum(a != b for a, b in itertools.pairwise(modes))


@pytest.mark.parametrize(
    ("batch", "from_was", "from_cas"),
    [
        (200, "fetch", "fetch"),
        (51, "fetch", "fetch"),
        (50, "fetch", "exchange"),
        (30, "fetch", "exchange"),
        (29, "exchange", "exchange"),
    ],
)
def test_a_mode_suits_the_batch_and_stays_near_the_threshold(batch, from_was, from_cas):
    assert choose_mode(snapshot(batch, batch)) == from_was
    assert choose_mode(snapshot(batch, batch, mode="exchange")) == from_cas


def test_rows_that_wait_for_room_in_full_rounds_count_for_copies():
    load = RankLoad(rank=0, num_active=60, mean_batch=16.0, wanted_rows=51.0)
    of_two = GroupSnapshot(loads=(load, load), mode="exchange", threshold_rows=B_TH)
    assert (of_two.batch, choose_mode(of_two)) == (51.0, "fetch")
    assert choose_mode(replace(of_two, loads=(replace(load, wanted_rows=0.0),))) == "exchange"


@pytest.mark.parametrize(
    ("running", "waiting", "kv_used", "wanted"),
    [(16, 0, 0.1, 16), (16, 4, 0.1, 20), (16, 400, 0.25, 64), (16, 400, 1.0, 16), (0, 9, 0, 0)],
)
def test_an_engine_wants_rows_that_it_has_kv_for(running, waiting, kv_used, wanted):
    found = wanted_rows(num_running=running, num_waiting=waiting, kv_used_fraction=kv_used)
    assert found == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("hiding", "most_rows", "limit"), [(40, 64, 40), (400, 64, 128), (100, 64, 100), (400, 1, 2)]
)
def test_full_rounds_are_left_where_copies_do_more_in_a_second(hiding, most_rows, limit):
    # twice as many rows in twice the time
    found = exchange_limit(hiding, most_rows=most_rows, exchange_s=0.05, fetch_s=0.1)
    assert found == pytest.approx(limit)


def test_dummies_are_known_and_do_not_count():
    group = snapshot(100, 0, 0, 0)
    assert group.dummies == {1, 2, 3}
    assert group.batch == 100
    assert choose_mode(group) == "fetch"
    assert choose_mode(snapshot(3, 0, 0, 0)) == "exchange"


def test_without_rows_weights_are_copied():
    for mode in ("fetch", "exchange"):
        assert choose_mode(snapshot(0, 0, mode=mode)) == "fetch"


def test_prompts_are_rows_of_a_pass():
    # 4 sequences run, of which one computes its prompt
    assert snapshot(100, active=(4,)).batch == 100


def test_no_threshold_never_leaves_weights():
    assert choose_mode(snapshot(1, threshold_rows=0)) == "fetch"


@given(
    level=st.floats(1, 400),
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 2, 4, 8]),
    mode=st.sampled_from(["fetch", "exchange"]),
)
@settings(max_examples=200, deadline=None)
def test_noise_of_20_percent_does_not_flap(level, seed, size, mode):
    rng = random.Random(seed)
    trace = [[max(1.0, level * rng.uniform(0.8, 1.2)) for _ in range(size)] for _ in range(300)]
    book = ModeBook(ranks=tuple(range(size)), current=ModeGeneration(generation=0, mode=mode))
    modes = [mode, *follow(book, trace)]
    assert num_changes(modes) <= 1


@given(seed=st.integers(0, 2**32), size=st.sampled_from([2, 4]))
@settings(max_examples=100, deadline=None)
def test_a_slow_ramp_down_and_up_changes_the_mode_once_each(seed, size):
    rng = random.Random(seed)
    down = [200 - 199 * i / 400 for i in range(401)]
    trace = [
        [max(1.0, level * rng.uniform(0.8, 1.2)) for _ in range(size)]
        for level in (*down, *reversed(down))
    ]
    modes = follow(ModeBook(ranks=tuple(range(size))), trace)
    assert (modes[0], modes[400], modes[-1]) == ("fetch", "exchange", "fetch")
    assert num_changes(modes) == 2


def test_two_boundaries_in_a_row_have_to_want_it():
    book = ModeBook(ranks=(0, 1))
    low, high = snapshot(3, 3), snapshot(90, 90)
    assert book.update(low, 1) is None
    # the same boundary again is no second one
    assert book.update(low, 1) is None
    assert book.update(high, 2) is None
    assert book.update(low, 3) is None
    assert book.update(low, 4) == ModeGeneration(generation=1, mode="exchange") == book.current
    assert book.num_switches == 1


def test_nothing_is_decided_before_all_ranks_have_seen_a_generation():
    book = ModeBook(ranks=(0, 1, 2))
    assert book.is_agreed
    follow_low = [book.update(snapshot(3, 3, 3), boundary) for boundary in (1, 2)]
    assert follow_low[-1].generation == 1
    high = snapshot(90, 90, 90, mode="exchange")
    for rank in (0, 2):
        book.acknowledge(rank, 1)
        assert not book.is_agreed
        assert [book.update(high, 3 + rank), book.update(high, 4 + rank)] == [None, None]
    book.acknowledge(1, 1)
    assert book.is_agreed
    assert [book.update(high, 10), book.update(high, 11)] == [
        None,
        ModeGeneration(generation=2, mode="fetch"),
    ]


def test_a_rank_that_missed_a_switch_fails_fast():
    book = ModeBook(ranks=(0, 1))
    for boundary in (1, 2):
        book.update(snapshot(3, 3), boundary)
    with pytest.raises(
        RankError, match="missed a mode switch: it is in generation 0, its group in generation 1"
    ):
        book.acknowledge(1, 0)
    with pytest.raises(RankError, match="generation 2"):
        book.acknowledge(1, 2)
    with pytest.raises(RankError, match="rank 7 is not among the ranks"):
        book.acknowledge(7, 1)
    assert not book.is_agreed


@given(
    levels=st.lists(st.sampled_from([0, 1, 20, 39, 41, 60, 300]), min_size=1, max_size=200),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_generations_only_rise_and_each_is_another_mode(levels, seed):
    rng, book = random.Random(seed), ModeBook(ranks=(0, 1))
    seen = [book.current]
    for boundary, level in enumerate(levels):
        found = book.update(snapshot(level, level, mode=book.current.mode), boundary)
        if found is not None:
            seen.append(found)
        # acknowledgements come late, in any order
        for rank in rng.sample((0, 1), rng.randint(0, 2)):
            book.acknowledge(rank, book.current.generation)
    assert [each.generation for each in seen] == list(range(len(seen)))
    assert all(a.mode != b.mode for a, b in itertools.pairwise(seen))
    assert book.num_switches == len(seen) - 1


def test_a_group_without_ranks_or_with_a_wrong_threshold_is_refused():
    for wrong in ({"loads": ()}, {"hysteresis": 1.0}, {"threshold_rows": -1.0}):
        with pytest.raises(ConfigError, match="a weight-sharing group needs"):
            replace(snapshot(3), **wrong)
    assert RankLoad(rank=0, num_active=0, mean_batch=9.0).is_dummy
