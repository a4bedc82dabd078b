"""The store of a sink: a folder, a bucket, or any other fsspec file system.

`Store` is the interface that the commit protocol needs. Errors of requests, and which of them are
retried, are handled here too.
"""

import errno
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from typing import Any, ParamSpec, Protocol, TypeVar

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.layout import check_name, part_unit, probe_name, staging_name
from raybatch.errors import ConfigError, MissingDependency, RaybatchError, error_text
from raybatch.installation import install_command

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

# mounted buckets have no links
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# and no folders that could be flushed
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

# a write is one request, and the server refuses to replace if asked to
_CONDITIONAL = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"})
# supports ranges relative to the end
_SUFFIX_RANGES = frozenset({"s3", "s3a", "memory"})

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 10.0
_REPEATABLE = (
    "EAGAIN EBUSY ECONNABORTED ECONNREFUSED ECONNRESET EHOSTUNREACH EIO ENETUNREACH EPIPE "
    "EREMOTEIO ETIMEDOUT"
)
_NUMBERS = {getattr(errno, name) for name in _REPEATABLE.split() if hasattr(errno, name)}
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


class Store(Protocol):
    """Files below one root.

    Names are relative, with "/", and never leave the root. Every method may be called from many
    threads, and a store can be sent to another process.
    """

    @property
    def uri(self) -> str:
        """Return the root with its protocol, without a slash at the end."""

    @property
    def is_exclusive(self) -> bool:
        """Return whether `create` never replaces a file, even when many call it at once."""

    def create(self, name: str, data: bytes) -> bool:
        """Write a whole file under a new name; return False if a file with that name exists."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file that may exist; for files that can be recreated, such as a report."""

    def read(self, name: str) -> bytes:
        """Return a whole file; FileNotFoundError if it does not exist."""

    def tail(self, name: str, num_bytes: int) -> bytes:
        """Return the last bytes of a file, or all if it is shorter; FileNotFoundError for none."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes, None if it does not exist; never from a cache."""

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder, sorted, relative to the root; never from a cache."""

    def remove(self, name: str) -> None:
        """Remove a file that exactly-once writing does not depend on; a missing one is fine."""


def warn_last_writer_wins(uri: str) -> None:
    """Warn that a store cannot create files exclusively, so concurrent runs replace files."""
    logger.warning(
        "%s cannot create files exclusively: of concurrent writers the last one wins; run only one "
        "job at a time here",
        uri,
    )


class LocalStore:
    """Files below a local folder; a file is flushed to disk before it gets its name.

    If the file system has no hard links, a file is renamed instead: then two concurrent writers may
    both win, and `is_exclusive` is False.

    Args:
        root: absolute path of the folder; it is created when the first file is written.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/") or "/"

    @property
    def uri(self) -> str:
        return f"file://{self._root}"

    @cached_property
    def is_exclusive(self) -> bool:
        probe = self._path(probe_name(uuid.uuid4().hex))
        with self._staged(b"") as staged:
            can_link = _link(staged, probe)
        with suppress(FileNotFoundError):
            os.unlink(probe)
        if not can_link:
            warn_last_writer_wins(self.uri)
        return can_link

    def create(self, name: str, data: bytes) -> bool:
        # flush also after a lost race: the winner may have died before its flush
        return self._put(name, data, _publish)

    def replace(self, name: str, data: bytes) -> None:
        self._put(name, data, _move)

    def read(self, name: str) -> bytes:
        with open(self._path(name), "rb") as file:
            return file.read()

    def tail(self, name: str, num_bytes: int) -> bytes:
        with open(self._path(name), "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes))
            return file.read(num_bytes)

    def size(self, name: str) -> int | None:
        path = self._path(name)
        try:
            return None if os.path.isdir(path) else os.stat(path).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def names(self, folder: str) -> list[str]:
        return sorted(_files_below(self._path(folder), folder))

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self._root, check_name(name))

    def _put(self, name: str, data: bytes, publish: Callable[[str, str], bool]) -> bool:
        path = self._path(name)
        _make_folder(os.path.dirname(path))
        won: bool | None = None
        while won is None:
            with self._staged(data) as staged:
                try:
                    won = publish(staged, path)
                except FileNotFoundError:  # another run has finished and cleaned up
                    if os.path.exists(staged) or not os.path.isdir(os.path.dirname(path)):
                        raise
        _flush_folder(os.path.dirname(path))
        return won

    @contextmanager
    def _staged(self, data: bytes) -> Iterator[str]:
        """Hold `data` in a temporary file, flushed to disk."""
        path = self._path(staging_name(uuid.uuid4().hex))
        _make_folder(os.path.dirname(path))
        try:
            with open(path, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)


