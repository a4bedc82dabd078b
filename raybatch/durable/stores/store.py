"""Opens the store of a sink."""

import time
from collections.abc import Callable

import fsspec
from fsspec.implementations.local import LocalFileSystem

from raybatch.durable.stores.local import LocalStore
from raybatch.durable.stores.objects import ObjectStore
from raybatch.durable.stores.protocols import Store
from raybatch.durable.stores.repeating import Repeating


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
