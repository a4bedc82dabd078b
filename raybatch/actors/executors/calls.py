"""Remote calls: to another thread of this process, or to another process.

The event loop of local pools runs in a dedicated thread. An engine and its driver call each other
over a socket. A message is eight bytes of length and a pickle: both ends are one program of one
user. A closed socket means that the other process died, which fails every open call.
"""

import asyncio
import itertools
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, NamedTuple

from raybatch.actors.wire.records import Requests
from raybatch.errors import error_text

_WAKE_S = 0.1
_LENGTH = struct.Struct("<Q")


class CallHandle:
    """A proxy of a remote object, whose methods start calls; cast it to the object's protocol.

    Args:
        begin: called with the name of a method and its arguments; starts the call and returns an
            awaitable of its result.
    """

    def __init__(self, begin: Callable[..., Any]) -> None:
        self._begin = begin

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._begin, name)


class LocalLoop:
    """An event loop in a daemon thread, which starts with the first coroutine.

    Without `close` it ends with the process.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._starting = threading.Lock()
        self._has_started = False

    def begin(self, work: Coroutine[Any, Any, Any]) -> "LocalCall":
        with self._starting:
            if not self._has_started:
                # set first: Ctrl-C may arrive during the start
                self._has_started = True
                self._thread.start()
        return LocalCall(asyncio.run_coroutine_threadsafe(work, self._loop))

    def handle(self, target: object) -> CallHandle:
        """Return a proxy of an object, whose coroutine methods run on this loop."""
        return CallHandle(lambda name, *args: self.begin(getattr(target, name)(*args)))

    def close(self) -> None:
        """Cancel all tasks, wait for them, and end the thread."""
        if self._has_started:
            self.begin(_end_others()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


class LocalCall:
    """A started call: await it on any event loop, or call `result` in a thread without one.

    Cancelling the wait does not cancel the call, as with Ray actors.
    """

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(asyncio.wrap_future(self._future)).__await__()

    def result(self) -> Any:  # noqa: ANN401 - what the method returns
        # a signal may not wake a blocked thread
        while not wait((self._future,), timeout=_WAKE_S).done:
            pass
        return self._future.result()


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


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


class PeerError(Exception):
    """A method called in the other process raised an exception, whose text this has."""


class PeerDiedError(PeerError):
    """The other process has exited, so a call cannot be answered."""


class Peer:
    """One end of a connection between two processes: `serve` this end and `call` the other.

    All methods run on one event loop. `find` returns the method to call here, by name.
    """

    def __init__(
        self, connection: socket.socket, find: Callable[[str], Callable[..., Any]]
    ) -> None:
        self._connection = connection
        self._find = find
        self._ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._serving: set[asyncio.Task[None]] = set()
        self._writer: asyncio.StreamWriter | None = None
        self._is_over = self._is_closing = False
        # why this end failed, if the other one did not exit
        self.cause = ""
        # set once calls can be made
        self.is_connected = asyncio.Event()

    def call(self, name: str, *args: object) -> asyncio.Future[Any]:
        """Call a method of the other process; the future raises `PeerError` if the call fails."""
        future = asyncio.get_running_loop().create_future()
        if self._is_over:
            future.set_exception(PeerDiedError("the process exited"))
            return future
        number = next(self._ids)
        try:
            message = _encoded("call", number, name, args)
        except Exception as error:
            future.set_exception(PeerError(error_text(error)))
            return future
        self._calls[number] = future
        self._send(message)
        return future

    async def serve(self) -> None:
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        self.is_connected.set()
        try:
            while not self._is_closing:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._take(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            return
        except Exception as error:
            self.cause = f"cannot read a message of the process: {error_text(error)}"
        finally:
            self._end()

    def close(self) -> None:
        """Close the connection at once; every open call fails."""
        self._is_closing = True
        if self._writer is not None:
            self._writer.transport.abort()

    def _take(self, message: tuple[Any, ...]) -> None:
        kind, number, *rest = message
        if kind == "call":
            task = asyncio.get_running_loop().create_task(self._answer(number, *rest))
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
            return
        future = self._calls.pop(number)
        if future.done():  # the caller was cancelled
            return
        if kind == "result":
            future.set_result(rest[0])
        else:
            future.set_exception(PeerError(rest[0]))

    async def _answer(self, number: int, name: str, args: tuple[Any, ...]) -> None:
        try:
            answer = _encoded("result", number, await self._find(name)(*args))
        except Exception as error:
            answer = _encoded("error", number, error_text(error))
        self._send(answer)

    def _send(self, message: bytes) -> None:
        assert self._writer is not None, "calls are made once the peer is connected"
        if not self._is_over:
            self._writer.write(_LENGTH.pack(len(message)))  # writelines would copy the message
            self._writer.write(message)

    def _end(self) -> None:
        self._is_over = True
        self.close()
        for task in self._serving:
            task.cancel()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(PeerDiedError(self.cause or "the process exited"))
        self._calls.clear()


def _encoded(*message: object) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