def _move(staged: str, path: str) -> bool:
    os.replace(staged, path)
    return True


def _publish(staged: str, path: str) -> bool:
    with suppress(FileExistsError):
        return _link(staged, path) or (not os.path.exists(path) and _move(staged, path))
    return False


def _link(staged: str, path: str) -> bool:
    """Give a file a second name; return False if the file system has no hard links."""
    try:
        os.link(staged, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def _make_folder(folder: str) -> None:
    if os.path.isdir(folder):
        return
    parent = os.path.dirname(folder)
    if parent != folder:
        _make_folder(parent)
    with suppress(FileExistsError):
        os.mkdir(folder)
    if not os.path.isdir(folder):
        what = "a broken link" if os.path.islink(folder) else "a file"
        message = f"{what} is in the place of a folder; move it away"
        raise NotADirectoryError(errno.ENOTDIR, message, folder)
    _flush_folder(parent)


def _flush_folder(folder: str) -> None:
    """Make the names in a folder survive a loss of power."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # the folder is writable but cannot be listed
        return
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
    finally:
        os.close(handle)


def _files_below(path: str, name: str) -> Iterator[str]:
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:
        return
    except NotADirectoryError:
        message = "a file is in the place of a folder; move it away"
        raise NotADirectoryError(errno.ENOTDIR, message, path) from None
    for entry in entries:
        below = f"{name}/{entry.name}"
        # a folder with the name of a part counts as an unreadable part
        if entry.is_dir() and part_unit(below) is None:
            yield from _files_below(entry.path, below)
        else:
            yield below


def open_store(uri: str) -> Store:
    """Return the store of a local path or fsspec URI; nothing is read or written."""
    with error_context(f"{uri!r} cannot be reached"):
        fs, root = fsspec.core.url_to_fs(uri)
    if isinstance(fs, LocalFileSystem):
        return LocalStore(root)
    return Repeating(ObjectStore(uri))


def absolute(place: str) -> str:
    """Return a local path as an absolute path, and a URI unchanged."""
    return place if "://" in place else os.path.abspath(os.path.expanduser(place))


def store_of(sink: str) -> Store:
    """Return the store of a sink, cached per process, because a new one probes the bucket."""
    # a relative path depends on the current working directory
    return _store_at(absolute(sink))


_store_at = lru_cache(maxsize=8)(open_store)


def real_path(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Return a local path with symlinks resolved, and any other path unchanged."""
    return os.path.realpath(path) if isinstance(fs, LocalFileSystem) else path


def is_below(folder: str, other: str) -> bool:
    """Return whether a folder is `other` or below it, with symlinks resolved."""
    with error_context(f"{folder!r} or {other!r} cannot be reached"):
        fs, path = fsspec.core.url_to_fs(folder)
        other_fs, root = fsspec.core.url_to_fs(other)
    path, root = real_path(fs, path), real_path(other_fs, root)
    return bool(fs == other_fs) and f"{path.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Turn errors of a file system into a ConfigError that begins with `what`."""
    try:
        yield
    except RaybatchError:
        raise
    except IsADirectoryError as error:
        raise ConfigError(f"{what}: it is a folder; name a file") from error
    except ImportError as error:
        commands = {
            "s3fs": install_command("s3"),
            "gcsfs": install_command("gcs"),
            "adlfs": install_command("azure"),
        }
        # fsspec names the package of a protocol
        command = commands.get(getattr(error.__cause__, "name", None) or "")
        hint = f": {command}" if command else ""
        raise MissingDependency(f"{what}: {error_text(error)}{hint}") from error
    except Exception as error:  # file systems raise various classes
        raise ConfigError(f"{what}: {error_text(error)}") from error


class ObjectStore:
    """Objects below a prefix, each written by one request, without retries.

    Args:
        uri: root with its protocol, without secrets; credentials come from the environment.
        is_exclusive: result of an earlier probe of the same store; None probes once.
    """

    def __init__(
        self, uri: str, is_exclusive: bool | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        self._options = dict(options or {})
        # a new file system object, without shared settings or cached listings
        self._fs, root = fsspec.core.url_to_fs(
            uri, skip_instance_cache=True, use_listings_cache=False, **self._options
        )
        self._root = root.rstrip("/")
        self._is_exclusive = is_exclusive
        protocols = self._fs.protocol
        self._protocols = {protocols} if isinstance(protocols, str) else set(protocols)

    def __reduce__(self) -> tuple[Any, ...]:
        return ObjectStore, (self.uri, self._is_exclusive, self._options)

    @property
    def uri(self) -> str:
        return str(self._fs.unstrip_protocol(self._root)).rstrip("/")

    @property
    def is_exclusive(self) -> bool:
        if self._is_exclusive is None:
            self._is_exclusive = bool(self._protocols & _CONDITIONAL) and self._probe()
            if not self._is_exclusive:
                warn_last_writer_wins(self.uri)
        return self._is_exclusive

    def create(self, name: str, data: bytes) -> bool:
        if self.is_exclusive:
            return self._create(name, data)
        if self.size(name) is not None:
            return False
        self.replace(name, data)
        return True

    def replace(self, name: str, data: bytes) -> None:
        self._fs.pipe_file(self._path_to_write(name), data)

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name)))

    def tail(self, name: str, num_bytes: int) -> bytes:
        path = self._path(name)
        if self._protocols & _SUFFIX_RANGES:
            return bytes(self._fs.cat_file(path, start=-num_bytes))
        size = self.size(name)
        if size is None:
            raise FileNotFoundError(path)
        return bytes(self._fs.cat_file(path, start=max(0, size - num_bytes), end=size))

    def size(self, name: str) -> int | None:
        self._fs.invalidate_cache()
        try:
            info = self._fs.info(self._path(name))
        except FileNotFoundError:
            return None
        return int(info["size"]) if info["type"] == "file" else None

    def names(self, folder: str) -> list[str]:
        self._fs.invalidate_cache()
        try:
            paths = self._fs.find(self._path(folder))
        except FileNotFoundError:
            return []
        return sorted(path.removeprefix(self._root).lstrip("/") for path in paths)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def _create(self, name: str, data: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path_to_write(name), data, mode="create")
        except Exception as error:  # file systems raise various classes
            if says_it_exists(error):
                return False
            raise
        return True

    def _probe(self) -> bool:
        """Return whether a second create of the same name is refused."""
        name = probe_name(uuid.uuid4().hex)
        try:
            # a refused first create is a repeated request, which shows the same
            return not (self._create(name, b"") and self._create(name, b""))
        except Exception as error:
            if not says_unsupported(error):
                raise
            logger.info("%s does not support conditional writes: %s", self.uri, error)
            return False
        finally:
            try:
                self.remove(name)
            except Exception as error:  # append-only credentials are sufficient
                logger.info("could not remove the test file %s/%s: %s", self.uri, name, error)

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"

    def _path_to_write(self, name: str) -> str:
        path = self._path(name)
        if not self._protocols & _CONDITIONAL:
            self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        return path


