"""File systems of every kind behind one kind of error, and the store of a sink."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.stores.local import LocalStore
from raybatch.durable.stores.objects import ObjectStore
from raybatch.durable.stores.protocols import Store
from raybatch.durable.stores.repeating import Repeating
from raybatch.errors import ConfigError, RaybatchError, error_text


def open_store(uri: str, *, sleep: Callable[[float], None] = time.sleep) -> Store:
    """Return the store of a folder; nothing is read or written yet.

    Args:
        uri: a local path, or any URI that fsspec knows.
        sleep: waits for so many seconds before a request is sent again.
    """
    fs, root = fsspec.core.url_to_fs(uri)
    if isinstance(fs, LocalFileSystem):
        return LocalStore(root)
    return Repeating(ObjectStore(uri), sleep=sleep)


def store_of(sink: str) -> Store:
    """Return the store of a sink: one in a process, because a new one probes the bucket."""
    # a relative path means another folder where the process has changed its own
    return _store_at(sink if "://" in sink else os.path.abspath(sink))


_store_at = lru_cache(maxsize=8)(open_store)


def real_path(fs: fsspec.AbstractFileSystem, path: str) -> str:
    """Return a local path with its links followed, and any other as it is."""
    return os.path.realpath(path) if isinstance(fs, LocalFileSystem) else path


def is_below(folder: str, other: str) -> bool:
    """Return whether a folder is `other` or lies below it, by whatever links it is named."""
    fs, path = fsspec.core.url_to_fs(folder)
    other_fs, root = fsspec.core.url_to_fs(other)
    path, root = real_path(fs, path), real_path(other_fs, root)
    return bool(fs == other_fs) and f"{path.rstrip('/')}/".startswith(f"{root.rstrip('/')}/")


@contextmanager
def error_context(what: str) -> Iterator[None]:
    """Turn what a file system raises into a ConfigError that begins with `what`."""
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"{what}: {error_text(error)}") from error
