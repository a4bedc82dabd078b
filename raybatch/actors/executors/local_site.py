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
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, TypeVar, cast

from raybatch.actors.executors.calls import CallHandle, LocalLoop, Peer, PeerDiedError, PeerError
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import Placement
from raybatch.actors.replicas.site import Errors, ReplicaGroup, ReplicaSite, Site, Started
from raybatch.actors.wire.api import PoolApi, ReplicaApi
from raybatch.actors.wire.records import Place, PoolSpec, Requests
from raybatch.backends.registry import type_of
from raybatch.errors import error_text

_T = TypeVar("_T")


class TableName(NamedTuple):
    """What a reference to a table becomes on its way to another process."""

    number: int


class KeptTable:
    """A reference to a request table, which lives as long as this object."""

    def __init__(self, requests: Requests, number: int) -> None:
        self.requests = requests
        self._number = number

    def __reduce__(self) -> tuple[type[TableName], tuple[int]]:
        return TableName, (self._number,)


class LocalSite(Site):
    """Where the coordinator of a local pool runs: engines reserve nothing of this host."""

    died: Errors = (PeerDiedError,)
    failed: Errors = (PeerError,)

    def __init__(self, loop: LocalLoop) -> None:
        # set once the coordinator is made, which needs this site for that
        self.owner: PoolApi | None = None
        self._loop = loop
        self._numbers = itertools.count()
        self._tables: weakref.WeakValueDictionary[int, KeptTable] = weakref.WeakValueDictionary()

    def coordinator(self) -> PoolApi:
        assert self.owner is not None, "the coordinator is made first"
        return cast(PoolApi, self._loop.handle(self.owner))

    def keep(self, requests: Requests) -> KeptTable:
        number = next(self._numbers)
        kept = self._tables[number] = KeptTable(requests, number)
        return kept

    def start(
        self,
        spec: PoolSpec,
        plan: Placement,
        rank: int,
        replica_id: int,
        *,
        avoid: Collection[str] = (),
        group: ReplicaGroup | None = None,
    ) -> Started:
        if type_of(spec.backend).may_end_process(spec.backend):
            return _EngineProcess(spec, replica_id, self._find)
        return _EngineThread(spec, replica_id)

    async def make_room(self, wanted: str) -> None:
        """Do nothing: engines reserve nothing that others would wait for."""

    def _find(self, name: str) -> Any:  # noqa: ANN401 - a method
        return getattr(self if name == "fetch" else self.owner, name)

    async def fetch(self, name: TableName) -> Requests | None:
        """Return a table; None where nobody holds it any more."""
        kept = self._tables.get(name.number)
        return None if kept is None else kept.requests


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

    @property
    def actor(self) -> ReplicaApi:
        handle = CallHandle(lambda name, *args: asyncio.create_task(self._call(name, *args)))
        return cast(ReplicaApi, handle)

    def end(self) -> None:
        self._peer.close()
        end_group(self._process)

    async def _call(self, name: str, *args: object) -> Any:  # noqa: ANN401 - of any method
        if name == "place":
            return Place(self._process.pid)
        try:
            if name in ("start", "run"):
                # the coordinator is at the other end of its socket
                args = args[:-1]
            if name == "start":
                await self._peer.is_connected.wait()
                args = (self._spec, self._replica_id, *args)
            return await self._peer.call(name, *args)
        except PeerDiedError:
            if name not in ("start", "run"):
                raise
            code = await asyncio.to_thread(end_group, self._process)
            how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
            ended = f"the process of the engine ended {how}"
            raise PeerDiedError(self._peer.cause or ended) from None

    def _watch(self) -> None:
        """Close the connection when the process ends: what it has started may hold its end."""
        if hasattr(os, "waitid"):
            # the exit code stays readable
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            # macOS has none before Python 3.13: the group ends here, before another can get its
            # number
            self._process.wait()
            _kill_group(self._process.pid)
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all with it
            self._loop.call_soon_threadsafe(self._peer.close)


class _EngineThread(ReplicaSite):
    """A replica on the loop of the coordinator; its engine has a thread."""

    def __init__(self, spec: PoolSpec, replica_id: int) -> None:
        self._replica = Replica(spec, replica_id, self)
        self._is_dead = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def actor(self) -> ReplicaApi:
        handle = CallHandle(lambda name, *args: asyncio.create_task(self._call(name, *args)))
        return cast(ReplicaApi, handle)

    def settle(self, spec: PoolSpec) -> None:
        """Leave the process as it is: it is not the engine's own."""

    async def fetch(self, ref: KeptTable) -> Requests | None:
        return ref.requests

    async def die(self) -> None:
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
        method: Callable[..., Any] = self._run if name == "run" else getattr(self._replica, name)
        try:
            return await method(*args)
        except PeerDiedError:
            raise
        except Exception as error:
            raise PeerError(error_text(error)) from error

    async def _run(self, coordinator: PoolApi) -> None:
        self._running = asyncio.create_task(self._replica.run(coordinator))
        dead = asyncio.create_task(self._is_dead.wait())
        await asyncio.wait({self._running, dead}, return_when=asyncio.FIRST_COMPLETED)
        if not self._is_dead.is_set():
            dead.cancel()
            await self._running
            return
        self._running.cancel()
        raise PeerDiedError("the engine broke")


def start_python(module: str, *args: str, **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401
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
        _kill_group(process.pid)
    return process.wait()


def _kill_group(group: int) -> None:
    # macOS permits no signal to a group all of whose processes have ended
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def _spawn(descriptor: int) -> subprocess.Popen[bytes]:
    try:
        stderr = sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):  # a command reads its own descriptor 2
        stderr = 2
    return start_python(
        "raybatch.actors.executors.engine_process",
        str(descriptor),
        stdin=subprocess.DEVNULL,
        stdout=stderr,  # what an engine prints is no output of the command
        stderr=stderr,
        pass_fds=(descriptor,),
    )
