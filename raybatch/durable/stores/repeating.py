"""Requests that failed for a moment are sent again; which errors those are."""

import errno
import logging
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from raybatch.durable.stores.protocols import Store

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 10.0

_NUMBERS = frozenset(
    getattr(errno, name)
    for name in (
        "EAGAIN",
        "EBUSY",
        "ECONNABORTED",
        "ECONNREFUSED",
        "ECONNRESET",
        "EHOSTUNREACH",
        "EIO",
        "ENETUNREACH",
        "EPIPE",
        "EREMOTEIO",
        "ETIMEDOUT",
    )
    if hasattr(errno, name)
)
_CONFLICT = 409
_STATUSES = frozenset({408, _CONFLICT, 425, 429, 500, 502, 503, 504})
_EXISTS = 412
_UNSUPPORTED = frozenset({400, 405, 501})
# by name, for clients that may not be installed; few of them are an OSError
_BROKEN_CONNECTIONS = frozenset(
    {
        "aiohttp.client_exceptions.ClientConnectionError",
        "aiohttp.client_exceptions.ClientPayloadError",
        "botocore.exceptions.ConnectionError",
        "botocore.exceptions.HTTPClientError",
        "botocore.exceptions.IncompleteReadError",
        "botocore.parsers.ResponseParserError",
    }
)


class Repeating:
    """A store whose operations are repeated when a failure may be temporary.

    Every operation of a store may be repeated: a `create` that took effect before its reply was
    lost returns False the second time, which callers accept as well as True.
    """

    def __init__(
        self, store: Store, *, num_tries: int = 6, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._store = store
        self._num_tries = num_tries
        self._sleep = sleep

    def __repr__(self) -> str:
        return repr(self._store)

    @property
    def uri(self) -> str:
        return self._store.uri

    @property
    def is_exclusive(self) -> bool:
        return self._repeat(lambda: self._store.is_exclusive)

    def create(self, name: str, data: bytes) -> bool:
        try:
            return self._repeat(self._store.create, name, data)
        except Exception as error:
            # some stores answer "conflict" to every create of an object that is there
            if _CONFLICT in _statuses(error) and self.size(name) is not None:
                return False
            raise

    def replace(self, name: str, data: bytes) -> None:
        self._repeat(self._store.replace, name, data)

    def read(self, name: str) -> bytes:
        return self._repeat(self._store.read, name)

    def tail(self, name: str, num_bytes: int) -> bytes:
        return self._repeat(self._store.tail, name, num_bytes)

    def size(self, name: str) -> int | None:
        return self._repeat(self._store.size, name)

    def names(self, folder: str) -> list[str]:
        return self._repeat(self._store.names, folder)

    def remove(self, name: str) -> None:
        self._repeat(self._store.remove, name)

    def _repeat(self, operation: Callable[_P, _T], *args: _P.args, **options: _P.kwargs) -> _T:
        for number in range(self._num_tries - 1):
            try:
                return operation(*args, **options)
            except Exception as error:  # each file system has errors of its own
                if not is_repeatable(error):
                    raise
                wait_s = min(_FIRST_WAIT_S * 2.0**number, _LONGEST_WAIT_S)
                logger.info("%s: %s; trying again in %.1f s", self.uri, error, wait_s)
            self._sleep(wait_s)
        return operation(*args, **options)


def is_repeatable(error: BaseException) -> bool:
    """Return whether an operation that raised this may succeed when it is sent again."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    if isinstance(error, TimeoutError | ConnectionError) or _is_broken_connection(error):
        return True
    if _STATUSES.intersection(_statuses(error)):
        return True
    return isinstance(error, OSError) and error.errno in _NUMBERS


def says_it_exists(error: BaseException) -> bool:
    """Return whether a `create` that raised this found the file there."""
    return isinstance(error, FileExistsError) or _EXISTS in _statuses(error)


def says_unsupported(error: BaseException) -> bool:
    """Return whether the store, or its client, does not support what raised this."""
    if isinstance(error, NotImplementedError | TypeError):
        return True
    # stores answer 400 to what was too slow and to whom they do not know, too
    if isinstance(error, TimeoutError | PermissionError):
        return False
    return bool(_UNSUPPORTED.intersection(_statuses(error)))


def _is_broken_connection(error: BaseException) -> bool:
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    return bool(names & _BROKEN_CONNECTIONS)


def _statuses(error: BaseException | None) -> list[int]:
    """Return the HTTP statuses in an error and its causes, as the common clients keep them."""
    statuses = []
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            statuses.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        statuses += [getattr(error, name, None) for name in ("status", "status_code", "code")]
        error = error.__cause__
    return [int(one) for one in statuses if str(one).isdecimal()]
