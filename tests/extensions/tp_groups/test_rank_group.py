"""Groups of ranks in threads, and the messages between them."""

import os
import socket
import threading
from datetime import timedelta
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from raybatch.engine.batch.forward_batch import ForwardBatch
from raybatch.errors import RankError
from raybatch.kernels.attention_plan import AttentionPlan, DecodePart, PrefillPart, PrefixSegment
from raybatch_extensions.ranks import mapped
from raybatch_extensions.ranks.records import RankInit
from raybatch_extensions.ranks.rendezvous import Rendezvous, RendezvousStore
from raybatch_extensions.tp_groups.group import GlooGroup, connect, shared_bytes
from raybatch_extensions.tp_groups.messages import Kind, Wire, pack, unpack
from tests.warm_processes import start_warm

CPU = torch.device("cpu")
_generations = count(1)


@pytest.fixture(scope="module")
def store():
    return RendezvousStore()


def in_threads(store, size, act, *, by_gloo=False, timeout_s=10.0):
    """Return the result or error of `act` on each rank of a group."""
    calls = store.calls(next(_generations), size, timeout_s=timeout_s)
    made = [None] * size

    def run(call):
        try:
            rendezvous = Rendezvous(call, store if call.rank == 0 else None)
            group = GlooGroup(call, rendezvous) if by_gloo else connect(call, rendezvous, CPU)
            try:
                made[call.rank] = act(group, call)
            finally:
                group.close()
        except RankError as error:
            made[call.rank] = error

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return made


def test_waits_for_a_text_fail_when_the_tp_group_is_cancelled(store):
    calls = store.calls(next(_generations), 3, timeout_s=1000.0)
    rendezvouses = [Rendezvous(call, store if call.rank == 0 else None) for call in calls]
    errors = []

    def wait(rendezvous):
        with pytest.raises(RankError, match="cancelled: rank 2 is gone") as raised:
            rendezvous.find("check of rank 2")
        errors.append(raised)

    threads = [threading.Thread(target=wait, args=(rendezvous,)) for rendezvous in rendezvouses[:2]]
    for thread in threads:
        thread.start()
    store.call_off(calls[0].generation, "rank 2 is gone")
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    # waits of other generations are not cancelled
    others = Rendezvous(store.calls(next(_generations), 2)[0], store)
    others.leave("memory", "none")
    assert "none" == others.find("memory")


def test_a_tp_group_is_cancelled_while_its_driver_waits():
    """Else the event loop of a replica would wait too. The first reason counts."""
    store, generation, events = RendezvousStore(), next(_generations), []

    def wait():
        with pytest.raises(RuntimeError):
            store.server.get("what comes never")
        events.append("has waited")

    store.server.set_timeout(timedelta(seconds=4))
    waiting = threading.Thread(target=wait)
    waiting.start()
    for reason in ("rows wait", "a rank is gone"):
        store.call_off(generation, reason)
    events.append("called off")
    waiting.join()
    assert ["called off", "has waited"] == events
    with pytest.raises(RankError, match="cancelled: rows wait"):
        Rendezvous(store.calls(generation, 2)[0], store).find("check of rank 1")


@pytest.mark.parametrize(("host", "table"), [("127.0.0.1", "tcp"), ("::1", "tcp6")])
def test_a_store_takes_clients_of_one_family(host, table):
    """Else it asks a name server for ::ffff:127.0.0.1, and all ranks wait for its timeout."""
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this host has no IPv6")
    store = RendezvousStore(host)
    Rendezvous(*store.calls(1, 1)).leave("memory", "none")
    assert "none" == Rendezvous(store.calls(1, 1)[0], store).find("memory")
    place = f":{store.port:04X} "
    listening = {
        name
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()
        if place in line and " 0A " in line
    }
    assert {table} == listening


@pytest.mark.parametrize("by_gloo", [False, True], ids=["shared", "gloo"])
@pytest.mark.parametrize("shape", [(1, 5), (7, 64), (600, 700)])
def test_a_sum_is_that_of_all_ranks_and_the_same_bits_on_each(by_gloo, shape, store):
    def parts(rank):
        return torch.randn(shape, generator=torch.Generator().manual_seed(rank))

    def act(group, call):
        x = parts(call.rank)
        group.sum_(x)
        return x

    made = in_threads(store, 3, act, by_gloo=by_gloo)
    torch.testing.assert_close(made[0], parts(0) + parts(1) + parts(2))
    assert all(torch.equal(made[0], x) for x in made)


