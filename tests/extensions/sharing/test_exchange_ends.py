"""Activation exchange: which ranks wait, which are notified, and how it ends."""

import random
import threading

import pytest

from raybatch.errors import RankError
from tests.extensions.sharing.groups import decoder_of
from tests.extensions.sharing.models import check, load
from tests.extensions.sharing.ranks import (
    NO_ROWS,
    TWO_ROWS,
    CountedPeers,
    random_pass,
    ranks_in_threads,
)


def test_a_dummy_that_owns_nothing_returns_at_once(folder_of, store):
    whole, models = load(folder_of("llama-biases-tied", 2), 4, "layer", num_layers=2)
    has_returned = threading.Event()

    def act(rank, number):
        if number == 3:
            rank.run(NO_ROWS)
            has_returned.set()
            return None
        rank.exchange.begin(2 if number == 0 else 0)
        # before any peer acts
        assert has_returned.wait(10)
        if number:
            rank.exchange.serve()
            return None
        return TWO_ROWS.logits(rank.decoder, rank.spec)

    made = ranks_in_threads(store, models, act)
    check(TWO_ROWS.logits(decoder_of(whole), whole.spec), made[0])


def test_all_leave_after_the_exchange_in_which_one_requested_it(folder_of, store):
    whole, models = load(folder_of("llama-biases-tied"), 3, "layer")

    def act(rank, number):
        num_exchanges, is_last = 0, False
        while not is_last:
            ends = number == 1 and num_exchanges == 4
            is_last = rank.exchange.begin(2, ends=ends).is_last
            logits = TWO_ROWS.logits(rank.decoder, rank.spec)
            num_exchanges += 1
        return num_exchanges, logits

    expected = TWO_ROWS.logits(decoder_of(whole), whole.spec)
    for num_exchanges, logits in ranks_in_threads(store, models, act):
        assert num_exchanges == 5
        check(expected, logits)


@pytest.mark.parametrize("kind", ["shared", "inboxes", "gloo"])
def test_an_idle_rank_notices_an_exchange_that_has_begun(kind, folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    may_begin, has_looked = threading.Event(), []

    def act(rank, number):
        if number == 0:
            assert may_begin.wait(10)
            rank.run(TWO_ROWS)
            return
        has_looked.append(rank.exchange.is_wanted())
        may_begin.set()
        while not rank.exchange.is_wanted():
            pass
        rank.run(NO_ROWS)
        has_looked.append(rank.exchange.is_wanted())

    assert [None, None] == ranks_in_threads(store, models, act, kind=kind)
    assert [False, False] == has_looked


@pytest.mark.parametrize("by", ["layer", "shard"])
def test_a_rank_that_is_late_only_delays_the_others(by, folder_of, store):
    whole, models = load(folder_of("qwen3-moe-sparse-step"), 3, by)
    dice = random.Random(by)
    passes = [[random_pass(dice) for _ in range(3)] for _ in range(3)]

    def late(peers, number):
        return LatePeers(peers, 0) if number == 1 else peers

    def act(rank, number):
        return [rank.run(each[number]) for each in passes]

    alone = decoder_of(whole)
    for number, found in enumerate(ranks_in_threads(store, models, act, wrap=late)):
        for each, logits in zip((of_ranks[number] for of_ranks in passes), found, strict=True):
            if each.num_rows:
                check(each.logits(alone, whole.spec), logits)


class LatePeers(CountedPeers):
    def before(self):
        threading.Event().wait(0.02)


class FailingPeers(CountedPeers):
    def fail(self):
        raise RankError("this rank fails")


@pytest.mark.parametrize("kind", ["shared", "inboxes", "gloo"])
@pytest.mark.parametrize("by", ["layer", "shard"])
def test_the_others_notice_a_rank_that_fails_anywhere(by, kind, folder_of, store):
    """In a gather, in a transfer, and in a computation for others."""
    num_layers = 3
    path = folder_of("qwen3-moe-sparse-step", num_layers)
    _, models = load(path, 3, by, num_layers=num_layers)
    # gloo may notice a closed connection only at its timeout
    options = {"kind": kind} | ({"timeout_s": 5.0} if kind == "gloo" else {})
    at = 0
    while True:
        at += 1

        def failing(peers, number, at=at):
            return FailingPeers(peers, at) if number == 1 else peers

        def act(rank, number):
            for turn in range(2):
                rank.run(NO_ROWS if turn == number == 1 else TWO_ROWS)

        made = ranks_in_threads(store, models, act, wrap=failing, **options)
        if made[1] is None:
            break
        assert [RankError] * 3 == [type(one) for one in made]
        assert str(made[1]) == "this rank fails"
        # no rank waited for the timeout
        assert not any("within" in str(one) for one in made)
    # every operation of two passes, exchanges included
    assert at > 2 * num_layers
    assert [None] * 3 == made


def test_a_rank_that_hangs_is_not_waited_for_longer_than_the_timeout(folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    has_failed = threading.Event()

    def act(rank, number):
        if number == 1:
            rank.exchange.begin(2)
            assert has_failed.wait(10)
            return
        try:
            rank.run(TWO_ROWS)
        finally:
            has_failed.set()

    made = ranks_in_threads(store, models, act, timeout_s=0.4)
    assert "rank 1 did not answer within 0.4 s" == str(made[0])


def test_a_rank_leaves_with_its_error(folder_of, store):
    """The others need not wait until it is closed."""
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")
    has_heard = threading.Event()

    def failing(peers, number):
        return FailingPeers(peers, 3) if number == 1 else peers

    def act(rank, number):
        try:
            rank.run(TWO_ROWS)
        except RankError:
            if number == 1:
                assert has_heard.wait(10)
            has_heard.set()
            raise

    made = ranks_in_threads(store, models, act, wrap=failing)
    assert ["rank 1 has left the group", "this rank fails"] == [str(one) for one in made]


def test_a_rank_that_has_left_does_nothing_more(folder_of, store):
    _, models = load(folder_of("llama-biases-tied"), 2, "layer")

    def act(rank, number):
        rank.exchange.close()
        assert not rank.exchange.is_wanted()
        rank.exchange.begin(2)

    made = ranks_in_threads(store, models, act)
    assert ["this rank has left its group"] * 2 == [str(one) for one in made]
