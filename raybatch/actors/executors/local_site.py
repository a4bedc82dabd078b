"""Coordinator and replicas without Ray: the first on a loop of this process, engines outside of it.

An engine that computes has a process of its own, so that a row that kills it kills no more. One
that only waits for an endpoint, and the fake one, are threads of this process. Request tables stay
with the driver, and engines ask for them.
"""

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

from raybatch.actors.executors.local_loop import LocalLoop
from raybatch.actors.executors.peer import Peer, PeerDiedError, PeerError
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.site import CallHandle, Errors, Handle, NoMetrics, Started
from raybatch.actors.wire.records import FailedStart, PoolSpec, Requests
from raybatch.backends.registry import type_of
from raybatch.errors import error_text

_T = TypeVar("_T")


class TableName(NamedTuple):
    """What a reference to a table becomes on its way to another process."""

    number: int


class KeptTable:
    """A reference to a request table, which lives as long as this object."""

    def __init__(self, requests: Requests, name: TableName) -> None:
        self.requests = requests
        self._name = name

    def __reduce__(self) -> tuple[type[TableName], tuple[int]]:
        return TableName, (self._name.number,)


class LocalTables:
    """The tables of one pool that somebody still holds a reference to."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._kept: weakref.WeakValueDictionary[TableName, KeptTable] = (
            weakref.WeakValueDictionary()
        )

    def keep(self, requests: Requests) -> KeptTable:
        name = TableName(next(self._numbers))
        kept = self._kept[name] = KeptTable(requests, name)
        return kept

    def find(self, name: TableName) -> Requests | None:
        """Return a table; None where nobody holds it any more."""
        kept = self._kept.get(name)
        return None if kept is None else kept.requests


class LocalSite:
    """Where the coordinator of a local pool runs; see `raybatch.actors.replicas.site.Site`."""

    died: Errors = (PeerDiedError,)
    failed: Errors = (PeerError,)

    def __init__(self, loop: LocalLoop) -> None:
        self._loop = loop
        self._tables = LocalTables()
        self._coordinator: object | None = None
        self.metrics = NoMetrics()

    def set_coordinator(self, coordinator: object) -> CallHandle:
        """Keep the coordinator of the pool, and return its handle."""
        self._coordinator = coordinator
        return self.coordinator()

    def coordinator(self) -> CallHandle:
        assert self._coordinator is not None, "set_coordinator is called first"
        return self._loop.handle(self._coordinator)

    def keep(self, requests: Requests) -> KeptTable:
        return self._tables.keep(requests)

    def start(self, spec: PoolSpec, plan: Placement, rank: int, replica_id: int) -> Started:
        if type_of(spec.backend).may_end_process(spec.backend):
            return _EngineProcess(spec, replica_id, self._find)
        return _EngineThread(spec, replica_id)

    async def make_room(self, wanted: str) -> None:
        """Do nothing: engines reserve nothing that others would wait for."""

    def _find(self, name: str) -> Callable[..., Awaitable[Any]]:
        method: Callable[..., Awaitable[Any]] = getattr(
            self if name == "fetch" else self._coordinator, name
        )
        return method

    async def fetch(self, name: TableName) -> Requests | None:
        return self._tables.find(name)


class _EngineProcess:
    """A replica in a process of its own, as the coordinator sees it."""

    def __init__(
        self, spec: PoolSpec, replica_id: int, find: Callable[[str], Callable[..., Any]]
    ) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = _spawn(theirs.fileno())
        self._peer = Peer(ours, find)
        self._serving = asyncio.create_task(self._peer.serve())
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._watch, name="raybatch-engine-watch", daemon=True).start()
        self._spec = spec
        self._replica_id = replica_id
        self._methods = CallHandle(self._peer.call)

    @property
    def actor(self) -> Handle:
        return CallHandle(lambda name, *args: asyncio.create_task(getattr(self, name)(*args)))

    async def pid(self) -> int:
        return self._process.pid

    async def start(self, num_engines_on_host: int) -> FailedStart | None:
        await self._peer.connected()
        await self._call(self._methods.make.remote(self._spec, self._replica_id))
        failed: FailedStart | None = await self._call(
            self._methods.start.remote(num_engines_on_host)
        )
        return failed

    async def run(self, coordinator: Handle) -> None:
        """Work until there are no more rows; raise `PeerDiedError` where the process ends."""
        await self._call(self._methods.run.remote())

    async def give_back(self, max_rows: int, max_cost: int) -> list[tuple[int, int]]:
        rows: list[tuple[int, int]] = await self._methods.give_back.remote(max_rows, max_cost)
        return rows

    async def abort(self, batch_id: int) -> None:
        await self._methods.abort.remote(batch_id)

    def end(self) -> None:
        self._peer.close()
        end_group(self._process)

    async def _call(self, call: asyncio.Future[Any]) -> Any:  # noqa: ANN401
        try:
            return await call
        except PeerDiedError:
            how_it_ended = await asyncio.to_thread(self._how_it_ended)
            raise PeerDiedError(self._peer.cause or how_it_ended) from None

    def _watch(self) -> None:
        """Close the connection when the process ends: what it has started may hold its end."""
        # the exit code stays readable
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all with it
            self._loop.call_soon_threadsafe(self._peer.close)

    def _how_it_ended(self) -> str:
        code = end_group(self._process)
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return f"the process of the engine ended {how}"


class _EngineThread:
    """A replica on the loop of the coordinator; its engine has a thread."""

    def __init__(self, spec: PoolSpec, replica_id: int) -> None:
        self.metrics = NoMetrics()
        self._replica = Replica(spec, replica_id, self)
        self._is_dead = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def actor(self) -> Handle:
        return CallHandle(lambda name, *args: asyncio.create_task(self._call(name, *args)))

    def settle(self, spec: PoolSpec) -> None:
        """Leave the process as it is: it is not the engine's own."""

    async def fetch(self, ref: KeptTable) -> Requests | None:
        return ref.requests

    async def die(self) -> None:
        """Let `run` raise."""
        self._is_dead.set()
        await asyncio.Event().wait()

    def end(self) -> None:
        self._is_dead.set()
        if self._running is not None:
            self._running.cancel()
        self._replica.close_soon()

    async def _call(self, name: str, *args: object) -> Any:  # noqa: ANN401 - of any method
        """Call a method of the replica; what it raises looks as if it came from a process."""
        if self._is_dead.is_set():
            raise PeerDiedError("the engine broke")
        method = self._run if name == "run" else getattr(self._replica, name)
        try:
            return await method(*args)
        except PeerDiedError:
            raise
        except Exception as error:
            raise PeerError(error_text(error)) from error

    async def _run(self, coordinator: Handle) -> None:
        """Work until there are no more rows; raise `PeerDiedError` where the engine breaks."""
        self._running = asyncio.create_task(self._replica.run(coordinator))
        dead = asyncio.create_task(self._is_dead.wait())
        await asyncio.wait({self._running, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not self._is_dead.is_set():
            dead.cancel()
            await self._running
            return
        self._running.cancel()
        raise PeerDiedError("the engine broke")


def start_python(
    module: str,
    *args: str,
    **options: Any,  # noqa: ANN401 - of subprocess.Popen
) -> subprocess.Popen[bytes]:
    """Start a module in a session of its own, with what this process can import.

    A signal that a terminal sends to the driver and what it has started is the driver's to mind;
    and what the process starts ends with it, see `end_group`. Nothing is imported from the working
    folder, where a module may have the name of another one.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *args],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def end_group(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that is over, or is ended here with all it has started."""
    # until it is waited for, no other process and no other group has its number
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    """Start the process of an engine with one end of its socket."""
    stderr = _stderr()
    return start_python(
        "raybatch.actors.executors.engine_process",
        str(descriptor),
        stdin=subprocess.DEVNULL,
        stdout=stderr,  # what an engine prints is no output of the command
        stderr=stderr,
        pass_fds=(descriptor,),
    )


def _stderr() -> int:
    """Return where this process writes its errors; a command reads its own descriptor 2."""
    try:
        return sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return 2
