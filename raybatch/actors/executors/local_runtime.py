"""The runtime of a pool without Ray: the coordinator in this process, engines in subprocesses.

An engine that computes runs in a separate process, which contains its crashes. Engines of endpoints
and fake ones are threads of this process. Request tables stay in the driver; engines fetch them.
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
from raybatch.actors.replicas.runtime import (
    Errors,
    PoolRuntime,
    ReplicaGroup,
    ReplicaRuntime,
    Started,
)
from raybatch.actors.wire.api import PoolApi, ReplicaApi
from raybatch.actors.wire.records import Place, PoolSpec, Requests
from raybatch.backends.registry import type_of
from raybatch.errors import error_text

_T = TypeVar("_T")


class TableName(NamedTuple):
    """The pickled form of a reference to a request table: its number."""

    number: int


class KeptTable:
    """A reference to a request table, which lives as long as this object."""

    def __init__(self, requests: Requests, number: int) -> None:
        self.requests = requests
        self._number = number

    def __reduce__(self) -> tuple[type[TableName], tuple[int]]:
        return TableName, (self._number,)


class LocalRuntime(PoolRuntime):
    """The runtime of the coordinator of a pool without Ray; engines reserve no resources."""

    died: Errors = (PeerDiedError,)
    failed: Errors = (PeerError,)

    def __init__(self, loop: LocalLoop) -> None:
        # set once the coordinator exists, whose constructor needs this object
        self.owner: PoolApi | None = None
        self._loop = loop
        self._numbers = itertools.count()
        self._tables: weakref.WeakValueDictionary[int, KeptTable] = weakref.WeakValueDictionary()

    def coordinator(self) -> PoolApi:
        assert self.owner is not None, "the coordinator exists"
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
        """Do nothing, since engines reserve no resources."""

    def _find(self, name: str) -> Any:  # noqa: ANN401 - a method
        return getattr(self if name == "fetch" else self.owner, name)

    async def fetch(self, name: TableName) -> Requests | None:
        """Return a table; None if it was released."""
        kept = self._tables.get(name.number)
        return None if kept is None else kept.requests


class _EngineProcess:
    """The coordinator's side of a replica in a separate process."""

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
                # the process reaches the coordinator by its socket
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
            ended = f"the engine process ended {how}"
            raise PeerDiedError(self._peer.cause or ended) from None

    def _watch(self) -> None:
        """Close the connection when the process exits, as its children may keep it open."""
        if hasattr(os, "waitid"):
            # the exit code stays readable
            with contextlib.suppress(ChildProcessError):
                os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        else:
            # macOS lacks waitid before Python 3.13: end the group before its number is reused
            self._process.wait()
            _kill_group(self._process.pid)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._peer.close)


class _EngineThread(ReplicaRuntime):
    """A replica on the event loop of the coordinator; its engine runs in a thread."""

    def __init__(self, spec: PoolSpec, replica_id: int) -> None:
        self._replica = Replica(spec, replica_id, self)
        self._is_dead = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def actor(self) -> ReplicaApi:
        handle = CallHandle(lambda name, *args: asyncio.create_task(self._call(name, *args)))
        return cast(ReplicaApi, handle)

    def settle(self, spec: PoolSpec) -> None:
        """Do nothing: the engine shares the process of the user, which must not be changed."""

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
        """Call a method of the replica, with the exceptions of a separate process."""
        if self._is_dead.is_set():
            raise PeerDiedError("engine failed")
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
        raise PeerDiedError("engine failed")


def start_python(module: str, *args: str, **options: Any) -> subprocess.Popen[bytes]:  # noqa: ANN401
    """Start a Python module as a process in a new session, with the import path of this process.

    So signals of a terminal reach the driver only, and `end_group` can end the process with all its
    children. Nothing is imported from the working folder, where a module may shadow another one.

    Args:
        args: arguments of the module.
        options: options of `subprocess.Popen`.
    """
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *args],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path},
        **options,
    )


def end_group(process: subprocess.Popen[bytes]) -> int:
    """Kill a process with all its children, unless it has exited; return its exit code."""
    # its number cannot be reused before it is waited for
    if process.returncode is None:
        _kill_group(process.pid)
    return process.wait()


def _kill_group(group: int) -> None:
    # macOS permits no signal to a group of exited processes
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
        stdout=stderr,  # output of engines is no output of the command
        stderr=stderr,
        pass_fds=(descriptor,),
    )
