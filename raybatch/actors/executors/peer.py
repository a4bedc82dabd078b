"""Two processes that call each other's methods over a socket; for an engine and its driver.

A message is eight bytes of length and a pickle: both ends are one program of one user. The end of
the socket is the death of the other process, which fails every open call.
"""

import asyncio
import itertools
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

from raybatch.errors import error_text

_LENGTH = struct.Struct("<Q")


class PeerError(Exception):
    """A method of the other process has raised; the text is its error."""


class PeerDiedError(PeerError):
    """The other process has ended."""


class Peer:
    """One end of the connection; used on one event loop.

    Args:
        find: returns a method of this process by its name, a coroutine function.
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
        # why this end has given up, where it was not the other one that ended
        self.cause = ""
        self._is_connected = asyncio.Event()

    def call(self, name: str, *args: object) -> asyncio.Future[Any]:
        """Call a method of the other process; the future raises `PeerError` where it fails."""
        future = asyncio.get_running_loop().create_future()
        if self._is_over:
            future.set_exception(PeerDiedError("the process has ended"))
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
        """Answer calls until the other process ends or closes its end."""
        reader, self._writer = await asyncio.open_unix_connection(sock=self._connection)
        self._is_connected.set()
        try:
            while not self._is_closing:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                self._take(pickle.loads(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            return
        except Exception as error:
            self.cause = f"what the process has sent cannot be read: {error_text(error)}"
        finally:
            self._end()

    async def connected(self) -> None:
        """Wait until calls can be made."""
        await self._is_connected.wait()

    def close(self) -> None:
        """Close this end, whatever is on its way; every open call fails."""
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
        if future.done():  # who waited has been cancelled
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
            self._writer.write(_LENGTH.pack(len(message)))
            self._writer.write(message)

    def _end(self) -> None:
        self._is_over = True
        self.close()
        for task in self._serving:
            task.cancel()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(PeerDiedError(self.cause or "the process has ended"))
        self._calls.clear()


def _encoded(*message: object) -> bytes:
    return pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
