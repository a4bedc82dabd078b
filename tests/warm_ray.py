"""Workers of Ray that are forked from a warm process, which has loaded what most of them import.

Ray starts a worker as two processes in turn that both import Ray, and an actor of the package then
imports Ray Data, transformers or torch: one to three CPU seconds each. On the cluster that tests
share, `ray_worker.py` takes the place of the first process and asks the warm one to fork. What it
forks has the environment of its cluster and driver, since Ray reads its settings when it is
imported; other workers start as Ray has it.

Run as a module, this is the warm process: it serves until its standard input ends.
"""

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from unittest import mock

import numpy as np
import ray
from ray._private.parameter import RayParams

from tests.ray_worker import ADDRESS, MAX_BYTES
from tests.warm_processes import become

_SCRIPT = Path(__file__).with_name("ray_worker.py")
# what workers import, once they have a task or an actor
_LOADED = (
    "ray._private.workers.default_worker",
    "ray.data",
    "transformers",
    "raybatch.actors.executors.ray_pools",
    "raybatch.backends.native",
    "raybatch.engine.loading.prepared",
    "raybatch.engine.phases",
    "raybatch.planning.tasks",
    "raybatch.stages.unit_feeder",
)
_END_S = 10.0
# variables of Ray and of pytest that workers of one cluster and the warm process may differ in
_FREE = {
    *("RAY_LD_PRELOAD_ON_WORKERS", "SPT_NOENV", "PYTHONBREAKPOINT", "PYTHONPATH"),
    *("RAY_DATA_SHUFFLE_MAP_WORKER", "RAY_DATA_SHUFFLE_REDUCE_WORKER", "PYTEST_CURRENT_TEST"),
}


class WarmWorkers:
    """Starts the warm process of a cluster that starts in `with workers.of_cluster():`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def of_cluster(self) -> Iterator[None]:
        """Let the cluster that starts here ask a warm process, which starts at the end."""
        if sys.platform != "linux":
            yield
            return
        os.environ[ADDRESS] = str(Path(tempfile.mkdtemp(prefix="warm-ray-")) / "socket")
        begin = functools.partialmethod(RayParams.__init__, setup_worker_path=str(_SCRIPT))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            # workers that start before the warm process wait for it
            listening.bind(os.environ[ADDRESS])
            listening.listen(100)
            try:
                with mock.patch.object(RayParams, "__init__", begin):
                    yield
                self._process = self._start(listening)
            except BaseException:
                self.end()
                raise

    def _start(self, listening: socket.socket) -> "subprocess.Popen[bytes]":
        (raylet,) = ray._private.worker._global_node.all_processes["raylet"]
        of_workers = {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            "RAY_RAYLET_PID": str(raylet.process.pid),
            "RAY_JOB_ID": ray.get_runtime_context().get_job_id(),
        }
        return subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(listening.fileno())],
            stdin=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **of_workers},
            pass_fds=(listening.fileno(),),
        )

    def end(self) -> None:
        if (address := os.environ.pop(ADDRESS, None)) is not None:
            shutil.rmtree(Path(address).parent)
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
            self._process.kill()
            self._process = None


def _serve(listening: socket.socket) -> list[str] | None:
    """Fork a process for each request; return its arguments there, and None at the end."""
    while True:
        ready, _, _ = select.select([listening, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        asking, _ = listening.accept()
        with asking:
            message, descriptors, _, _ = socket.recv_fds(asking, MAX_BYTES, 2)
            if not message:  # who asked has died
                continue
            request = json.loads(message)
            if _is_like_this(request["environment"]):
                pid = os.fork()
                if pid == 0:
                    listening.close()
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    become(request["environment"], request["folder"], *descriptors)
                    for descriptor in descriptors:
                        os.close(descriptor)
                    np.random.seed()
                    arguments: list[str] = request["arguments"]
                    return arguments
                with contextlib.suppress(OSError):  # who asked has died meanwhile
                    asking.send(str(pid).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _is_like_this(environment: Mapping[str, str]) -> bool:
    """Return whether a process with this environment would import what this one did."""
    return all(
        os.environ.get(name) == environment.get(name)
        for name in {*os.environ, *environment}.difference(_FREE)
    )


def _reap(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class _ClassIds:
    """Draws ids of actor classes; Ray's generator, once seeded, would be the same in all forks."""

    @staticmethod
    def from_random() -> ray.ActorClassID:
        return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))


def _main() -> None:
    with mock.patch("ray.actor.ActorClassID", _ClassIds):
        for name in _LOADED:
            importlib.import_module(name)
    # what is never collected stays in pages that the forked processes share
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, _reap)
    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    if arguments is not None:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).parent))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _main()
