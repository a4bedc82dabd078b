"""Processes of engines that are forked from a warm one, which has loaded what they run.

A process of an engine takes two CPU seconds to import torch and the package. Tests that start many
of them ask for the fixture `warm_processes`; those of tests/actors/test_local_pool.py start theirs
as a user's job does. Functions of tests run in such processes by `start_warm`. Run as a module,
this is the warm process: it reads requests from a socket.
"""

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import pickle
import runpy
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess

ENGINE = "raybatch.actors.executors.engine_process"
# what that imports, and what a native engine imports once it starts
_LOADED = (
    "raybatch.actors.replica.replica",
    "raybatch.backends.native",
    "raybatch.engine.loading.prepared",
    "raybatch.engine.phases",
)
_YIELD_S = 2e-5
_MAX_BYTES = 1 << 17
_PR_SET_CHILD_SUBREAPER = 36


def start_warm(target: Callable[..., None], *args: object) -> BaseProcess:
    """Start a function in a process that is forked from a warm one, with the environment of now.

    That one asks for the process as soon as it has ended: it leaves no zombie.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.extensions.tp_groups.tp_ranks"])
    call = (dict(os.environ), target, *args)
    process = context.Process(target=_with_environment, args=call, daemon=True)
    process.start()
    return process


def _with_environment(
    environment: dict[str, str], target: Callable[..., None], *args: object
) -> None:
    os.environ.update(environment)
    target(*args)


class Forked:
    """A process that this one has not started, but is the parent of; waited for as a `Popen` is."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._waiting = threading.Lock()

    def wait(self) -> int:
        with self._waiting:
            if self.returncode is None:
                _, status = os.waitpid(self.pid, 0)
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


class WarmProcess:
    """Forks processes of engines; starts with the first one."""

    def __init__(self) -> None:
        self._asking = threading.Lock()
        self._requests: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, connection: int) -> Forked:
        """Start a process that serves an engine at a socket, as `local_pools` does."""
        with self._asking, _adopting():
            if self._requests is None:
                self._requests = self._begin()
            message = pickle.dumps((dict(os.environ), os.getcwd()))
            socket.send_fds(self._requests, [message], [connection, 2])
            return Forked(int(self._requests.recv(_MAX_BYTES)))

    def end(self) -> None:
        if self._requests is not None and self._process is not None:
            self._requests.close()
            self._process.wait()

    def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                start_new_session=True,
                # of engines, which have one thread each
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
            )
        return ours


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Let this process become the parent of those below it whose own parents end."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _serve(requests: socket.socket) -> None:
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MAX_BYTES, 2)
        if not message:
            return
        pid = _fork_for_parent(*pickle.loads(message), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid == 0:
            requests.close()
            runpy.run_module(ENGINE, run_name="__main__", alter_sys=True)
            return
        requests.send(str(pid).encode())


def become(environment: dict[str, str], folder: str, output: int, errors: int) -> None:
    """Make a forked process one that was started with this environment, folder and descriptors."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(output, 1)
    os.dup2(errors, 2)


def _fork_for_parent(environment: dict[str, str], folder: str, connection: int, output: int) -> int:
    """Fork a process that is a child of the parent of this one; return as `os.fork` does."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            return int(pipe.read())
    pid = os.fork()
    if pid:
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.close(reading)
    os.close(writing)
    become(environment, folder, output, output)
    sys.argv = [ENGINE, str(os.dup(connection))]
    return 0


def _main() -> None:
    for name in _LOADED:
        importlib.import_module(name)
    # engines of tests are more than cores: who waits for another one leaves it the core
    os.sched_yield = lambda: time.sleep(_YIELD_S)
    # what is never collected stays in pages that the forked processes share
    gc.collect()
    gc.freeze()
    try:
        _serve(socket.socket(fileno=int(sys.argv[1])))
    except Exception:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    _main()
