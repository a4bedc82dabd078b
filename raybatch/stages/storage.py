"""File systems of every kind behind one kind of error, and the store of a sink."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from raybatch.durable.protocols import Store
from raybatch.durable.store import open_store
from raybatch.errors import ConfigError, RaybatchError, error_text

__all__ = ["store_of", "told_as"]


@lru_cache(maxsize=8)
def store_of(sink: str) -> Store:
    """Return the store of a sink: one in a process, because a new one asks a bucket what it can."""
    return open_store(sink)


@contextmanager
def told_as(what: str) -> Iterator[None]:
    """Turn what a file system raises into a ConfigError that begins with `what`."""
    try:
        yield
    except RaybatchError:
        raise
    except Exception as error:  # each file system has errors of its own
        raise ConfigError(f"{what}: {error_text(error)}") from error
