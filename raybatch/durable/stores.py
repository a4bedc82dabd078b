"""What the commit protocol needs of the store of an output, and one on a mounted file system."""

import errno
import logging
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from raybatch.durable.layout import check_name, part_unit, probe_name, staging_name

logger = logging.getLogger(__name__)

# mounted buckets have no links
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
# and no folders that could be flushed
_NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)


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
        """Write a whole file under a name that nobody has; return False where it is there."""

    def replace(self, name: str, data: bytes) -> None:
        """Write a file that may be there already; for what can be made again, such as a report."""

    def read(self, name: str) -> bytes:
        """Return a whole file; FileNotFoundError where there is none."""

    def tail(self, name: str, num_bytes: int) -> bytes:
        """Return the last bytes of a file, or all where it is shorter; FileNotFoundError."""

    def size(self, name: str) -> int | None:
        """Return the bytes of a file, None where there is none; never from a cache."""

    def names(self, folder: str) -> list[str]:
        """Return the files below a folder, sorted, relative to the root; never from a cache."""

    def remove(self, name: str) -> None:
        """Remove a file that the protocol does not count with; a missing one is fine."""


def warn_last_writer_wins(uri: str) -> None:
    """Warn that two runs at once would replace each other's files; they hold the same rows."""
    logger.warning(
        "%s cannot refuse to replace a file, so of two runs at once the last writer wins; let one "
        "run at a time write here",
        uri,
    )


class LocalStore:
    """Files below a folder; a file is on the disk before it has its name.

    Where the file system refuses links, a file is moved to its name instead: then of two writers
    at once both may win, and `is_exclusive` is False.

    Args:
        root: absolute path of the folder; it is made when the first file is written.
    """

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/") or "/"
        self._is_exclusive: bool | None = None

    def __repr__(self) -> str:
        return f"LocalStore({self._root!r})"

    @property
    def uri(self) -> str:
        return f"file://{self._root}"

    @property
    def is_exclusive(self) -> bool:
        if self._is_exclusive is None:
            probe = self._path(probe_name(uuid.uuid4().hex))
            with self._staged(b"") as staged:
                self._is_exclusive = _link(staged, probe)
            with suppress(FileNotFoundError):
                os.unlink(probe)
            if not self._is_exclusive:
                warn_last_writer_wins(self.uri)
        return self._is_exclusive

    def create(self, name: str, data: bytes) -> bool:
        # the folder is flushed also after a lost race: the winner may have died before it did this
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
                won = _unless_vanished(publish, staged, path)
        _flush_folder(os.path.dirname(path))
        return won

    @contextmanager
    def _staged(self, data: bytes) -> Iterator[str]:
        """Hold `data` in a file of no lasting name, on the disk."""
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


def _unless_vanished(publish: Callable[[str, str], bool], staged: str, path: str) -> bool | None:
    """Give a staged file its name, as `publish` does; None where the file has vanished."""
    try:
        return publish(staged, path)
    except FileNotFoundError:  # another run was complete and has tidied up
        if os.path.exists(staged) or not os.path.isdir(os.path.dirname(path)):
            raise
        return None


def _move(staged: str, path: str) -> bool:
    os.replace(staged, path)
    return True


def _publish(staged: str, path: str) -> bool:
    with suppress(FileExistsError):
        return _link(staged, path) or (not os.path.exists(path) and _move(staged, path))
    return False


def _link(staged: str, path: str) -> bool:
    """Give a file a second name; return False where the file system has no links."""
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
        what = "a link to nothing" if os.path.islink(folder) else "a file"
        message = f"{what} lies where a folder should be; move it away"
        raise NotADirectoryError(errno.ENOTDIR, message, folder)
    _flush_folder(parent)


def _flush_folder(folder: str) -> None:
    """Make the names in a folder survive a loss of power."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except PermissionError:  # names can be written in it, but not listed
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
        message = "a file lies where a folder should be; move it away"
        raise NotADirectoryError(errno.ENOTDIR, message, path) from None
    for entry in entries:
        below = f"{name}/{entry.name}"
        # a folder that has the name of a part counts as a part that cannot be read
        if entry.is_dir() and part_unit(below) is None:
            yield from _files_below(entry.path, below)
        else:
            yield below
