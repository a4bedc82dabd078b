"""Calls between two processes, here between two ends of a socket on one loop."""

import asyncio
import gc
import pickle
import socket
from concurrent.futures import CancelledError

import pytest

from raybatch.actors.executors.calls import CallHandle, LocalLoop, Peer, PeerDiedError, PeerError
from raybatch.actors.executors.local_pools import LocalRuntime

TIMEOUT_S = 60


class Unreadable:
    """Cannot be made again from what is sent of it."""

    def __reduce__(self):
        return (int, ("no number",))


class Target:
    """What one end may call."""

    def __init__(self):
        self.is_cancelled = False
        self.is_waiting = asyncio.Event()

    async def double(self, value):
        return value * 2

    async def fail(self):
        raise ValueError("no such row")

    async def unsendable(self):
        return lambda: None

    async def unreadable(self):
        return Unreadable()

    async def wait(self):
        self.is_waiting.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.is_cancelled = True
            raise


def run(scene):
    """Run a scene with a handle, what it reaches, and its own end of the connection."""

    async def drive():
        ours, theirs = socket.socketpair()
        target = Target()
        near = Peer(ours, lambda name: getattr(target, name))
        far = Peer(theirs, lambda name: getattr(target, name))
        serving = [asyncio.create_task(peer.serve()) for peer in (near, far)]
        await near.is_connected.wait()
        await far.is_connected.wait()
        async with asyncio.timeout(TIMEOUT_S):
            result = await scene(CallHandle(near.call), target, near, far)
        near.close()
        far.close()
        await asyncio.gather(*serving)
        return result

    return asyncio.run(drive())


def test_calls_are_answered_also_large_ones_and_several_at_once():
    async def scene(handle, *_):
        values = [3, "ab", b"x" * (1 << 20)]
        return await asyncio.gather(*(handle.double(value) for value in values))

    assert run(scene) == [6, "abab", b"x" * (2 << 20)]


def test_an_error_comes_back_as_its_text():
    async def scene(handle, *_):
        with pytest.raises(PeerError, match="ValueError: no such row"):
            await handle.fail()

    run(scene)


@pytest.mark.parametrize("begin", [lambda h: h.unsendable(), lambda h: h.double(len)])
def test_what_cannot_be_sent_is_the_error_of_the_call(begin):
    async def scene(handle, *_):
        with pytest.raises(PeerError, match=r"pickle|unsupported|local object"):
            await begin(handle)

    run(scene)


def test_open_calls_hear_why_an_answer_could_not_be_read():
    async def scene(handle, *_):
        with pytest.raises(PeerDiedError, match="ValueError"):
            await handle.unreadable()

    run(scene)


def test_open_calls_hear_of_the_end_of_the_other_process_and_later_ones_too():
    async def scene(handle, target, near, far):
        waiting = handle.wait()
        await target.is_waiting.wait()
        far.close()
        for call in (waiting, handle.double(1)):
            with pytest.raises(PeerDiedError):
                await call

    run(scene)


def test_what_is_done_for_a_process_that_has_ended_is_cancelled():
    async def scene(handle, target, near, far):
        waiting = handle.wait()
        await target.is_waiting.wait()
        near.close()
        await asyncio.gather(waiting, return_exceptions=True)
        while not target.is_cancelled:
            await asyncio.sleep(0)

    run(scene)


def test_a_table_is_found_while_somebody_holds_its_reference():
    runtime = LocalRuntime(None)
    kept = runtime.keep(("a table", ()))
    name = pickle.loads(pickle.dumps(kept))
    assert asyncio.run(runtime.fetch(name)) == ("a table", ())
    del kept
    gc.collect()
    assert asyncio.run(runtime.fetch(name)) is None


def test_a_loop_that_closes_cancels_what_runs():
    loop, target = LocalLoop("test"), Target()
    waiting = loop.handle(target).wait()
    assert loop.handle(target).double(4).result() == 8
    loop.close()
    assert target.is_cancelled
    with pytest.raises(CancelledError):
        waiting.result()


def test_who_stops_to_wait_does_not_stop_the_call():
    loop, target = LocalLoop("test"), Target()

    async def impatient():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await loop.handle(target).wait()

    asyncio.run(impatient())
    assert not target.is_cancelled
    loop.close()