@pytest.mark.parametrize("by_gloo", [False, True], ids=["shared", "gloo"])
@pytest.mark.parametrize("size", [3, 400_000])
def test_the_tensor_of_rank_0_is_broadcast_to_all(by_gloo, size, store):
    def act(group, call):
        x = torch.arange(size) if call.rank == 0 else torch.zeros(size, dtype=torch.int64)
        group.broadcast_(x)
        return x

    expected = torch.arange(size)
    assert all(torch.equal(expected, x) for x in in_threads(store, 3, act, by_gloo=by_gloo))


@pytest.mark.parametrize("by_gloo", [False, True], ids=["shared", "gloo"])
@pytest.mark.parametrize("size", [3, 400_000])
def test_rank_0_gathers_the_tensors_of_all(by_gloo, size, store):
    def act(group, call):
        return group.gather(torch.full((size,), float(call.rank)))

    made = in_threads(store, 3, act, by_gloo=by_gloo)
    assert [0.0, 1.0, 2.0] == [float(x.mean()) for x in made[0]]
    assert [[], []] == made[1:]


def test_many_operations_in_a_row_keep_their_order(store):
    def act(group, call):
        found = []
        for number in range(300):
            x = torch.tensor([float(number if call.rank == 0 else -1)])
            group.broadcast_(x)
            y = torch.tensor([float(number)])
            group.sum_(y)
            found.append((int(x), int(y)))
        return found

    expected = [(number, 2 * number) for number in range(300)]
    assert [expected, expected] == in_threads(store, 2, act)


@pytest.mark.parametrize("by_gloo", [False, True], ids=["shared", "gloo"])
def test_a_rank_that_leaves_makes_the_calls_of_others_fail(by_gloo, store):
    def act(group, call):
        if call.rank == 0:
            raise RankError("this rank leaves")
        group.sum_(torch.zeros(4))

    made = in_threads(store, 3, act, by_gloo=by_gloo)
    assert [RankError] * 3 == [type(x) for x in made]
    assert not any("within" in str(x) for x in made)


def test_a_rank_that_hangs_makes_the_calls_of_others_fail_in_time(store):
    left = threading.Event()

    def act(group, call):
        if call.rank == 0:
            left.wait(10)
            return None
        try:
            group.sum_(torch.zeros(4))
        finally:
            left.set()

    made = in_threads(store, 2, act, timeout_s=0.3)
    assert "rank 0 did not answer within 0.3 s" == str(made[1])


def die_in_group(call):
    connect(call, Rendezvous(call), CPU)
    os._exit(9)


def test_a_rank_whose_process_ends_is_noticed_long_before_the_timeout(store):
    calls = store.calls(next(_generations), 2, timeout_s=100.0)
    process = start_warm(die_in_group, calls[1])
    group = connect(calls[0], Rendezvous(calls[0], store), CPU)
    process.join()
    with pytest.raises(RankError, match="the process of rank 1 has exited"):
        group.sum_(torch.zeros(4))


@pytest.mark.parametrize("text", ["it has rows", ""])
def test_a_driver_gets_a_refusal_before_it_connects(text, store):
    calls = store.calls(next(_generations), 3, timeout_s=0.5)
    Rendezvous(calls[2]).come(2, "")
    Rendezvous(calls[1]).come(1, text)
    driver = Rendezvous(calls[0], store)
    if text:
        with pytest.raises(RankError, match="rank 1 cannot join the group: it has rows"):
            driver.await_all(3)
        return
    driver.await_all(3)
    with pytest.raises(RankError, match="timeout waiting for rank 3"):
        driver.await_all(4)


def test_a_rank_that_never_comes_is_not_waited_for_longer_than_the_timeout(store):
    (call, _) = store.calls(next(_generations), 2, timeout_s=0.3)
    with pytest.raises(RankError, match="timeout waiting for memory of rank 1"):
        connect(call, Rendezvous(call, store), CPU)


