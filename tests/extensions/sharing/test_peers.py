"""Tensors and numbers between ranks, which are threads here."""

import mmap
import threading

import pytest
import torch

from raybatch.errors import RankError
from raybatch_extensions.ranks.shared_memory import LINE_BYTES, Lines, Wait
from raybatch_extensions.sharing.peers import peers_bytes, seconds_of_channel
from tests.extensions.sharing.ranks import ThreadStore, peers_in_threads

KINDS = pytest.mark.parametrize("kind", ["shared", "inboxes", "gloo"])


@pytest.fixture
def store():
    return ThreadStore()


def tensor(source, target, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(10 * source + target)
    return torch.randn(size, generator=generator).to(dtype)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 5), (7, 64), (600, 700), (3, 0)])
def test_what_all_send_to_all_comes_whole(kind, dtype, size, store):
    """Also more than a channel holds, where all send before any has received."""

    def act(peers, rank):
        others = [other for other in range(3) if other != rank]
        sends = {other: tensor(rank, other, size, dtype) for other in others}
        receives = {other: torch.zeros(size, dtype=dtype) for other in others}
        peers.transfer(sends, receives)
        return receives

    for rank, found in enumerate(peers_in_threads(store, 3, act, kind=kind)):
        assert all(torch.equal(tensor(i, rank, size, dtype), x) for i, x in found.items())


@KINDS
def test_many_messages_between_two_keep_their_order(kind, store):
    sizes = [1 + number * 7919 % 5000 for number in range(60)]

    def act(peers, rank):
        if rank == 0:
            for number, size in enumerate(sizes):
                peers.transfer({1: torch.full((size,), number)}, {})
            return None
        found = []
        for size in sizes:
            x = torch.zeros(size, dtype=torch.int64)
            peers.transfer({}, {0: x})
            assert x[0] == x[-1]
            found.append(int(x[0]))
        return found

    assert list(range(60)) == peers_in_threads(store, 2, act, kind=kind)[1]


@KINDS
def test_all_hear_the_numbers_of_all(kind, store):
    def act(peers, rank):
        return [peers.all_gather((rank, number, -5)) for number in range(40)]

    expected = [[[rank, number, -5] for rank in range(3)] for number in range(40)]
    assert [expected] * 3 == peers_in_threads(store, 3, act, kind=kind)


@KINDS
def test_a_rank_sees_that_another_one_waits_for_it(kind, store):
    has_begun = threading.Event()

    def act(peers, rank):
        seen = []
        for _ in range(2):
            if rank == 0:
                has_begun.wait(10)
                has_begun.clear()
                while not peers.is_awaited():
                    pass
            else:
                seen.append(peers.is_awaited())
                has_begun.set()
            peers.all_gather((0,))
            seen.append(peers.is_awaited() if rank == 0 else None)
        return seen

    made = peers_in_threads(store, 2, act, kind=kind)
    assert [False, None, False, None] == made[1]
    # rank 1 may have begun the next one since, but no rank the one after the last
    assert made[0][-1] is False


@KINDS
@pytest.mark.parametrize("operation", ["exchange", "send", "receive"])
def test_a_rank_that_leaves_is_missed_by_those_who_need_it(operation, kind, store):
    def act(peers, rank):
        if rank == 0:
            raise RankError("this rank leaves")
        if operation == "exchange":
            peers.all_gather((1,))
        elif operation == "send":
            peers.transfer({0: torch.zeros(1 << 20)}, {})
        else:
            peers.transfer({}, {0: torch.zeros(3)})

    made = peers_in_threads(store, 3, act, kind=kind)
    assert [RankError] * 3 == [type(one) for one in made]
    assert not any("within" in str(one) for one in made)


def test_what_was_sent_before_a_rank_left_is_there(store):
    has_left = threading.Event()

    def act(peers, rank):
        if rank == 0:
            peers.transfer({1: torch.arange(9)}, {})
            peers.close()
            has_left.set()
            return None
        has_left.wait(10)
        x = torch.zeros(9, dtype=torch.int64)
        peers.transfer({}, {0: x})
        return x.tolist()

    assert list(range(9)) == peers_in_threads(store, 2, act)[1]


def test_what_a_rank_did_while_another_one_looked_is_seen_before_it_is_missed(store, monkeypatch):
    monkeypatch.setattr("raybatch_extensions.ranks.shared_memory._SPIN_S", 0.0)
    memory = mmap.mmap(-1, 2 * LINE_BYTES)
    own, other = (Lines(memory, call) for call in store.calls(2, timeout_s=10.0))
    wait = Wait(own)
    assert not own.has_begun(1, 1)
    other.begin(1)
    other.leave()
    wait.pass_time((1,))
    assert own.has_begun(1, 1)
    with pytest.raises(RankError, match="rank 1 has left"):
        wait.pass_time((1,))


def test_ranks_that_need_nothing_of_one_that_left_go_on(store):
    has_left = threading.Event()

    def act(peers, rank):
        if rank == 2:
            peers.close()
            has_left.set()
            return None
        has_left.wait(10)
        x = torch.zeros(300_000)
        peers.transfer({1 - rank: torch.full((300_000,), 1.0 + rank)}, {1 - rank: x})
        return float(x.mean())

    assert [2.0, 1.0, None] == peers_in_threads(store, 3, act)


def test_a_pair_of_ranks_has_a_channel_each_way():
    lines, numbers, channels = 3 * 64, 3 * 2 * 8 * 8, 6 * (128 + (1 << 18))
    assert lines + numbers + channels == peers_bytes(3)
    assert peers_bytes(3) - peers_bytes(3, has_areas=False) == 6 << 18


def test_a_rank_whose_inbox_cannot_be_opened_is_named(store):
    def act(peers, rank):
        raise AssertionError("there are no peers")

    made = peers_in_threads(store, 2, act, kind="closed inboxes")
    assert [RankError] * 2 == [type(one) for one in made]
    assert "cannot open the receive buffer (inbox) of rank 1: " in str(made[0])


@pytest.mark.parametrize("num_bytes", [1, 3 << 18])
def test_a_channel_is_timed_with_more_than_it_holds_too(num_bytes):
    assert seconds_of_channel(num_bytes, torch.device("cpu")) > 0
