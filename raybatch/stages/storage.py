"""File systems of every kind behind one kind of error, and files that are created once."""

import errno
import os
import posixpath
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raybatch.errors import ConfigError, RaybatchError, error_text

# file systems that mount a bucket have no links
_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP)


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Turn what a file system raises into a ConfigError that begins with `what`."""
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"{what}: {error_text(error)}") from error


def create_file(path: str, data: bytes) -> bool:
    """Write a file under a name that nobody has; return False where it is there already.

    Two writers never both win, and no reader sees a part of a file. On stores without conditional
    writes the last one wins.

    Args:
        path: with its protocol; folders are made.
        data: the whole file.
    """
    fs, name = fsspec.core.url_to_fs(path)
    fs.makedirs(posixpath.dirname(name), exist_ok=True)
    if isinstance(fs, LocalFileSystem):
        return _create_local(name, data)
    try:
        fs.pipe_file(name, data, mode="create")
    except FileExistsError:
        return False
    return True


def _create_local(path: str, data: bytes) -> bool:
    staged = f"{posixpath.dirname(path)}/.{uuid.uuid4().hex}.staged"
    with open(staged, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(staged, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.exists(path):
            return False
        os.replace(staged, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(staged)
    return True