def test_data_from_a_rank_that_left_stays_readable(store):
    def act(group, call):
        x = torch.tensor([7.0 if call.rank == 0 else 0.0])
        if call.rank == 0:
            group.broadcast_(x)
            return float(x)
        threading.Event().wait(0.1)
        group.broadcast_(x)
        return float(x)

    assert [7.0, 7.0] == in_threads(store, 2, act)


def names_in_memory():
    return {path.name for path in Path("/dev/shm").iterdir() if "raybatch" in path.name}


def test_the_memory_of_a_group_has_no_name(store):
    kinds = in_threads(store, 2, lambda group, call: (group.kind, names_in_memory()))
    assert [("shared memory", set())] * 2 == kinds


def test_ranks_without_shared_memory_use_gloo(store, monkeypatch):
    # as in two containers on one host
    numbers = count()
    monkeypatch.setattr(mapped, "pid_namespace", lambda: next(numbers))
    assert ["gloo"] * 2 == in_threads(store, 2, lambda group, call: group.kind)


@pytest.mark.parametrize("length", [0, 3, 4092, 4093, 20_000])
def test_a_message_of_any_length_is_received_whole(length, store):
    body = np.arange(length)

    def act(group, call):
        wire = Wire(group, 5)
        if call.rank == 0:
            wire.send(Kind.STEP, body)
            wire.send(Kind.RELEASE, body[:1])
            return None
        kind, found = wire.receive()
        return kind, found.tolist(), wire.receive()[0]

    assert (Kind.STEP, body.tolist(), Kind.RELEASE) == in_threads(store, 2, act)[1]


def test_a_message_of_another_generation_stops_a_worker(store):
    def act(group, call):
        wire = Wire(group, 5 + call.rank)
        if call.rank == 0:
            wire.send(Kind.STEP, np.arange(3))
            return None
        return wire.receive()

    expected = "expected message 1 of generation 6, got message 1 of generation 5"
    assert f"unexpected message in the TP group: {expected}" == str(in_threads(store, 2, act)[1])


def plan(*, decode=True, prefill=True, first=True, chunk=1):
    ids = torch.arange(3)
    return AttentionPlan(
        num_decode=2,
        decode=DecodePart(
            block_ids=ids + 4,
            owners=ids % 2,
            num_valid=ids + 1,
            is_contiguous=True,
            first_positions=ids * 4 if first else None,
        )
        if decode
        else None,
        prefill=PrefillPart(starts=(2, 5), lens=(3, 1)) if prefill else None,
        segments=(
            PrefixSegment(query_idx=ids, block_ids=ids + 9, num_tokens=11, first_position=8),
            PrefixSegment(query_idx=ids[:1], block_ids=ids[:1], num_tokens=2, chunk=chunk),
        ),
    )


def as_lists(record):
    """A record as plain values, which can be compared."""
    if isinstance(record, torch.Tensor):
        return record.tolist()
    if isinstance(record, tuple):
        return [as_lists(item) for item in record]
    if hasattr(record, "__dataclass_fields__"):
        return {name: as_lists(getattr(record, name)) for name in record.__dataclass_fields__}
    return record


@pytest.mark.parametrize(
    ("attention", "last"),
    [
        (plan(), None),
        (plan(decode=False, chunk=0), plan(prefill=False, first=False)),
        (plan(prefill=False, chunk=None), plan()),
    ],
)
def test_a_batch_is_unpacked_as_it_was_packed(attention, last):
    batch = ForwardBatch(
        token_ids=torch.arange(6),
        positions=torch.arange(6) + 40,
        slot_mapping=torch.arange(6) * 3,
        logits_idx=torch.tensor([0, 1, 5]),
        attention=attention,
        logits_attention=last,
    )
    assert as_lists(batch) == as_lists(unpack(pack(batch)))


def test_ranks_share_a_line_and_two_areas_each():
    assert 3 * (64 + 2 * (1 << 20)) == shared_bytes(3)


def test_connecting_to_a_driver_that_has_ended_fails_at_once(monkeypatch):
    """A refused connection fails at once: torch's store would wait for its timeout."""
    with socket.socket() as ended:
        ended.bind(("127.0.0.1", 0))
        port = ended.getsockname()[1]
        monkeypatch.delattr("torch.distributed.TCPStore")
        with pytest.raises(RankError, match=r"driver's store.*refused"):
            Rendezvous(RankInit(generation=1, rank=1, size=2, host="127.0.0.1", port=port))
