"""The process of one engine without Ray: a replica that calls the driver over a socket.

python -m raybatch.actors.executors.engine_process FILE_DESCRIPTOR

It ends with the driver, however that ends, unless it hangs: the kernel closes the driver's end of
the socket. What it has started, such as a compiler or the workers of an engine, ends with it.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Any, cast

from raybatch.actors.executors.calls import CallHandle, Peer
from raybatch.actors.executors.local_site import TableName
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.site import use_threads
from raybatch.actors.wire.api import PoolApi
from raybatch.actors.wire.records import FailedStart, Place, PoolSpec, Requests
from raybatch.records.share import ShareSeat
from raybatch.telemetry.metrics import metrics_of_process
from raybatch.telemetry.providers import flush


class _OwnProcess:
    """Where the replica runs; see `raybatch.actors.replicas.site.ReplicaSite`."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self.metrics = metrics_of_process()

    def place(self) -> Place:
        return Place(os.getpid())

    settle = staticmethod(use_threads)

    def device(self) -> str | None:
        return None

    async def fetch(self, ref: TableName) -> Requests | None:
        requests: Requests | None = await self._peer.call("fetch", ref)
        return requests

    def share(self, value: object) -> object:
        """Return what it is: it travels through the driver."""
        return value

    async def shared(self, ref: object) -> object:
        return ref

    async def die(self) -> None:
        os._exit(1)


class _Child:
    """What the driver calls: `make` first, then `run` and the methods of the replica."""

    def __init__(self, connection: socket.socket) -> None:
        self.peer = Peer(connection, self._find)
        self._replica: Replica | None = None
        self._coordinator = cast(PoolApi, CallHandle(self.peer.call))

    async def make(self, spec: PoolSpec, replica_id: int) -> None:
        # whoever sends that wants the process to end, and waits for some time
        why = f"its process {os.getpid()} has got SIGTERM"
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, self.peer.call, "leave", replica_id, why
        )
        self._replica = Replica(spec, replica_id, _OwnProcess(self.peer))

    async def start(self, num_engines: int, seat: ShareSeat | None) -> FailedStart | None:
        assert self._replica is not None, "the driver calls make first"
        return await self._replica.start(num_engines, seat, self._coordinator)

    async def run(self) -> None:
        assert self._replica is not None, "the driver calls make first"
        await self._replica.run(self._coordinator)

    def _find(self, name: str) -> Any:  # noqa: ANN401 - a method
        return getattr(self if name in ("make", "start", "run") else self._replica, name)


async def _serve(connection: socket.socket) -> None:
    await _Child(connection).peer.serve()
    flush("metrics")
    # the engine may be in a step, and nobody waits for what it finishes
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
