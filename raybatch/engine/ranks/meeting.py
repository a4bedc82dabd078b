"""Where ranks meet before they are a group: a store of the first one, by TCP."""

import contextlib
import math
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed

from raybatch.errors import TeamError, error_text
from raybatch.records.team import TeamCall

# its types are not all declared
_c10d: Any = torch.distributed

# what a rank says that will take part, and how long idle engines may take for it
_COMES, _ROLL_CALL_S = "comes", 5.0
# what is left where a team is not to form, and the seconds between two looks
_CALLED_OFF, _LOOK_S = "called off", 2e-3
# to reach a store that is there; torch then asks for its name, which a name server that does not
# answer delays
_CONNECT_S, _NAME_S = 2.0, 15.0


@contextlib.contextmanager
def failing_as(what: str) -> Iterator[None]:
    """Raise what torch raises of connections and timeouts as a TeamError."""
    try:
        yield
    except (RuntimeError, OSError, ValueError) as error:
        raise TeamError(f"{what}: {error_text(error)}") from error


class TeamStore:
    """A store of a leader, which teams of all epochs meet at; `host` is where others find it."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.host = host
        # of one family: where it takes both, it asks for the names of clients as ::ffff:127.0.0.1,
        # which no file of hosts has, and stands still until a name server answers
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

    def call_off(self, epoch: int, why: str) -> None:
        """Let all ranks of a team give up that wait for each other's texts; of another thread.

        The server is one client's at a time, who may wait for long. The first reason counts.
        """
        with failing_as("a team could not be called off"):
            if self._beside is None:
                self._beside = _client(self.host, self.port, _CONNECT_S)
            store = _c10d.PrefixStore(_prefix(epoch), self._beside)
            if not store.check([_CALLED_OFF]):
                store.set(_CALLED_OFF, why)

    def calls(self, epoch: int, size: int, *, timeout_s: float = 30.0) -> list[TeamCall]:
        """Return what each rank of a new team is told, the leader first."""
        return [
            TeamCall(
                epoch=epoch,
                rank=rank,
                size=size,
                host=self.host,
                port=self.port,
                timeout_s=timeout_s,
            )
            for rank in range(size)
        ]


def _client(host: str, port: int, timeout_s: float) -> Any:  # noqa: ANN401
    # nobody listens where the leader has ended, and torch would look for it until twice the timeout
    socket.create_connection((host, port), min(timeout_s, _CONNECT_S)).close()
    timeout = timedelta(seconds=min(timeout_s, _NAME_S))
    return _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _prefix(epoch: int) -> str:
    return f"team-{epoch}"


class Meeting:
    """Short texts that the ranks of one epoch leave for each other, by name."""

    def __init__(self, call: TeamCall, store: TeamStore | None = None) -> None:
        self._timeout_s = call.timeout_s
        with failing_as("the leader's store cannot be reached"):
            base = None if store is None else store.server
            if base is None:
                base = _client(call.host, call.port, call.timeout_s)
            self.store = _c10d.PrefixStore(_prefix(call.epoch), base)
            self.store.set_timeout(timedelta(seconds=call.timeout_s))

    def leave(self, name: str, text: str) -> None:
        with failing_as(f"{name} could not be told"):
            self.store.set(name, text)

    def find(self, name: str, *, most_s: float = math.inf) -> str:
        """Return the text of a name, once there is one.

        Raises TeamError: there is none in time, or the team is called off.
        """
        end_s = time.monotonic() + min(self._timeout_s, most_s)
        with failing_as(f"nothing was heard of {name}"):
            while not self.store.check([name]):
                if self.store.check([_CALLED_OFF]):
                    raise TeamError(f"the team was called off: {self._get(_CALLED_OFF)}")
                if time.monotonic() > end_s:
                    raise TeamError(f"nothing was heard of {name}")
                time.sleep(_LOOK_S)
            return self._get(name)

    def _get(self, name: str) -> str:
        return str(self.store.get(name).decode())

    def come(self, rank: int, refusal: str) -> None:
        """Tell the leader that this rank is there, or why it will not be."""
        self.leave(f"rank {rank}", refusal or _COMES)

    def await_all(self, size: int) -> None:
        """Wait until all followers are there; raises TeamError where one is not, or will not be."""
        for rank in range(1, size):
            text = self.find(f"rank {rank}", most_s=_ROLL_CALL_S)
            if text != _COMES:
                raise TeamError(f"rank {rank} refuses: {text}")


def connect_gloo(call: TeamCall, meeting: Meeting) -> Any:  # noqa: ANN401
    """Return a process group of torch that reaches all ranks by TCP."""
    timeout = timedelta(seconds=call.timeout_s)
    with failing_as("the ranks of a team could not be connected"):
        store = _c10d.PrefixStore("gloo", meeting.store)
        return _c10d.ProcessGroupGloo(store, call.rank, call.size, timeout)