class Repeating:
    """A store that retries operations after failures that may be temporary.

    Every operation may be retried: a `create` that took effect before its reply was lost returns
    False on the retry, which callers accept as well as True.
    """

    def __init__(
        self, store: Store, *, num_tries: int = 6, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._store = store
        self._num_tries = num_tries
        self._sleep = sleep

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
            # some stores answer "conflict" to every create of an existing object
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
            except Exception as error:  # file systems raise various classes
                if not is_repeatable(error):
                    raise
                wait_s = min(_FIRST_WAIT_S * 2.0**number, _LONGEST_WAIT_S)
                logger.info("%s failed: %s; trying again in %.1f s", self.uri, error, wait_s)
            self._sleep(wait_s)
        return operation(*args, **options)


def is_repeatable(error: BaseException) -> bool:
    """Return whether an operation that raised this may succeed on a retry."""
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__}
    if isinstance(error, TimeoutError | ConnectionError) or names & _BROKEN_CONNECTIONS:
        return True
    if _STATUSES.intersection(_statuses(error)):
        return True
    return isinstance(error, OSError) and error.errno in _NUMBERS


def says_it_exists(error: BaseException) -> bool:
    """Return whether an error of `create` says that the file exists."""
    return isinstance(error, FileExistsError) or _EXISTS in _statuses(error)


def says_unsupported(error: BaseException) -> bool:
    """Return whether an error says that the store, or its client, lacks the operation."""
    if isinstance(error, NotImplementedError | TypeError):
        return True
    # stores also answer 400 to slow requests and unknown credentials
    if isinstance(error, TimeoutError | PermissionError):
        return False
    return bool(_UNSUPPORTED.intersection(_statuses(error)))


def _statuses(error: BaseException | None) -> list[int]:
    """Return the HTTP statuses in an error and its causes, as common clients store them."""
    statuses = []
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            statuses.append(response.get("ResponseMetadata", {}).get("HTTPStatusCode"))
        statuses += [getattr(error, name, None) for name in ("status", "status_code", "code")]
        error = error.__cause__
    return [int(one) for one in statuses if str(one).isdecimal()]
