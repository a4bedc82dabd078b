"""The process of one engine without Ray: a replica connected to the driver by a socket.

python -m raybatch.actors.executors.engine_process FILE_DESCRIPTOR

It exits with the driver, unless it hangs: the kernel closes the driver's end of the socket. Its
children, such as a compiler or the workers of an engine, are killed with it.
"""

import asyncio
import os
import signal
import socket
import sys
from typing import Any, cast

from raybatch.actors.executors.calls import CallHandle, Peer, TableName
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.runtime import ReplicaRuntime
from raybatch.actors.wire.records import FailedStart, PoolApi, PoolSpec, Requests
from raybatch.records.share import ShareRank
from raybatch.telemetry import flush


class EngineProcess(ReplicaRuntime):
    """Runs a replica in this process, and serves calls of the driver process to it.

    The driver calls `start`, then `run` and methods of the replica. This is also the runtime of
    the replica. Objects that replicas share pass through the driver.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.peer = Peer(connection, self._find)
        self._coordinator = cast(PoolApi, CallHandle(self.peer.call))
        self._replica: Replica | None = None

    async def start(
        self, spec: PoolSpec, replica_id: int, num_engines: int, share_rank: ShareRank | None
    ) -> FailedStart | None:
        # the sender of SIGTERM waits for some time before SIGKILL
        why = f"its process {os.getpid()} received SIGTERM"
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, self.peer.call, "drain", replica_id, why
        )
        self._replica = Replica(spec, replica_id, self)
        return await self._replica.start(num_engines, share_rank, self._coordinator)

    async def run(self) -> None:
        assert self._replica is not None, "the driver calls start first"
        await self._replica.run(self._coordinator)

    async def fetch(self, ref: TableName) -> Requests | None:
        requests: Requests | None = await self.peer.call("fetch", ref)
        return requests

    def _find(self, name: str) -> Any:  # noqa: ANN401 - a method
        return getattr(self if name in ("start", "run") else self._replica, name)


async def _serve(connection: socket.socket) -> None:
    await EngineProcess(connection).peer.serve()
    flush("metrics")
    # a step may still run, whose results are not needed
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
