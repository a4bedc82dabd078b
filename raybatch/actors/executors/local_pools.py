"""Pools without Ray: the coordinator in this process, engines in subprocesses.

An engine that computes runs in a separate process, which contains its crashes. Engines of endpoints
and fake ones are threads of this process. Request tables stay in the driver; engines fetch them.

python -m raybatch.actors.executors.local_pools measures an engine: it reads a pickled query from
stdin, and writes a pickled answer to stdout.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from raybatch.actors.coordinator.coordinator import Coordinator
from raybatch.actors.executors.calls import (
    CallHandle,
    KeptTable,
    LocalCall,
    LocalLoop,
    Peer,
    PeerDiedError,
    PeerError,
    TableName,
)
from raybatch.actors.installed_extensions import extensions_of
from raybatch.actors.replica.replica import Replica
from raybatch.actors.replicas.placement import (
    ClusterView,
    HostView,
    Placement,
    check_groups,
    first_of,
    settled,
    usable_cores,
)
from raybatch.actors.replicas.runtime import (
    Errors,
    PoolRuntime,
    ReplicaGroup,
    ReplicaRuntime,
    Started,
    T,
    obey_log_level,
    use_threads,
)
from raybatch.actors.wire.records import Place, PoolApi, PoolSpec, ReplicaApi, Requests, digest_of
from raybatch.backends.choice import BackendChoice, gpus_of_engine, unproven_on_gpus, vllm_build
from raybatch.backends.cost_cache import (
    MEASURE_S,
    cost_model_path,
    load_cost_model,
    load_or_measure,
)
from raybatch.backends.registry import check_version, type_of
from raybatch.config import environment
from raybatch.errors import ConfigError, MeasureError, error_text
from raybatch.models.source import has_weights_here, is_local_model
from raybatch.policy.cost.cost_model import CostModel

logger = logging.getLogger(__name__)

_GPUS = Path("/proc/driver/nvidia/gpus")
_GPU_NAME = re.compile(r"\s*(\d+|(GPU|MIG)-\S+)\s*")


class LocalPools:
    """Creates and stops coordinators on an event loop of this process, with methods of `RayPools`.

    A coordinator dies only with the process.
    """

    gone: Errors = ()
    failed: Errors = ()

    def __init__(self) -> None:
        self._loop = LocalLoop("raybatch-pools")
        self._coordinators: dict[str, PoolApi] = {}
        # last used of the pools that differ in the number of engines only
        self._in_use: dict[str, str] = {}
        self._lock = threading.Lock()

    def settle(
        self, spec: PoolSpec, *, began_with: str | None = None, connect: bool = True
    ) -> tuple[PoolSpec, BackendChoice | None]:
        if spec.backend.is_decided:
            # this is the host of the engines
            check_version(spec.backend)
        host = ClusterView(hosts=(HostView(num_gpus=gpus_of_host()),))
        return settled(spec, host, vllm=vllm_build, began_with=began_with)

    def connect(self, spec: PoolSpec) -> PoolApi:
        name = digest_of(spec)
        with self._lock:
            if name not in self._coordinators:
                self._coordinators[name] = self._loop.begin(_make(spec, self._loop)).result()
            # the number of engines follows from the rows of a job, and the host has memory for
            # one such pool: stop idle engines of the previous one
            family = digest_of(replace(spec, pool=replace(spec.pool, replicas=None)))
            before = self._in_use.get(family)
            self._in_use[family] = name
            if before != name and before in self._coordinators:
                self.result(self._coordinators[before].rest())
            return self._coordinators[name]

    def result(self, call: Awaitable[T]) -> T:
        # calls of this process are `LocalCall`s
        result: T = cast(LocalCall, call).result()
        return result

    def forget(self, spec: PoolSpec, coordinator: PoolApi) -> None:
        with self._lock:
            self._coordinators.pop(digest_of(spec), None)

    def end(self, spec: PoolSpec) -> None:
        with self._lock:
            coordinator = self._coordinators.pop(digest_of(spec), None)
        if coordinator is not None:
            self.result(coordinator.shutdown())

    def end_all(self) -> None:
        with self._lock:
            coordinators, self._coordinators = self._coordinators, {}
        for coordinator in coordinators.values():
            self.result(coordinator.shutdown())


async def _make(spec: PoolSpec, loop: LocalLoop) -> PoolApi:
    for warning in unproven_on_gpus(spec.backend) if _has_gpus(spec) else ():
        logger.warning("%s", warning)
    runtime = LocalRuntime(loop)
    plan = plan_local_placement(spec)
    runtime.owner = Coordinator(spec, plan, runtime, extensions_of(spec, plan))
    return runtime.coordinator()


def gpus_of_host() -> int:
    """Return the number of GPUs for engines on this host, without importing a library."""
    num_gpus = len(list(_GPUS.iterdir())) if _GPUS.is_dir() else 0
    visible = environment().get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    # CUDA ignores all names from the first invalid one on
    names = itertools.takewhile(_GPU_NAME.fullmatch, visible.split(","))
    return min(num_gpus, len(list(names)))


def _has_gpus(spec: PoolSpec) -> bool:
    return gpus_of_host() > 0 and gpus_of_engine(spec.backend, spec.engine) > 0


def plan_local_placement(spec: PoolSpec) -> Placement:
    """Return the number of engines of a pool on this host, as configured or by its cores.

    GPUs are not divided: one engine uses them.
    """
    number = spec.pool.most_replicas
    if number is None and (_has_gpus(spec) or type_of(spec.backend).is_endpoint):
        number = 1
    if number is None:
        number = max(1, usable_cores() // spec.engine.num_threads)
    number = max(number, spec.pool.min_replicas or 1)
    check_groups(spec.pool, number)
    return Placement(
        num_replicas=number,
        num_cpus=0,
        num_gpus=0,
        num_engines_on_host=number,
        num_first=first_of(spec.pool),
    )


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


def measure_local(spec: PoolSpec) -> CostModel:
    """Return the cost model of one engine of a local pool, cached or measured now.

    Raises:
        MeasureError: the engine fails to start, dies, or is too slow; with the reason.
    """
    num_engines = plan_local_placement(spec).num_replicas
    if (cached := cached_model(spec, num_engines)) is not None:
        return cached
    timeout_s = patience_s(spec)
    failure = f"{spec.model} was not measured"
    process = start_python(
        "raybatch.actors.executors.local_pools", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        answer, _ = process.communicate(pickle.dumps((spec, num_engines)), timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MeasureError(
            f"{failure}: starting and measuring an engine took longer than {timeout_s} s; raise "
            "pool.start_timeout_s"
        ) from error
    finally:
        code = end_group(process)
    if code:
        raise MeasureError(
            f"{failure}: the process that measures it exited with code {code}; its output above "
            "says why"
        )
    return model_in(pickle.loads(answer))


def cached_model(spec: PoolSpec, num_engines: int, folder: Path | None = None) -> CostModel | None:
    path = cost_model_path(
        spec.model, spec.backend, spec.engine, num_engines_on_host=num_engines, folder=folder
    )
    return load_cost_model(path)


def patience_s(spec: PoolSpec) -> float | None:
    """Return the timeout of a measurement: five minutes more than that of an engine start."""
    start_s = spec.pool.start_timeout_s
    return None if start_s is None else start_s + MEASURE_S


def model_or_reason(
    spec: PoolSpec, num_engines: int, folder: Path | None = None
) -> CostModel | str:
    """Return the cost model of an engine on this host, cached or measured, or why there is none.

    The reason is a text, since exceptions may not be picklable. Weights are not fetched for a
    measurement. `num_engines` is the number of engines that share the host.
    """
    try:
        if why_not := _why_not_measured(spec):
            return f"{spec.model} was not measured, {why_not}"
        return load_or_measure(
            spec.model, spec.backend, spec.engine, num_engines_on_host=num_engines, folder=folder
        )
    except (MeasureError, ConfigError) as error:
        return str(error)


def _why_not_measured(spec: PoolSpec) -> str:
    """Return why no engine is started to measure a model, "" if one is."""
    backend_type, model = type_of(spec.backend), spec.model
    is_read, is_here = backend_type.reads_safetensors(spec.backend), is_local_model(model)
    if not backend_type.has_weights or has_weights_here(model) or (is_here and not is_read):
        return ""
    if is_here:
        return f"as its folder has no weights on host {socket.gethostname()}"
    if not is_read:
        return "as with its load_format the engine loads the weights itself when a run starts"
    way_out = f"only a run fetches them; `raybatch fetch {model}` does it before"
    return f"as its weights are not on the host and {way_out}"


def model_in(answer: CostModel | str) -> CostModel:
    """Return the result of `model_or_reason`; raise MeasureError if it is a reason."""
    if isinstance(answer, str):
        raise MeasureError(answer)
    return answer


def _answer() -> None:
    # output of libraries must not mix with the answer
    answers = os.dup(1)
    os.dup2(2, 1)
    spec, num_engines = pickle.load(sys.stdin.buffer)
    use_threads(spec)
    obey_log_level()
    with os.fdopen(answers, "wb") as out:
        pickle.dump(model_or_reason(spec, num_engines), out)


if __name__ == "__main__":
    _answer()
