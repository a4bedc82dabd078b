"""Rendezvous of ranks before they form a group, through a TCP store of rank 0."""

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from raybatch.errors import RankError, error_text
from raybatch_extensions.ranks.records import RankInit

# not all of its types are declared
_c10d: Any = torch.distributed

# text of a rank that joins, and the seconds that idle engines may need to join
_COMES, _ROLL_CALL_S = "comes", 5.0
# key that cancels a group, and the seconds between two polls
_CALLED_OFF, _POLL_S = "called off", 2e-3
# seconds to connect to a store; torch then resolves its name, which a dead name server delays
_CONNECT_S, _NAME_S = 2.0, 15.0


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Convert torch's connection errors and timeouts to a RankError that begins with `what`."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise RankError(f"{what}: {error_text(error)}") from error


class RendezvousStore:
    """Key-value store of a driver rank, for all groups that it forms; peers reach it at `host`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        # one address family: a dual-stack server resolves clients as ::ffff:127.0.0.1, which is in
        # no hosts file, and blocks until a name server answers
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server(("", 0), family=family)
        port = listener.getsockname()[1]
        self.server = _c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            use_libuv=True,
            master_listen_fd=listener.detach(),
        )
        self._beside: Any = None

    @property
    def port(self) -> int:
        return int(self.server.port)

    def call_off(self, generation: int, why: str) -> None:
        """Cancel the group of a generation: ranks that wait in `Rendezvous.find` fail with `why`.

        May be called from another thread: uses a new connection, as a client may block in a wait.
        If called again, the first reason counts.
        """
        with failing_as("a group could not be cancelled"):
            if self._beside is None:
                self._beside = _client(self.host, self.port, _CONNECT_S)
            store = _c10d.PrefixStore(_prefix(generation), self._beside)
            if not store.check([_CALLED_OFF]):
                store.set(_CALLED_OFF, why)

    def calls(self, generation: int, size: int, *, timeout_s: float = 30.0) -> list[RankInit]:
        """Return the records with which ranks join a new group, one per rank, the driver first."""
        return [
            RankInit(
                generation=generation,
                rank=rank,
                size=size,
                host=self.host,
                port=self.port,
                timeout_s=timeout_s,
            )
            for rank in range(size)
        ]


def _client(host: str, port: int, timeout_s: float) -> Any:  # noqa: ANN401
    # fail fast if the driver rank has ended: torch would retry for twice the timeout
    socket.create_connection((host, port), min(timeout_s, _CONNECT_S)).close()
    timeout = timedelta(seconds=min(timeout_s, _NAME_S))
    return _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _prefix(generation: int) -> str:
    return f"team-{generation}"


class Rendezvous:
    """Exchanges short named texts between the ranks of one generation."""

    def __init__(self, call: RankInit, store: RendezvousStore | None = None) -> None:
        self._timeout_s = call.timeout_s
        with failing_as("cannot connect to the driver's store"):
            base = None if store is None else store.server
            if base is None:
                base = _client(call.host, call.port, call.timeout_s)
            self.store = _c10d.PrefixStore(_prefix(call.generation), base)
            self.store.set_timeout(timedelta(seconds=call.timeout_s))

    def leave(self, name: str, text: str) -> None:
        with failing_as(f"could not send {name}"):
            self.store.set(name, text)

    def find(self, name: str, *, most_s: float = math.inf) -> str:
        """Return the text that a rank left under a name; blocks until it exists, at most `most_s`.

        Raises RankError: timeout, or the group is cancelled.
        """
        end_s = time.monotonic() + min(self._timeout_s, most_s)
        with failing_as(f"timeout waiting for {name}"):
            while not self.store.check([name]):
                if self.store.check([_CALLED_OFF]):
                    raise RankError(f"the group of ranks was cancelled: {self._get(_CALLED_OFF)}")
                if time.monotonic() > end_s:
                    raise RankError(f"timeout waiting for {name}")
                time.sleep(_POLL_S)
            return self._get(name)

    def _get(self, name: str) -> str:
        return str(self.store.get(name).decode())

    def come(self, rank: int, refusal: str) -> None:
        """Report to the driver rank that this rank joins, or that it cannot, with the reason.

        `refusal` is "" if it joins.
        """
        self.leave(f"rank {rank}", refusal or _COMES)

    def await_all(self, size: int) -> None:
        """Wait until all worker ranks have joined; raises RankError if one cannot or is missing."""
        for rank in range(1, size):
            text = self.find(f"rank {rank}", most_s=_ROLL_CALL_S)
            if text != _COMES:
                raise RankError(f"rank {rank} cannot join the group: {text}")


def connect_gloo(call: RankInit, rendezvous: Rendezvous) -> Any:  # noqa: ANN401
    """Return a gloo process group of all ranks."""
    timeout = timedelta(seconds=call.timeout_s)
    with failing_as("gloo could not connect the ranks of a group"):
        store = _c10d.PrefixStore("gloo", rendezvous.store)
        return _c10d.ProcessGroupGloo(store, call.rank, call.size, timeout)
